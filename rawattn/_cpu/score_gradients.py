"""Gradients of the options' arrays: each task returns its part, and parts are added up in a fixed order.

So the same call gives the same bits with any number of threads. A part covers the elements of an array that
the task's tile of scores, or its key tile with all rows, reads. Few parts wait for earlier ones at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from rawattn._call.problem import Problem
from rawattn._cpu.scores import Changed, Scores, TilePosition
from rawattn._cpu.threads import Task
from rawattn._cpu.tiles import Array, Floats
from rawattn._scores.numpy_eval import PartialValues

Sums = dict[str, Array]  # by the names of gradients


class Part:
    """The contribution of one task to the gradients. `where` covers all of its tiles."""

    def __init__(self, totals: Totals, where: TilePosition) -> None:
        self.where = where
        self.sums: Sums = {}
        self._totals = totals

    def add_scores(self, ds: Floats, where: TilePosition, changed: Changed) -> None:
        """Adds a tile's contribution. ds: the gradient with respect to the scores, 0 where a key is hidden."""
        totals = self._totals
        inner = where.view(ds, totals.scores.nheads_q(where))
        if "dbias" in totals.sums:
            self._add_bias(inner, where)
        if totals.captured:
            for each in totals.scores.partials(where, changed):
                self._add_captured(each, inner)

    def add_sinks(self, normaliser: Floats, delta: Floats, where: TilePosition) -> None:
        """Adds the contribution of rows. Both arrays are (..., kv heads, rows of a group's heads, 1).

        normaliser: lse, with inf in place of -inf. delta: dout . out - dlse.
        """
        totals = self._totals
        if "dsink_logits" not in totals.sums:
            return
        sinks = totals.scores.sinks(where, normaliser.shape[-2])
        assert sinks is not None
        shares = np.where(sinks == -np.inf, np.float32(0), np.exp(sinks - normaliser) * -delta)
        alone = where._replace(keys=(0, 1))
        by_head = alone.view(shares, totals.scores.nheads_q(where)).sum(
            axis=(0, 3, 4), dtype=np.float64
        )
        found = self.sums.get("dsink_logits")
        self.sums["dsink_logits"] = by_head if found is None else found + by_head

    def _add_captured(self, values: PartialValues, ds: Floats) -> None:
        name = self._totals.captured[values.name]
        total = self._totals.sums[name]
        # Where the key is hidden its partial derivative is undefined.
        seen = ds != 0
        products = np.where(seen, ds * values.partial, np.float32(0))
        flat = np.ravel_multi_index(values.indices, total.shape).reshape(-1)
        first = flat.min(initial=total.size - 1)
        sums = np.bincount(flat - first, weights=products.reshape(-1))
        if name not in self.sums:
            self.sums[name] = np.zeros(total.shape, np.float64)
        self.sums[name].reshape(-1)[first:][: sums.size] += sums

    def _add_bias(self, ds: Floats, where: TilePosition) -> None:
        problem, total = self._totals.problem, self._totals.sums["dbias"]
        batches, heads, rows, keys = total.shape
        axes = [axis for axis, n in ((0, batches), (3, rows), (4, keys)) if n == 1]
        if heads < problem.nheads_q:
            axes += [2] if heads == problem.nheads_kv else [1, 2]
        # A copy, since ds is changed in place later.
        summed = ds.sum(axis=tuple(axes), keepdims=True) if axes else ds.copy()
        count, nheads_kv, group_size, *sides = summed.shape
        summed = summed.reshape(count, nheads_kv * group_size, *sides)
        whole = self.where
        if where == whole:
            self.sums["dbias"] = summed
            return
        if "dbias" not in self.sums:
            shape = (*summed.shape[:2], _extent(rows, whole.rows), _extent(keys, whole.keys))
            self.sums["dbias"] = np.zeros(shape, np.float32)
        of_rows, of_keys = (
            _within(rows, where.rows, whole.rows),
            _within(keys, where.keys, whole.keys),
        )
        self.sums["dbias"][:, :, of_rows, of_keys] += summed


def _extent(axis: int, span: tuple[int, int]) -> int:
    """The extent, along an axis of an option's array, for a span of rows or keys: 1 if the axis is 1 and so broadcast."""
    return 1 if axis == 1 else span[1] - span[0]


def _within(axis: int, span: tuple[int, int], whole: tuple[int, int]) -> slice:
    return slice(0, 1) if axis == 1 else slice(span[0] - whole[0], span[1] - whole[0])


class Totals:
    """The gradients of a call's options, summed over its tasks."""

    def __init__(self, problem: Problem, scores: Scores, names: Collection[str]) -> None:
        self.problem = problem
        self.scores = scores
        self.sums: Sums = {}
        if "dbias" in names:
            assert problem.bias is not None
            self.sums["dbias"] = np.zeros(problem.bias.shape, np.float32)
        if "dsink_logits" in names:
            self.sums["dsink_logits"] = np.zeros(problem.nheads_q, np.float64)
        # The name of each captured array's gradient, by the array's name.
        self.captured: dict[str, str] = {}
        for n, form in enumerate(problem.captured):
            name = f"dcaptured{n}"
            if name in names and scores.score_mod is not None:
                self.captured[scores.score_mod.arrays[n][0]] = name
                self.sums[name] = np.zeros(form.given, np.float64)
        self._lock = Lock()
        self._next = 0
        self._done: dict[int, Part | None] = {}

    @property
    def has_sinks(self) -> bool:
        return "dsink_logits" in self.sums

    def collecting(self, tasks: Iterable[Task]) -> list[Task]:
        """The tasks, wrapped so that the parts they return are added here in a fixed order: that in which `threads.run` takes
        them, largest first.
        """
        tasks = sorted(tasks, key=lambda task: task.work, reverse=True)
        return [
            Task(task.work, partial(self._collect, number, task.compute))
            for number, task in enumerate(tasks)
        ]

    @np.errstate(all="ignore")  # a sum may leave the range of a 16-bit dtype
    def write(self, results: Mapping[str, Any]) -> None:
        """Writes the sums to `results`, by the names of the gradients."""
        for name, total in self.sums.items():
            results[name][...] = total.reshape(results[name].shape)

    def _collect(self, number: int, compute: Callable[[], Part | None]) -> None:
        part = compute()
        with self._lock, np.errstate(all="ignore"):
            self._done[number] = part
            while self._next in self._done:
                part = self._done.pop(self._next)
                self._next += 1
                if part is not None:
                    self._add(part)

    def _add(self, part: Part) -> None:
        for name, values in part.sums.items():
            total = self.sums[name]
            if name == "dbias":
                total[self.scores.index(total.shape, part.where)] += values
            elif name == "dsink_logits":
                first, _ = part.where.kv_heads
                group_size = self.problem.nheads_q // self.problem.nheads_kv
                total[first * group_size :][: values.size] += values.reshape(-1)
            else:
                total += values

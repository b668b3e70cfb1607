"""One search: generate candidates, compile them, and run rounds on the GPU."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.tuning import candidates, compiling, halving
from bench.tuning.candidates import SearchedRow, label
from bench.tuning.cases import cases, problem
from bench.tuning.kernels import Kernel
from bench.tuning.racing import Racer
from bench.tuning.record import Figure, Search
from rawattn._bench.cases import Case, select
from rawattn._bench.contender import Contender
from rawattn._bench.timing import BURST_SECONDS
from rawattn._console.progress import Progress
from rawattn._kernels.tile_tables import Row


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a search.

    spills: bytes that a candidate may spill beyond the spills of the present choice, for kernels that may spill.
    """

    dtype: str = "bfloat16"
    only: Mapping[str, int] | None = None
    words: str = ""
    spills: int = 0
    jobs: int = 1
    budget: float = 120.0
    burst_seconds: float = BURST_SECONDS
    peers: Sequence[Contender] = ()


def searched_row(kernel: Kernel, table: str, headdim: int, arch: str, dtype: str) -> SearchedRow:
    problems = dict.fromkeys(problem(case, dtype) for case in cases(kernel, table, headdim))
    return SearchedRow(kernel, table, headdim, tuple(problems), arch)


def chosen_cases(where: SearchedRow, options: Options) -> list[Case]:
    """Return the cases of a search whose names contain the caller's words; all cases if there are no words."""
    found = select(cases(where.kernel, where.table, where.headdim), options.words)
    if not found:
        raise ValueError(f"no case has the words {options.words!r}")
    return found


def compile_candidates(where: SearchedRow, options: Options) -> tuple[Search, dict[str, Row]]:
    """Do the part of a search that needs no GPU; return it and the rows that may run, the present choice first."""
    rows, refused = candidates.generate(where, options.only or {})
    named = {label(row.fields): row for row in rows}
    present = next(iter(named))
    # The variants that the cases need, all with 16-byte copies.
    variants = list(
        dict.fromkeys(problem(case, options.dtype) for case in chosen_cases(where, options))
    )

    def job(name: str, allowed: Sequence[int | None]) -> compiling.Job:
        configs = [where.config(named[name], variant) for variant in variants]
        sources = tuple(config.source() for config in configs)
        return compiling.Job(name, sources, where.arch, tuple(allowed))

    limits: list[int | None] = [0] * len(variants)
    with Progress(len(named)) as progress:
        verdicts = compiling.judge_all([job(present, [None] * len(variants))], 1, progress.step)
        if verdicts[present].kind:
            raise ValueError(f"the present choice: {verdicts[present].reason}")
        if where.kernel.may_spill:
            limits = [spills + options.spills for spills in verdicts[present].by_variant]
        work = [job(name, limits) for name in named if name != present]
        verdicts |= compiling.judge_all(work, options.jobs, progress.step)

    search = Search(
        *(where.kernel.name, where.table, where.headdim, options.dtype, where.arch, present)
    )
    for name, row in named.items():
        verdict = verdicts[name]
        if verdict.kind:
            refused[verdict.kind] += 1
        search.figures.append(
            Figure(
                label=name,
                fields=row.fields,
                shared=max(where.config(row, each).shared_bytes for each in where.problems),
                registers=verdict.registers,
                spills=verdict.spills,
                reason=verdict.reason,
            )
        )
    search.refused = dict(refused)
    return search, {name: row for name, row in named.items() if not verdicts[name].kind}


def measure(where: SearchedRow, search: Search, rows: Mapping[str, Row], options: Options) -> None:
    """Run the rounds on the GPU, and enter the results."""
    measured = chosen_cases(where, options)
    search.flops = {case.name: case.flops for case in measured}
    search.burst_seconds = options.burst_seconds
    search.date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    racer = Racer(
        *(where, rows, search.present, measured, options.peers, options.dtype),
        burst_seconds=options.burst_seconds,
    )
    search.device = racer.device
    started = time.monotonic()

    def round_of(names: Sequence[str], repeats: int) -> Mapping[str, float]:
        scores = racer(names, repeats)
        seconds = time.monotonic() - started
        best = max(scores, key=lambda name: scores[name]) if scores else "nobody"
        print(f"{seconds:4.0f} s: {len(names)} candidates, {repeats} bursts; fastest: {best}")
        return scores

    rounds = halving.search(
        list(rows), search.present, round_of, lambda: time.monotonic() - started > options.budget
    )
    fill(search, rounds, racer.dropped)
    for name, results in racer.results.items():
        if name in rows:
            search.figure(name).results = results
        else:
            search.peers.append(Figure(name, results=results))
    search.spent = rounds[-1].repeats != halving.FINAL_REPEATS


def fill(search: Search, rounds: Sequence[halving.Round], dropped: Mapping[str, str]) -> None:
    """Enter speeds, reasons for dropping candidates, and the winner."""
    for one in rounds:
        for name, score in one.scores.items():
            figure = search.figure(name)
            figure.ran, figure.speed, figure.rounds = True, score, figure.rounds + 1
    for name, reason in dropped.items():
        search.figure(name).ran, search.figure(name).reason = True, reason
    if search.present in rounds[-1].scores:
        search.winner = halving.winner(rounds, search.present)

"""The setup launch of a ragged call: it sends integers on the host, orders the sequences and fills padding rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rawattn._kernels.portable import ragged_setup
from rawattn._kernels.steps import Step, Steps
from rawattn._runtime import kernel
from rawattn._runtime.kernel import Arguments
from rawattn._runtime.launches import BoundLaunch, Launch, bound_launch, launch_of


class Setup:
    """The setup launches of one call on one device.

    slot: the index of each address, by name. ordered_once: orders are kept with a layout, so only its first run computes them.
    later_runs: the launch of every run but the first one with a layout, with its number of blocks; None if there is nothing to
    do.
    """

    def __init__(
        self, steps: Steps, slot: dict[str, int], batch: int, device: int, ordered_once: bool
    ) -> None:
        self._parts = batch, steps.schedules, steps.paddings
        self._slot, self._device = slot, device
        self._early = kernel.target(device).early_launches
        again = () if ordered_once else steps.schedules
        self._later_step = ragged_setup.step(batch, again, steps.paddings)
        self.later_runs = self._launch(self._later_step)
        self._send_all: SendIntegers | None = None
        self._send_pieces: tuple[SendIntegers, tuple[Launch, int] | None] | None = None

    def bound_later_runs(self, kept: Collection[str]) -> BoundLaunch | None:
        """`later_runs` with parameters of its own. It leaves padding rows of the arrays `kept` as they are."""
        step = replace(without_filling(self._later_step, kept), early=self._early)
        assert isinstance(step.blocks, int)
        return bound_launch(step, self._slot, self._device, step.blocks) if step.blocks else None

    def load_first_run(self, nbytes: int) -> SendIntegers:
        """`first_run` for up to `nbytes` of integers, with its kernels loaded now."""
        whole = self._load_send_all() if nbytes else self.first_run
        if nbytes <= ragged_setup.MOST:
            return whole
        self._load_pieces()
        return self.first_run

    def first_run(self, data: bytes, to: int, addresses: Sequence[int], stream: int) -> None:
        """The setup of a layout's first run: sends `data` to the address `to`, orders sequences and fills padding rows."""
        if len(data) <= ragged_setup.MOST:
            whole = self._send_all or self._load_send_all()
            whole(data, to, addresses, stream)
            return
        # More integers than one launch carries: several launches send them. Ordering and filling need all of them, so that is
        # a launch of its own behind these.
        send, rest = self._send_pieces or self._load_pieces()
        for start in range(0, len(data), ragged_setup.MOST):
            send(data[start : start + ragged_setup.MOST], to + start, addresses, stream)
        if rest is not None:
            launch, blocks = rest
            launch(addresses, blocks, stream)

    def _load_send_all(self) -> SendIntegers:
        step = ragged_setup.step(*self._parts, carrying=True)
        self._send_all = self._sender(step)
        return self._send_all

    def _load_pieces(self) -> tuple[SendIntegers, tuple[Launch, int] | None]:
        alone = ragged_setup.step(0, (), (), carrying=True)
        rest = self._launch(ragged_setup.step(*self._parts))
        self._send_pieces = self._sender(alone), rest
        return self._send_pieces

    def _launch(self, step: Step) -> tuple[Launch, int] | None:
        blocks = step.blocks
        assert isinstance(blocks, int)
        step = replace(step, early=self._early)
        return (launch_of(step, self._slot, self._device), blocks) if blocks else None

    def _sender(self, step: Step) -> SendIntegers:
        return sender_of(replace(step, early=self._early), self._slot, self._device)


def without_filling(step: Step, kept: Collection[str]) -> Step:
    """A step that does the same but leaves padding rows of these arrays as they are."""
    return replace(step, fills=tuple(each for each in step.fills if each[1] not in kept))


# Sends integers on the host to an address. Arguments: their bytes, that address, all addresses of the call, the stream.
SendIntegers = Callable[[bytes, int, Sequence[int], int], None]


def sender_of(step: Step, slot: dict[str, int], device: int) -> SendIntegers:
    """A step as such a function, with its kernel loaded."""
    assert isinstance(step.blocks, int)
    blocks, params = step.blocks, step.params
    loaded = kernel.load(step.source, device)
    enqueue = loaded.launcher(step.threads, step.shared_bytes, step.early)
    free = [Arguments((params,))]  # arguments that no launch is using
    at = free[0].at[0]
    patches = [((at + offset) // 8, slot[name]) for offset, name in (*step.patches, *step.fills)]
    where, count = (at + ragged_setup.TO) // 8, (at + ragged_setup.COUNT) // 8
    start = at + ragged_setup.WORDS

    def launch(data: bytes, to: int, addresses: Sequence[int], stream: int) -> None:
        try:
            arguments = free.pop()
        except IndexError:  # another thread is launching it
            arguments = Arguments((params,))
        words, size = arguments.words, len(data)
        for index, n in patches:
            words[index] = addresses[n]
        words[where] = to
        words[count] = size // 4
        arguments.view[start : start + size] = data
        enqueue(blocks, stream, arguments)
        free.append(arguments)

    return launch

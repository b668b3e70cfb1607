"""What a ragged call launches before all else: integers of the host are sent, sequences ordered, padding rows filled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rawattn._kernels.portable import ragged_setup
from rawattn._kernels.steps import Step, Steps
from rawattn._runtime import kernel
from rawattn._runtime.kernel import Arguments
from rawattn._runtime.launches import Launch, launch_of


class Setup:
    """That of one call on one device.

    slot: of the addresses by name. ordered_once: orders belong to a layout, and only its first run finds them.
    each: what every run but the first one with a layout launches, and of how many blocks; None where that is nothing.
    """

    def __init__(
        self, steps: Steps, slot: dict[str, int], batch: int, device: int, ordered_once: bool
    ) -> None:
        self._parts = batch, steps.schedules, steps.paddings
        self._slot, self._device = slot, device
        self._early = kernel.target(device).early_launches
        again = () if ordered_once else steps.schedules
        self._each = ragged_setup.step(batch, again, steps.paddings)
        self.each = self._launch(self._each)
        self._whole: Carrying | None = None
        self._pieces: tuple[Carrying, tuple[Launch, int] | None] | None = None

    def each_but(self, kept: Collection[str]) -> tuple[Launch, int] | None:
        """`each`, where padding rows of these arrays stay as they are."""
        return self._launch(without_filling(self._each, kept))

    def loaded(self, nbytes: int) -> Carrying:
        """`first` of up to so many bytes, what it launches loaded now."""
        whole = self._load_whole() if nbytes else self.first
        if nbytes <= ragged_setup.MOST:
            return whole
        self._load_pieces()
        return self.first

    def first(self, data: bytes, to: int, addresses: Sequence[int], stream: int) -> None:
        """All of it, with integers of the host that go to an address."""
        if len(data) <= ragged_setup.MOST:
            whole = self._whole or self._load_whole()
            whole(data, to, addresses, stream)
            return
        # More than a launch carries: what orders and fills would find a part of it, so it comes behind all that send.
        send, rest = self._pieces or self._load_pieces()
        for start in range(0, len(data), ragged_setup.MOST):
            send(data[start : start + ragged_setup.MOST], to + start, addresses, stream)
        if rest is not None:
            launch, blocks = rest
            launch(addresses, blocks, stream)

    def _load_whole(self) -> Carrying:
        step = ragged_setup.step(*self._parts, carrying=True)
        self._whole = self._carrying(step)
        return self._whole

    def _load_pieces(self) -> tuple[Carrying, tuple[Launch, int] | None]:
        alone = ragged_setup.step(0, (), (), carrying=True)
        rest = self._launch(ragged_setup.step(*self._parts))
        self._pieces = self._carrying(alone), rest
        return self._pieces

    def _launch(self, step: Step) -> tuple[Launch, int] | None:
        blocks = step.blocks
        assert isinstance(blocks, int)
        step = replace(step, early=self._early)
        return (launch_of(step, self._slot, self._device), blocks) if blocks else None

    def _carrying(self, step: Step) -> Carrying:
        return carrying_of(replace(step, early=self._early), self._slot, self._device)


def without_filling(step: Step, kept: Collection[str]) -> Step:
    """The same that leaves padding rows of these arrays as they are."""
    return replace(step, fills=tuple(each for each in step.fills if each[1] not in kept))


# A launch that brings whole integers of the host to an address, from all addresses and the stream.
Carrying = Callable[[bytes, int, Sequence[int], int], None]


def carrying_of(step: Step, slot: dict[str, int], device: int) -> Carrying:
    """One, its kernel loaded."""
    assert isinstance(step.blocks, int)
    blocks, params = step.blocks, step.params
    loaded = kernel.load(step.source, device)
    enqueue = loaded.launcher(step.threads, step.shared_bytes, step.early)
    free = [Arguments((params,))]  # that no launch is using
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

"""What `--suite` chooses from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rawattn._bench import cases, figures
from rawattn._bench.report import Figure


@dataclass(frozen=True, slots=True)
class Suite:
    """cases(quick), and functions (dtype, peers) for further figures, by their word in --filter."""

    summary: str
    cases: Callable[[bool], list[cases.Case]]
    figures: Mapping[str, Callable[[str, Sequence[str]], list[Figure]]]


SUITES = {
    "forward": Suite(
        "dense, ragged and windowed batches; host time a call; compile time",
        cases.forward,
        {"host": figures.host_times, "compile": figures.compile_times},
    ),
}

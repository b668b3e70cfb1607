"""The result of a search, as JSON, as tables to read, and as a section of a notebook page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rawattn._bench.report import Result
from rawattn._bench.timing import BURST_SECONDS
from rawattn._console import table


@dataclass(slots=True)
class Figure:
    """One candidate, or a peer (which has no fields).

    reason: why the candidate was refused after compilation or, if it `ran`, why it was dropped. rounds: the number of rounds in
    which it was timed. speed: relative to the present choice, in the last of these rounds.
    """

    label: str
    fields: dict[str, int] = field(default_factory=dict)
    shared: int = 0
    registers: int = 0
    spills: int = 0
    reason: str = ""
    ran: bool = False
    rounds: int = 0
    speed: float | None = None
    results: dict[str, Result] = field(default_factory=dict)


@dataclass(slots=True)
class Search:
    """The search for one row.

    refused: the number of candidates that were not run, by reason. flops: by case.
    """

    kernel: str
    table: str
    headdim: int
    dtype: str
    arch: str
    present: str
    device: str = ""
    date: str = ""
    burst_seconds: float = BURST_SECONDS
    winner: str = ""
    spent: bool = False  # the budget ended the search before the final round
    refused: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    peers: list[Figure] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.table}, head dim {self.headdim}, {self.dtype}"

    def figure(self, label: str) -> Figure:
        return next(figure for figure in self.figures if figure.label == label)

    def timed(self) -> list[Figure]:
        """Return the timed candidates: those with most rounds first, and among equals the fastest first."""
        timed = [
            figure for figure in self.figures if figure.speed is not None and not figure.reason
        ]
        return sorted(timed, key=lambda figure: (-figure.rounds, -(figure.speed or 0.0)))


def save(searches: Sequence[Search], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"searches": [asdict(search) for search in searches]}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> list[Search]:
    """Read searches from a file that `save` wrote. Raises ValueError for any other file, OSError if it cannot be read."""

    def figure(data: dict[str, object]) -> Figure:
        results = data.pop("results")
        assert isinstance(results, dict)
        return Figure(
            **data,  # type: ignore[arg-type]
            results={case: Result(**result) for case, result in results.items()},
        )

    expected = "expected a file that --json has written"
    try:
        searches = json.loads(path.read_text(encoding="utf-8"))["searches"]
        for search in searches:
            for group in ("figures", "peers"):
                search[group] = [figure(each) for each in search[group]]
        return [Search(**search) for search in searches]
    except OSError as error:
        raise OSError(f"--from {path}: {error.strerror}; {expected}") from None
    except (KeyError, TypeError, AttributeError, AssertionError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"--from {path}: no searches of bench/tune.py ({what}); {expected}"
        ) from error


def refusals(search: Search) -> str:
    """Return one line: how many candidates were not run, and why."""
    parts = [f"{count} {reason}" for reason, count in sorted(search.refused.items())]
    return f"refused: {sum(search.refused.values())}" + (f" ({', '.join(parts)})" if parts else "")


def compiled_table(search: Search) -> str:
    """Return a table of every compiled candidate with its registers, spills and shared memory."""
    rows = []
    for figure in search.figures:
        verdict = figure.reason or ("present" if figure.label == search.present else "ok")
        numbers = map(str, (figure.registers, figure.spills, figure.shared))
        rows.append([figure.label, verdict, *numbers])
    header = ("candidate", "verdict", "registers", "spills", "shared bytes")
    return f"{search.name}, {search.arch}\n{table.render(header, rows, left=2)}\n{refusals(search)}"


def timed_table(search: Search) -> str:
    """Return a table of the candidates that ran, the winner first, and of the peers."""
    header, rows = _cells(search)
    lines = [f"{search.name}, {search.device}, {search.date}", table.render(header, rows)]
    lines += [f"dropped: {f.label}: {f.reason}" for f in _dropped(search)]
    lines += [refusals(search), _outcome(search)]
    return "\n".join(lines)


def note(search: Search) -> str:
    """Return the same for a notebook page, with one line for each candidate."""
    header, rows = _cells(search)
    lines = [
        f"\n## Search: {search.name}, {search.device}, {search.date[:10]}",
        f"`bench/tune.py`; speed over the choice of that day ({search.present}), TFLOP/s by case; all in turns "
        f"of {search.burst_seconds:g} s. "
        f"{refusals(search).capitalize()}. {_outcome(search)}.",
        "",
    ]
    lines += [f"| {' | '.join(cells)} |" for cells in (header, ["--"] * len(header), *rows)]
    lines += [f"\nDropped: {figure.label}: {figure.reason}" for figure in _dropped(search)]
    return "\n".join(lines) + "\n"


def _cells(search: Search) -> tuple[list[str], list[list[str]]]:
    cases = list(search.flops)
    header = ["candidate", "speed", "rounds", *cases, "registers", "spills"]
    figures = search.timed()
    rows = []
    for figure in [*figures, *search.peers]:
        role = {search.winner: " (winner)", search.present: " (present)"}.get(figure.label, "")
        rates = []
        for case in cases:
            result = figure.results.get(case)
            known = result is not None and result.seconds
            rates.append(f"{search.flops[case] / known / 1e12:.0f}" if known else "-")
        speed = "-" if figure.speed is None else f"{figure.speed:.3f}"
        compiled = [str(figure.registers), str(figure.spills)] if figure.fields else ["-", "-"]
        stayed = str(figure.rounds) if figure.fields else "-"
        rows.append([figure.label + role, speed, stayed, *rates, *compiled])
    return header, rows


def _dropped(search: Search) -> list[Figure]:
    return [figure for figure in search.figures if figure.ran and figure.reason]


def _outcome(search: Search) -> str:
    if not search.winner:
        return "nothing was timed"
    ended = ", when the budget was spent" if search.spent else ""
    if search.winner == search.present:
        return f"the present choice stays{ended}: nothing was clearly faster"
    return f"winner{ended}: {search.winner}, {search.figure(search.winner).speed:.3f}x"

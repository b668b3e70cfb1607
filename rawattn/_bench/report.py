"""What a run found, as data: written to and read from JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rawattn._bench.timing import BURST_SECONDS


@dataclass(slots=True)
class Result:
    """One contender on one case: seconds a call, or the reason why there are none."""

    seconds: float | None = None
    spread: float = 0.0  # interquartile range over the median
    samples: tuple[float, ...] = ()
    first_seconds: float = 0.0  # the first call, with whatever it compiles
    sm_mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    reason: str = ""


@dataclass(slots=True)
class Row:
    """One case and everybody's result."""

    name: str
    kind: str
    headdim: int
    flops: int
    nbytes: int
    results: dict[str, Result]
    over: str | None = None
    by_time: bool = False

    def rate(self, contender: str) -> float | None:
        """FLOP/s of visible work."""
        result = self.results.get(contender)
        return self.flops / result.seconds if result and result.seconds else None


@dataclass(slots=True)
class Figure:
    """A number that is no rate of a case."""

    name: str
    value: float
    unit: str


@dataclass(slots=True)
class HostRow:
    """Host time of one call: seconds, or the reason why there are none. `over` and `also` name rows it is measured against."""

    name: str
    bound: float | None = None  # of the ratio to `over`
    over: str = ""
    also: str = ""
    seconds: float | None = None
    reason: str = ""


@dataclass(slots=True)
class Report:
    suite: str
    dtype: str
    date: str
    repeats: int
    machine: dict[str, Any]
    versions: dict[str, str]
    matmul_flops: float
    ours: list[str]
    peers: list[str]
    burst_seconds: float = BURST_SECONDS
    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    called: dict[str, str] = field(default_factory=dict)  # how each contender was
    host: list[HostRow] = field(default_factory=list)

    def ratio(self, row: Row, peer: str) -> float | None:
        """Speed of what a caller of ours gets over a peer's."""
        ours, theirs = row.rate(self.ours[0]), row.rate(peer)
        return ours / theirs if ours and theirs else None

    def ratios(self, peer: str) -> dict[str, float]:
        """Our speed over a peer's, by case."""
        return {row.name: ratio for row in self.rows if (ratio := self.ratio(row, peer))}

    def over_best(self) -> dict[str, float]:
        """Our speed over that of the fastest peer, by case."""
        found: dict[str, float] = {}
        for ratios in map(self.ratios, self.peers):
            for name, ratio in ratios.items():
                found[name] = min(ratio, found.get(name, ratio))
        return found

    def divided(self) -> list[Figure]:
        """Cases over the ones they are measured against, for each of our families."""
        rows = {row.name: row for row in self.rows}
        figures = []
        for row in self.rows:
            if (base := rows.get(row.over or "")) is None:
                continue
            for name in self.ours:
                top, bottom = row.rate(name), base.rate(name)
                if not top or not bottom:
                    continue
                if row.by_time:
                    what, value = "time", row.flops / top / (base.flops / bottom)
                else:
                    what, value = "FLOP/s", top / bottom
                figures.append(Figure(f"{name}, {what}: {row.name} / {base.name}", value, "x"))
        return figures

    def cost(self, variant: str) -> list[Figure]:
        """Time of another of ours over that of what a caller gets."""
        figures = []
        for row in self.rows:
            usual, other = row.rate(self.ours[0]), row.rate(variant)
            if usual and other:
                name = f"{variant} / {self.ours[0]}, time: {row.name}"
                figures.append(Figure(name, usual / other, "x"))
        return figures

    def host_ratio(self, row: HostRow, over: str) -> float | None:
        """Host time of a call over that of another."""
        seconds = {one.name: one.seconds for one in self.host}
        base = seconds.get(over)
        return row.seconds / base if row.seconds and base else None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Raises ValueError when the file is no report."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            data["rows"] = [
                Row(**{**row, "results": {k: _result(v) for k, v in row["results"].items()}})
                for row in data["rows"]
            ]
            data["figures"] = [Figure(**figure) for figure in data["figures"]]
            data["host"] = [HostRow(**row) for row in data.get("host", [])]
            return cls(**data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a report of `rawattn bench` ({error})") from error


def _result(data: dict[str, Any]) -> Result:
    # Reports of the first version held a `warning` beside the time; a contender that earned one is no longer timed.
    return Result(**{name: value for name, value in data.items() if name != "warning"})

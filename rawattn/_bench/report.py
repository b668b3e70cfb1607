"""What a run found, as data: written to and read from JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
    warning: str = ""


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
    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def best(self, row: Row) -> float | None:
        """FLOP/s of our fastest family."""
        return max(filter(None, map(row.rate, self.ours)), default=None)

    def ratio(self, row: Row, peer: str) -> float | None:
        """Our speed over a peer's."""
        ours, theirs = self.best(row), row.rate(peer)
        return ours / theirs if ours and theirs else None

    def means(self) -> dict[str, tuple[float, int]]:
        """Geometric mean of our speed over each peer's, and over how many cases."""
        found = {}
        for peer in self.peers:
            ratios = [ratio for row in self.rows if (ratio := self.ratio(row, peer))]
            if ratios:
                found[peer] = (math.exp(sum(map(math.log, ratios)) / len(ratios)), len(ratios))
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

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Raises ValueError when the file is no report."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            data["rows"] = [
                Row(**{**row, "results": {k: Result(**v) for k, v in row["results"].items()}})
                for row in data["rows"]
            ]
            data["figures"] = [Figure(**figure) for figure in data["figures"]]
            return cls(**data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a report of `rawattn bench` ({error})") from error

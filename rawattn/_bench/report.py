"""The results of a run as data, written to and read from JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rawattn._bench.timing import BURST_SECONDS


@dataclass(slots=True)
class Result:
    """The result of one contender on one case: seconds a call, or the reason why there are none."""

    seconds: float | None = None
    spread: float = 0.0  # interquartile range over the median
    samples: tuple[float, ...] = ()
    first_seconds: float = 0.0  # the first call, including compilation
    sm_mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound on our time of a case relative to another time.

    what: the text of its line. limit: the least of the other time over ours or, if at_most, the most of ours over the other.
    peers: the other time is that of the fastest of these; if empty, it is our own on the case named in `over`.
    """

    what: str
    limit: float
    at_most: bool = False
    peers: tuple[str, ...] = ()


@dataclass(slots=True)
class Row:
    """One case and the results of all contenders. base: our result on the case `over`, if that took turns with them."""

    name: str
    kind: str
    headdim: int
    flops: int
    nbytes: int
    results: dict[str, Result]
    over: str | None = None
    by_time: bool = False
    bounds: tuple[Bound, ...] = ()
    panel: str = ""
    base: Result | None = None

    def seconds(self, contender: str) -> float | None:
        """The seconds of one call."""
        result = self.results.get(contender)
        return result.seconds if result else None

    def rate(self, contender: str) -> float | None:
        """FLOP/s, counting visible (row, key) pairs only."""
        seconds = self.seconds(contender)
        return self.flops / seconds if seconds else None


@dataclass(slots=True)
class Figure:
    """A number other than the rate of a case; its value is None if it is not available.

    bound: the least that it should be or, if at_most, the most. of: the numbers it was computed from, or why it is missing.
    """

    name: str
    value: float | None
    unit: str
    bound: float | None = None
    at_most: bool = False
    of: str = ""

    @property
    def verdict(self) -> str:
        """For a value with a bound "ok", "above" or "below", without a bound "", and "not available" if there is no value."""
        if self.value is None:
            return "not available"
        if self.bound is None:
            return ""
        if self.at_most:
            return "ok" if self.value <= self.bound else "above"
        return "ok" if self.value >= self.bound else "below"

    @property
    def numbers(self) -> tuple[str, str]:
        """The value and the bound, of three digits, or of five where a bound that is missed would seem kept."""
        for digits in (3, 5):
            value, bound = (
                "" if x is None else f"{x:.{digits}g}" for x in (self.value, self.bound)
            )
            if value != bound or self.verdict == "ok":
                break
        return value, bound


@dataclass(slots=True)
class HostRow:
    """The host time of one call: seconds, or the reason why there are none. `over` and `also`: rows it is compared with."""

    name: str
    bound: float | None = None  # the most for the ratio to `over`
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
    called: dict[str, str] = field(default_factory=dict)  # `Contender.called` by contender
    host: list[HostRow] = field(default_factory=list)

    def ratio(self, row: Row, peer: str) -> float | None:
        """The speed of our default kernels over a peer's."""
        ours, theirs = row.rate(self.ours[0]), row.rate(peer)
        return ours / theirs if ours and theirs else None

    def ratios(self, peer: str) -> dict[str, float]:
        """Our speed over a peer's, by case."""
        return {row.name: ratio for row in self.rows if (ratio := self.ratio(row, peer))}

    def over_best(self) -> dict[str, float]:
        """Our speed over the fastest peer's, by case."""
        found: dict[str, float] = {}
        for ratios in map(self.ratios, self.peers):
            for name, ratio in ratios.items():
                found[name] = min(ratio, found.get(name, ratio))
        return found

    def divided(self) -> list[Figure]:
        """Ratios of cases to the cases in their `over`, for each of our contenders."""
        rows = {row.name: row for row in self.rows}
        figures = []
        for row in self.rows:
            if (base := rows.get(row.over or "")) is None:
                continue
            if any(not bound.peers for bound in row.bounds):
                continue  # `bounded` has this ratio
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

    def bounded(self) -> list[Figure]:
        """All figures with a bound, measured or not."""
        rows = {row.name: row for row in self.rows}
        found = [
            self._bound_figure(row, bound, rows.get(row.over or ""))
            for row in self.rows
            for bound in row.bounds
        ]
        return found + [figure for figure in self.figures if figure.bound is not None]

    def _bound_figure(self, row: Row, bound: Bound, base: Row | None) -> Figure:
        """The figure of a case for one of its bounds."""
        usual = self.ours[0]
        figure = Figure(f"{row.name}: {bound.what}", None, "x", bound.limit, bound.at_most)
        other, names = (row, bound.peers) if bound.peers else (base, (usual,))
        times = {name: seconds for name in names if other and (seconds := other.seconds(name))}
        if not bound.peers and row.base and row.base.seconds:
            times = {usual: row.base.seconds}
        ours = row.seconds(usual)
        if not ours:
            result = row.results.get(usual)
            figure.of = result.reason if result else "not run"
        elif other is None and not times:
            figure.of = f"without {row.over}"
        elif not times:
            figure.of = f"no time of {' or '.join(names)}"
        else:
            fastest = min(times, key=times.__getitem__)
            theirs = times[fastest]
            figure.value = ours / theirs if bound.at_most else theirs / ours
            whose = f"{fastest} " if bound.peers else ""
            figure.of = f"{1e3 * ours:.3f} ms, {whose}{1e3 * theirs:.3f} ms"
        return figure

    def cost(self, variant: str) -> list[Figure]:
        """The time of another of our contenders over that of our default."""
        figures = []
        for row in self.rows:
            usual, other = row.rate(self.ours[0]), row.rate(variant)
            if usual and other:
                name = f"{variant} / {self.ours[0]}, time: {row.name}"
                figures.append(Figure(name, usual / other, "x"))
        return figures

    def host_ratio(self, row: HostRow, over: str) -> float | None:
        """The host time of a call over that of another."""
        seconds = {one.name: one.seconds for one in self.host}
        base = seconds.get(over)
        return row.seconds / base if row.seconds and base else None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Report:
        """The report in a file. ValueError if the file is no report."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            data["rows"] = [_row(row) for row in data["rows"]]
            data["figures"] = [Figure(**figure) for figure in data["figures"]]
            data["host"] = [HostRow(**row) for row in data.get("host", [])]
            return cls(**data)
        except KeyError as error:
            raise ValueError(
                f"{path}: not a report of `rawattn bench` (it has no {error})"
            ) from error
        except (TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a report of `rawattn bench` ({error})") from error


def _row(data: dict[str, Any]) -> Row:
    results = {name: _result(result) for name, result in data["results"].items()}
    bounds = (Bound(**{**b, "peers": tuple(b["peers"])}) for b in data.get("bounds", ()))
    base = _result(data["base"]) if data.get("base") else None
    return Row(**{**data, "results": results, "bounds": tuple(bounds), "base": base})


def _result(data: dict[str, Any]) -> Result:
    # Reports of the first version have a `warning` beside the time. Contenders that had one are no longer timed.
    return Result(**{name: value for name, value in data.items() if name != "warning"})

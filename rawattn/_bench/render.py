"""Renders a report as a text table, as Markdown and as a plot."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rawattn._bench import figure_plot
from rawattn._bench.grids import (
    CUDNN,
    DETERMINISTIC,
    EFFICIENT,
    FA2,
    FA4,
    FA4_PAGED,
    FLASHINFER,
    FLEX,
    FSA,
    JAX,
)
from rawattn._bench.report import Figure, Report, Row
from rawattn._console import table


def text(report: Report) -> str:
    """The report as text for a terminal."""
    parts = [table.wrap(_heading(report))]
    if report.rows:
        parts.append(table.render(_header(report), _cells(report)))
    if report.host:
        parts.append(table.render(_HOST_HEADER, _host_cells(report), left=2))
    if bounded := _bounded(report):
        parts.append(table.render(_BOUNDED_HEADER, bounded))
    if figures := _figures(report):
        parts.append(table.render(("figure", "value"), figures))
    return "\n\n".join((*parts, table.wrap("\n".join(_legend(report)))))


def markdown(report: Report) -> str:
    """The report as Markdown, to commit beside the JSON."""
    parts = [f"# rawattn bench: {report.suite}, {report.dtype}", _heading(report)]
    if report.rows:
        parts.append(_markdown_table(_header(report), _cells(report)))
    if report.host:
        parts.append(_markdown_table(_HOST_HEADER, _host_cells(report)))
    if bounded := _bounded(report):
        parts.append(_markdown_table(_BOUNDED_HEADER, bounded))
    if figures := _figures(report):
        parts.append(_markdown_table(("figure", "value"), figures))
    return "\n\n".join((*parts, "\n".join(f"- {line}" for line in _legend(report)))) + "\n"


def plot(report: Report, path: Path) -> None:
    """Bars by shape, in percent of the matrix-product rate, with a panel for each head dim or kind of case.

    A report without cases gets bars of its figures. Raises ImportError without matplotlib.
    """
    picture = _rates(report) if report.rows else figure_plot.draw(report, _COLOURS["rawattn"])
    picture.suptitle(
        f"Attention {report.suite}, {report.dtype}, {report.machine['device']}, {report.date[:10]}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150)


def _rates(report: Report) -> Any:
    from matplotlib import figure as pictures
    from matplotlib.patches import Patch

    panels: dict[str, list[Row]] = defaultdict(list)
    for row in report.rows:
        if row.kind.endswith("-ref") or row.kind == "sweep":
            continue  # bases of ratios, and calls with too little work for a meaningful rate
        panels[_panel(row)].append(row)
    figure = pictures.Figure(figsize=(12, 3.2 * max(len(panels), 1)), layout="constrained")
    colours = {name: colour(name) for name in (*report.ours, *report.peers)}
    axes = figure.subplots(max(len(panels), 1), 1, squeeze=False)[:, 0]
    for axis, (title, rows) in zip(axes, panels.items(), strict=False):
        axis.set_title(title, loc="left", fontsize="medium", fontweight="bold")
        _bars(axis, report, rows, colours)
    keys = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes[0].legend(
        handles=keys, ncols=len(keys), loc="lower right", bbox_to_anchor=(1, 1), frameon=False
    )
    return figure


PLOT_ENDINGS = (".png", ".svg", ".pdf")

# A contender has the same colour in every plot. Ours are blue; peers are distinguishable for colour-blind readers too.
_COLOURS = {
    "rawattn": "#1b3a6b",
    "portable": "#4f83cc",
    DETERMINISTIC: "#a6c8f0",
    CUDNN: "#e69f00",
    FA2: "#999999",
    FA4: "#009e73",
    JAX: "#cc79a7",
    EFFICIENT: "#d55e00",
    FLEX: "#7b3294",
    FSA: "#e8d33f",
    FA4_PAGED: "#66d1b0",
    FLASHINFER: "#8c510a",
}
_OTHER = "#444444"


def colour(name: str) -> str:
    """The colour of a contender in every plot."""
    return _COLOURS.get(name, _OTHER)


def _panel(row: Row) -> str:
    if row.panel:
        verb = "backward" if "backward" in row.name.split() else "forward"
        return f"{row.panel}, {verb}"
    return f"dense, D {row.headdim}" if row.kind == "dense" else "other shapes"


def _bars(axis: Any, report: Report, rows: list[Row], colours: dict[str, str]) -> None:
    width = 0.8 / len(colours)
    for index, row in enumerate(rows):
        rates = {name: rate for name in colours if (rate := row.rate(name))}
        lefts = [index + width * (i - (len(rates) - 1) / 2) for i in range(len(rates))]
        percents = [100 * rate / report.matmul_flops for rate in rates.values()]
        bars = axis.bar(lefts, percents, width, color=[colours[name] for name in rates])
        labels = [f"{rate / 1e12:.0f}" for rate in rates.values()]
        axis.bar_label(bars, labels, fontsize=6, padding=1)
    axis.set_xticks(range(len(rows)), [_tick(row) for row in rows], fontsize="small")
    axis.set_ylabel("% of matrix product\n(labels: TFLOP/s)", fontsize="small")
    axis.set_ylim(0, 105)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _tick(row: Row) -> str:
    """The name of a case without the words that the title of its panel has."""
    if not row.panel:
        return row.name.removeprefix(f"dense D{row.headdim} ").replace(" ", "\n")
    words = [word for word in row.name.split() if word not in ("forward", "backward")]
    return "\n".join(" ".join(words[i : i + 2]) for i in range(0, len(words), 2))


def _heading(report: Report) -> str:
    machine = report.machine
    lines = [
        f"{machine['device']}, driver {machine['driver']}, {report.date}",
        ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    ]
    if report.matmul_flops:
        product = f"{report.dtype} matrix product of 8192 x 8192"
        lines.append(f"{product}: {report.matmul_flops / 1e12:.0f} TFLOP/s")
    return "\n".join(lines)


def _header(report: Report) -> list[str]:
    ours = [column for name in report.ours for column in (f"{name} TFLOP/s", "spread", "of peak")]
    return ["case", *ours, *report.peers, "SM MHz", "W", "°C"]


def _cells(report: Report) -> list[list[str]]:
    rows = []
    for row in report.rows:
        cells = [row.name]
        for name in report.ours:
            result, rate = row.results.get(name), row.rate(name)
            if result is None:
                cells += ["", "", ""]
            elif rate is None:
                cells += ["n/a", "", ""]
            else:
                share = rate / report.matmul_flops
                cells += [f"{rate / 1e12:.0f}", f"{result.spread:.1%}", f"{share:.0%}"]
        cells += [_peer(report, row, name) for name in report.peers]
        first = row.results[report.ours[0]]
        cells += [_whole(value) for value in (first.sm_mhz, first.watts, first.celsius)]
        rows.append(cells)
    return rows


_HOST_HEADER = ("call", "over", "us", "ratio", "bound", "")


def _host_cells(report: Report) -> list[list[str]]:
    rows = []
    for row in report.host:
        ratio = report.host_ratio(row, row.over)
        verdict = "n/a" if row.seconds is None else ""
        if ratio is not None and row.bound is not None:
            verdict = "within" if ratio <= row.bound else "above"
        rows.append(
            [
                row.name,
                row.over,
                "" if row.seconds is None else f"{1e6 * row.seconds:.1f}",
                "" if ratio is None else f"{ratio:.2f}x",
                "" if row.bound is None else f"{row.bound:.2f}x",
                verdict,
            ]
        )
    return rows


def _host_legend(report: Report) -> list[str]:
    lines = [
        "host time of a cached call, B1 S128 H16 D128, from its beginning to its return: median of batches that take "
        f"turns ({report.repeats} turns) in one process; ratio: over the time of the call named under over; "
        "equal, other: lengths of the call before, or of another order"
    ]
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in report.host:
        if row.reason:
            reasons[row.reason].append(row.name)
    lines += [f"{'; '.join(names)}: {reason}" for reason, names in reasons.items()]
    for row in report.host:
        if (ratio := report.host_ratio(row, row.also)) is not None:
            lines.append(f"{row.name} / {row.also}: {ratio:.2f}x")
    judged = [
        ratio <= row.bound
        for row in report.host
        if row.bound is not None and (ratio := report.host_ratio(row, row.over)) is not None
    ]
    bounded = sum(row.bound is not None for row in report.host)
    return [*lines, f"within their bounds: {sum(judged)} of {bounded} calls"]


def _peer(report: Report, row: Row, name: str) -> str:
    rate = row.rate(name)
    if name not in row.results:
        return ""
    if rate is None:
        return "n/a"
    ratio = report.ratio(row, name)
    beaten = f" ({ratio:.2f}x)" if ratio else ""
    return f"{rate / 1e12:.0f}{beaten}"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


_BOUNDED_HEADER = ("figure", "got", "bound", "verdict", "ours, other")


def _bounded(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for figure in report.bounded():
        most = "at most" if figure.at_most else "at least"
        bound = f"{most} {figure.numbers[1]} {figure.unit}".strip()
        rows.append((figure.name, _value(figure), bound, figure.verdict, figure.of))
    return rows


def _figures(report: Report) -> list[tuple[str, str]]:
    every = (*report.divided(), *report.cost(DETERMINISTIC), *report.figures)
    return [(figure.name, _value(figure)) for figure in every if figure.bound is None]


def _value(figure: Figure) -> str:
    return "n/a" if figure.value is None else f"{figure.numbers[0]} {figure.unit}".strip()


def _bounded_legend(report: Report) -> list[str]:
    verdicts = [figure.verdict for figure in report.bounded()]
    if not verdicts:
        return []
    line = f"within their bounds: {verdicts.count('ok')} of {len(verdicts)} figures"
    missing = verdicts.count("not available")
    return [f"{line}, {missing} not available" if missing else line]


def _legend(report: Report) -> list[str]:
    lines = _host_legend(report) if report.host else []
    if report.rows:
        line = (
            f"TFLOP/s of visible pairs, median of {report.repeats} bursts of "
            f"{report.burst_seconds:g} s; spread: interquartile "
            "range; (x): rawattn's speed over that peer's; "
        )
        jax = "JAX is timed by the host's clock, the others by CUDA events"
        lines.append(line + (jax if JAX in report.peers else "timed by CUDA events"))
        if called := [f"{name} {how}" for name, how in report.called.items() if how]:
            lines.append(f"how each was called: {'; '.join(called)}")
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in report.rows:
        for name, result in row.results.items():
            if result.reason:
                reasons[f"{name} n/a", result.reason].append(row.name)
    for (what, reason), names in reasons.items():
        where = names[0] if len(names) == 1 else f"{len(names)} cases"
        lines.append(f"{what} ({where}): {reason}")
    first: dict[str, list[float]] = {name: [] for name in (*report.ours, *report.peers)}
    for row in report.rows:
        for name, result in row.results.items():
            if result.seconds:
                first[name].append(result.first_seconds)
    slowest = [f"{name} {max(seconds):.1f} s" for name, seconds in first.items() if seconds]
    if slowest:
        lines.append(f"slowest first call, with what it compiles: {', '.join(slowest)}")
    lines += [
        f"{figure.name} n/a: {figure.of}"
        for figure in report.figures
        if figure.bound is None and figure.value is None
    ]
    lines += report.notes
    lines += _bounded_legend(report)
    over = {peer: report.ratios(peer) for peer in report.peers}
    over["each case's best peer"] = report.over_best()
    for peer, ratios in over.items():
        if ratios:
            least = min(ratios, key=ratios.__getitem__)
            lines.append(
                f"geometric mean, rawattn over {peer}: {geometric_mean(ratios.values()):.3f}x "
                f"({len(ratios)} cases; least {ratios[least]:.2f}x, {least})"
            )
    return lines


def _markdown_table(header: Any, rows: Any) -> str:
    lines = [header, ["--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

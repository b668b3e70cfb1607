"""Plots a report that has only figures: a bar for each figure with a bound, and a mark at the bound."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rawattn._bench.report import Figure, Report

_OTHERS = "others"
_MISSED, _BOUND = "#b2182b", "#000000"  # colours that no library has in render.py
_INCHES = 0.21  # height of a bar
_HALF = 0.42  # half the height of a mark, in bars


def draw(report: Report, kept: str) -> Any:
    """A matplotlib figure with a panel for each kind of figure: the part of its name behind the last colon.

    kept: the colour of figures within their bounds. Raises ImportError without matplotlib.
    """
    from matplotlib import figure as pictures
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    panels = _panels(report)
    heights = [len(found) + 2.5 for found in panels.values()] or [2.5]
    picture = pictures.Figure(figsize=(12, _INCHES * sum(heights) + 0.8), layout="constrained")
    axes = picture.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, found) in zip(axes, panels.items(), strict=False):
        axis.set_title(title, loc="left", fontsize="medium", fontweight="bold")
        _bars(axis, found, kept)
    keys = [
        Patch(color=kept, label="within its bound"),
        Patch(color=_MISSED, label="not within it"),
        Line2D([], [], color=_BOUND, linewidth=2, label="bound"),
    ]
    picture.legend(handles=keys, ncols=3, loc="outside lower right", frameon=False)
    return picture


def _panels(report: Report) -> dict[str, list[tuple[str, Figure]]]:
    """(name, figure) pairs by panel. Kinds with a single figure share a panel if their unit and direction are the same."""
    kinds: dict[tuple[str, str], list[tuple[str, Figure]]] = defaultdict(list)
    for figure in report.bounded():
        if figure.value is not None:
            name, _, kind = figure.name.rpartition(": ")
            better = "lower is better" if figure.at_most else "higher is better"
            kinds[kind, f"{figure.unit}, {better}" if figure.unit else better].append(
                (name, figure)
            )
    panels: dict[str, list[tuple[str, Figure]]] = defaultdict(list)
    for (kind, reading), found in kinds.items():
        if len(found) > 1:
            panels[f"{kind} ({reading})"] += found
        else:
            panels[f"{_OTHERS} ({reading})"] += [(f.name, f) for _, f in found]
    return panels


def _bars(axis: Any, found: list[tuple[str, Figure]], kept: str) -> None:
    heights = range(len(found))
    values = [figure.value for _, figure in found]
    colours = [kept if figure.verdict == "ok" else _MISSED for _, figure in found]
    bars = axis.barh(heights, values, color=colours)
    # Labels in the middle of bars, where no mark of a bound is.
    labels = [figure.numbers[0] for _, figure in found]
    axis.bar_label(bars, labels, fontsize=7, label_type="center", color="white")
    bounds = [figure.bound for _, figure in found]
    ends = [[height + side for height in heights] for side in (-_HALF, _HALF)]
    axis.vlines(bounds, *ends, color=_BOUND, linewidth=2)
    axis.set_yticks(heights, [name for name, _ in found], fontsize="small")
    axis.invert_yaxis()
    axis.margins(x=0.08)
    axis.spines[["top", "right"]].set_visible(False)

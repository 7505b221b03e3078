"""Figure of `experiments.causal_map`, as PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from griffin_eval.drawing import BLACK, BLUE, GRAY, ORANGE, save

SIDES = {"sufficient": "put into the other document: is it enough?"}
SIDES |= {"necessary": "taken away: is it needed?"}
KINDS = {"recurrent": BLUE, "attention": ORANGE}
CELL, TOP = 0.3, 1.3  # inches of a row of cells, and of the curves above them


def draw(maps: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Draw a row for each checkpoint, and return the path of the PNG.

    Layers stand from bottom to top over the distance from the fact, recurrent states in blue and
    attention in orange, hatched if the interval includes 0. Above them are all recurrent states and
    all attention, with the window marked. Beside them are the losses with keys of some ages hidden,
    the share of the fact that the gates keep, and the half-lives.
    """
    looks, remembers = (any(each[k] for each in maps) for k in ("keys_hidden", "half_lives"))
    widths = [1.35, 1.5] + [0.8] * looks + [0.9, 0.9] * remembers
    heights = [TOP + CELL * max(len(_single(each)), 4) + 1.0 for each in maps]
    figure = Figure(figsize=(4.1 * sum(widths), sum(heights)), layout="constrained")
    rows: Any = figure.subfigures(len(maps), 1, squeeze=False, height_ratios=heights)
    for facts, (own,) in zip(maps, rows, strict=True):
        _draw_row(own, facts, widths, looks, remembers)
    return save(figure, folder, "map")


def _draw_row(
    figure: Any, facts: dict[str, Any], widths: list[float], looks: bool, remembers: bool
) -> None:
    cells = max(len(_single(facts)), 4)
    grid = figure.add_gridspec(
        2, len(widths), width_ratios=widths, height_ratios=[TOP, CELL * cells]
    )
    columns, what = _columns(facts)
    for index, (side, title) in enumerate(SIDES.items()):
        above, below = (figure.add_subplot(grid[row, index]) for row in range(2))
        _curves(above, facts, side, columns)
        above.set_title(f"{side.capitalize()}: {title}", fontsize=9)
        labels = [*columns, "not\nwritten"] if side == "necessary" else columns
        values = [
            [*row[side], row["not_written"]] if side == "necessary" else row[side]
            for row in _single(facts)
        ]
        _heat(below, _single(facts), values, labels)
        below.set_xlabel(what, fontsize=8)
    beside = [_ages] * looks + [_left, _half_lives] * remembers
    for column, function in enumerate(beside, len(SIDES)):
        function(figure.add_subplot(grid[:, column]), facts)
    used = f"{facts['answered']} of {facts['pairs']} pairs, which the model answers"
    name = Path(facts["checkpoint"]).name
    figure.suptitle(f"{name}, {facts['task']}: {used}", fontsize=10, fontweight="bold")


def _single(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the components of single layers or halves, which are not drawn as curves."""
    return [row for row in facts["components"] if not row["component"].startswith("all ")]


def _columns(facts: dict[str, Any]) -> tuple[list[str], str]:
    if facts["symbols"] is not None:
        return [*map(str, facts["symbols"])], "symbol, cut before the first marker"
    names = ["end" if each is None else f"{each:,}" for each in facts["distances"]]
    return names, "tokens between the fact and the cut"


def _curves(axes: Axes, facts: dict[str, Any], side: str, columns: list[str]) -> None:
    """Draw all recurrent states and all attention, with their intervals."""
    for kind, color in KINDS.items():
        for row in facts["components"]:
            places = [x for x, cell in enumerate(row[side]) if cell is not None]
            label = f"all {kind}"
            if row["component"] != label or not places:
                continue
            cells = [row[side][x] for x in places]
            values = [cell["value"] for cell in cells]
            marker = "o" if kind == "recurrent" else "s"
            axes.plot(
                places, values, marker=marker, markersize=3, color=color, linewidth=1.3, label=label
            )
            low, high = (  # a single pair has no interval
                [cell["value"] if cell[bound] is None else cell[bound] for cell in cells]
                for bound in ("low", "high")
            )
            axes.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    _mark_window(axes, facts)
    axes.set_xticks(range(len(columns)), [])
    extra = 1 if side == "necessary" else 0
    axes.set_xlim(-0.5, len(columns) - 0.5 + extra)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.1), max(high, 1.1))
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=7, loc="center left")


def _mark_window(axes: Axes, facts: dict[str, Any]) -> None:
    """Draw a line between the last distance within the window and the first beyond it."""
    if facts["window"] is None or facts["distances"] is None:
        return
    within = [each for each in facts["distances"] if each is not None and each < facts["window"]]
    if within and len(within) < len(facts["distances"]):
        label = f"window, {facts['window']:,}"
        axes.axvline(len(within) - 0.5, color=GRAY, linestyle="--", linewidth=1, label=label)


def _heat(
    axes: Axes,
    rows: list[dict[str, Any]],
    values: list[list[dict[str, Any] | None]],
    columns: list[str],
) -> None:
    for y, (row, cells) in enumerate(zip(rows, values, strict=True)):
        colors = matplotlib.colormaps["Oranges" if row["kind"] == "attention" else "Blues"]
        for x, cell in enumerate(cells):
            _cell(axes, x, y, cell, colors, 6.5 if len(columns) < 12 else 5)
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.set_yticks(range(len(rows)), [row["component"] for row in rows], fontsize=7)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, max(len(rows), 1) - 0.5))
    axes.spines[["top", "right"]].set_visible(False)


def _cell(
    axes: Axes, x: int, y: int, cell: dict[str, Any] | None, colors: Any, size: float
) -> None:
    if cell is None:
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="#eeeeee"))
        return
    shade = 0.85 * float(np.clip(cell["value"], 0, 1))
    uncertain = cell["low"] is None or cell["low"] <= 0 <= cell["high"]
    axes.add_patch(
        Rectangle(
            (x - 0.5, y - 0.5),
            *(1, 1),
            facecolor=colors(shade),
            edgecolor="#cccccc",
            hatch="////" if uncertain else None,
            linewidth=0.5,
        )
    )
    color = "white" if shade > 0.5 else BLACK
    text = f"{cell['value']:z.2f}"
    axes.text(x, y, text, ha="center", va="center", size=size, color=color)


def _ages(axes: Axes, facts: dict[str, Any]) -> None:
    """Draw the losses with keys of some ages hidden, for single layers."""
    rows = [
        row | {"kind": "attention"}
        for row in facts["keys_hidden"]
        if not row["component"].startswith("all ")
    ]
    if not rows:
        axes.set_axis_off()
        return
    ages = [f"{one['from']:,}-\n{one['to']:,}" for one in rows[0]["ages"]]
    _heat(axes, rows, [[one["lost"] for one in row["ages"]] for row in rows], ages)
    axes.set_title("Lost without the keys of so many\ntokens before each query", fontsize=9)


def _left(axes: Axes, facts: dict[str, Any]) -> None:
    """Draw the share of the fact that the gates keep on the first document."""
    layers = facts["left_by_gates"]
    if not layers:
        axes.set_axis_off()
        return
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(layers)))
    for layer, color in zip(layers, colors, strict=True):
        x = [1 + each["tokens"] for each in layer["left"]]
        middle = [each["50%"] for each in layer["left"]]
        high = [each["95%"] for each in layer["left"]]
        label = f"layer {layer['layer']}"
        axes.plot(x, middle, "-o", markersize=2.5, linewidth=1.2, color=color, label=label)
        axes.plot(x, high, ":", linewidth=1, color=color)
    axes.set(xscale="log", ylim=(-0.03, 1.03))
    axes.set_xlabel("tokens after the fact, plus 1", fontsize=8)
    axes.set_title("Left of the fact by the gates alone:\nmedian channel, dotted 95 %", fontsize=9)
    _plain(axes)
    if len(layers) <= 8:
        axes.legend(frameon=False, fontsize=7)


def _half_lives(axes: Axes, facts: dict[str, Any]) -> None:
    """Draw half-lives on the first document: 5 % to 95 % of a layer's channels, and medians."""
    memory = facts["half_lives"]
    if not memory:
        axes.set_axis_off()
        return
    for y, layer in enumerate(memory):
        low, middle, high = layer["half_life_measured"].values()
        axes.plot([low, high], [y, y], color=BLUE, linewidth=2.5)
        axes.plot([middle], [y], "o", color=BLUE, markersize=4)
    if facts["window"]:
        label = f"window, {facts['window']:,}"
        axes.axvline(facts["window"], color=GRAY, linestyle="--", linewidth=1, label=label)
        axes.legend(frameon=False, fontsize=7)
    axes.set(xscale="log", ylim=(-0.5, len(memory) - 0.5))
    axes.set_xlabel("half-life of a channel, tokens", fontsize=8)
    axes.set_yticks(range(len(memory)), [f"layer {layer['layer']}" for layer in memory])
    axes.set_title("Half-lives: median,\n5 % to 95 % of the channels", fontsize=9)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)

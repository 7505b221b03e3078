"""Figure of `experiments.causal_map`, as PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.causal_map.tables import column_names
from griffin_eval.drawing import BLACK, BLUE, GRAY, ORANGE, save

SIDES = {
    "sufficient": "put into the other document: is it enough?",
    "necessary": "taken away: is it needed?",
}
KINDS = {"recurrent": (BLUE, "o"), "attention": (ORANGE, "s")}
CELL, TOP = 0.3, 1.3  # inches of a row of cells, and of the curves above them


def draw(maps: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Draw a row for each checkpoint, and return the path of the PNG.

    Layers stand from bottom to top over the distance from the fact, recurrent states in blue and
    attention in orange, hatched where the interval holds 0. Above them stand all recurrent states
    and all attention, with the window marked. Beside them stand the losses where keys of some ages
    are hidden, the share of the fact that the gates leave, and the half-lives.
    """
    beside = {_ages: "keys_hidden", _left: "left_by_gates", _half_lives: "half_lives"}
    drawn = [function for function, key in beside.items() if any(each[key] for each in maps)]
    widths = [1.35, 1.5] + [0.8 if function is _ages else 0.9 for function in drawn]
    cells = [CELL * max(len(_single(each["components"])), 4) for each in maps]
    heights = [TOP + each + 1.0 for each in cells]
    figure = Figure(figsize=(4.1 * sum(widths), sum(heights)), layout="constrained")
    rows: Any = figure.subfigures(len(maps), 1, squeeze=False, height_ratios=heights)
    for facts, (row,), height in zip(maps, rows, cells, strict=True):
        ratios = {"width_ratios": widths, "height_ratios": [TOP, height]}
        grid = row.add_gridspec(2, len(widths), **ratios)
        for column, (side, title) in enumerate(SIDES.items()):
            above, below = (row.add_subplot(grid[place, column]) for place in range(2))
            _draw_side(above, below, facts, side)
            above.set_title(f"{side.capitalize()}: {title}", fontsize=9)
        for column, function in enumerate(drawn, len(SIDES)):
            axes = row.add_subplot(grid[:, column])
            if facts[beside[function]]:
                function(axes, facts)
            else:
                axes.set_axis_off()
        used = f"{facts['answered']} of {facts['pairs']} pairs, which the model answers"
        name = f"{Path(facts['checkpoint']).name}, {facts['task']}"
        row.suptitle(f"{name}: {used}", fontsize=10, fontweight="bold")
    return save(figure, folder, "map")


def _single(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the components of single layers or halves, which are not drawn as curves."""
    return [row for row in rows if not row["component"].startswith("all ")]


def _draw_side(above: Axes, below: Axes, facts: dict[str, Any], side: str) -> None:
    columns, single = column_names(facts), _single(facts["components"])
    _curves(above, facts, side, columns)
    extra = ["not_written"] if side == "necessary" else []
    values = [row[side] + [row[key] for key in extra] for row in single]
    _heat(below, single, values, columns + ["not\nwritten" for _ in extra])
    symbols = "symbol, cut before the first marker"
    axis = symbols if facts["symbols"] else "tokens between the fact and the cut"
    below.set_xlabel(axis, fontsize=8)
    above.set_xlim(below.get_xlim())


def _curves(axes: Axes, facts: dict[str, Any], side: str, columns: list[str]) -> None:
    """Draw all recurrent states and all attention, with their intervals."""
    rows = {row["component"]: row[side] for row in facts["components"]}
    for kind, (color, marker) in KINDS.items():
        cells = rows.get(label := f"all {kind}", [])
        places = [x for x, cell in enumerate(cells) if cell is not None]
        if not places:
            continue
        cells = [cells[x] for x in places]
        values = [cell["value"] for cell in cells]
        style: dict[str, Any] = {"marker": marker, "markersize": 3, "linewidth": 1.3}
        axes.plot(places, values, color=color, label=label, **style)
        low, high = (  # a single pair has no interval
            [cell["value"] if cell[bound] is None else cell[bound] for cell in cells]
            for bound in ("low", "high")
        )
        axes.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    distances, window = facts["distances"] or [], facts["window"]
    within = sum(each is not None and window is not None and each < window for each in distances)
    # The line is between the last distance within the window and the next.
    if window is not None and 0 < within < len(distances):
        _mark_window(axes, within - 0.5, window)
    axes.set_xticks(range(len(columns)), [])
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.1), max(high, 1.1))
    _plain(axes, "y")
    axes.legend(frameon=False, fontsize=7, loc="center left")


def _mark_window(axes: Axes, x: float, window: int) -> None:
    axes.axvline(x, color=GRAY, linestyle="--", linewidth=1, label=f"window, {window:,}")


def _heat(
    axes: Axes,
    rows: list[dict[str, Any]],
    values: list[list[dict[str, Any] | None]],
    columns: list[str],
) -> None:
    """Draw a cell for each value, with its number, hatched where the interval holds 0."""
    for y, (row, cells) in enumerate(zip(rows, values, strict=True)):
        attention = row.get("kind", "attention") == "attention"
        colors = matplotlib.colormaps["Oranges" if attention else "Blues"]
        for x, cell in enumerate(cells):
            corner = (x - 0.5, y - 0.5)
            if cell is None:
                axes.add_patch(Rectangle(corner, 1, 1, facecolor="#eeeeee"))
                continue
            shade = 0.85 * float(np.clip(cell["value"], 0, 1))
            uncertain = cell["low"] is None or cell["low"] <= 0 <= cell["high"]
            style: dict[str, Any] = {"edgecolor": "#cccccc", "linewidth": 0.5}
            style["hatch"] = "////" if uncertain else None
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=colors(shade), **style))
            color, size = "white" if shade > 0.5 else BLACK, 6.5 if len(columns) < 12 else 5
            text = f"{cell['value']:z.2f}"
            axes.text(x, y, text, ha="center", va="center", size=size, color=color)
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.set_yticks(range(len(rows)), [row["component"] for row in rows], fontsize=7)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, max(len(rows), 1) - 0.5))
    axes.spines[["top", "right"]].set_visible(False)


def _ages(axes: Axes, facts: dict[str, Any]) -> None:
    """Draw the losses where keys of some ages are hidden, for single layers."""
    rows = _single(facts["keys_hidden"])
    ages = [f"{one['from']:,}-\n{one['to']:,}" for one in facts["keys_hidden"][0]["ages"]]
    _heat(axes, rows, [[one["lost"] for one in row["ages"]] for row in rows], ages)
    axes.set_title("Lost without the keys of so many\ntokens before each query", fontsize=9)


def _left(axes: Axes, facts: dict[str, Any]) -> None:
    """Draw the share of the fact that the gates keep on the first document."""
    layers = facts["left_by_gates"]
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(layers)))
    for layer, color in zip(layers, colors, strict=True):
        x = [1 + each["tokens"] for each in layer["left"]]
        middle, high = ([each[q] for each in layer["left"]] for q in ("50%", "95%"))
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
    for y, layer in enumerate(memory):
        low, middle, high = layer["half_life_measured"].values()
        axes.plot([low, high], [y, y], color=BLUE, linewidth=2.5)
        axes.plot([middle], [y], "o", color=BLUE, markersize=4)
    if facts["window"]:
        _mark_window(axes, facts["window"], facts["window"])
        axes.legend(frameon=False, fontsize=7)
    axes.set(xscale="log", ylim=(-0.5, len(memory) - 0.5))
    axes.set_xlabel("half-life of a channel, tokens", fontsize=8)
    axes.set_yticks(range(len(memory)), [f"layer {layer['layer']}" for layer in memory])
    axes.set_title("Half-lives: median,\n5 % to 95 % of the channels", fontsize=9)
    _plain(axes)


def _plain(axes: Axes, grid: Any = "both") -> None:
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis=grid, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)

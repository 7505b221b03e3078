"""The figure of `griffin-eval map`, as PNG and SVG."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from griffin_eval.drawing import BLACK, GRAY, panels, save

SIDES = {"sufficient": "put into the other document: is it enough?"}
SIDES |= {"necessary": "taken away: is it needed?"}


def draw(facts: dict[str, Any], folder: Path) -> Path:
    """Layers from bottom to top over the distance from the fact, recurrent states in blue and
    attention in orange; hatched where the interval holds 0. Half-lives are drawn beside, if there
    are any.

    Args:
        facts: the numbers as ``--json`` prints them.
        folder: created if it does not exist.

    Returns:
        The path of the PNG.
    """
    rows, memory = facts["components"], facts["half_lives"]
    figure, drawn = panels(3 if memory else 2, 15.5 if memory else 11)
    figure.set_figheight(max(3.2, 1.6 + 0.34 * len(rows)))
    for axes, (side, title) in zip(drawn, SIDES.items(), strict=False):
        _cells(axes, rows, side)
        axes.set_xticks(range(len(facts["distances"])))
        names = ["end" if each is None else f"{each:,}" for each in facts["distances"]]
        axes.set_xticklabels(names, fontsize=8)
        axes.set_yticks(range(len(rows)))
        axes.set_yticklabels([row["component"] for row in rows], fontsize=8)
        axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(-0.5, len(rows) - 0.5))
        axes.set_xlabel("tokens between the fact and the cut")
        axes.set_title(f"{side.capitalize()}: {title}", fontsize=10)
        axes.grid(False)
    if memory:
        _half_lives(drawn[2], memory, facts["window"], [row["component"] for row in rows])
    used = f"{facts['answered']} of {facts['pairs']} pairs, which the model answers"
    figure.suptitle(f"{Path(facts['checkpoint']).name}, {facts['task']}: {used}", fontsize=10)
    return save(figure, folder, "map")


def _cells(axes: Axes, rows: list[dict[str, Any]], side: str) -> None:
    for y, row in enumerate(rows):
        colors = matplotlib.colormaps["Oranges" if "attention" in row["component"] else "Blues"]
        for x, cell in enumerate(row[side]):
            if cell is None:
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="#eeeeee"))
                continue
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
            axes.text(x, y, f"{cell['value']:z.2f}", ha="center", va="center", size=7, color=color)


def _half_lives(
    axes: Axes, memory: list[dict[str, Any]], window: int | None, names: list[str]
) -> None:
    """Half-lives on the first document: 5 % to 95 % of a layer's channels, and their median."""
    for layer in memory:
        name = f"{layer['layer']} RG-LRU"
        if name in names:
            low, middle, high = layer["half_life_measured"].values()
            axes.plot([low, high], [names.index(name)] * 2, color="#0072B2", linewidth=2.5)
            axes.plot([middle], [names.index(name)], "o", color="#0072B2", markersize=5)
    if window:
        axes.axvline(window, color=GRAY, linestyle="--", linewidth=1, label=f"window, {window}")
        axes.legend(frameon=False, fontsize=8)
    axes.set(xscale="log", ylim=(-0.5, len(names) - 0.5), xlabel="half-life of a channel, tokens")
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels(names, fontsize=8)
    axes.set_title("Half-lives: median, 5 % to 95 % of the channels", fontsize=10)

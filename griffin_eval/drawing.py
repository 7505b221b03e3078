"""What all figures share: colours that every reader can tell apart, panels, and saving."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, without its yellow, which is hard to read on white. Lines that share a
# panel differ by dashes or markers as well.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY_BLUE, BLACK, GRAY = "#E69F00", "#56B4E9", "#000000", "#777777"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY_BLUE, BLACK)


def panels(count: int, width: float, *, share_y: bool = False) -> tuple[Figure, Sequence[Axes]]:
    """A figure of panels side by side, with light grid lines and no frame above and to the right.

    Args:
        width: width of the whole figure in inches; its height is 4.2.
        share_y: whether all panels have one vertical axis.
    """
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    drawn = list(figure.subplots(1, count, sharey=share_y, squeeze=False)[0])
    for axes in drawn:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, drawn


def save(figure: Figure, folder: Path, name: str, *, outlined_text: bool = False) -> Path:
    """Writes ``name.png`` and ``name.svg``; equal figures give equal files.

    Args:
        folder: created if it does not exist.
        name: file name without its ending.
        outlined_text: whether the SVG holds its texts as outlines, which look the same whatever
            fonts a reader has, and not as texts, which can be searched.

    Returns:
        The path of the PNG.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=160, metadata={"Software": None})
    fonttype = "path" if outlined_text else "none"
    with matplotlib.rc_context({"svg.fonttype": fonttype, "svg.hashsalt": name}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return path

"""The style of all figures: colours, lines with bands, panels, legends, titles and files."""

import math
import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

# Okabe and Ito's palette, without its yellow, which is hard to read on white. Lines that share a
# panel differ by dashes and markers as well.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY_BLUE, BLACK, GRAY = "#E69F00", "#56B4E9", "#000000", "#777777"
LIGHT_GRAY = "#cccccc"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY_BLUE, BLACK)
MARKERS = "osD^vPX"
DASHES = ("-", "--", "-.", ":")

LINE_WIDTH, MARKER_SIZE = 1.6, 4.5
TITLE_SIZE, LABEL_SIZE, SMALL_SIZE = 10, 9, 8  # points
WIDTH, PANEL_WIDTH, HEIGHT = 6.4, 3.6, 4.0  # inches; PANEL_WIDTH is for panels side by side
MAX_BANDS = 4  # maximum number of distinguishable intervals in a panel
MAX_COLUMNS = 3  # maximum number of panels side by side
FORMATS = ("png", "svg", "pdf")


class Files(NamedTuple):
    """Settings for files of figures."""

    folder: Path  # created if it does not exist
    formats: Sequence[str] = ("png", "svg")  # from `FORMATS`
    width: float | None = None  # inches; None for the width that suits the figure
    titles: bool = True  # papers put them into the caption


def panels(
    count: int, width: float | None = None, *, height: float = HEIGHT, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels, at most `MAX_COLUMNS` side by side, with light grid lines. Sizes
    are in inches; ``height`` is that of the figure, or of each row if there are several."""
    columns = min(count, MAX_COLUMNS)
    rows = math.ceil(count / columns)
    if width is None:
        width = max(WIDTH, PANEL_WIDTH * columns)
    row_height = height if rows == 1 else min(height, 2.6)
    figure = Figure(figsize=(width, row_height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=share_y, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.remove()
    for axes in grid[:count]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", labelsize=SMALL_SIZE)
        axes.xaxis.label.set_size(LABEL_SIZE)
        axes.yaxis.label.set_size(LABEL_SIZE)
    return figure, list(grid[:count])


def draw_line(
    axes: Axes,
    x: ArrayLike,
    y: ArrayLike,
    index: int,
    label: str | None = None,
    *,
    color: str | None = None,
    markers: bool = True,
) -> None:
    """Draw a line in the style, or another color, of its ``index`` in the panel; all lines are
    equally wide."""
    axes.plot(
        x,
        y,
        label=label,
        color=color or COLORS[index % len(COLORS)],
        linestyle=DASHES[index % len(DASHES)],
        marker=MARKERS[index % len(MARKERS)] if markers else "",
        linewidth=LINE_WIDTH,
        markersize=MARKER_SIZE,
    )


def draw_band(
    axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], index: int
) -> None:
    """Draw the intervals of a line; a single one is a bar, since a band needs two points."""
    color = COLORS[index % len(COLORS)]
    if len(x) == 1:
        axes.vlines(x, low, high, color=color, linewidth=LINE_WIDTH, alpha=0.6)
    elif len(x):
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def finish(
    figure: Figure, axes: Sequence[Axes], files: Files | Path, title: str = "", note: str = ""
) -> None:
    """Set the width; add the title, and below all panels one legend of their lines and a note about
    bands, bars and the number of items."""
    if isinstance(files, Files) and files.width is not None:
        old, height = figure.get_size_inches()
        ratio = files.width / old
        # Legend and note keep their height, so a narrower figure needs a larger ratio.
        figure.set_size_inches(files.width, height * max(ratio, (1 + ratio) / 2))
    letters = figure.get_figwidth() * 72 * 1.8  # per line at 1 point: a letter is 5/9 point wide
    if title and (isinstance(files, Path) or files.titles):
        lines = textwrap.fill(title, int(letters / TITLE_SIZE))
        figure.suptitle(lines, fontsize=TITLE_SIZE)
    note = textwrap.fill(note, int(letters / SMALL_SIZE))
    handles = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        if note:
            figure.supxlabel(note, fontsize=SMALL_SIZE, color=GRAY)
        return
    inches = 0.6 + 0.065 * max(map(len, handles))  # width of a column
    legend = figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=max(1, min(len(handles), int(figure.get_figwidth() / inches))),
        fontsize=SMALL_SIZE,
        frameon=False,
        title=note or None,
        title_fontsize=SMALL_SIZE,
    )
    legend.get_title().set_color(GRAY)


def save(figure: Figure, files: Files | Path, name: str) -> Path:
    """Write a figure in each format and return the first path; equal figures give equal files. SVG
    and PDF contain texts as text, which can be searched and edited."""
    files = files if isinstance(files, Files) else Files(files)
    files.folder.mkdir(parents=True, exist_ok=True)
    paths = [files.folder / f"{name}.{ending}" for ending in files.formats]
    for path, ending in zip(paths, files.formats, strict=True):
        path.write_bytes(rendered(figure, ending, name))
    return paths[0]


def rendered(figure: Figure, ending: str, name: str) -> bytes:
    """Return the content of a figure's file in a format of `FORMATS`. An SVG's identifiers are
    derived from its name."""
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "pdf.fonttype": 42}
    content = BytesIO()
    with matplotlib.rc_context(settings):
        figure.savefig(content, format=ending, dpi=160, metadata=metadata[ending])
    return content.getvalue()

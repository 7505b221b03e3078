"""Figures of the three commands: measured points with their range, and the model as lines."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from experiments import MODEL_NAMES
from griffin_eval.drawing import BLACK, BLUE, GREEN, VERMILION, panels, save

Row = Mapping[str, Any]
STYLES: dict[str, Any] = {"griffin": (BLUE, "-"), "hawk": (VERMILION, "--"), "mqa": (GREEN, "-.")}
FRAMEWORKS = {"torch": ("PyTorch", "o"), "jax": ("JAX", "s"), "transformers": ("transformers", "^")}
ASIDE = {"torch": 0.96, "jax": 1.04}  # factors of x, so that marks do not cover each other
PANEL, HEIGHT = 4.6, 4.8  # inches, with the legend below


def draw_latency(findings: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the seconds to sample, one figure a batch with a panel for each prompt (figure 4)."""
    rows = findings["latencies"]
    prompts, batches = (list(dict.fromkeys(row[k] for row in rows)) for k in ("prompt", "batch"))
    paths = []
    for batch in batches:
        figure, drawn = _panels(len(prompts))
        for axes, prompt in zip(drawn, prompts, strict=True):
            chosen = [row for row in rows if (row["batch"], row["prompt"]) == (batch, prompt)]
            _series(axes, chosen, "sampled", "seconds", "modelled_seconds")
            axes.set(xlabel="tokens sampled", title=f"prompt of {prompt:,} tokens")
            _logarithmic(axes)
        drawn[0].set_ylabel("seconds")
        _label(figure, findings, rows, f"time to sample, batch {batch}")
        paths.append(save(figure, folder, f"latency_batch_{batch}"))
    return paths


def draw_throughput(findings: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw tokens per second over the number of sampled tokens (figure 1(b) of the paper)."""
    rows = findings["throughputs"]
    figure, (speeds, batches) = _panels(2, share_y=False)
    _series(speeds, rows, "sampled", "tokens_per_second", "modelled_tokens_per_second")
    _series(batches, rows, "sampled", None, "batch")
    speeds.set(xlabel="tokens sampled", ylabel="tokens per second")
    batches.set(xlabel="tokens sampled", ylabel="rows of the largest batch")
    for axes in (speeds, batches):
        _logarithmic(axes)
    _label(figure, findings, rows, f"throughput with {findings['memory'] / 1e9:g} GB")
    return [save(figure, folder, "throughput")]


def draw_training(findings: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the time of a step over the Transformer's at the shortest length (figure 3)."""
    rows = []
    for row in findings["steps"]:
        scale = row["over_mqa_at_shortest"] / np.median(row["seconds"])
        over = {"framework": "jax", "over": scale * np.array(row["seconds"])}
        rows.append(row | over)
    widths = list(dict.fromkeys(row["width"] for row in rows))
    figure, drawn = _panels(len(widths))
    for axes, width in zip(drawn, widths, strict=True):
        chosen = [row for row in rows if row["width"] == width]
        _series(axes, chosen, "length", "over", "modelled_over_mqa_at_shortest")
        axes.axhline(1, color=BLACK, linewidth=0.8)
        axes.set(xlabel="tokens of a sequence", title=f"width {width}", ylim=(0, None))
    shortest = min(row["length"] for row in rows)
    drawn[0].set_ylabel(f"time of a step over MQA's at {shortest} tokens")
    title = f"training, {findings['tokens']:,} tokens a step, JAX"
    _label(figure, findings, rows, title, model="products alone")
    return [save(figure, folder, "training")]


PAINTERS = {"latency": draw_latency, "throughput": draw_throughput, "training": draw_training}


def _panels(count: int, share_y: bool = True) -> tuple[Figure, Sequence[Axes]]:
    return panels(count, PANEL * max(count, 1.4), height=HEIGHT, share_y=share_y)


def _series(axes: Axes, rows: Sequence[Row], x: str, y: str | None, modelled: str) -> None:
    """Draw points of each framework with their range, and the model as lines.

    Args:
        axes: Panel.
        rows: Rows of results.
        x, y, modelled: Keys of the rows; without ``y``, a list of rounds, there are lines only.
    """
    ticks = sorted({row[x] for row in rows})
    aside = ASIDE if len({row["framework"] for row in rows}) > 1 else {}
    for name, (color, dashes) in STYLES.items():
        of_model = [row for row in rows if row["model"] == name]
        line = sorted({row[x]: row[modelled] for row in of_model}.items())
        axes.plot(*zip(*line, strict=True), dashes, color=color, linewidth=1.2)
        for framework, (_, marker) in FRAMEWORKS.items():
            chosen = [row for row in of_model if row["framework"] == framework]
            if not chosen or y is None:
                continue
            rounds = np.array([row[y] for row in chosen])
            values = np.median(rounds, 1)
            axes.errorbar(
                [row[x] * aside.get(framework, 1) for row in chosen],
                values,
                np.abs([rounds.min(1) - values, rounds.max(1) - values]),
                fmt=marker,
                color=color,
                markersize=5,
                markerfacecolor="white" if framework == "jax" else color,
                elinewidth=1,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _logarithmic(axes: Axes) -> None:
    """Give axes a logarithmic vertical axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _label(
    figure: Figure,
    findings: Mapping[str, Any],
    rows: Iterable[Row],
    title: str,
    model: str = "roofline by bytes moved",
) -> None:
    """Add the title, and a legend below: models by color, frameworks by mark, the model by line."""
    figure.suptitle(f"{title}, {findings['dtype']}, {findings['device']}", fontsize=11)
    handles = [
        Line2D([], [], color=color, linestyle=dashes, label=f"{MODEL_NAMES[name]}, {model}")
        for name, (color, dashes) in STYLES.items()
    ]
    frameworks = {row["framework"] for row in rows}
    for name, (label, marker) in FRAMEWORKS.items():
        if name in frameworks:
            face = "white" if name == "jax" else BLACK
            line = Line2D([], [], color=BLACK, linestyle="", marker=marker, markerfacecolor=face)
            line.set_label(f"{label}, measured")
            handles.append(line)
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside lower center", ncols=3)

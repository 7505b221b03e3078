"""Figures of the three commands: measured points with their range, and the model as lines."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from experiments.paper_speed.models import TITLES
from griffin_eval.drawing import BLACK, BLUE, GREEN, VERMILION, panels, save

COLORS = {"griffin": BLUE, "hawk": VERMILION, "mqa": GREEN}
DASHES: tuple[Literal["-", "--", "-."], ...] = ("-", "--", "-.")
MARKERS = {"torch": "o", "jax": "s", "transformers": "^"}
FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX", "transformers": "transformers"}
ASIDE = {"torch": 0.96, "jax": 1.04}  # of their places, so that marks do not cover each other
SPREAD = ("fastest", "slowest")
PANEL, HEIGHT = 4.6, 4.8  # inches; there is a legend below


def draw_latency(found: dict[str, Any], folder: Path) -> list[Path]:
    """Seconds to sample, one figure a batch with a panel for each prompt (the paper's figure 4);
    and milliseconds of a step over its context, with a panel for each batch."""
    rows, steps = found["latencies"], found["steps"]
    prompts, batches = (list(dict.fromkeys(r[k] for r in rows)) for k in ("prompt", "batch"))
    paths = []
    for batch in batches:
        figure, drawn = panels(len(prompts), PANEL * max(len(prompts), 1.4), share_y=True)
        figure.set_figheight(HEIGHT)
        for axes, prompt in zip(drawn, prompts, strict=True):
            chosen = [r for r in rows if (r["batch"], r["prompt"]) == (batch, prompt)]
            _series(axes, chosen, "sampled", "seconds", "modelled_seconds")
            axes.set(xlabel="tokens sampled", title=f"prompt of {prompt:,} tokens")
            _logarithmic(axes)
        drawn[0].set_ylabel("seconds")
        _legend(figure, rows)
        title = f"time to sample, batch {batch}, {found['dtype']}, {found['device']}"
        figure.suptitle(title, fontsize=11)
        paths.append(save(figure, folder, f"latency_batch_{batch}"))
    figure, drawn = panels(len(batches), PANEL * max(len(batches), 1.4))
    figure.set_figheight(HEIGHT)
    for axes, batch in zip(drawn, batches, strict=True):
        chosen = [
            step
            | {
                "seconds": 1e3 * float(np.median(step["seconds"])),
                "fastest": 1e3 * min(step["seconds"]),
                "slowest": 1e3 * max(step["seconds"]),
                "modelled_seconds": 1e3 * step["modelled_seconds"],
            }
            for step in steps
            if step["batch"] == batch
        ]
        _series(axes, chosen, "context", "seconds", "modelled_seconds", to_the_end=True)
        axes.set_xscale("linear")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
        axes.set(xlabel="tokens of context", title=f"batch {batch}", ylim=(0, None))
    drawn[0].set_ylabel("milliseconds of a decoding step")
    _legend(figure, rows)
    return [*paths, save(figure, folder, "latency_steps")]


def draw_throughput(found: dict[str, Any], folder: Path) -> list[Path]:
    """Tokens per second over the number of sampled tokens (the paper's figure 1(b))."""
    rows = found["throughputs"]
    figure, (speeds, batches) = panels(2, 2 * PANEL)
    figure.set_figheight(HEIGHT)
    _series(speeds, rows, "sampled", "tokens_per_second", "modelled_tokens_per_second")
    _series(batches, rows, "sampled", None, "batch")
    speeds.set(xlabel="tokens sampled", ylabel="tokens per second")
    batches.set(xlabel="tokens sampled", ylabel="rows of the largest batch")
    for axes in (speeds, batches):
        _logarithmic(axes)
    _legend(figure, rows)
    title = f"throughput with {found['memory'] / 1e9:g} GB, {found['dtype']}, {found['device']}"
    figure.suptitle(title, fontsize=11)
    return [save(figure, folder, "throughput")]


def draw_training(found: dict[str, Any], folder: Path) -> list[Path]:
    """Time of a step over the Transformer's at the shortest length (the paper's figure 3)."""
    rows = [row | {"framework": "jax"} for row in found["steps"]]
    widths = list(dict.fromkeys(row["width"] for row in rows))
    figure, drawn = panels(len(widths), PANEL * max(len(widths), 1.4), share_y=True)
    figure.set_figheight(HEIGHT)
    for axes, width in zip(drawn, widths, strict=True):
        chosen = [
            row
            | {kind: row["over_mqa_at_shortest"] * row[kind] / row["seconds"] for kind in SPREAD}
            for row in rows
            if row["width"] == width
        ]
        _series(axes, chosen, "length", "over_mqa_at_shortest", "modelled_over_mqa_at_shortest")
        axes.axhline(1, color=BLACK, linewidth=0.8)
        axes.set(xlabel="tokens of a sequence", title=f"width {width}", ylim=(0, None))
    shortest = min(row["length"] for row in rows)
    drawn[0].set_ylabel(f"time of a step over MQA's at {shortest} tokens")
    _legend(figure, rows, model="products alone")
    title = f"training, {found['tokens']:,} tokens a step, JAX, {found['dtype']}, {found['device']}"
    figure.suptitle(title, fontsize=11)
    return [save(figure, folder, "training")]


def _series(
    axes: Axes,
    rows: Sequence[dict[str, Any]],
    x: str,
    y: str | None,
    modelled: str,
    *,
    to_the_end: bool = False,
) -> None:
    """Points of each framework with their range, and what the model says as lines, which go on to
    the end where a cache has stopped growing."""
    ticks = sorted({row[x] for row in rows})
    aside = ASIDE if len({row["framework"] for row in rows}) > 1 and not to_the_end else {}
    for (name, color), dashes in zip(COLORS.items(), DASHES, strict=True):
        of_model = [row for row in rows if row["model"] == name]
        line = sorted({row[x]: row[modelled] for row in of_model}.items())
        if to_the_end:
            line.append((ticks[-1], line[-1][1]))
        axes.plot(*zip(*line, strict=True), dashes, color=color, linewidth=1.2)
        for framework, marker in MARKERS.items():
            chosen = [row for row in of_model if row["framework"] == framework]
            if not chosen or y is None:
                continue
            values = np.array([row[y] for row in chosen])
            ranges = np.abs(np.array([[row[kind] for row in chosen] for kind in SPREAD]) - values)
            axes.errorbar(
                [row[x] * aside.get(framework, 1) for row in chosen],
                values,
                ranges,
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
    """A logarithmic vertical axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _legend(figure: Figure, rows: Iterable[dict[str, Any]], model: str = "byte model") -> None:
    """Below the panels: colours are models, marks frameworks, lines what is computed."""
    rows = list(rows)
    handles = [
        Line2D([], [], color=color, linestyle=dashes, label=f"{TITLES[name]}, {model}")
        for (name, color), dashes in zip(COLORS.items(), DASHES, strict=True)
    ]
    handles += [
        Line2D(
            [],
            [],
            color=BLACK,
            linestyle="",
            marker=marker,
            markerfacecolor="white" if name == "jax" else BLACK,
            label=f"{FRAMEWORKS[name]}, measured",
        )
        for name, marker in MARKERS.items()
        if any(row["framework"] == name for row in rows)
    ]
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside lower center", ncols=3)

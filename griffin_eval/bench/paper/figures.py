"""Figures of the three commands: measured points with their range, and the model as lines."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from griffin_eval.bench.paper.models import TITLES
from griffin_eval.drawing import BLACK, BLUE, GREEN, VERMILION, panels, save

COLORS = {"griffin": BLUE, "hawk": VERMILION, "mqa": GREEN}
DASHES = {"griffin": "-", "hawk": "--", "mqa": "-."}
MARKERS = {"torch": "o", "jax": "s", "transformers": "^"}
FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX", "transformers": "transformers"}
PANEL = 4.6  # width in inches


def draw_latency(found: dict[str, Any], folder: Path) -> list[Path]:
    """Seconds to sample, one figure a batch with a panel for each prompt (the paper's figure 4);
    and milliseconds of a step over its context, with a panel for each batch."""
    rows, steps = found["latencies"], found["steps"]
    prompts, batches = (list(dict.fromkeys(r[k] for r in rows)) for k in ("prompt", "batch"))
    paths = []
    for batch in batches:
        figure, drawn = panels(len(prompts), PANEL * max(len(prompts), 1.4), share_y=True)
        for axes, prompt in zip(drawn, prompts, strict=True):
            chosen = [r for r in rows if (r["batch"], r["prompt"]) == (batch, prompt)]
            _series(axes, chosen, "sampled", "seconds", "modelled_seconds")
            axes.set(xlabel="tokens sampled", title=f"prompt of {prompt:,} tokens", yscale="log")
        drawn[0].set_ylabel("seconds")
        _legend(drawn[0], rows)
        title = f"time to sample, batch {batch}, {found['dtype']}, {found['device']}"
        figure.suptitle(title, fontsize=11)
        paths.append(save(figure, folder, f"latency_batch_{batch}"))
    figure, drawn = panels(len(batches), PANEL * max(len(batches), 1.4))
    for axes, batch in zip(drawn, batches, strict=True):
        chosen = [
            step
            | {
                "seconds": 1e3 * float(np.median(step["seconds"])),
                "fastest": 1e3 * min(step["seconds"]),
                "slowest": 1e3 * max(step["seconds"]),
                "modelled_seconds": 1e3 * step["modelled_seconds"],
            }
            for step in _to_the_end(steps, max(p["context"] for p in steps))
            if step["batch"] == batch
        ]
        _series(axes, chosen, "context", "seconds", "modelled_seconds")
        axes.set_xscale("linear")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
        axes.set(xlabel="tokens of context", title=f"batch {batch}", ylim=(0, None))
    drawn[0].set_ylabel("milliseconds of a decoding step")
    _legend(drawn[0], rows)
    return [*paths, save(figure, folder, "latency_steps")]


def draw_throughput(found: dict[str, Any], folder: Path) -> list[Path]:
    """Tokens per second over the number of sampled tokens (the paper's figure 1(b))."""
    rows = found["throughputs"]
    speed = {"tokens_per_second": "tokens per second", "batch": "rows, largest batch"}
    figure, drawn = panels(len(speed), PANEL * len(speed))
    for axes, (quantity, label) in zip(drawn, speed.items(), strict=True):
        modelled = "modelled_tokens_per_second" if quantity != "batch" else "batch"
        kept = rows if quantity != "batch" else _one_each(rows)
        _series(axes, kept, "sampled", quantity, modelled, spread=quantity != "batch")
        axes.set(xlabel="tokens sampled", ylabel=label, yscale="log")
    _legend(drawn[0], rows)
    title = f"throughput with {found['memory'] / 1e9:g} GB, {found['dtype']}, {found['device']}"
    figure.suptitle(title, fontsize=11)
    return [save(figure, folder, "throughput")]


def draw_training(found: dict[str, Any], folder: Path) -> list[Path]:
    """Time of a step over the Transformer's at the shortest length (the paper's figure 3)."""
    rows = [row | {"framework": "jax"} for row in found["steps"]]
    widths = list(dict.fromkeys(row["width"] for row in rows))
    figure, drawn = panels(len(widths), PANEL * max(len(widths), 1.4), share_y=True)
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
    _legend(drawn[0], rows, model="products alone")
    title = f"training, {found['tokens']:,} tokens a step, JAX, {found['dtype']}, {found['device']}"
    figure.suptitle(title, fontsize=11)
    return [save(figure, folder, "training")]


SPREAD = ("fastest", "slowest")


def _series(
    axes: Axes,
    rows: Sequence[dict[str, Any]],
    x: str,
    y: str,
    modelled: str,
    *,
    spread: bool = True,
) -> None:
    """Points of each framework with their range, and the model of each kind of model as a line."""
    for name in COLORS:
        of_model = [row for row in rows if row["model"] == name]
        line = sorted({row[x]: row[modelled] for row in of_model}.items())
        axes.plot(*zip(*line, strict=True), DASHES[name], color=COLORS[name], linewidth=1.2)
        for framework, marker in MARKERS.items():
            chosen = [row for row in of_model if row["framework"] == framework]
            if not chosen:
                continue
            values = np.array([row[y] for row in chosen])
            ranges = None
            if spread:
                ends = np.array([[row[kind] for row in chosen] for kind in SPREAD])
                ranges = np.abs(ends - values)
            axes.errorbar(
                [row[x] for row in chosen],
                values,
                ranges,
                fmt=marker,
                color=COLORS[name],
                markersize=5,
                markerfacecolor="white" if framework == "jax" else COLORS[name],
                elinewidth=1,
            )
    ticks = sorted({row[x] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _legend(axes: Axes, rows: Iterable[dict[str, Any]], model: str = "byte model") -> None:
    """Colours are models, marks frameworks, lines what is computed."""
    rows = list(rows)
    handles = [
        Line2D([], [], color=COLORS[name], linestyle=DASHES[name], label=f"{TITLES[name]}, {model}")
        for name in COLORS
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
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="best")


def _one_each(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the second framework's rows, where they say the same."""
    return list({(row["model"], row["sampled"]): row for row in reversed(rows)}.values())


def _to_the_end(steps: Sequence[dict[str, Any]], longest: int) -> list[dict[str, Any]]:
    """The steps, and where the cache has stopped growing its last one again at the longest context,
    since it is the same."""
    last = {(s["framework"], s["model"], s["batch"]): s for s in steps}
    return [*steps, *(s | {"context": longest} for s in last.values() if s["context"] < longest)]

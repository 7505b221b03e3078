"""Figures of `griffin-eval memory`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from griffin_eval.analysis.half_lives import BINS, QUANTILES, ChannelDecay
from griffin_eval.drawing import (
    BLACK,
    BLUE,
    COLORS,
    GRAY,
    GREEN,
    LINE_WIDTH,
    MARKER_SIZE,
    PURPLE,
    TITLE_SIZE,
    VERMILION,
    Files,
    draw_line,
    finish,
    panels,
    save,
)

Drawn = dict[str, tuple[Figure, str, str]]  # figure, title and note by name


def draw(layers: list[ChannelDecay], facts: dict[str, Any], files: Files | None = None) -> Drawn:
    """Draw the caches and, for recurrent layers, their half-lives and gates.

    Args:
        facts: Numbers as ``--json`` prints them.
        files: Width and titles; None for default widths with titles.
    """
    drawn: Drawn = {
        "caches": (
            _caches(facts),
            f"Memory per sequence, {facts['dtype']}",
            "Transformers have the same depth, width and head dimension, and global attention",
        )
    }
    if layers:
        read = f" on {facts['text']['tokens']:,} tokens" if facts["text"] else ""
        drawn["half_lives"] = (
            _half_lives(layers, facts),
            "Half-lives of the RG-LRU by layer",
            f"Marks: median of the channels{read}; bars: 5% to 95% of them",
        )
        drawn["gate"] = (_gate(layers), "", "")
    for figure, title, note in drawn.values():
        finish(figure, figure.axes, files or Files(Path()), title, note)
    return drawn


def save_all(layers: list[ChannelDecay], facts: dict[str, Any], files: Files) -> list[Path]:
    """Draw all figures, and return the path of the first file of each."""
    drawn = draw(layers, facts, files)
    return [save(figure, files, f"memory_{name}") for name, (figure, _, _) in drawn.items()]


def _half_lives(layers: list[ChannelDecay], facts: dict[str, Any]) -> Figure:
    """Draw the median and the range from 5% to 95% of the half-lives of each layer's channels."""
    figure, (axes,) = panels(1)
    kinds: list[tuple[str, str, str, Callable[[ChannelDecay], np.ndarray]]] = [
        ("gate open, r = 1", VERMILION, "s", lambda layer: layer.half_life(1.0)),
    ]
    if layers[0].mean_gate is None:
        kinds.append(("r = 0.5", BLUE, "o", lambda layer: layer.half_life(0.5)))
    else:
        kinds.append(
            ("mean gate on the text", BLUE, "o", lambda layer: layer.half_life(_mean(layer)))
        )
    for offset, (label, color, marker, half_life) in zip((-0.15, 0.15), kinds, strict=True):
        x = np.array([layer.number for layer in layers]) + offset
        low, middle, high = np.transpose(
            [np.quantile(half_life(layer), QUANTILES, method="inverted_cdf") for layer in layers]
        )
        axes.vlines(x, low, high, color=color, linewidth=LINE_WIDTH, alpha=0.6)
        axes.plot(x, middle, marker, color=color, markersize=MARKER_SIZE, label=label)
    if facts["window"]:
        label = f"attention window, {facts['window']:,} tokens"
        axes.axhline(facts["window"], color=BLACK, linestyle="--", linewidth=1, label=label)
    axes.set(yscale="log", xlabel="layer", ylabel="half-life of a channel, tokens")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    recurrent = {layer.number for layer in layers}
    numbers = range(facts["layers"])
    axes.set_xlim(-0.6, facts["layers"] - 0.4)
    if len(numbers) <= 12:
        axes.set_xticks(numbers, [f"{n}" if n in recurrent else f"{n}\nattention" for n in numbers])
    return figure


def _gate(layers: list[ChannelDecay]) -> Figure:
    """Draw figure 7 of appendix A for this checkpoint, and its gates on the text.

    Each recurrence is h_t = α(r) h_{t-1} + β(r) x_t; the figure shows β / (α + β), the weight of
    the new input. RG-LRU: α = a^(8r), β = √(1 - α²). GRU, and Mamba with A = 1: α = 1 - r, β = r.
    LRU: no gate, so the value of the RG-LRU at r = 1.
    """
    measured = layers[0].histogram is not None
    figure, axes = panels(2 if measured else 1, 8.4 if measured else None)
    r = np.linspace(0, 1, 401)
    rate = np.concatenate([layer.rate for layer in layers])
    for index, q in enumerate((0.95, 0.5, 0.05)):
        nats = np.quantile(rate, q)
        alpha, beta = np.exp(-nats * r), np.sqrt(-np.expm1(-2 * nats * r))
        weight = beta / (alpha + beta)
        label = f"RG-LRU, $a^8$ = {np.exp(-nats):.3g} ({1 - q:.0%} of channels below)"
        draw_line(axes[0], r, weight, index, label, markers=False)
        axes[0].axhline(weight[-1], color=COLORS[index], linestyle=":", linewidth=1)
    axes[0].plot([], [], ":", color=BLACK, linewidth=1, label="LRU with the same $a^8$, no gate")
    axes[0].plot(r, r, "-", color=PURPLE, linewidth=LINE_WIDTH, label="GRU; Mamba with A = 1")
    axes[0].set(xlabel="gate r", ylabel="weight of the new input, β / (α + β)", ylim=(0, 1.02))
    axes[0].set_title("Weight of the input by gate", fontsize=TITLE_SIZE)
    if measured:
        histograms = [layer.histogram for layer in layers if layer.histogram is not None]
        density = np.array([h / h.sum() * BINS for h in histograms])
        centers = (np.arange(BINS) + 0.5) / BINS
        axes[1].fill_between(
            centers, density.min(0), density.max(0), step="mid", color=GREEN, alpha=0.25,
            label="density, lowest to highest layer",
        )  # fmt: skip
        mean = density.mean(0)
        axes[1].step(centers, mean, where="mid", color=GREEN, label="density, mean of the layers")
        axes[1].set(xlabel="gate r on the text", ylabel="density", xlim=(0, 1), ylim=(0, None))
        axes[1].set_title("Gates on the text", fontsize=TITLE_SIZE)
    return figure


def _caches(facts: dict[str, Any]) -> Figure:
    """Draw the bytes for one sequence over its length (appendix F.4)."""
    figure, (axes,) = panels(1)
    rows = facts["caches"]
    tokens = [row["tokens"] for row in rows]
    kinds = (("total", "this model"), ("mha", "MHA Transformer"), ("mqa", "MQA Transformer"))
    for index, (key, label) in enumerate(kinds):
        draw_line(axes, tokens, [row[key] for row in rows], index, label)
    weights = facts["parameter_bytes"]
    axes.axhline(weights, color=GRAY, linestyle=":", linewidth=1.2, label="weights of the model")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens of a sequence", ylabel="memory for the sequence")
    axes.set_xticks(tokens, [_binary(count) for count in tokens])
    axes.yaxis.set_major_formatter(FuncFormatter(_bytes))
    return figure


def _binary(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}k"


def _bytes(value: float, _: Any) -> str:
    """Format a number of bytes like the tables: 10 kB, 1 MB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"


def _mean(layer: ChannelDecay) -> np.ndarray:
    assert layer.mean_gate is not None
    return layer.mean_gate

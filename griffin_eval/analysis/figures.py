"""The figures of `griffin-eval memory`, as PNG and SVG."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from griffin_eval.analysis.half_lives import BINS, QUANTILES, ChannelDecay
from griffin_eval.drawing import BLACK, BLUE, GREEN, PURPLE, VERMILION, panels, save

ONE_PANEL, TWO_PANELS = 6.4, 10.4  # widths in inches


def draw(layers: list[ChannelDecay], facts: dict[str, Any], folder: Path) -> list[Path]:
    """Draws the caches and, if the model has recurrent layers, their half-lives and gates.

    Args:
        layers: the recurrent layers, with or without measured gates; empty without any.
        facts: the numbers as ``--json`` prints them.
        folder: created if it does not exist.

    Returns:
        The paths of the PNGs.
    """
    figures = {"caches": _caches(facts)}
    if layers:
        figures |= {"half_lives": _half_lives(layers, facts), "gate": _gate(layers)}
    return [save(figure, folder, f"memory_{name}") for name, figure in figures.items()]


def _half_lives(layers: list[ChannelDecay], facts: dict[str, Any]) -> Figure:
    """Half-lives of each layer's channels: 5 % to 95 % as a line, the median as a mark."""
    figure, (axes,) = panels(1, ONE_PANEL)
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
        axes.vlines(x, low, high, color=color, linewidth=2.5, alpha=0.55)
        axes.plot(x, middle, marker, color=color, markersize=5, label=label)
    if facts["window"]:
        axes.axhline(facts["window"], color=BLACK, linestyle="--", linewidth=1)
        axes.annotate(
            f"attention window, {facts['window']} tokens",
            (1, facts["window"]),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    axes.set(yscale="log", xlabel="layer", ylabel="half-life of a channel, tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Half-lives of the RG-LRU: median, 5 % to 95 % of the channels", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _add_headroom(axes)
    return figure


def _gate(layers: list[ChannelDecay]) -> Figure:
    """Figure 7 of appendix A for this checkpoint, and the distribution of its gates on the text.

    Each recurrence is h_t = α(r) h_{t-1} + β(r) x_t; the figure shows β / (α + β), the weight of
    the new input. RG-LRU: α = a^(8r), β = √(1 - α²). GRU, and Mamba with A = 1: α = 1 - r, β = r.
    LRU: no gate, so the value of the RG-LRU at r = 1.
    """
    measured = layers[0].histogram is not None
    figure, axes = panels(2, TWO_PANELS) if measured else panels(1, ONE_PANEL)
    r = np.linspace(0, 1, 401)
    rate = np.concatenate([layer.rate for layer in layers])
    for q, color, dash in ((0.95, VERMILION, "--"), (0.5, BLUE, "-"), (0.05, GREEN, "-.")):
        nats = np.quantile(rate, q)
        alpha, beta = np.exp(-nats * r), np.sqrt(-np.expm1(-2 * nats * r))
        weight = beta / (alpha + beta)
        label = f"RG-LRU, $a^8$ = {np.exp(-nats):.3g} ({1 - q:.0%} of channels below)"
        axes[0].plot(r, weight, dash, color=color, label=label)
        axes[0].axhline(weight[-1], color=color, linestyle=":", linewidth=1)
    axes[0].plot([], [], ":", color=BLACK, linewidth=1, label="LRU with the same $a^8$, no gate")
    axes[0].plot(r, r, "-", color=PURPLE, label="GRU; Mamba with A = 1")
    axes[0].set(xlabel="gate r", ylabel="weight of the new input, β / (α + β)", ylim=(0, 1.02))
    axes[0].set_title("What the gate does (appendix A)", fontsize=10)
    axes[0].legend(frameon=False, fontsize=7.5, loc="upper left")
    if measured:
        histograms = [layer.histogram for layer in layers if layer.histogram is not None]
        density = np.array([h / h.sum() * BINS for h in histograms])
        centers = (np.arange(BINS) + 0.5) / BINS
        axes[1].fill_between(
            centers, density.min(0), density.max(0), step="mid", color=BLUE, alpha=0.25,
            label="lowest to highest layer",
        )  # fmt: skip
        axes[1].step(centers, density.mean(0), where="mid", color=BLUE, label="mean of the layers")
        axes[1].set(xlabel="gate r on the text", ylabel="density", xlim=(0, 1), ylim=(0, None))
        axes[1].set_title("Where the gates are", fontsize=10)
        axes[1].legend(frameon=False, fontsize=8)
    return figure


def _caches(facts: dict[str, Any]) -> Figure:
    """Bytes kept for one sequence over its length (appendix F.4)."""
    figure, (axes,) = panels(1, ONE_PANEL)
    rows = facts["caches"]
    tokens = [row["tokens"] for row in rows]
    for key, label, color, style in (
        ("mha", "MHA Transformer", VERMILION, "--s"),
        ("mqa", "MQA Transformer", PURPLE, "-.D"),
        ("total", "this model", BLUE, "-o"),
    ):
        megabytes = [row[key] / 1e6 for row in rows]
        axes.plot(tokens, megabytes, style, color=color, markersize=4, label=label)
    weights = facts["parameter_bytes"] / 1e6
    axes.axhline(weights, color=BLACK, linestyle=":", linewidth=1.2, label="the weights")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens of a sequence", ylabel="kept for the sequence, MB")
    title = f"Caches of one sequence in {facts['dtype']}; Transformers of the same shape"
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _add_headroom(axes)
    return figure


def _mean(layer: ChannelDecay) -> np.ndarray:
    assert layer.mean_gate is not None
    return layer.mean_gate


def _add_headroom(axes: Axes) -> None:
    """Extends a logarithmic vertical axis upwards, so that the legend has space above the data."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.3)

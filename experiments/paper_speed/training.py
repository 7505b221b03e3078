"""Section 4.3: the time of a training step with as many tokens in shorter or longer sequences.

A step is the JAX trainer's own compiled update: gradients, clipping and AdamW, float32, nothing
recomputed. Its least time is that of its products of matrices, three times those of reading the
tokens, at the best rate of this run. Prefill, of one document in JAX, is measured beside it.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.model_flops import step_flops
from benchmarks.timing import Job
from experiments.paper_speed.decoding import processors
from experiments.paper_speed.models import DTYPE, PATTERNS, make_models
from griffin_eval.config import PRESETS, GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import parameter_count

WORKER = "experiments.paper_speed.training_worker"
PRODUCT_ROWS = 2048  # of the products that give the best rate
SIZES = {"400m": "400m", "1.3b": "1.3b", "3b": "3b", "7b": "6b"}  # Griffin's, and MQA's beside it
PRESET_LENGTHS = (2048, 4096, 8192)  # of figure 3


def presets() -> list[dict[str, Any]]:
    """Parameters, and the operations of Griffin over the Transformer's, of the paper's sizes."""
    rows = []
    for size, mqa_size in SIZES.items():
        griffin, mqa = PRESETS[f"griffin-{size}"], PRESETS[f"mqa-{mqa_size}"]
        rows.append(
            {
                "size": size,
                "parameters": {"griffin": parameter_count(griffin), "mqa": parameter_count(mqa)},
                "lengths": list(PRESET_LENGTHS),
                "flops_over_mqa": [
                    step_flops(griffin, n, n) / step_flops(mqa, n, n) for n in PRESET_LENGTHS
                ],
            }
        )
    return rows


def make_widths(
    widths: Sequence[int], *, layers: int, head_dim: int, vocab_size: int, visible_keys: int
) -> dict[int, dict[str, GriffinConfig]]:
    """The three models of each width, with heads of one size.

    Raises:
        ArgumentError: sizes that do not fit together.
    """
    if narrow := [width for width in widths if width % head_dim]:
        raise ArgumentError(f"--widths {narrow[0]}: expected multiples of --head-dim {head_dim}")
    return {
        width: make_models(
            width=width,
            layers=layers,
            heads=width // head_dim,
            vocab_size=vocab_size,
            visible_keys=visible_keys,
        )
        for width in widths
    }


def measure(
    widths: dict[int, dict[str, GriffinConfig]],
    lengths: Sequence[int],
    tokens: int,
    *,
    rounds: int,
    device: str,
    say: Any,
) -> dict[str, Any]:
    """Measures in rounds, in each every length of every model in turn; the results as in JSON.

    Args:
        widths: from `make_widths`.
        lengths: tokens of a sequence, which divide ``tokens``.
        tokens: of a step.
        rounds: times that each is measured.
        device: as JAX names it.
        say: called with a line about each stage.

    Raises:
        Failed: a process did not come to its end.
    """
    seconds: dict[tuple[int, str, int], list[float]] = {}
    prefill: dict[tuple[int, str, int], list[float]] = {}
    rates: dict[int, list[float]] = {width: [] for width in widths}
    environment = {"JAX_PLATFORMS": "cpu"} if device == "cpu" else None
    for width, models in widths.items():  # one width after the other: optimizers take memory
        with ExitStack() as stack:
            jobs = {}
            for name, config in models.items():
                say(f"width {width}, loading: {name}")
                arguments = json.dumps(config.__dict__), device
                jobs[name] = stack.enter_context(Job(WORKER, *arguments, environment=environment))
                jobs[name].ask("load")
            for number in range(rounds):
                ways = jobs["mqa"].ask("products", tokens=PRODUCT_ROWS)
                rates[width].append(max(ways.values()))
                for length in lengths:
                    say(f"width {width}, round {number + 1} of {rounds}: {length} tokens")
                    for name, job in jobs.items():
                        taken = job.ask("train", rows=tokens // length, length=length)
                        seconds.setdefault((width, name, length), []).append(taken)
                        taken = job.ask("prefill", length=length)
                        prefill.setdefault((width, name, length), []).append(taken)
    return _results(widths, tokens, device, seconds, prefill, rates)


def _results(
    widths: dict[int, dict[str, GriffinConfig]],
    tokens: int,
    device: str,
    seconds: dict[tuple[int, str, int], list[float]],
    prefill: dict[tuple[int, str, int], list[float]],
    rates: dict[int, list[float]],
) -> dict[str, Any]:
    rows = []
    shortest = min(length for _, _, length in seconds)
    for (width, name, length), taken in seconds.items():
        config, mqa = widths[width][name], widths[width]["mqa"]
        flops = step_flops(config, length, tokens)
        median = float(np.median(taken))
        read = float(np.median(prefill[width, name, length]))
        rows.append(
            {
                "width": width,
                "length": length,
                "model": name,
                "parameters": parameter_count(config),
                "seconds": median,
                "fastest": min(taken),
                "slowest": max(taken),
                "over_mqa": median / float(np.median(seconds[width, "mqa", length])),
                "over_mqa_at_shortest": median / float(np.median(seconds[width, "mqa", shortest])),
                "flops": flops,
                "modelled_over_mqa_at_shortest": flops / step_flops(mqa, shortest, tokens),
                "of_products": flops / median / float(np.median(rates[width])),
                "prefill_seconds": read,
                "prefill_over_mqa": read / float(np.median(prefill[width, "mqa", length])),
            }
        )
    return {
        "device": device,
        "threads": processors(),
        "dtype": DTYPE,
        "tokens": tokens,
        "product_rates": {width: float(np.median(each)) for width, each in rates.items()},
        "steps": sorted(
            rows, key=lambda r: (r["width"], r["length"], list(PATTERNS).index(r["model"]))
        ),
        "presets": presets(),
    }

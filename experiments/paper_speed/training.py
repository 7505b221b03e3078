"""Section 4.3: the time of a training step with equally many tokens in sequences of any length.

A step is the JAX trainer's own compiled update: gradients, clipping and AdamW in float32, without
recomputation. Its least time is that of its matrix products, three times those of reading the
tokens, at the best rate of this run. Prefill of one document in JAX is measured too.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.model_flops import step_flops
from experiments.paper_speed.decoding import PRODUCT_ROWS, machine, start
from experiments.paper_speed.models import DTYPE, PATTERNS
from griffin_eval.config import PRESETS, GriffinConfig
from griffin_eval.layout import parameter_count

WORKER = "experiments.paper_speed.training_worker"
SIZES = {"400m": "400m", "1.3b": "1.3b", "3b": "3b", "7b": "6b"}  # Griffin's and MQA's presets
PRESET_LENGTHS = (2048, 4096, 8192)  # lengths of figure 3
Widths = Mapping[int, Mapping[str, GriffinConfig]]
Seconds = dict[tuple[int, str, int], list[float]]  # seconds of rounds by width, model and length


def presets() -> list[dict[str, Any]]:
    """Return the parameters of the paper's sizes, and Griffin's operations divided by MQA's."""
    rows = []
    for size, mqa_size in SIZES.items():
        griffin, mqa = PRESETS[f"griffin-{size}"], PRESETS[f"mqa-{mqa_size}"]
        counts = {
            "griffin_parameters": parameter_count(griffin),
            "mqa_parameters": parameter_count(mqa),
        }
        flops = {
            f"flops_over_mqa_at_{n}": step_flops(griffin, n, n) / step_flops(mqa, n, n)
            for n in PRESET_LENGTHS
        }
        rows.append({"size": size} | counts | flops)
    return rows


def measure(
    widths: Widths,
    lengths: Sequence[int],
    tokens: int,
    rounds: int,
    device: str,
    say: Callable[[str], Any],
) -> dict[str, Any]:
    """Measure every length of every model in turn, in each round; return the results as in JSON."""
    seconds: Seconds = {}
    prefill: Seconds = {}
    rates: dict[int, list[float]] = {width: [] for width in widths}
    for width, models in widths.items():  # one width after the other: optimizers take memory
        with ExitStack() as stack:
            jobs = {}
            for name, config in models.items():
                say(f"width {width}, loading: {name}")
                jobs[name] = stack.enter_context(start(WORKER, config, device))
                jobs[name].ask("load")
            for number in range(1, rounds + 1):
                rates[width].append(max(jobs["mqa"].ask("products", tokens=PRODUCT_ROWS).values()))
                for length in lengths:
                    say(f"width {width}, round {number} of {rounds}: {length} tokens")
                    for name, job in jobs.items():
                        key = width, name, length
                        taken = job.ask("train", rows=tokens // length, length=length)
                        seconds.setdefault(key, []).append(taken)
                        prefill.setdefault(key, []).append(job.ask("prefill", length=length))
    return machine(device) | results(widths, tokens, seconds, prefill, rates)


def results(
    widths: Widths, tokens: int, seconds: Seconds, prefill: Seconds, rates: dict[int, list[float]]
) -> dict[str, Any]:
    """Return the results as JSON has them."""
    rows = []
    shortest = min(length for _, _, length in seconds)
    step, read = (
        {key: float(np.median(taken)) for key, taken in each.items()} for each in (seconds, prefill)
    )
    best = {width: float(np.median(each)) for width, each in rates.items()}
    for (width, name, length), taken in seconds.items():
        key, mqa_key = (width, name, length), (width, "mqa", length)
        flops = step_flops(widths[width][name], length, tokens)
        mqa_flops = step_flops(widths[width]["mqa"], shortest, tokens)
        rows.append(
            {
                "width": width,
                "length": length,
                "model": name,
                "parameters": parameter_count(widths[width][name]),
                "seconds": step[key],
                "fastest": min(taken),
                "slowest": max(taken),
                "over_mqa": step[key] / step[mqa_key],
                "over_mqa_at_shortest": step[key] / step[width, "mqa", shortest],
                "flops": flops,
                "modelled_over_mqa_at_shortest": flops / mqa_flops,
                "of_products": flops / step[key] / best[width],
                "prefill_seconds": read[key],
                "prefill_over_mqa": read[key] / read[mqa_key],
            }
        )
    order = list(PATTERNS)
    rows.sort(key=lambda row: (row["width"], row["length"], order.index(row["model"])))
    return {
        "dtype": DTYPE,
        "tokens": tokens,
        "product_rates": best,
        "steps": rows,
        "presets": presets(),
    }

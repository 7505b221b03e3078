"""Section 4.3: the time of a training step with equally many tokens in sequences of any length.

A step is the JAX trainer's own compiled update: gradients, clipping and AdamW in float32, without
recomputation. Its least time is that of its matrix products, three times those of reading the
tokens, at the best rate of this run. Prefill of one document in JAX is measured too.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from benchmarks.commands import tell
from benchmarks.model_flops import step_flops
from benchmarks.timing import interleave
from experiments.paper_speed.decoding import PRODUCT_ROWS, machine, start
from experiments.paper_speed.models import DTYPE, PATTERNS
from griffin_eval.config import GriffinConfig

Widths = Mapping[int, Mapping[str, GriffinConfig]]
Seconds = dict[tuple[int, str, int], list[float]]  # rounds by width, model and length


def measure(
    widths: Widths, lengths: Sequence[int], tokens: int, rounds: int, device: str
) -> dict[str, Any]:
    """Measure every length of every model in turn; return the results as in JSON.

    The lengths of sequences divide ``tokens``, those of a step.
    """
    found: dict[str, Seconds] = {"train": {}, "prefill": {}}
    rates: dict[int, list[float]] = {}
    for width, models in widths.items():  # one width after the other: optimizers take memory
        with ExitStack() as stack:
            jobs, measurements = {}, dict[Any, Callable[[], Any]]()
            for name, config in models.items():
                tell(f"width {width}, loading: {name}")
                jobs[name] = stack.enter_context(start("training_worker", config, device))
                jobs[name].ask("load")
            measurements["rates"] = partial(jobs["mqa"].ask, "products", tokens=PRODUCT_ROWS)
            for length in lengths:
                for name, job in jobs.items():
                    step = partial(job.ask, "train", rows=tokens // length, length=length)
                    measurements["train", (width, name, length)] = step
                    read = partial(job.ask, "prefill", length=length)
                    measurements["prefill", (width, name, length)] = read
            taken = interleave(rounds, measurements, tell)
        rates[width] = [max(ways.values()) for ways in taken.pop("rates")]
        for (kind, key), seconds in taken.items():
            found[kind][key] = seconds
    return machine(device) | results(widths, tokens, found["train"], found["prefill"], rates)


def results(
    widths: Widths, tokens: int, seconds: Seconds, prefill: Seconds, rates: dict[int, list[float]]
) -> dict[str, Any]:
    """Return the results as JSON has them; ``rates`` are FLOP/s of products, by width."""
    rows = []
    shortest = min(length for _, _, length in seconds)
    step, read = (
        {key: float(np.median(taken)) for key, taken in each.items()} for each in (seconds, prefill)
    )
    for key, taken in seconds.items():
        width, name, length = key
        flops = step_flops(widths[width][name], length, tokens)
        mqa_flops = step_flops(widths[width]["mqa"], shortest, tokens)
        rows.append(
            {
                "width": width,
                "length": length,
                "model": name,
                "seconds": taken,
                "over_mqa": step[key] / step[width, "mqa", length],
                "over_mqa_at_shortest": step[key] / step[width, "mqa", shortest],
                "modelled_over_mqa_at_shortest": flops / mqa_flops,
                "flops": flops,
                "of_products": flops / step[key] / float(np.median(rates[width])),
                "prefill_seconds": prefill[key],
                "prefill_over_mqa": read[key] / read[width, "mqa", length],
            }
        )
    order = list(PATTERNS)
    rows.sort(key=lambda row: (row["width"], row["length"], order.index(row["model"])))
    return {"dtype": DTYPE, "tokens": tokens, "steps": rows}

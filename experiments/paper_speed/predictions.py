"""Predictions of the byte model for the paper's models of 1.3B parameters in bfloat16."""

from typing import Any

import numpy as np

from experiments.paper_speed.byte_model import (
    Rates,
    largest_batch,
    sampling_seconds,
)
from experiments.paper_speed.models import PATTERNS, RECURRENT
from griffin_eval.config import PRESETS

SIZE, ITEMSIZE = "1.3b", 2
BATCH = 16  # batch of figure 4
PROMPTS, SAMPLED = (0, 4096), (128, 512, 1024, 2048, 4096)
LENGTHS = (512, 1024, 2048, 4096)  # lengths of figure 1(b)
MEMORY = 9 * 16 * 10**8  # nine tenths of the 16 GB of a TPU-v3
TPU_V3_INTENSITY = 136  # operations per byte that it reads (appendix F.2)
# The unit is the time of a byte, since only ratios are printed: bytes alone, and a TPU-v3.
BYTES, TPU_V3 = Rates(1, np.inf), Rates(1, TPU_V3_INTENSITY)

CONFIGS = {name: PRESETS[f"{name}-{SIZE}"] for name in PATTERNS}


def latencies() -> list[dict[str, Any]]:
    """Return the Transformer's sampling time divided by each model's, at the batch of figure 4."""
    rows = []
    for prompt in PROMPTS:
        for sampled in SAMPLED:
            seconds = {
                name: sampling_seconds(config, BYTES, BATCH, prompt, sampled, ITEMSIZE)
                for name, config in CONFIGS.items()
            }
            over = {name: seconds["mqa"] / seconds[name] for name in RECURRENT}
            rows.append({"prompt": prompt, "sampled": sampled} | over)
    return rows


def throughputs() -> list[dict[str, Any]]:
    """Return the largest batch of each model within `MEMORY`, and its tokens per second divided by
    the Transformer's: by the bytes alone, and with the operations of a TPU-v3."""
    rows = []
    for length in LENGTHS:
        batches = {
            name: largest_batch(config, length, MEMORY, ITEMSIZE)
            for name, config in CONFIGS.items()
        }
        row = {"sampled": length} | {f"{name}_batch": batch for name, batch in batches.items()}
        for kind, rates in (("by_bytes", BYTES), ("on_tpu_v3", TPU_V3)):
            speeds = {
                name: batches[name]
                / sampling_seconds(config, rates, batches[name], 0, length, ITEMSIZE)
                for name, config in CONFIGS.items()
            }
            row |= {f"{name}_{kind}": speeds[name] / speeds["mqa"] for name in RECURRENT}
        rows.append(row)
    return rows

"""Operations of a model's products, (a, b) by (b, c) as 2abc. Nothing else is counted."""

import numpy as np

from griffin_eval.config import GriffinConfig


def reading_flops(config: GriffinConfig, positions: np.ndarray) -> int:
    """Return the operations that turn tokens into hidden vectors.

    ``positions``, int [N], are the tokens of the document before each of them, for attention.
    """
    c = config
    mlp = 3 * 2 * c.width * c.mlp_width
    gates = 2 * 2 * c.recurrent_channels * (c.lru_width // c.gate_blocks)
    projections = 2 * c.width * (2 * c.q_width + 2 * c.kv_width)  # q and output, k and v
    recurrent = mlp + 3 * 2 * c.width * c.lru_width + gates
    seen = positions.astype(np.int64) + 1
    keys = {
        "local_attention": int(np.minimum(seen, c.visible_keys).sum()),
        "global_attention": int(seen.sum()),
    }
    # Every head has a product with the keys and one with the values.
    return sum(
        recurrent * len(positions)
        if block == "recurrent"
        else (mlp + projections) * len(positions) + 2 * 2 * c.q_width * keys[block]
        for block in c.block_types
    )


def logit_flops(config: GriffinConfig) -> int:
    """Return the operations of the logits of one position."""
    return 2 * config.width * config.vocab_size


def step_flops(config: GriffinConfig, length: int, tokens: int) -> int:
    """Return the operations of a training step: forward once, backward twice as many.

    Attention counts the keys that causal queries see. The step's tokens are a multiple of the
    sequences' length.
    """
    forward = reading_flops(config, np.arange(length)) + length * logit_flops(config)
    return 3 * forward * (tokens // length)

"""AdamW with learning rates by group, and learning rate schedules."""

import optax

from griffin_eval.training.recipes import Recipe
from griffin_eval.training.step import Params

WARM_UP_SHARE = 0.05  # share of the steps before a cosine
WARM_UP_STEPS = 75  # steps before the other schedules
FINAL_RATE_SHARE = 0.1  # last learning rate of a cosine over its peak
FALLING_SHARE = 0.1  # share of the steps in which a falling schedule goes to 0
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0  # larger gradients are scaled down to this norm
BETAS = (0.9, 0.98)  # AdamW's decay rates of the two moments
# Layers that exist only in recurrent blocks.
RECURRENT_PARTS = ("rg_lru", "conv_1d", "linear_x", "linear_y", "linear_out")


def make_schedule(recipe: Recipe) -> optax.Schedule:
    """Return the learning rate by step, after a linear warm-up.

    ``cosine`` ends at a tenth of the peak with the recipe's last step. ``constant`` stays at the
    peak, so that a run can be extended. ``falling`` stays at the peak, then goes to 0 in the last
    tenth of the steps.
    """
    peak, steps = recipe.learning_rate, recipe.steps
    if recipe.schedule == "cosine":
        warm_up = max(1, round(WARM_UP_SHARE * steps))
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, warm_up, max(steps, warm_up + 1), FINAL_RATE_SHARE * peak
        )
    last = max(1, round(FALLING_SHARE * steps)) if recipe.schedule == "falling" else 0
    warm_up = min(WARM_UP_STEPS, max(steps - last, 1)) if last else WARM_UP_STEPS
    pieces = [optax.linear_schedule(0.0, peak, warm_up), optax.constant_schedule(peak)]
    ends = [warm_up]
    if last:
        pieces.append(optax.linear_schedule(peak, 0.0, last))
        ends.append(max(warm_up, steps - last))
    return optax.join_schedules(pieces, ends)


def make_optimizer(
    rate: optax.Schedule, recurrent_rate: float = 1.0, decayed: str = "matrices"
) -> optax.GradientTransformation:
    """Return AdamW after clipping, with updates of `RECURRENT_PARTS` times ``recurrent_rate``.

    Weight decay acts on the weights of linear layers (``linear``), or on all parameters of two or
    more dimensions except convolutions (``matrices``), including embedding and gates.
    """

    def recurrent(params: Params) -> dict[str, bool]:
        return {name: _part(name) in RECURRENT_PARTS for name in params}

    def mask(params: Params) -> dict[str, bool]:
        spared = ("conv_1d",) if decayed == "matrices" else ("conv_1d", "rg_lru", "embed_tokens")
        return {n: value.ndim > 1 and _part(n) not in spared for n, value in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(MAX_GRADIENT_NORM),
        optax.adamw(rate, *BETAS, weight_decay=WEIGHT_DECAY, mask=mask),
        optax.masked(optax.scale(recurrent_rate), recurrent),
    )


def _part(name: str) -> str:
    """Return the layer of a parameter: ``rg_lru`` for ``….rg_lru.recurrent_param``."""
    return name.split(".")[-2]

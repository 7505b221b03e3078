"""Recipes: section 6.2 of the paper on a small scale, and a language model of bytes.

All models have RecurrentGemma's conventions (embedding scale, soft cap, as many gate blocks as
heads, lru_width = width), so that Griffin models fit into Hugging Face's and DeepMind's formats.
"""

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.config import GRIFFIN, HAWK, LOCAL_MQA, MQA, GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean

if TYPE_CHECKING:
    import numpy as np

MODELS = {"griffin": GRIFFIN, "hawk": HAWK, "mqa": MQA, "local_mqa": LOCAL_MQA}
MIN_LENGTH = 8  # tokens of a training sequence


class Batch(NamedTuple):
    """Sequences of one length, or without the axis B a single one.

    Attributes:
        tokens: int32 [B, T], input of the model.
        targets: int32 [B, T], the right next token after each token.
        weights: float32 [B, T], weight of each target in the loss.
        asked: bool [B, T], whether a target counts for the accuracy.
        distance: int32 [B, T], tokens from the one that the target repeats to the one it follows, 0
            where it repeats none; None where nobody wants to know.
    """

    tokens: "np.ndarray"
    targets: "np.ndarray"
    weights: "np.ndarray"
    asked: "np.ndarray"
    distance: "np.ndarray | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a training task and the shape of its models.

    Attributes:
        name: name of the recipe, and of its data in `griffin_eval.training.batches.DATA`.
        vocab_size, rope_fraction: as in `GriffinConfig`. Without a fraction, RoPE rotates whole
            heads of the Transformer and, as in RecurrentGemma, half of each head of Griffin.
        width, heads, layers, window: ``width``, ``num_heads``, ``num_layers`` and ``visible_keys``
            of `GriffinConfig`.
        lru_width: channels of the recurrence; None for the model's width.
        conv_variance: initial variance of a convolution's output where its inputs have variance 1.
        length: tokens of a training sequence.
        curriculum: pairs of a number of steps and a share of the length: the run begins with these
            stages of shorter sequences and then trains on the whole length.
        advance: accuracy on held-out sequences of a stage's length from which on the next stage
            begins, in the place of its number of steps; None for the steps.
        scale_window: whether in a stage attention sees only the stage's share of the window.
        tokens: tokens of one step, from which the number of rows follows.
        steps: steps of a run.
        learning_rate: peak learning rate.
        recurrent_rate: factor of the learning rate of the recurrent blocks' parameters.
        schedule, decayed: see `griffin_eval.training.optimizer`.
    """

    name: str
    vocab_size: int
    width: int = 64
    heads: int = 2
    layers: int
    lru_width: int | None = None
    conv_variance: float = 0.01
    window: int
    rope_fraction: float | None = None
    length: int
    curriculum: tuple[tuple[int, float], ...] = ()
    advance: float | None = None
    scale_window: bool = False
    tokens: int = 4096
    steps: int
    learning_rate: float = 3e-3
    recurrent_rate: float = 1.0
    schedule: str = "cosine"
    decayed: str = "matrices"

    def config(self, model: str, stage: int | None = None) -> GriffinConfig:
        """Return the architecture of one of `MODELS` in a stage; None for the last one."""
        rope = self.rope_fraction or (0.5 if "recurrent" in MODELS[model] else 1.0)
        share = self._share(stage) if self.scale_window else 1.0
        return GriffinConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            mlp_width=3 * self.width,
            num_heads=self.heads,
            num_layers=self.layers,
            lru_width=self.lru_width or self.width,
            gate_blocks=self.heads,
            block_pattern=MODELS[model],
            visible_keys=max(1, round(share * self.window)),
            rope_fraction=rope,
        )

    def stage_at(self, step: int) -> int:
        """Return the stage of a step, from 0, where stages have numbers of steps."""
        ends = itertools.accumulate(steps for steps, _ in self.curriculum)
        return sum(step >= end for end in ends)

    def length_of(self, stage: int | None) -> int:
        """Return the tokens of a sequence in a stage; None for the last one."""
        share = self._share(stage)
        return self.length if share == 1.0 else max(MIN_LENGTH, round(share * self.length))

    def _share(self, stage: int | None) -> float:
        if stage is None or stage >= len(self.curriculum):
            return 1.0
        return self.curriculum[stage][1]


_SYMBOLS: dict[str, Any] = {
    "vocab_size": 16,
    "layers": 5,
    "window": 128,
    "length": 256,
    "curriculum": ((225, 1 / 8), (225, 1 / 4), (225, 1 / 2)),
    "steps": 1500,
}
_BYTES: dict[str, Any] = {
    "vocab_size": 259,
    "layers": 6,
    "window": 256,
    "length": 512,
    "steps": 3000,
}
_LOOKUP: dict[str, Any] = {
    "length": 192,
    "curriculum": ((1600, 2 / 3), (1000, 5 / 6), (1000, 1.0)),
    "steps": 8000,
}
_SHARES = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
_SETTINGS: dict[str, dict[str, Any]] = {
    "selective_copy": _SYMBOLS,
    "induction_heads": _SYMBOLS,
    "bytes": _BYTES | {"curriculum": ((600, 1 / 4), (600, 1 / 2))},
    "phonebook": _BYTES | {"curriculum": tuple((0, each) for each in _SHARES), "advance": 0.95},
    "phonebook_lookup": _BYTES | _LOOKUP,
    "text": _BYTES,
}
RECIPES = {name: Recipe(name=name, **settings) for name, settings in _SETTINGS.items()}


def recipe_named(name: str) -> Recipe:
    """Return the recipe of a name.

    Raises:
        ArgumentError: no recipe has this name.
    """
    if name not in RECIPES:
        raise ArgumentError(
            f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}"
            f"{did_you_mean(name, RECIPES)}"
        )
    return RECIPES[name]

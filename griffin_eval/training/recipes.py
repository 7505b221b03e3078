"""Recipes: section 6.2 of the paper on a small scale, and a language model of bytes.

All models have RecurrentGemma's conventions (embedding scale, soft cap, one gate block per head,
lru_width = width), so that Griffin models fit into Hugging Face's and DeepMind's formats.
"""

import dataclasses
import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.config import GRIFFIN, HAWK, LOCAL_MQA, MQA, GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean

if TYPE_CHECKING:
    import numpy as np

MODELS = {"griffin": GRIFFIN, "hawk": HAWK, "mqa": MQA, "local_mqa": LOCAL_MQA}
MIN_LENGTH = 8  # smallest number of tokens of a training sequence


class Batch(NamedTuple):
    """Sequences of one length. A single sequence lacks the axis B.

    Attributes:
        tokens: int32 [B, T], input of the model.
        targets: int32 [B, T], the right next token after each token.
        weights: float32 [B, T], weight of each target in the loss.
        scored: bool [B, T], whether a target counts for the accuracy.
        distance: int32 [B, T], distance from the token that the target repeats to the token before
            the target; 0 if the target repeats none. None if unused.
    """

    tokens: "np.ndarray"
    targets: "np.ndarray"
    weights: "np.ndarray"
    scored: "np.ndarray"
    distance: "np.ndarray | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a training task and the shape of its models, as in `GriffinConfig`.

    A run goes through the stages of its curriculum and then trains on the full length.
    """

    name: str
    vocab_size: int
    width: int = 64
    heads: int = 2
    layers: int
    lru_width: int | None = None  # None for the model's width
    conv_variance: float = 0.01  # initial variance of a convolution's output for inputs of 1
    window: int  # keys that local attention sees
    rope_fraction: float | None = None  # None for half of a head in Griffin, and whole heads in MQA
    length: int  # tokens of a training sequence
    curriculum: tuple[tuple[int, float], ...] = ()  # number of steps and share of the length
    advance: float | None = None  # accuracy that ends a stage, instead of its number of steps
    scale_window: bool = False  # whether a stage also shortens the window
    tokens: int = 4096  # tokens of one step
    steps: int
    learning_rate: float = 3e-3  # peak
    recurrent_rate: float = 1.0  # factor of the learning rate of recurrent blocks
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
        """Return the stage of a step, from 0, if stages have fixed numbers of steps."""
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


_SYMBOLS: dict[str, Any] = dict(vocab_size=16, layers=5, window=128, length=256, steps=1500)
_BYTES: dict[str, Any] = dict(vocab_size=259, layers=6, window=256, length=512, steps=3000)
_EIGHTHS = ((225, 1 / 8), (225, 1 / 4), (225, 1 / 2))
_BY_ACCURACY = tuple((0, share) for share in (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4))
_LOOKUPS = ((1600, 2 / 3), (1000, 5 / 6), (1000, 1.0))
_SETTINGS: dict[str, dict[str, Any]] = {
    "selective_copy": _SYMBOLS | dict(curriculum=_EIGHTHS),
    "induction_heads": _SYMBOLS | dict(curriculum=_EIGHTHS),
    "bytes": _BYTES | dict(curriculum=((600, 1 / 4), (600, 1 / 2))),
    "phonebook": _BYTES | dict(curriculum=_BY_ACCURACY, advance=0.95),
    "phonebook_lookup": _BYTES | dict(length=192, curriculum=_LOOKUPS, steps=8000),
    "text": _BYTES,
}
RECIPES = {name: Recipe(name=name, **settings) for name, settings in _SETTINGS.items()}


def check_name(kind: str, name: str, names: Collection[str]) -> None:
    """Raise `ArgumentError` for a name that is not among ``names``."""
    if name not in names:
        raise ArgumentError(
            f"unknown {kind} {name!r}: expected one of {', '.join(names)}"
            f"{did_you_mean(name, names)}"
        )


def recipe_named(name: str) -> Recipe:
    """Return the recipe with a name, or raise `ArgumentError`."""
    check_name("recipe", name, RECIPES)
    return RECIPES[name]

"""The three models that sections 4.3 and 5 of the paper compare, in one size."""

from dataclasses import replace
from typing import NamedTuple

from benchmarks.model.run import make_config
from griffin_eval.config import GRIFFIN, HAWK, MQA, GriffinConfig

PATTERNS = {"griffin": GRIFFIN, "hawk": HAWK, "mqa": MQA}
RECURRENT = ("griffin", "hawk")  # compared with the Transformer
DTYPE, ITEMSIZE = "float32", 4  # weights and activations in every measurement


class Size(NamedTuple):
    """Sizes shared by the three models."""

    layers: int
    width: int
    head_dim: int
    vocab_size: int
    visible_keys: int


SMALL = Size(layers=6, width=512, head_dim=128, vocab_size=32_000, visible_keys=1024)
TINY = Size(layers=3, width=64, head_dim=32, vocab_size=256, visible_keys=32)  # for --tiny


def make_models(size: Size) -> dict[str, GriffinConfig]:
    """Return Griffin, Hawk and the MQA Transformer of a size, with RecurrentGemma's conventions."""
    sizes = {name: value for name, value in size._asdict().items() if name != "head_dim"}
    config = make_config(heads=size.width // size.head_dim, **sizes)
    return {name: replace(config, block_pattern=pattern) for name, pattern in PATTERNS.items()}

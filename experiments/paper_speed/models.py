"""The three models that sections 4.3 and 5 compare, in one size."""

import dataclasses

from benchmarks.model.run import make_config
from griffin_eval.config import GRIFFIN, HAWK, MQA, GriffinConfig

PATTERNS = {"griffin": GRIFFIN, "hawk": HAWK, "mqa": MQA}
TITLES = {"griffin": "Griffin", "hawk": "Hawk", "mqa": "MQA Transformer"}
RECURRENT = ("griffin", "hawk")  # what is compared with the Transformer
DTYPE, ITEMSIZE = "float32", 4  # of everything that is measured


def make_models(**sizes: int) -> dict[str, GriffinConfig]:
    """Griffin, Hawk and the MQA Transformer of one size, with RecurrentGemma's conventions.

    Args:
        sizes: as of `benchmarks.model.run.make_config`.

    Raises:
        ArgumentError: sizes that do not fit together.
    """
    config = make_config(**sizes)
    return {
        name: dataclasses.replace(config, block_pattern=pattern)
        for name, pattern in PATTERNS.items()
    }

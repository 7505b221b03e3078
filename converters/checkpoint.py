"""Opens a checkpoint folder: its config, its tensors, and the proof that they belong together."""

import dataclasses
import logging
from pathlib import Path

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.huggingface_config import read_config
from griffin_eval.converters.safetensors_folder import SafetensorsFolder
from griffin_eval.layout import param_specs

logger = logging.getLogger(__name__)

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class Checkpoint:
    """A Hugging Face RecurrentGemma folder whose tensors are exactly those its config asks for.

    Attributes:
        config: the architecture.
        tensors: the reader; every name of ``param_specs(config)`` is in it with its shape.
        dtype: what the embedding is stored in, as ``float32`` or ``bfloat16``.

    Args:
        folder: holds config.json and safetensors.
        visible_keys: overrides the config's.

    Raises:
        CheckpointError: naming the file, key or tensors that are not as they must be.
    """

    def __init__(self, folder: str | Path, visible_keys: int | None = None):
        config, _ = read_config(folder)
        if visible_keys is not None:
            logger.warning(
                "local attention sees %d keys, not %d", visible_keys, config.visible_keys
            )
            config = dataclasses.replace(config, visible_keys=visible_keys)
        self.config: GriffinConfig = config
        self.tensors = SafetensorsFolder(folder)
        self.tensors.check_against(param_specs(config))
        self.dtype = _DTYPES[self.tensors.tensors["model.embed_tokens.weight"].dtype]


def warn_not_finite(name: str, not_finite: int, size: int) -> None:
    """Says in the log that a tensor holds NaN or infinity."""
    if not_finite:
        logger.warning("%s: %d of %d weights are NaN or infinite", name, not_finite, size)

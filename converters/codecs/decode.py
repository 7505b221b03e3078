"""Recognises quantised checkpoints, and quantisations that cannot be read."""

import dataclasses
from pathlib import Path
from typing import Any

from griffin_eval.converters.codecs import bitsandbytes, mlx
from griffin_eval.converters.configs.huggingface import CONFIG_FILE
from griffin_eval.converters.containers.container import Container, in_natural_order
from griffin_eval.converters.quantised import Quantised
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import read_json
from griffin_eval.messages import brief

# Quantisations that cannot be read, by name in config.json: name for messages, and endings of
# tensors' names that no other quantisation has.
_REFUSED = {
    "gptq": ("GPTQ", (".g_idx",)),
    "awq": ("AWQ", (".qweight", ".qzeros")),
    "torchao": ("torchao", (".weight:_data", ".weight_qdata", "._weight_qdata")),
    "compressed-tensors": ("compressed-tensors", (".weight_packed",)),
    "fp8": ("FP8", (".weight_scale_inv",)),
}

_READ = ("bitsandbytes", "mlx", "gguf")  # names of the methods in config.json


def decoded(container: Container, folder: Path, *, reads_config: bool = True) -> Container:
    """Return a container whose quantised parameters are dequantised when they are read;
    CheckpointError if the quantisation cannot be read, or is damaged. ``reads_config``: whether
    config.json may describe it."""
    stated = _stated(folder) if reads_config else {}
    refuse(container, stated, folder)
    tensors = container.tensors
    if not quantised(container):  # GGUF's blocks are dequantised already
        tensors = bitsandbytes.decoded(tensors)
        if tensors == container.tensors:
            tensors = mlx.decoded(tensors, stated, str(folder / CONFIG_FILE))
    container = dataclasses.replace(container, tensors=in_natural_order(tensors))
    facts = quantised(container).values()
    if stated and not facts:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} says that weights are quantised ({brief(stated)}), but no "
            "tensor is: remove that from the file if they were dequantised"
        )
    layout = ", ".join([container.layout, *sorted({each.scheme for each in facts})])
    return dataclasses.replace(container, layout=layout)


def quantised(container: Container) -> dict[str, Quantised]:
    """Return how each quantised parameter of a container is stored, by name."""
    return {n: t.quantised for n, t in container.tensors.items() if t.quantised is not None}


def refuse(container: Container, stated: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError for a quantisation that cannot be read."""
    method = stated.get("quant_method", _READ[0])
    kinds = [kind for key, (kind, _) in _REFUSED.items() if method == key]
    for kind, ends in _REFUSED.values():
        if kinds or method not in _READ:
            break
        kinds += [kind for name in container.tensors if name.endswith(ends)][:1]
    if kinds or method not in _READ:
        raise CheckpointError(
            f"{folder} is quantised with {kinds[0] if kinds else brief(method)}, which is not "
            "read (bitsandbytes, MLX and GGUF are): dequantise it with its own library, or take "
            "the checkpoint that it was made from"
        )


def _stated(folder: Path) -> dict[str, Any]:
    """Return the object in config.json that describes the quantisation, {} if there is none. MLX
    has a key of its own for that."""
    path = folder / CONFIG_FILE
    raw = read_json(path) if path.is_file() else {}
    for key in ("quantization", "quantization_config"):
        stated = raw.get(key)
        if stated and not isinstance(stated, dict):
            raise CheckpointError(f"{path}: {key} is {brief(stated)}, expected an object")
        if stated:
            return stated
    return {}

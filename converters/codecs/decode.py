"""Recognises quantised checkpoints, and those of kinds that are not read."""

from pathlib import Path
from typing import Any

from griffin_eval.converters.codecs import bitsandbytes
from griffin_eval.converters.codecs.quantised import Dequantised
from griffin_eval.converters.configs.huggingface import CONFIG_FILE
from griffin_eval.converters.containers.container import Container
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import read_json
from griffin_eval.messages import brief

_CODECS = (bitsandbytes.find,)
# Other kinds: what config.json calls them, and the ends of names that tensors of them alone have.
_REFUSED = {
    "gptq": ("GPTQ", (".g_idx",)),
    "awq": ("AWQ", (".qweight", ".qzeros")),
    "torchao": ("torchao", (".weight:_data", ".weight_qdata", "._weight_qdata")),
    "compressed-tensors": ("compressed-tensors", (".weight_packed",)),
    "fp8": ("FP8", (".weight_scale_inv",)),
}


def decoded(container: Container, folder: Path) -> Container:
    """A container with its quantised parameters dequantised; the same one if it has none.

    Args:
        container: as it was opened.
        folder: that may have a config.json, which names what it was quantised with.

    Raises:
        CheckpointError: quantised in a way that is not read, or damaged.
    """
    stated = _stated(folder)
    refuse(container, stated, folder)
    for find in _CODECS:
        decoding = find(container)
        if decoding is not None:
            return Dequantised(container, decoding)
    if stated:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: quantization_config is {brief(stated)}, but no tensor is "
            "quantised: remove it from the file if the weights were dequantised"
        )
    return container


def refuse(container: Container, stated: dict[str, Any], folder: Path) -> None:
    """Refuses what is quantised in a way that is not read.

    Raises:
        CheckpointError: naming it.
    """
    method = stated.get("quant_method", "bitsandbytes")
    kinds = [kind for key, (kind, _) in _REFUSED.items() if method == key]
    for kind, ends in _REFUSED.values():
        if kinds or method != "bitsandbytes":
            break
        kinds += [kind for name in container.tensors if name.endswith(ends)][:1]
    if kinds or method != "bitsandbytes":
        raise CheckpointError(
            f"{folder} is quantised with {kinds[0] if kinds else brief(method)}, which is not "
            "read (bitsandbytes is): dequantise it with its own library, or take the checkpoint "
            "that it was made from"
        )


def _stated(folder: Path) -> dict[str, Any]:
    """What config.json says of quantisation."""
    path = folder / CONFIG_FILE
    stated = read_json(path).get("quantization_config") if path.is_file() else None
    if not stated:
        return {}
    if not isinstance(stated, dict):
        raise CheckpointError(f"{path}: quantization_config is {brief(stated)}, expected an object")
    return stated

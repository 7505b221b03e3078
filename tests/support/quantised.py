"""Quantised copies of a tiny model, written by the libraries that tests compare with."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peers import recurrent_gemma

BITS = {  # arguments of BitsAndBytesConfig by name
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4, double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
    },
    "nf4 in bfloat16s": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True},
}


def load_bitsandbytes(folder: Path, dtype: torch.dtype | str = "auto", **config: Any) -> Any:
    """Load a model that bitsandbytes has quantised, or quantise it with ``config``."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if config:
        config = {"quantization_config": transformers.BitsAndBytesConfig(**config)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = (
            recurrent_gemma()
            .from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", device_map="cpu", **config
            )
            .eval()
        )
    for module in model.modules():  # disables a kernel that rounds scales
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def write_bitsandbytes(folder: Path, base: Path, dtype: torch.dtype, **config: Any) -> None:
    """Quantise and save a checkpoint with transformers and bitsandbytes."""
    model = load_bitsandbytes(base, dtype, **config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)


def bitsandbytes_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return every parameter as bitsandbytes dequantises it, by canonical name."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    model = load_bitsandbytes(folder)
    weights = dict(model.named_parameters())
    for name, module in model.named_modules():
        if type(getattr(module, "weight", None)).__name__ in ("Params4bit", "Int8Params"):
            state = getattr(module, "state", None)
            weights[f"{name}.weight"] = dequantize_bnb_weight(module.weight, state)
    return {name: weight.detach() for name, weight in weights.items()}


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor, in its shape plus a last axis."""
    return tensor.contiguous()[..., None].view(torch.uint8).numpy()


def write_mlx(folder: Path, base: Path, dtype: str, bits: int, group: int) -> dict[str, np.ndarray]:
    """Write a checkpoint as ``mlx_lm.convert`` does; return MLX's dequantised parameters by name.

    Linear maps and the embedding are quantised where ``group`` divides their rows. The taps of
    convolutions are the last axis but one. All other files except the manifest are copied.
    """
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    shutil.copytree(
        base, folder, ignore=shutil.ignore_patterns("*.safetensors", "griffin_manifest.json")
    )
    tensors, expected = {}, {}
    for name, array in mx.load(str(base / "model.safetensors")).items():
        array = array.astype(getattr(mx, dtype))
        if array.ndim == 2 and "rg_lru" not in name and array.shape[1] % group == 0:
            packed = mx.quantize(array, group_size=group, bits=bits)
            module = name.removesuffix(".weight")
            tensors |= {
                f"{module}.{part}": value
                for part, value in zip(("weight", "scales", "biases"), packed, strict=True)
            }
            array = mx.dequantize(*packed, group_size=group, bits=bits)
        else:
            tensors[name] = array.moveaxis(2, 1) if "conv_1d.weight" in name else array
        expected[name] = _of_mlx(array, dtype)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    settings = {"group_size": group, "bits": bits, "mode": "affine"}
    config = json.loads((base / "config.json").read_text())
    config |= {"quantization": settings, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def _of_mlx(array: Any, dtype: str) -> np.ndarray:
    """Convert an array of MLX to numpy, bit for bit."""
    import ml_dtypes
    import mlx.core as mx

    if dtype == "bfloat16":
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)

"""Checkpoints with the shapes of a preset, written once, as sources of measured conversions.

All contents are random, since the time of dequantising depends on the kind of blocks and hardly on
their values.
"""

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from griffin_eval.config import PRESETS
from griffin_eval.converters.adapters.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from griffin_eval.converters.codecs.bitsandbytes import code_of
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.containers.safetensors.writer import SafetensorsWriter
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.atomic import SafeOutput
from griffin_eval.layout import ParamSpec, param_specs

RANK = 16  # rank of the adapter that is merged
BLOCK = 64  # elements that have one scale
ENCODED = ("bnb-nf4", "bnb-fp4", "bnb-int8", "mlx-4", "mlx-8")
GGUF = ("F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

Shape = tuple[int, ...]
Draw = Callable[[Shape], Iterator[np.ndarray]]  # rows of a tensor, some at a time


def write_model(preset: str, folder: Path) -> None:
    """Write the model in bfloat16 in the format ``griffin``."""
    draw = _normal(np.dtype(ml_dtypes.bfloat16))
    tensors = {n: (s.shape, "bfloat16", draw) for n, s in param_specs(PRESETS[preset]).items()}
    _write(folder, tensors, config_json(PRESETS[preset], FORMATS["griffin"], "bfloat16"))


def write_adapter(preset: str, folder: Path) -> None:
    """Write a LoRA of every linear map."""
    from safetensors.numpy import save_file

    rng, state = np.random.default_rng(0), {}
    for name, spec in param_specs(PRESETS[preset]).items():
        if _is_matrix(spec) and "vocab" not in spec.axes:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("A", (RANK, spec.shape[1])), ("B", (spec.shape[0], RANK))):
                state[f"{module}.lora_{part}.weight"] = rng.standard_normal(shape, np.float32)
    with SafeOutput(folder) as new:
        save_file(state, new / ADAPTER_FILE)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK / 100}
        (new / ADAPTER_CONFIG).write_text(json.dumps(config))


def write_encoded(preset: str, kind: str, folder: Path) -> None:
    """Write the model as bitsandbytes or MLX quantise it (`ENCODED`), in the format ``hf``."""
    library, _, how = kind.partition("-")
    encode = {"mlx": _mlx, "bnb": _bitsandbytes_8 if how == "int8" else _bitsandbytes_4}[library]
    tensors: dict[str, tuple[Shape, str, Draw]] = {}
    for name, spec in param_specs(PRESETS[preset]).items():
        takes = _is_matrix(spec) and (library == "mlx" or "vocab" not in spec.axes)
        if takes and spec.shape[1] % BLOCK == 0:
            tensors |= encode(spec, how)
        else:
            rows, *rest = spec.shape
            taps = library == "mlx" and name.endswith("conv_1d.weight")
            shape = (rows, rest[1], 1) if taps else spec.shape
            tensors[name] = shape, "bfloat16", _normal(np.dtype(ml_dtypes.bfloat16))
    raw = config_json(PRESETS[preset], FORMATS["hf"], "bfloat16")
    if library == "mlx":
        raw["quantization"] = {"group_size": BLOCK, "bits": int(how), "mode": "affine"}
    else:
        bits = {"load_in_4bit": how != "int8", "load_in_8bit": how == "int8"}
        kinds = {"bnb_4bit_quant_type": "nf4" if how == "int8" else how}
        raw["quantization_config"] = {"quant_method": "bitsandbytes", **bits, **kinds}
    _write(folder, tensors, raw)


def _bitsandbytes_4(spec: ParamSpec, kind: str) -> dict[str, tuple[Shape, str, Draw]]:
    state = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": spec.shape}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return {
        spec.name: ((spec.size // 2, 1), "uint8", _integers(np.uint8)),
        f"{spec.name}.absmax": ((spec.size // BLOCK,), "float32", _normal(np.dtype(np.float32))),
        f"{spec.name}.quant_map": ((16,), "float32", lambda shape: iter([code_of(kind)])),
        f"{spec.name}.quant_state.bitsandbytes__{kind}": (
            *(text.shape, "uint8"),
            lambda shape: iter([text]),
        ),
    }


def _bitsandbytes_8(spec: ParamSpec, kind: str) -> dict[str, tuple[Shape, str, Draw]]:
    scale = spec.name.removesuffix("weight") + "SCB"
    return {
        spec.name: (spec.shape, "int8", _integers(np.int8)),
        scale: (spec.shape[:1], "float32", _normal(np.dtype(np.float32))),
    }


def _mlx(spec: ParamSpec, bits: str) -> dict[str, tuple[Shape, str, Draw]]:
    rows, columns = spec.shape
    module, draw = spec.name.removesuffix("weight"), _normal(np.dtype(ml_dtypes.bfloat16))
    return {
        spec.name: ((rows, columns * int(bits) // 32), "uint32", _integers(np.uint32)),
        f"{module}scales": ((rows, columns // BLOCK), "bfloat16", draw),
        f"{module}biases": ((rows, columns // BLOCK), "bfloat16", draw),
    }


def write_gguf(preset: str, kind: str, folder: Path) -> None:
    """Write a file as candle does, matrices in blocks of a kind of `GGUF`, the rest in float32."""
    import gguf

    specs = param_specs(PRESETS[preset])
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks, rng = _gguf_blocks(kind, nbytes), np.random.default_rng(0)
    normal = _normal(np.dtype(np.float32))
    with SafeOutput(folder) as new:
        writer = gguf.GGUFWriter(new / "model.gguf", "recurrent-gemma")
        whole = {n: len(s.shape) == 2 and s.shape[1] % block == 0 for n, s in specs.items()}
        for name, spec in specs.items():
            own = gguf.GGMLQuantizationType[kind if whole[name] else "F32"]
            per, size = gguf.GGML_QUANT_SIZES[own]
            nbytes_of = spec.size // per * size
            writer.add_tensor_info(name, spec.shape, np.dtype("f4"), nbytes_of, own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, spec in specs.items():
            if whole[name]:
                values = blocks[rng.integers(0, len(blocks), spec.size // block)]
            else:
                values = np.concatenate(list(normal(spec.shape)))
            writer.write_tensor_data(values)
        writer.close()
        raw = config_json(PRESETS[preset], FORMATS["griffin"], "float32")
        (new / "config.json").write_text(json.dumps(raw))


def _gguf_blocks(kind: str, nbytes: int) -> np.ndarray:
    """Return different blocks of random bytes with small values, uint8 [N, nbytes]."""
    import gguf

    pool = np.random.default_rng(0).integers(0, 256, (4096, nbytes), np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(pool, gguf.GGMLQuantizationType[kind])
        return pool[np.abs(values.astype(np.float32)).max(1) < 0.5]  # finite in 16 bits too


def _write(folder: Path, tensors: dict[str, tuple[Shape, str, Draw]], config: Any) -> None:
    """Write safetensors and config.json."""
    specs = {name: (shape, dtype) for name, (shape, dtype, _) in tensors.items()}
    with SafeOutput(folder) as new:
        with SafetensorsWriter(new, specs) as writer:
            for name, (shape, _, draw) in tensors.items():
                writer.write(name, draw(shape))
        (new / "config.json").write_text(json.dumps(config))


def _normal(dtype: np.dtype) -> Draw:
    rng = np.random.default_rng(0)
    return lambda shape: (
        rng.standard_normal(part, np.float32).astype(dtype) for part in _parts(shape)
    )


def _integers(dtype: Any) -> Draw:
    rng, limits = np.random.default_rng(0), np.iinfo(dtype)
    return lambda shape: (
        rng.integers(limits.min, limits.max, part, dtype, endpoint=True) for part in _parts(shape)
    )


def _parts(shape: Shape) -> Iterator[Shape]:
    """Yield the shapes of consecutive rows, at most 32 Mi elements each."""
    rows = max(1, (32 << 20) // max(1, prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield min(rows, shape[0] - start), *shape[1:]


def _is_matrix(spec: ParamSpec) -> bool:
    return spec.name.endswith(".weight") and len(spec.shape) == 2

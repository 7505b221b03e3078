"""The checkpoints that conversions are measured on: random, of a preset's shapes, written once.

What quantised ones hold is random as well: how long it takes to dequantise depends on the kind of
blocks and hardly on their content.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers import check_peer
from griffin_eval.config import PRESETS
from griffin_eval.converters.adapters.files import ADAPTER_CONFIG, ADAPTER_FILE
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.atomic import SafeOutput
from griffin_eval.layout import ParamSpec, param_specs

if TYPE_CHECKING:
    import numpy as np

RANK = 16  # of the adapter that is merged
_CONFIG = "config.json"
_POOL = 4096  # different blocks of a GGUF file
_LARGEST = 0.5  # value in them, so that nothing is infinite in 16 bits


def write_source(preset: str, target: str, folder: Path) -> None:
    """Writes the model in bfloat16.

    Args:
        preset: name of the preset whose tensor shapes it has.
        target: name of a format in safetensors.
        folder: to write.
    """
    import ml_dtypes
    import numpy as np

    from griffin_eval.converters.configs.own import config_json
    from griffin_eval.converters.containers.safetensors.writer import SafetensorsWriter

    specs, rng = param_specs(PRESETS[preset]), np.random.default_rng(0)
    with SafeOutput(folder) as new:
        with SafetensorsWriter(new, {n: (s.shape, "bfloat16") for n, s in specs.items()}) as writer:
            for name, spec in specs.items():
                writer.write(name, (rows.astype(ml_dtypes.bfloat16) for rows in _random(spec, rng)))
        raw = config_json(PRESETS[preset], FORMATS[target], "bfloat16")
        (new / _CONFIG).write_text(json.dumps(raw))


def write_adapter(preset: str, folder: Path) -> None:
    """Writes a LoRA of every linear map, if it is not there."""
    if folder.exists():
        return
    import numpy as np
    from safetensors.numpy import save_file

    rng, state = np.random.default_rng(0), {}
    for name, spec in param_specs(PRESETS[preset]).items():
        if name.endswith(".weight") and len(spec.shape) == 2 and "vocab" not in spec.axes:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("A", (RANK, spec.shape[1])), ("B", (spec.shape[0], RANK))):
                state[f"{module}.lora_{part}.weight"] = rng.standard_normal(shape, np.float32)
    with SafeOutput(folder) as new:
        save_file(state, new / ADAPTER_FILE)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK / 100}
        (new / ADAPTER_CONFIG).write_text(json.dumps(config))


def write_fp4(nf4: Path, folder: Path) -> None:
    """Writes a checkpoint in nf4 as one in fp4: of the same numbers, which mean other values."""
    import numpy as np

    from griffin_eval.converters.codecs.bitsandbytes import code_of
    from griffin_eval.converters.containers.safetensors.reader import SafetensorsFolder
    from griffin_eval.converters.containers.safetensors.writer import SafetensorsWriter

    def changed(name: str) -> "Iterator[np.ndarray]":
        if name.endswith(".quant_map"):
            yield code_of("fp4")
        elif name.endswith("__nf4"):
            text = stored.numpy(name).tobytes().replace(b'"nf4"', b'"fp4"')
            yield np.frombuffer(text, np.uint8)
        else:
            yield from stored.pieces(name)

    with SafetensorsFolder(nf4) as stored, SafeOutput(folder) as new:
        specs = {
            name.replace("__nf4", "__fp4"): (tensor.shape, stored.numpy(name).dtype.name)
            for name, tensor in stored.tensors.items()
        }
        with SafetensorsWriter(new, specs) as writer:
            for name in stored.tensors:
                writer.write(name.replace("__nf4", "__fp4"), changed(name))
        (new / _CONFIG).write_text((nf4 / _CONFIG).read_text().replace('"nf4"', '"fp4"'))


def write_gguf(preset: str, kind: str, folder: Path) -> None:
    """Writes a GGUF file as candle does, matrices in blocks, the rest in float32; with a config.

    Args:
        preset: name of the preset whose tensor shapes it has.
        kind: name of a type of GGUF.
        folder: to write.

    Raises:
        Absent: the gguf library is not installed.
    """
    check_peer("gguf")
    import gguf
    import numpy as np

    from griffin_eval.converters.configs.own import config_json

    specs = param_specs(PRESETS[preset])
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = _blocks(kind, nbytes)
    rng = np.random.default_rng(0)

    def kind_of(spec: ParamSpec) -> "gguf.GGMLQuantizationType":
        whole = len(spec.shape) == 2 and spec.shape[1] % block == 0
        return gguf.GGMLQuantizationType[kind if whole else "F32"]

    def values(spec: ParamSpec) -> np.ndarray:
        if kind_of(spec).name != "F32":
            return blocks[rng.integers(0, len(blocks), spec.size // block)]
        return np.concatenate(list(_random(spec, rng)))

    with SafeOutput(folder) as new:
        writer = gguf.GGUFWriter(new / "model.gguf", "recurrent-gemma")
        for spec in specs.values():
            own, per_own = gguf.GGML_QUANT_SIZES[kind_of(spec)]
            size = spec.size // own * per_own
            writer.add_tensor_info(spec.name, spec.shape, np.dtype("f4"), size, kind_of(spec))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for spec in specs.values():
            writer.write_tensor_data(values(spec))
        writer.close()
        raw = config_json(PRESETS[preset], FORMATS["griffin"], "float32")
        (new / _CONFIG).write_text(json.dumps(raw))


def _blocks(kind: str, nbytes: int) -> "np.ndarray":
    """Different blocks of random bytes whose values are small, uint8 [N, nbytes]."""
    import gguf
    import numpy as np

    pool = np.random.default_rng(0).integers(0, 256, (_POOL, nbytes), np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(pool, gguf.GGMLQuantizationType[kind])
        return pool[np.abs(values.astype(np.float32)).max(1) < _LARGEST]  # NaN is not


def _random(spec: ParamSpec, rng: "np.random.Generator") -> "Iterator[np.ndarray]":
    """The rows of a parameter in float32, some at a time."""
    import numpy as np

    rows = max(1, (32 << 20) // max(1, spec.size // spec.shape[0]))
    for start in range(0, spec.shape[0], rows):
        yield rng.standard_normal((min(rows, spec.shape[0] - start), *spec.shape[1:]), np.float32)

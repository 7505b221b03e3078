"""Write `layouts.json`: configs, names and shapes of the public implementations' models.

JAX_PLATFORMS=cpu PYTHONPATH=tests/support .venv/bin/python -P tests/golden/make_layouts.py
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from parity_oracles import deepmind_shapes, hf_config
from recurrentgemma import common
from recurrentgemma import torch as deepmind_torch

from griffin_eval.config import PRESETS

FILE = Path(__file__).with_name("layouts.json")
DEEPMIND_PRESETS = {
    "recurrentgemma-2b": common.Preset.RECURRENT_GEMMA_2B_V1,
    "recurrentgemma-9b": common.Preset.RECURRENT_GEMMA_9B_V1,
    "griffin-7b": common.Preset.GRIFFIN_PAPER_7B,
    "hawk-7b": common.Preset.HAWK_PAPER_7B,
}


def of_transformers(preset: str) -> dict[str, list[int]]:
    with torch.device("meta"):
        model = transformers.RecurrentGemmaForCausalLM(hf_config(PRESETS[preset]))
    return {name: list(p.shape) for name, p in model.named_parameters()}


def deepmind_config(preset: str) -> common.GriffinConfig:
    vocab_size = PRESETS[preset].vocab_size
    return common.GriffinConfig.from_preset(DEEPMIND_PRESETS[preset], vocab_size=vocab_size)


def config_of_deepmind(preset: str) -> dict[str, Any]:
    fields = deepmind_config(preset)._asdict()
    fields.pop("scan_type")  # chooses a kernel
    return fields | {"block_types": [kind.name.lower() for kind in fields["block_types"]]}


def of_deepmind(preset: str) -> dict[str, list[int]]:
    shapes = deepmind_shapes(deepmind_config(preset))
    return {name: list(shape) for name, shape in shapes.items()}


def of_deepmind_in_torch(preset: str) -> dict[str, list[int]]:
    with torch.device("meta"):
        model = deepmind_torch.Griffin(deepmind_config(preset))
    return {name: list(p.shape) for name, p in model.named_parameters()}


def layouts() -> dict[str, dict[str, dict[str, Any]]]:
    """Return fields of configs by preset, and shapes by library, preset and tensor."""
    return {
        "deepmind-config": {name: config_of_deepmind(name) for name in DEEPMIND_PRESETS},
        "transformers": {name: of_transformers(name) for name in list(DEEPMIND_PRESETS)[:2]},
        "deepmind-jax": {name: of_deepmind(name) for name in DEEPMIND_PRESETS},
        "deepmind-torch": {
            name: of_deepmind_in_torch(name) for name in ("recurrentgemma-2b", "hawk-7b")
        },
    }


def main() -> None:
    text = json.dumps(layouts(), indent=1)
    one_line_a_shape = "".join(
        line.strip() if line.strip()[0].isdigit() or line.strip()[0] == "]" else f"\n{line}"
        for line in text.splitlines()
    )
    FILE.write_text(one_line_a_shape.lstrip() + "\n")


if __name__ == "__main__":
    main()

"""Write `layouts.json`: names and shapes of every tensor of the public implementations' models.

PYTHONPATH=tests/support .venv/bin/python -P tests/golden/make_layouts.py
"""

import json
from pathlib import Path

import torch
import transformers
from parity_oracles import deepmind_shapes, hf_config
from recurrentgemma import common

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


def of_deepmind(preset: str) -> dict[str, list[int]]:
    vocab_size = PRESETS[preset].vocab_size
    config = common.GriffinConfig.from_preset(DEEPMIND_PRESETS[preset], vocab_size=vocab_size)
    return {name: list(shape) for name, shape in deepmind_shapes(config).items()}


def layouts() -> dict[str, dict[str, dict[str, list[int]]]]:
    """Return shapes by library, preset and tensor."""
    return {
        "transformers": {name: of_transformers(name) for name in list(DEEPMIND_PRESETS)[:2]},
        "deepmind-jax": {name: of_deepmind(name) for name in DEEPMIND_PRESETS},
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

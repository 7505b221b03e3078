"""The same tiny model in every format, for tests that convert it hundreds of times."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from parity import BASE, weights
from safetensors.numpy import load_file, save_file

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.huggingface import to_huggingface
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.plan import make_plan

CONFIG = dataclasses.replace(
    BASE,
    vocab_size=11,
    width=8,
    mlp_width=6,
    lru_width=8,
    block_pattern=("recurrent", "local_attention"),
    num_layers=2,
)
SHARD = 2000  # bytes of a file of the format "sharded"


def write_source(folder: Path, config: GriffinConfig = CONFIG) -> None:
    """The model as transformers' users have it, without a manifest."""
    folder.mkdir(parents=True)
    save_file(weights(config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_huggingface(config)))


def write_all(root: Path) -> None:
    """A folder per format, ``sharded`` among them, each with its manifest."""
    write_source(root / "source")
    plans = {name: make_plan(Checkpoint(root / "source"), FORMATS[name]) for name in FORMATS}
    for name, plan in plans.items():
        convert_checkpoint(plan, root / name)
    convert_checkpoint(plans["hf"], root / "sharded", max_shard_size=SHARD)


def holds_the_original(folder: Path, *, config: bool = True) -> bool:
    """Whether a folder in the format griffin holds the undamaged model, as safetensors reads it.

    Args:
        folder: the folder.
        config: whether its config must be the original's as well.
    """
    found, expected = load_file(folder / "model.safetensors"), weights(CONFIG)
    raw = json.loads((folder / "config.json").read_text())
    stated = GriffinConfig(**{field: raw[field] for field in dataclasses.asdict(CONFIG)})
    return (
        (stated == CONFIG or not config)
        and found.keys() == expected.keys()
        and all(
            found[name].dtype == value.dtype
            and np.array_equal(found[name].view("u1"), value.view("u1"))
            for name, value in expected.items()
        )
    )

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
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.containers.orbax.writer import OrbaxWriter
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.naming.tables import bind
from griffin_eval.converters.plan import make_plan
from griffin_eval.converters.tensors import in_memory, torch_tensor

CONFIG = dataclasses.replace(
    BASE,
    vocab_size=11,
    width=8,
    mlp_width=6,
    lru_width=8,
    block_pattern=("recurrent", "local_attention"),
    num_layers=2,
)
SHARD = 2000  # maximum file size in bytes in the format "sharded"


def write_source(folder: Path, config: GriffinConfig = CONFIG) -> None:
    """Write the model as transformers does, without a manifest."""
    folder.mkdir(parents=True)
    save_file(weights(config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_huggingface(config)))


def write_griffin(folder: Path, config: GriffinConfig, arrays=None) -> Path:
    """Write any model in canonical names with our config format, without a manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(config) if arrays is None else arrays, folder / "model.safetensors")
    raw = config_json(config, FORMATS["griffin"], "float32")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def tensors_of(table, config: GriffinConfig, arrays=None) -> dict[str, np.ndarray]:
    """Return the tensors of a model under the names of a table."""
    arrays = weights(config) if arrays is None else arrays
    return {
        b.foreign: np.ascontiguousarray(
            b.op.to_foreign(*(in_memory(arrays[s.name]) for s in b.canonical)).numpy()
        )
        for b in bind(table, config)
    }


def write_tensors(folder: Path, container: str, tensors: dict[str, np.ndarray]) -> Path:
    """Write tensors under any names to a new folder without other files."""
    folder.mkdir(parents=True)
    if container == "safetensors":
        contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(contiguous, folder / "model.safetensors")
    elif container == "torch":
        import torch

        state = {name: torch_tensor(np.array(array)) for name, array in tensors.items()}
        torch.save(state, folder / "model.pt")
    else:
        specs = {name: (array.shape, array.dtype.name) for name, array in tensors.items()}
        with OrbaxWriter(folder, specs) as writer:
            for name, array in tensors.items():
                writer.write(name, [array])
    return folder


def write_all(root: Path) -> None:
    """Write a folder with a manifest for every format and for ``sharded``."""
    write_source(root / "source")
    plans = {name: make_plan(Checkpoint(root / "source"), FORMATS[name]) for name in FORMATS}
    for name, plan in plans.items():
        convert_checkpoint(plan, root / name)
    convert_checkpoint(plans["hf"], root / "sharded", max_shard_size=SHARD)


def holds_the_original(folder: Path, *, config: bool = True) -> bool:
    """Return whether a griffin folder, read by safetensors, holds the undamaged weights (and with
    ``config`` the original config)."""
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

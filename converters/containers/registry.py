"""The registry of containers. A new kind needs a module in this package and an entry here."""

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from griffin_eval.converters.containers.container import Container, ContainerKind, NothingThere
from griffin_eval.converters.containers.gguf import gguf_files, looks_like_gguf, one_gguf, open_gguf
from griffin_eval.converters.containers.orbax.find import (
    MANIFEST,
    MSGPACK,
    TREE_METADATA,
    looks_like_orbax,
)
from griffin_eval.converters.containers.safetensors.reader import (
    model_names,
    open_safetensors,
    weight_files,
)
from griffin_eval.converters.containers.torch_pt.reader import (
    looks_like_torch,
    one_torch,
    open_torch,
    torch_files,
)
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import list_folder

_TORCH_FILE = "model.pt"


def _later(module: str, name: str) -> Callable[..., Any]:
    """Return a function or class of this package whose module, which needs NumPy, is imported when
    it is called, so that a header is read without NumPy."""

    def call(*arguments: Any, **named: Any) -> Any:
        found = getattr(import_module(f"griffin_eval.converters.containers.{module}"), name)
        return found(*arguments, **named)

    return call


open_orbax, orbax_writer = (
    _later("orbax.reader", "open_orbax"),
    _later("orbax.writer", "OrbaxWriter"),
)
output_files = _later("safetensors.writer", "output_files")
safetensors_writer = _later("safetensors.writer", "SafetensorsWriter")
torch_writer = _later("torch_pt.writer", "TorchWriter")

# In the order in which they are looked for.
CONTAINERS: dict[str, ContainerKind] = {
    "safetensors": ContainerKind(  # one file, or shards and their index, beside a config.json
        noun="safetensors",
        looks_like=lambda path: path.is_dir() and bool(model_names(list_folder(path))),
        recognises=lambda names: any(n.endswith(".safetensors") for n in model_names(names)),
        weight_files=weight_files,
        open=lambda path, item: open_safetensors(path),
        output_files=output_files,
        open_writer=lambda folder, specs, size, parts: safetensors_writer(
            folder, specs, max_shard_size=size
        ),
        needs_config=True,
        sharded=True,
    ),
    "torch": ContainerKind(  # a state dict that torch.save wrote, alone or within a trainer's file
        noun="a .pt file",
        looks_like=looks_like_torch,
        recognises=lambda names: bool(torch_files(names)),
        weight_files=one_torch,
        open=lambda path, item: open_torch(path, item=item),
        output_files=lambda specs, size: dict.fromkeys(specs, _TORCH_FILE),
        open_writer=lambda folder, specs, size, parts: torch_writer(folder / _TORCH_FILE, specs),
        has_items=True,
    ),
    "orbax": ContainerKind(  # an item, a step or a root of steps; or flax's msgpack
        noun="an Orbax folder",
        looks_like=looks_like_orbax,
        recognises=lambda names: not {MANIFEST, MSGPACK, TREE_METADATA}.isdisjoint(names),
        open=lambda path, item: open_orbax(path, item=item),
        output_files=lambda specs, size: dict.fromkeys(specs, "ocdbt database"),
        open_writer=lambda folder, specs, size, parts: orbax_writer(folder, specs, parts=parts),
        has_items=True,
        is_folder=True,
        compressed=True,
        chunked=True,
        remote=True,
    ),
    "gguf": ContainerKind(  # candle's format: canonical names, no config
        noun="a GGUF file",
        looks_like=looks_like_gguf,
        recognises=lambda names: bool(gguf_files(names)),
        weight_files=one_gguf,
        open=lambda path, item: open_gguf(path),
        is_copy=True,
    ),
}


def open_container(path: Path, item: str | None = None) -> tuple[str, Container]:
    """Open the container at a path; return its name in ``CONTAINERS`` and the open container.
    NothingThere if nothing looks like a checkpoint, CheckpointError if it cannot be opened."""
    able = {name: kind for name, kind in CONTAINERS.items() if item is None or kind.has_items}
    try:
        for name, kind in able.items():
            if kind.looks_like(path):
                return name, kind.open(path, item)
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from None
    if item is not None:
        nouns = " nor ".join(kind.noun for kind in able.values())
        raise NothingThere(f"{path} is neither {nouns}, so that it has no {item!r}")
    if path.is_dir() and list_folder(path, "*.distcp"):
        raise NothingThere(
            f"{path} is a checkpoint of torch.distributed.checkpoint, which is not read: write it "
            "as one file with python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            "FOLDER model.pt"
        )
    raise NothingThere(f"{path} holds no checkpoint: expected {any_of(CONTAINERS.values())}")


def any_of(kinds: Iterable[ContainerKind]) -> str:
    """Return ``"safetensors, a .pt file, an Orbax folder or a GGUF file"``."""
    *others, last = (kind.noun for kind in kinds)
    return f"{', '.join(others)} or {last}"

"""The kinds of containers there are. Another one is a folder beside these, and a line here."""

from collections.abc import Iterable
from pathlib import Path

from griffin_eval.converters.containers.container import Container, ContainerKind, NothingThere
from griffin_eval.converters.containers.gguf.kind import Gguf
from griffin_eval.converters.containers.orbax.kind import Orbax
from griffin_eval.converters.containers.safetensors.kind import Safetensors
from griffin_eval.converters.containers.torch_pt.kind import TorchPt
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import list_folder

# In the order in which they are looked for; readers and writers are imported when one is used.
CONTAINERS: dict[str, ContainerKind] = {
    "safetensors": Safetensors(),
    "torch": TorchPt(),
    "orbax": Orbax(),
    "gguf": Gguf(),
}


def open_container(path: Path, item: str | None = None) -> tuple[str, Container]:
    """Opens whatever lies at a path; returns its name in ``CONTAINERS`` and the open container.

    Raises:
        NothingThere: nothing that looks like a checkpoint.
        CheckpointError: it cannot be opened.
    """
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
    """``"safetensors, a .pt file, an Orbax folder or a GGUF file"``."""
    *others, last = (kind.noun for kind in kinds)
    return f"{', '.join(others)} or {last}"

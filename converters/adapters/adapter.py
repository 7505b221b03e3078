"""An adapter as peft saves it, opened: its config, its tensors, and the hash of both."""

import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from griffin_eval.converters.adapters.config import base_named_in, read_adapter_config
from griffin_eval.converters.adapters.files import ADAPTER_CONFIG, ADAPTER_FILE, ADAPTER_PICKLE
from griffin_eval.converters.containers.container import Container
from griffin_eval.converters.containers.safetensors.reader import open_safetensors
from griffin_eval.converters.containers.torch_pt.reader import open_torch, torch_files
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.json_files import list_folder

if TYPE_CHECKING:
    import numpy as np


class Adapter:
    """An adapter of peft, a LoRA, rsLoRA or DoRA, in a folder with ``adapter_config.json`` and
    ``adapter_model.safetensors`` or ``.bin``. CheckpointError if a file is missing or damaged,
    or says what is not supported.

    Attributes:
        file: File of its tensors.
        weight: Factor of what it adds to the base.
        config: Content of its adapter_config.json.
        container: Its tensors.
    """

    def __init__(self, folder: Path, weight: float = 1.0):
        self.folder, self.weight = folder, weight
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: expected the folder of an adapter of peft")
        absent = [name for name in (ADAPTER_CONFIG, ADAPTER_FILE) if not (folder / name).is_file()]
        pickled = absent == [ADAPTER_FILE] and (folder / ADAPTER_PICKLE).is_file()
        if absent and not pickled:
            raise CheckpointError(
                f"{folder} holds no adapter of peft: {' and '.join(absent)} missing"
            )
        self.file = folder / (ADAPTER_PICKLE if pickled else ADAPTER_FILE)
        self.config = read_adapter_config(folder / ADAPTER_CONFIG)
        self.container: Container = (
            open_torch(self.file) if pickled else open_safetensors(folder, [self.file])
        )
        self._sha256: str | None = None

    @property
    def files(self) -> list[Path]:
        """The files that it consists of."""
        return [self.folder / ADAPTER_CONFIG, self.file]

    @property
    def sha256(self) -> str:
        """SHA-256 of its tensors' file followed by its config, in hexadecimal digits: what ``cat
        adapter_model.safetensors adapter_config.json | sha256sum`` says."""
        if self._sha256 is None:
            total = hashlib.sha256()
            for file in reversed(self.files):
                try:
                    with open(file, "rb") as handle:
                        while block := handle.read(1 << 20):
                            total.update(block)
                except OSError as error:
                    raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
            self._sha256 = total.hexdigest()
        return self._sha256

    def record(self) -> dict[str, Any]:
        """Return what manifests and results say of it."""
        return {"path": str(self.folder), "weight": self.weight, "sha256": self.sha256}

    def array(self, name: str, dtype: str) -> "np.ndarray":
        """Return a tensor, copied in a dtype; CheckpointError if it holds NaN or infinity, or
        cannot be read."""
        import numpy as np

        values = self.container.tensors[name]
        values = values.read(values.whole)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.file}: {name} holds NaN or infinity")
        return np.ascontiguousarray(values, dtype)


def parse_adapters(texts: Sequence[str], option: str) -> list[tuple[str, float]]:
    """Return places and weights of adapters in texts such as ``DIR`` or ``DIR=0.7``;
    ArgumentError for a weight that is no finite number."""
    parsed = []
    for text in texts:
        place, equals, number = text.rpartition("=")
        if not equals or os.path.isdir(os.path.expanduser(text)):  # a folder may be called so
            place, number = text, "1"
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight) or not place:
            raise ArgumentError(
                f"{option} {text!r}: expected a folder or hub id, or one with a weight such as "
                "my-adapter=0.7"
            )
        parsed.append((place, weight))
    return parsed


def refuse_lone_adapter(path: Path) -> None:
    """Raise CheckpointError, with the base's name, for a folder that holds an adapter where a
    model is expected."""
    if not path.is_dir() or not (path / ADAPTER_CONFIG).is_file():
        return
    if any(name != ADAPTER_FILE for name in list_folder(path, "*.safetensors")):
        return  # a whole model that an adapter lies beside
    has_tensors = (path / ADAPTER_FILE).is_file() or (path / ADAPTER_PICKLE).is_file()
    if (path / "config.json").is_file() and (not has_tensors or torch_files(list_folder(path))):
        return
    base = base_named_in(path)
    named = f"the base that it was trained on, {base!r}" if base else "the base of it"
    raise CheckpointError(
        f"{path} holds only an adapter: give {named}, and the adapter with --adapter or peft="
    )

"""The .pt file of torch.save as a kind of container."""

from collections.abc import Collection, Mapping
from pathlib import Path

from griffin_eval.converters.containers.container import Container, ContainerKind, Specs, Writer
from griffin_eval.errors import CheckpointError

_FILE = "model.pt"


class TorchPt(ContainerKind):
    """A state dict that torch.save wrote, alone or within a trainer's file."""

    noun = "a .pt file"
    has_items = True

    def looks_like(self, path: Path) -> bool:
        from griffin_eval.converters.containers.torch_pt.reader import looks_like_torch

        return looks_like_torch(path)

    def recognises(self, names: Collection[str]) -> bool:
        from griffin_eval.converters.containers.torch_pt.reader import torch_files

        return bool(torch_files(names))

    def weight_files(self, names: list[str], where: str) -> list[str]:
        from griffin_eval.converters.containers.torch_pt.reader import not_one_file, torch_files

        files = torch_files(names)
        if len(files) > 1:
            raise CheckpointError(f"{where}: {not_one_file(files)} (download it first)")
        return files

    def open(self, path: Path, item: str | None) -> Container:
        from griffin_eval.converters.containers.torch_pt.reader import TorchFile

        return TorchFile(path, item=item)

    def output_files(self, specs: Specs, max_shard_size: int) -> dict[str, str]:
        return dict.fromkeys(specs, _FILE)

    def open_writer(
        self,
        folder: Path,
        specs: Specs,
        *,
        max_shard_size: int,
        parts: Mapping[str, tuple[int, ...]],
    ) -> Writer:
        from griffin_eval.converters.containers.torch_pt.writer import TorchWriter

        return TorchWriter(folder / _FILE, specs)

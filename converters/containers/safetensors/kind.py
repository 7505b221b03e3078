"""safetensors as a kind of container."""

from collections.abc import Collection, Mapping
from pathlib import Path

from griffin_eval.converters.containers.container import Container, ContainerKind, Specs, Writer
from griffin_eval.converters.containers.safetensors.files import INDEX_FILE, only_file
from griffin_eval.json_files import list_folder


class Safetensors(ContainerKind):
    """``model.safetensors``, or shards and their index, beside a config.json."""

    noun = "safetensors"
    needs_config = True
    sharded = True

    def looks_like(self, path: Path) -> bool:
        return path.is_dir() and bool(list_folder(path, "*.safetensors*"))

    def recognises(self, names: Collection[str]) -> bool:
        return any(name.endswith(".safetensors") for name in names)

    def weight_files(self, names: list[str], where: str) -> list[str]:
        files = [name for name in names if name.endswith(".safetensors")]
        return files if INDEX_FILE in names else [only_file(where, files)]

    def open(self, path: Path, item: str | None) -> Container:
        from griffin_eval.converters.containers.safetensors.reader import SafetensorsFolder

        return SafetensorsFolder(path)

    def output_files(self, specs: Specs, max_shard_size: int) -> dict[str, str]:
        from griffin_eval.converters.containers.safetensors.writer import SafetensorsWriter

        shards = SafetensorsWriter("", specs, max_shard_size=max_shard_size).shards
        return {name: file for file, names in shards.items() for name in names}

    def open_writer(
        self,
        folder: Path,
        specs: Specs,
        *,
        max_shard_size: int,
        parts: Mapping[str, tuple[int, ...]],
    ) -> Writer:
        from griffin_eval.converters.containers.safetensors.writer import SafetensorsWriter

        return SafetensorsWriter(folder, specs, max_shard_size=max_shard_size)

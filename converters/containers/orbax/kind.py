"""Orbax checkpoints, and flax's msgpack, as a kind of container."""

from collections.abc import Collection, Mapping
from pathlib import Path

from griffin_eval.converters.containers.container import Container, ContainerKind, Specs, Writer


class Orbax(ContainerKind):
    """An item, a step or a root of steps, as `griffin_eval.converters.containers.orbax.find`."""

    noun = "an Orbax folder"
    has_items = True
    is_folder = True
    compressed = True
    chunked = True
    remote = True

    def looks_like(self, path: Path) -> bool:
        from griffin_eval.converters.containers.orbax.find import looks_like_orbax

        return looks_like_orbax(path)

    def recognises(self, names: Collection[str]) -> bool:
        from griffin_eval.converters.containers.orbax.find import MANIFEST, MSGPACK, TREE_METADATA

        return not {MANIFEST, MSGPACK, TREE_METADATA}.isdisjoint(names)

    def open(self, path: Path, item: str | None) -> Container:
        from griffin_eval.converters.containers.orbax.reader import OrbaxFolder

        return OrbaxFolder(path, item=item)

    def output_files(self, specs: Specs, max_shard_size: int) -> dict[str, str]:
        return dict.fromkeys(specs, "ocdbt database")

    def open_writer(
        self,
        folder: Path,
        specs: Specs,
        *,
        max_shard_size: int,
        parts: Mapping[str, tuple[int, ...]],
    ) -> Writer:
        from griffin_eval.converters.containers.orbax.writer import OrbaxWriter

        return OrbaxWriter(folder, specs, parts=parts)

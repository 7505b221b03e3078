"""GGUF as a kind of container, which is read and not written."""

from collections.abc import Collection
from pathlib import Path

from griffin_eval.converters.containers.container import Container, ContainerKind
from griffin_eval.errors import CheckpointError
from griffin_eval.messages import listed


class Gguf(ContainerKind):
    """One GGUF file, as candle writes it: canonical names, no config."""

    noun = "a GGUF file"
    is_copy = True

    def looks_like(self, path: Path) -> bool:
        from griffin_eval.converters.containers.gguf.reader import looks_like_gguf

        return looks_like_gguf(path)

    def recognises(self, names: Collection[str]) -> bool:
        from griffin_eval.converters.containers.gguf.reader import gguf_files

        return bool(gguf_files(names))

    def weight_files(self, names: list[str], where: str) -> list[str]:
        from griffin_eval.converters.containers.gguf.reader import gguf_files

        files = gguf_files(names)
        if len(files) > 1:
            raise CheckpointError(
                f"{where}: expected one .gguf file, found {listed(files)}; download the one that "
                "is meant and give its path"
            )
        return files

    def open(self, path: Path, item: str | None) -> Container:
        from griffin_eval.converters.containers.gguf.reader import GgufFile

        return GgufFile(path)

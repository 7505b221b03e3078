"""The files of a folder that hold a model in safetensors."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import exists, list_folder, read_json
from griffin_eval.messages import DAMAGED, brief, listed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Dtypes as numpy calls them, as far as it has them, and what safetensors calls them.
CODES = {
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16"},
    **{"uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64", "complex64": "C64"},
    **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
}
_SHARD = re.compile(r"-of-0*([2-9]|[1-9][0-9]+)\.safetensors$")


def model_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the safetensors files of the model in a folder, and the ``weight_map`` of its
    index, if any.

    They are ``model.safetensors``, the shards that its index names, or the only such file.

    Raises:
        CheckpointError: no folder, no model or several, an index that is malformed, leads out of
            the folder, or names shards that are not there.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise CheckpointError(f"{folder}: expected a folder with {SINGLE_FILE}, found {found}")
    single, index_path = folder / SINGLE_FILE, folder / INDEX_FILE
    if index_path.is_file():
        index = _read_index(index_path)
        files = sorted({folder / name for name in index.values()})
        if single.is_file() and single not in files:
            raise CheckpointError(
                f"{folder} holds two models, {SINGLE_FILE} and the shards of {INDEX_FILE}: "
                "remove the one that is not meant"
            )
        missing = [file for file in files if not (exists(file) and file.is_file())]
        if absent := [repr(file.name) for file in missing]:
            raise CheckpointError(
                f"{index_path} names {len(absent)} of {len(files)} shards that are not there: "
                f"{listed(absent)}; download or save the folder again"
            )
        return files, index
    names = [name for name in list_folder(folder, "*.safetensors") if (folder / name).is_file()]
    if names:
        return [folder / only_file(str(folder), names)], None
    others = listed(list_folder(folder)) or "nothing"
    raise CheckpointError(
        f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found {others}; other formats have to "
        "be converted first"
    )


def is_weights(name: str) -> bool:
    """Whether a name is that of a safetensors file."""
    return name.endswith(".safetensors")


def weight_files(names: list[str], where: str) -> list[str]:
    """Return the files of weights among those of a folder; raises as `only_file` does."""
    files = [name for name in names if is_weights(name)]
    return files if INDEX_FILE in names else [only_file(where, files)]


def only_file(where: str, names: Sequence[str]) -> str:
    """Return the safetensors file of a model that has no index: ``model.safetensors``, or the
    only one; CheckpointError if there are several, or it is a shard."""
    if SINGLE_FILE in names:
        return SINGLE_FILE
    if len(names) == 1 and not _SHARD.search(names[0]):
        return names[0]
    raise CheckpointError(
        f"{where}: expected {SINGLE_FILE}, one *.safetensors file, or shards with {INDEX_FILE}, "
        f"found only {listed(names)}; download the index too, or save the model again"
    )


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        found = "an empty one" if index == {} else f"a {type(index).__name__}"
        raise CheckpointError(
            f"{path}: expected an object 'weight_map' from tensor names to file names, found "
            f"{found}; {DAMAGED}"
        )
    problems = [
        f"{name!r} is in {brief(file)}"
        for name, file in index.items()
        if not isinstance(file, str) or not file or leads_out(file)
    ]
    if problems:
        raise CheckpointError(
            f"{path}: {listed(problems)}; expected names of files within the same folder"
        )
    return index


def leads_out(path: str) -> bool:
    parts = PurePosixPath(path)
    return "\\" in path or parts.is_absolute() or ".." in parts.parts

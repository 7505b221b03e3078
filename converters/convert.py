"""Converts from any format to any other, tensor by tensor, and writes a manifest as proof."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from griffin_eval.converters.chunk_sums import ChunkSummer
from griffin_eval.converters.configs.huggingface import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKEN_IDS,
    token_ids,
)
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.containers.orbax.remote import is_remote, url_of
from griffin_eval.converters.containers.registry import CONTAINERS
from griffin_eval.converters.files import write_file, writing
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.naming.ops import SAME
from griffin_eval.converters.naming.tables import Binding
from griffin_eval.converters.naming.trainers import TRAINERS
from griffin_eval.converters.output.atomic import SafeOutput, check_disk
from griffin_eval.converters.output.card import write_card
from griffin_eval.converters.output.manifest import checksums, mismatch, write_manifest
from griffin_eval.converters.output.remote import RemoteOutput
from griffin_eval.converters.plan import MAX_SHARD_SIZE, Plan, Write
from griffin_eval.converters.source.companions import TOKENIZERS, tokenizer_folder
from griffin_eval.converters.tensors import (
    LazyTensor,
    assembled,
    bytes_of,
    in_memory,
    not_finite,
    numpy_dtype,
)
from griffin_eval.converters.threads import run_all
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError, MissingExtraError
from griffin_eval.json_files import read_file
from griffin_eval.layout import ParamSpec
from griffin_eval.messages import printable

logger = logging.getLogger(__name__)

WORKERS = 2  # tensors converted at a time, to keep two cores busy hashing, the slowest part


def convert_checkpoint(
    plan: Plan,
    destination: str | Path,
    *,
    overwrite: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
    progress: Callable[[int], None] = lambda nbytes: None,
    command: str | None = None,
) -> None:
    """Convert a checkpoint as planned.

    The output is written beside its destination and renamed when it is whole and on disk, so that
    the destination is never half-written. Two tensors are converted at a time, each in pieces of
    `PIECE_BYTES`; where names or layouts differ by more than that, a tensor is held whole.

    Args:
        destination: Folder to write; for Orbax also ``gs://bucket/path`` or ``s3://bucket/path``.
        max_shard_size: Bytes of a safetensors file.
        progress: Function that any thread calls with the number of bytes it has written.
        command: Command line, for the card of the model.

    Raises:
        CheckpointError: a value does not fit into its new dtype; a parameter does not match the
            manifest of its checkpoint; a file changes while it is read.
        ArgumentError: the destination exists.
        BadInput: the disk is too small, or the system refuses.
    """
    stamps = stamps_of(plan)
    remote = is_remote(destination)
    if remote:
        _check_remote(plan, destination, overwrite)
        output = RemoteOutput(str(destination))
    else:
        output = SafeOutput(
            destination,
            overwrite=overwrite,
            protect=[*_sources(plan), *(file for file, *_ in stamps)],
        )
    checked = _checked_against(plan) if plan.check else "nothing"
    with output as folder:
        if not remote:
            check_disk(plan.nbytes, destination)
        records = _write_tensors(plan, folder, max_shard_size, progress)
        _write_companions(plan, folder)
        source = {
            "path": url_of(plan.source.path) or printable(str(plan.source.path)),
            "format": plan.source.format.name,
            "layout": plan.source.inspection.layout,
            "left_out": plan.source.inspection.left_out,
            "checked": checked,
        }
        write_manifest(folder, plan.config, records, source, plan.target.name, plan.notes)
        if plan.target is FORMATS["hf"]:
            write_card(folder, plan, records, Path(destination).name, command)
        check_unchanged(plan, stamps)


def _sources(plan: Plan) -> list[Path]:
    """Return the paths given to a conversion as input; `stamps_of` covers the files in them."""
    source, names = plan.source, plan.source.overrides.names
    own_names = [] if names is None or str(names) in TRAINERS else [Path(os.path.expanduser(names))]
    return [source.folder, source.path, *(a.folder for a in source.adapters), *own_names]


def _check_remote(plan: Plan, url: str | Path, overwrite: bool) -> None:
    """Refuse formats and options that an object store does not allow."""
    if not plan.output.remote:
        raise ArgumentError(
            f"{plan.target.name} cannot be written to {url}, where only Orbax can "
            f"({', '.join(f.name for f in FORMATS.values() if CONTAINERS[f.container].remote)}): "
            "write a folder and copy that"
        )
    if overwrite:
        raise ArgumentError(
            "--overwrite is not possible in an object store, which replaces no folder in one "
            f"step: write to another URL than {url}, or remove what is there first"
        )


def _checked_against(plan: Plan) -> str:
    """Return in words what the source is checked against. The files' checksums, such as the hub's,
    are compared at once."""
    source = plan.source
    source.check_files()
    if plan.recorded:
        return f"{len(plan.recorded)} parameters"
    return ", ".join(checksums(source)) or "nothing"


def _write_tensors(
    plan: Plan, folder: Path, max_shard_size: int, progress: Callable[[int], None]
) -> dict[str, dict[str, Any]]:
    """Write every tensor of a plan; return the manifest's entry of every parameter, in order."""
    parameters = {
        write.binding.foreign: [
            _Parameter(plan, spec, write.dtype) for spec in write.binding.canonical
        ]
        for write in plan.writes
    }

    def pieces(binding: Binding, stopped: Callable[[], bool]) -> Iterator[np.ndarray]:
        """Yield the pieces of a tensor, unless another one fails meanwhile."""
        held = parameters[binding.foreign]
        if binding.op is SAME:
            pieces = held[0].pieces()
        else:
            pieces = binding.op.to_foreign(*(p.whole() for p in held)).pieces()
        for piece in pieces:
            if stopped():
                raise _Stopped
            yield piece
            progress(piece.nbytes)

    with plan.output.open_writer(folder, plan.specs, max_shard_size, plan.parts) as writer:

        def write(write: Write, stopped: Callable[[], bool]) -> None:
            writer.write(write.binding.foreign, pieces(write.binding, stopped))

        run_all(write, plan.writes, workers=WORKERS)
    return {p.spec.name: p.record() for each in parameters.values() for p in each}


class _Stopped(Exception):
    """Another tensor failed."""


class _Parameter:
    """A parameter on its way: cast, checked and hashed piece by piece."""

    def __init__(self, plan: Plan, spec: ParamSpec, dtype: str):
        self.spec, self._dtype = spec, dtype
        self._stored = plan.source.dtypes[spec.name]
        self._source = plan.source
        self._sha = hashlib.sha256()
        self._chunks = ChunkSummer(spec.shape, plan.grid(spec, dtype))
        self._not_finite = 0
        self._check = plan.check
        self._folder, self._recorded = plan.source.folder, plan.recorded.get(spec.name)
        cut = plan.config.vocab_size != plan.source.config.vocab_size
        # If true, the output's hash is not the stored one's.
        self._changes = cut or dtype != self._stored or plan.source.changes(spec.name)

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield the parameter in pieces."""
        for piece in self._cast():
            self._sha.update(bytes_of(piece))
            self._chunks.update(piece)
            yield piece

    def _cast(self) -> Iterator[np.ndarray]:
        rows = self.spec.shape[0]  # fewer than the source has where the vocabulary is cut
        stored = hashlib.sha256()

        adapted = self._source.changes(self.spec.name)
        for whole in self._source.pieces(self.spec.name, check=self._check):
            if self._recorded and self._changes and not adapted:
                stored.update(bytes_of(whole))
            piece, rows = whole[: max(rows, 0)], rows - len(whole)
            del whole
            if not len(piece):  # cut off, and read to be checked
                continue
            if self._dtype != self._stored:
                with np.errstate(over="ignore"):  # said below, with the name
                    cast = piece.astype(numpy_dtype(self._dtype))
                lost = int(np.sum(np.isfinite(piece) & ~np.isfinite(cast)))
                if lost:
                    raise CheckpointError(
                        f"{self.spec.name}: {lost} values do not fit into {self._dtype}; choose "
                        "another --dtype, or keep this tensor with --dtype "
                        f"…,{self.spec.name}={self._stored}"
                    )
                piece = cast
                del cast
            self._not_finite += not_finite(piece)
            yield piece
            if rows <= 0 and not self._recorded and not self._check:
                break
        if self._recorded:
            sha = (stored if self._changes else self._sha).hexdigest()
            if adapted:  # the stored values were read in another order, or not at all
                sha = self._source.sha256(self.spec.name, check=False)
            wrong = mismatch(self._folder, self.spec.name, self._stored, sha, self._recorded)
            if wrong is not None:
                raise CheckpointError(f"{wrong} (--no-check converts it as it is)")
        if self._not_finite:
            logger.warning("%s: %d values are NaN or infinite", self.spec.name, self._not_finite)

    def whole(self) -> LazyTensor:
        """Return the parameter, read."""
        return in_memory(assembled(self.spec.shape, self._dtype, self.pieces()))

    def record(self) -> dict[str, Any]:
        """Return the manifest's entry for it, once it was read."""
        record = {
            "sha256": self._sha.hexdigest(),
            "shape": list(self.spec.shape),
            "dtype": self._dtype,
            "chunks": self._chunks.result().record(),
        }
        return record if self._dtype == self._stored else record | {"cast_from": self._stored}


def _write_companions(plan: Plan, folder: Path) -> None:
    copied = plan.companions
    for name, path in copied.items():
        with writing(folder / name):
            (folder / name).parent.mkdir(exist_ok=True)
        write_file(folder / name, read_file(path))
    if "tokenizer.model" in copied and "tokenizer.json" not in copied:
        # Only here: it may load transformers.
        from griffin_eval.text.make_tokenizer_json import write_json

        write_json(folder)
    ids = _token_ids(plan)
    if plan.target is FORMATS["hf"] and GENERATION_FILE not in copied:
        text = json.dumps({key: value for key, value in ids.items() if value is not None}, indent=2)
        write_file(folder / GENERATION_FILE, text + "\n")
    raw = config_json(plan.config, plan.target, plan.writes[0].dtype) | ids
    write_file(folder / CONFIG_FILE, json.dumps(raw, indent=2) + "\n")


def _token_ids(plan: Plan) -> dict[str, Any]:
    """Return the ids of BOS, EOS and padding from the source's files, or else from its tokenizer;
    an unknown id is None, since transformers replaces an absent one by Gemma's."""
    stated, found = token_ids(plan.source.folder), dict.fromkeys(TOKEN_IDS)
    if stated.keys() < found.keys() and plan.companions.keys() & set(TOKENIZERS):
        from griffin_eval.text.load import load_tokenizer  # only here: it may load transformers

        try:
            tokenizer = load_tokenizer(tokenizer_folder(plan.source.folder))
        except (BadInput, MissingExtraError) as error:
            logger.warning("the ids of BOS, EOS and padding stay unknown: %s", error)
        else:
            ids = {key: getattr(tokenizer, key) for key in found}
            rows = plan.config.vocab_size
            found |= {key: i for key, i in ids.items() if i is not None and i < rows}
    return found | stated


def stamps_of(plan: Plan) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of every file that a conversion reads;
    CheckpointError if one of them cannot be looked at."""
    try:
        stats = [(str(path), os.stat(path)) for path in sorted(_files(plan))]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    return [(path, status.st_size, status.st_mtime_ns) for path, status in stats]


def check_unchanged(plan: Plan, stamps: list[tuple[str, int, int]]) -> None:
    """Raise CheckpointError if a file that the conversion reads has changed."""
    if changed := sorted(set(stamps) ^ set(stamps_of(plan))):
        raise CheckpointError(
            f"{changed[0][0]} changed while it was read, so that nothing is written: wait until "
            "whatever writes it has ended, and convert it again"
        )


def _files(plan: Plan) -> set[Path]:
    """Return the files that a conversion reads."""
    beside = [plan.source.folder / CONFIG_FILE, *plan.companions.values()]
    adapters = (path for adapter in plan.source.adapters for path in adapter.files)
    files = (*plan.source.container.files(), *beside, *adapters)
    return {path.resolve() for path in files if path.is_file()}

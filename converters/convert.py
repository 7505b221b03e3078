"""Converts from any format to any other, a tensor at a time, and leaves a manifest as proof."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from griffin_eval.converters.arrays.chunk_sums import ChunkSummer
from griffin_eval.converters.arrays.pieces import bytes_of, chunks
from griffin_eval.converters.arrays.write import writing
from griffin_eval.converters.configs.huggingface import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKEN_IDS,
    token_ids,
)
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.containers.container import Writer
from griffin_eval.converters.containers.orbax.remote import is_remote, url_of
from griffin_eval.converters.containers.registry import CONTAINERS
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.naming.ops import SAME
from griffin_eval.converters.naming.user_table import SHIPPED
from griffin_eval.converters.output.atomic import SafeOutput, check_disk
from griffin_eval.converters.output.card import write_card
from griffin_eval.converters.output.journal import Journal, check_unchanged, job_of, stamps_of
from griffin_eval.converters.output.manifest import checksums, mismatch, write_manifest
from griffin_eval.converters.output.memory_plan import BUFFERINGS, Buffering
from griffin_eval.converters.output.remote import RemoteOutput
from griffin_eval.converters.plan import MAX_SHARD_SIZE, Plan, Write
from griffin_eval.converters.source.companions import TOKENIZERS, tokenizer_folder
from griffin_eval.converters.source.hub import check_files
from griffin_eval.converters.threads import run_all
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError, MissingExtraError
from griffin_eval.json_files import read_file
from griffin_eval.layout import ParamSpec

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)


def convert_checkpoint(
    plan: Plan,
    destination: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
    buffering: Buffering = BUFFERINGS[0],
    progress: Callable[[int], None] = lambda nbytes: None,
    command: str | None = None,
) -> None:
    """Converts a checkpoint as planned.

    The output is written beside its destination and renamed when it is whole and on disk, so that
    the destination is never half-written. Memory: `griffin_eval.converters.output.memory_plan`.

    Args:
        plan: the plan, from `make_plan`.
        destination: folder to write; for Orbax also ``gs://bucket/path`` or ``s3://bucket/path``.
        overwrite: replace what is there.
        resume: go on after the files that a run of the same plan had finished before it was
            killed, and leave finished ones for a later run if this one fails. Only safetensors has
            such files; other containers start from their beginning.
        max_shard_size: bytes of a safetensors file.
        buffering: how much is held in memory at once, from `choose_buffering`.
        progress: called with the number of bytes that were written or skipped, by any thread.
        command: the command line, for the card of the model.

    Raises:
        CheckpointError: a value does not fit into its new dtype; a parameter is not what the
            manifest of its checkpoint says; a file changes while it is read.
        ArgumentError: the destination exists; the run to resume was another conversion.
        BadInput: the disk is too small, or the system refuses.
    """
    stamps = stamps_of(plan)
    remote = is_remote(destination)
    if remote:
        _check_remote(plan, destination, overwrite, resume)
        output = RemoteOutput(str(destination))
    else:
        output = SafeOutput(
            destination,
            overwrite=overwrite,
            resume=resume,
            job=job_of(plan, max_shard_size),
            protect=[*_sources(plan), *(file for file, *_ in stamps)],
        )
    checked = _known(plan) if plan.check else "nothing"
    with output as folder:
        if output.resumed and not plan.output.resumable:
            logger.warning(
                "%s has no parts to go on after: starting from the beginning", plan.target.name
            )
            with writing(folder):
                shutil.rmtree(folder)
                folder.mkdir()
        conversion = _Conversion(plan, folder, max_shard_size, buffering, progress)
        disk = None if remote else destination
        records = conversion.write_tensors(disk, output.resumed)
        conversion.journal.remove()
        _write_companions(plan, folder)
        source = {
            "path": url_of(plan.source.path) or str(plan.source.path),
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
    """What a conversion was told to read; the files in it are those of its stamps."""
    source, names = plan.source, plan.source.overrides.names
    own_names = [] if names is None or str(names) in SHIPPED else [Path(names).expanduser()]
    return [source.folder, source.path, *(a.folder for a in source.adapters), *own_names]


def _check_remote(plan: Plan, url: str | Path, overwrite: bool, resume: bool) -> None:
    """Refuses what an object store cannot do.

    Raises:
        ArgumentError: naming it.
    """
    if not plan.output.remote:
        raise ArgumentError(
            f"{plan.target.name} cannot be written to {url}, where only Orbax can "
            f"({', '.join(f.name for f in FORMATS.values() if CONTAINERS[f.container].remote)}): "
            "write a folder and copy that"
        )
    for option, given in (("--overwrite", overwrite), ("--resume", resume)):
        if given:
            raise ArgumentError(
                f"{option} is not possible in an object store, which replaces no folder in one "
                f"step: write to another URL than {url}, or remove what is there first"
            )


def _known(plan: Plan) -> str:
    """What the source is checked against, in words. Files of the hub are compared here and now."""
    source = plan.source
    check_files(source.container.files())
    if plan.recorded:
        return f"{len(plan.recorded)} parameters"
    return ", ".join(checksums(source)) or "nothing"


class _Conversion:
    """The tensors of a plan on their way into a folder.

    Attributes:
        journal: the files that are finished.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        max_shard_size: int,
        buffering: Buffering,
        progress: Callable[[int], None],
    ):
        self.journal = Journal(folder)
        self._plan, self._folder, self._max_shard_size = plan, folder, max_shard_size
        self._buffering, self._progress = buffering, progress
        self._files = plan.output.output_files(plan.specs, max_shard_size)
        self._kept: set[str] = set()  # tensors in files that an earlier run finished
        self._parameters = {
            write.binding.foreign: [
                _Parameter(plan, spec, write.dtype, buffering.piece)
                for spec in write.binding.canonical
            ]
            for write in plan.writes
        }

    def write_tensors(self, disk: str | Path | None, resumed: bool) -> dict[str, dict[str, Any]]:
        """Writes every tensor that is not in a finished file.

        Args:
            disk: a path on the disk that must hold them, or None if no disk must.
            resumed: whether an earlier run may have finished some.

        Returns:
            The manifest's entry for every parameter, in the order of the plan.
        """
        writer = self._plan.output.open_writer(
            self._folder,
            self._plan.specs,
            piece=self._buffering.piece,
            max_shard_size=self._max_shard_size,
            on_disk=self._note,
            parts=self._plan.parts,
        )
        with writer:
            finished = self._finished(writer) if resumed and self._plan.output.resumable else {}
            left = [w for w in self._plan.writes if w.binding.canonical[0].name not in finished]
            nbytes = sum(write.nbytes for write in left)
            if disk is not None:
                check_disk(nbytes, disk)
            self._progress(self._plan.nbytes - nbytes)
            run_all(partial(self._write, writer), left, workers=self._buffering.workers)
        records = finished | {
            parameter.spec.name: parameter.record()
            for write in left
            for parameter in self._parameters[write.binding.foreign]
        }
        return {s.name: records[s.name] for w in self._plan.writes for s in w.binding.canonical}

    def _finished(self, writer: Writer) -> dict[str, dict[str, Any]]:
        """The manifest's entries for the parameters in files that an earlier run finished."""
        files = writer.finished_files(self.journal.entries)
        total = len(set(self._files.values()))
        logger.warning("resumed: %d of %d files were finished", len(files), total)
        self._kept = {name for name, file in self._files.items() if file in files}
        names = {p.spec.name for foreign in self._kept for p in self._parameters[foreign]}
        entries = [self.journal.entries[file]["tensors"] for file in files]
        return {n: record for entry in entries for n, record in entry.items() if n in names}

    def _note(self, file: str, path: Path) -> None:
        """Adds a finished file to the journal."""
        names = [name for name, home in self._files.items() if home == file]
        written = [parameter for name in names for parameter in self._parameters[name]]
        self.journal.add(file, path, {p.spec.name: p.record() for p in written})

    def _write(self, writer: Writer, write: Write, stopped: Callable[[], bool]) -> None:
        """Writes what is written for a tensor, unless another one fails meanwhile."""

        def put(name: str, pieces: "Iterable[np.ndarray]") -> None:
            def counted() -> Iterator["np.ndarray"]:
                for piece in pieces:
                    if stopped():
                        raise _Stopped
                    yield piece
                    self._progress(piece.nbytes)

            if name not in self._kept:
                writer.write(name, counted())
                return
            for _ in counted():  # for what is made of it beside
                pass

        parameters = self._parameters[write.binding.foreign]
        if write.binding.op is SAME:
            put(write.binding.foreign, parameters[0].pieces())
        else:
            whole = (parameter.whole() for parameter in parameters)
            pieces = chunks(write.binding.op.to_foreign(*whole), self._buffering.piece)
            put(write.binding.foreign, pieces)


class _Stopped(Exception):
    """Another tensor failed."""


class _Parameter:
    """A parameter on its way: cast, checked and hashed piece by piece.

    Attributes:
        spec: its name and shape.
        piece: bytes that are read at a time.
    """

    def __init__(self, plan: Plan, spec: ParamSpec, dtype: str, piece: int):
        self.spec, self.piece, self._dtype = spec, piece, dtype
        self._stored = plan.source.dtypes[spec.name]
        self._read = plan.source.pieces
        self._sha = hashlib.sha256()
        self._chunks = ChunkSummer(spec.shape, plan.grid(spec, dtype))
        self._not_finite = 0
        self._check = plan.check
        self._folder, self._recorded = plan.source.folder, plan.recorded.get(spec.name)
        cut = plan.config.vocab_size != plan.source.config.vocab_size
        # So that what is written hashes otherwise.
        self._changes = cut or dtype != self._stored or plan.source.changes(spec.name)

    def pieces(self) -> Iterator["np.ndarray"]:
        """The parameter in pieces."""
        for piece in self._cast():
            self._sha.update(bytes_of(piece))
            self._chunks.update(piece)
            yield piece

    def _cast(self) -> Iterator["np.ndarray"]:
        import ml_dtypes  # noqa: F401  (teaches numpy the name bfloat16)
        import numpy as np

        rows = self.spec.shape[0]  # fewer than the source has where the vocabulary is cut
        stored = hashlib.sha256()

        def hash_stored(piece: "np.ndarray") -> None:
            stored.update(bytes_of(piece))

        seen = hash_stored if self._recorded and self._changes else None
        for whole in self._read(self.spec.name, self.piece, self._check, seen):
            piece, rows = whole[: max(rows, 0)], rows - len(whole)
            del whole
            if not len(piece):  # cut off, and read to be checked
                continue
            if self._dtype != self._stored:
                with np.errstate(over="ignore"):  # said below, with the name
                    cast = piece.astype(self._dtype)
                lost = int(np.sum(np.isfinite(piece) & ~np.isfinite(cast)))
                if lost:
                    raise CheckpointError(
                        f"{self.spec.name}: {lost} values do not fit into {self._dtype}; choose "
                        "another --dtype, or keep this tensor with --dtype "
                        f"…,{self.spec.name}={self._stored}"
                    )
                piece = cast
                del cast
            self._not_finite += _not_finite(piece)
            yield piece
            if rows <= 0 and not self._recorded and not self._check:
                break
        if self._recorded:
            sha = stored if self._changes else self._sha
            wrong = mismatch(
                self._folder, self.spec.name, self._stored, sha.hexdigest(), self._recorded
            )
            if wrong is not None:
                raise CheckpointError(f"{wrong} (--no-check converts it as it is)")
        if self._not_finite:
            logger.warning("%s: %d values are NaN or infinite", self.spec.name, self._not_finite)

    def whole(self) -> "np.ndarray":
        import ml_dtypes  # noqa: F401  (teaches numpy the name bfloat16)
        import numpy as np

        out, at = np.empty(self.spec.shape, self._dtype), 0
        for piece in self.pieces():
            out[at : at + len(piece)] = piece
            at += len(piece)
        return out

    def record(self) -> dict[str, Any]:
        """The manifest's entry for it, once it was read."""
        record = {
            "sha256": self._sha.hexdigest(),
            "shape": list(self.spec.shape),
            "dtype": self._dtype,
            "chunks": self._chunks.result().record(),
        }
        return record if self._dtype == self._stored else record | {"cast_from": self._stored}


def _not_finite(piece: "np.ndarray") -> int:
    """The number of values that are NaN or infinite."""
    import numpy as np

    # numpy has no fast bfloat16. NaN and infinity are its largest bit patterns: of those without
    # a sign bit as signed numbers, of those with one as unsigned numbers. Nothing is allocated.
    if piece.dtype.name == "bfloat16" and piece.size:
        positive, negative = piece.view(np.int16).max(), piece.view(np.uint16).max()
        if positive < 0x7F80 and negative < 0xFF80:
            return 0
    return int(np.sum(~np.isfinite(piece)))


def _write_companions(plan: Plan, folder: Path) -> None:
    copied = plan.companions
    for name, path in copied.items():
        content = read_file(path)
        with writing(folder / name):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    if "tokenizer.model" in copied and "tokenizer.json" not in copied:
        from griffin_eval.text.make_tokenizer_json import (
            write_json,  # only here: it may load transformers
        )

        write_json(folder)
    ids = _token_ids(plan)
    if plan.target is FORMATS["hf"] and GENERATION_FILE not in copied:
        text = json.dumps({key: value for key, value in ids.items() if value is not None}, indent=2)
        with writing(folder / GENERATION_FILE):
            (folder / GENERATION_FILE).write_text(text + "\n")
    raw = config_json(plan.config, plan.target, plan.writes[0].dtype) | ids
    with writing(folder / CONFIG_FILE):
        (folder / CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n")


def _token_ids(plan: Plan) -> dict[str, Any]:
    """The ids of BOS, EOS and padding that the files of the source say, else those of its
    tokenizer; None where there is none, since transformers takes Gemma's for what is absent."""
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

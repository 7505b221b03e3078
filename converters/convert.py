"""From any format to any other, a tensor at a time, with a plan before and a proof after."""

import dataclasses
import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.formats import Format, check_expressible
from griffin_eval.converters.huggingface_config import to_huggingface, token_ids
from griffin_eval.converters.manifest import chunks, write_manifest
from griffin_eval.converters.memory import BYTES, ROOMS, Room
from griffin_eval.converters.naming import SAME, Binding, bind
from griffin_eval.converters.resolve import COMPANIONS, tokenizer_folder
from griffin_eval.converters.resume import Journal, job_of
from griffin_eval.converters.survey import CONFIG_FILE, FLOATS, MODEL_TYPE
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.hints import nearest
from griffin_eval.layout import ParamSpec

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

TORCH_FILE = "model.pt"
MAX_SHARD_SIZE = 5 * 10**9


class Write(NamedTuple):
    """One tensor of the output: which parameters it holds, and in what dtype."""

    binding: Binding
    dtype: str
    cast_from: tuple[str, ...]  # what its parameters are stored in, where that is another dtype

    @property
    def nbytes(self) -> int:
        return sum(spec.size for spec in self.binding.canonical) * BYTES[self.dtype]


class Plan(NamedTuple):
    """Everything a conversion will do, known from headers alone."""

    source: Checkpoint
    target: Format
    config: GriffinConfig
    writes: list[Write]
    companions: list[Path]
    notes: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(write.nbytes for write in self.writes)


def parse_dtypes(text: str | None) -> dict[str, str]:
    """``bfloat16`` or ``bfloat16,recurrent_param=bfloat16``: ending of a name -> dtype.

    The empty ending is the rule for all parameters but Λ and θ, which keep theirs unless named.

    Raises:
        ArgumentError: not of that form, or no dtype of that name.
    """
    rules: dict[str, str] = {}
    for part in text.split(",") if text else []:
        ending, _, dtype = part.strip().rpartition("=")
        if dtype not in FLOATS:
            raise ArgumentError(
                f"unknown dtype {dtype!r}: expected {', '.join(FLOATS)}{nearest(dtype, FLOATS)}"
            )
        rules[ending] = dtype
    return rules


def make_plan(
    source: Checkpoint,
    target: Format,
    *,
    dtypes: Mapping[str, str] | None = None,
    vocab_size: int | None = None,
) -> Plan:
    """Decides every tensor of an output, from headers alone.

    Args:
        source: what to convert.
        target: the format to write.
        dtypes: from `parse_dtypes`; by default everything keeps the dtype it has.
        vocab_size: keep only so many leading rows of the embedding.

    Raises:
        CheckpointError: the target cannot express the model.
        ArgumentError: a vocabulary larger than the one there is.
    """
    config, notes = source.config, dict(source.notes)
    if vocab_size is not None and vocab_size != config.vocab_size:
        if not 0 < vocab_size < config.vocab_size:
            raise ArgumentError(
                f"--vocab-size {vocab_size}: the model has {config.vocab_size} rows, and rows can "
                "only be dropped"
            )
        notes["vocab_rows_dropped"] = config.vocab_size - vocab_size
        config = dataclasses.replace(config, vocab_size=vocab_size)
    check_expressible(config, target)
    writes = []
    for binding in bind(target.table, config):
        stored = [source.dtypes[spec.name] for spec in binding.canonical]
        wanted = {
            _wanted(spec, have, dtypes or {})
            for spec, have in zip(binding.canonical, stored, strict=True)
        }
        if len(wanted) > 1:
            names = " and ".join(spec.name for spec in binding.canonical)
            raise CheckpointError(
                f"{target.name} holds {names} in one tensor, but they are "
                f"{' and '.join(sorted(wanted))}: choose one with --dtype"
            )
        (dtype,) = wanted
        writes.append(Write(binding, dtype, tuple(have for have in stored if have != dtype)))
    homes = (tokenizer_folder(source.folder), source.folder)
    found = {name: p for home in homes for name in COMPANIONS if (p := home / name).is_file()}
    return Plan(source, target, config, writes, list(found.values()), notes)


def _wanted(spec: ParamSpec, stored: str, rules: Mapping[str, str]) -> str:
    for ending, dtype in rules.items():
        if ending and spec.name.endswith(ending):
            return dtype
    return stored if spec.keep_float32 else rules.get("", stored)


def convert(
    plan: Plan,
    destination: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
    room: Room = ROOMS[0],
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Carries out a plan.

    The output is written beside its destination and renamed when it is whole and on disk, so that
    the destination is never half-written. Memory: `griffin_eval.converters.memory`.

    Args:
        plan: from `make_plan`.
        destination: folder to write.
        overwrite: replace what is there.
        resume: go on after the safetensors files that a run of the same plan had finished before
            it was killed, and leave finished ones for a later run if this one fails. Orbax and .pt
            have no such parts, and start from their beginning.
        max_shard_size: bytes of a safetensors file.
        room: what is held at once, from `choose_room`.
        progress: called with the number of bytes that were written or skipped, by any thread.

    Raises:
        CheckpointError: a value does not fit into its new dtype.
        ArgumentError: the destination exists; what is to be resumed is another conversion.
        BadInput: the disk is too small, or the system refuses.
    """
    from griffin_eval.converters.output import SafeOutput, check_disk

    output = SafeOutput(
        destination,
        overwrite=overwrite,
        resume=resume,
        job=job_of(plan, max_shard_size),
        protect=[plan.source.folder],
    )
    with output as folder:
        if output.resumed and plan.target.container != "safetensors":
            logger.warning(
                "%s has no parts to go on after: starting from the beginning", plan.target.name
            )
            shutil.rmtree(folder)
            folder.mkdir()
        journal = Journal(folder)
        parameters = {
            write.binding.foreign: [
                _Parameter(plan, spec, write.dtype, room.piece) for spec in write.binding.canonical
            ]
            for write in plan.writes
        }

        def note(file: str, path: Path) -> None:
            found = [p for name in writer.shards[file] for p in parameters[name]]
            journal.add(file, path, {p.spec.name: p.record() for p in found})

        with _open_writer(plan, folder, max_shard_size, room, note) as writer:
            done: dict[str, dict[str, Any]] = {}
            if output.resumed and plan.target.container == "safetensors":
                finished = writer.finished_shards(journal.entries)
                for file in finished:
                    done |= journal.entries[file]["tensors"]
                logger.warning(
                    "resumed: %d of %d files were finished", len(finished), len(writer.shards)
                )
            left = [w for w in plan.writes if w.binding.canonical[0].name not in done]
            nbytes = sum(write.nbytes for write in left)
            check_disk(nbytes, destination)
            progress(plan.nbytes - nbytes)
            with _Workers(room.workers) as workers:
                for write in left:
                    workers.start(
                        _carry_out, write, parameters[write.binding.foreign], writer, progress
                    )
        records = {p.spec.name: p.record() for w in left for p in parameters[w.binding.foreign]}
        records |= done
        tensors = {s.name: records[s.name] for w in plan.writes for s in w.binding.canonical}
        journal.remove()
        _write_companions(plan, folder)
        source = {
            "path": str(plan.source.path),
            "format": plan.source.format.name,
            "layout": plan.source.layout,
            "left_out": plan.source.left_out,
        }
        write_manifest(folder, plan.config, tensors, source, plan.target.name, plan.notes)


def _carry_out(
    write: Write,
    parameters: "list[_Parameter]",
    writer: Any,
    progress: Callable[[int], None],
    stopped: Callable[[], bool],
) -> None:
    """Writes a tensor of the output, unless another one fails meanwhile."""
    if write.binding.op is SAME:
        pieces: Iterable[np.ndarray] = parameters[0].pieces()
    else:
        whole = (parameter.whole() for parameter in parameters)
        pieces = chunks(write.binding.op.to_foreign(*whole), parameters[0].piece)

    def counted() -> Iterator["np.ndarray"]:
        for piece in pieces:
            if stopped():
                raise _Stopped
            yield piece
            progress(piece.nbytes)

    writer.write(write.binding.foreign, counted())


class _Stopped(Exception):
    """Another tensor failed."""


class _Workers:
    """Threads that each do one thing after another, until one fails.

    A context manager that waits for all of them, and raises the first failure.
    """

    def __init__(self, count: int):
        self._pool = ThreadPoolExecutor(count)
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._futures: list[Future[None]] = []

    def __enter__(self) -> "_Workers":
        return self

    def start(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function with these, and last a function that says when to stop."""
        self._futures.append(self._pool.submit(self._run, function, *arguments))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                wait(self._futures)
        finally:
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)
        if kind is None and self._failure is not None:
            raise self._failure

    def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._stop.is_set():
            return
        try:
            function(*arguments, self._stop.is_set)
        except BaseException as error:
            if not self._stop.is_set():
                self._failure = error
                self._stop.set()


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
        self._not_finite = 0

    def pieces(self) -> Iterator["np.ndarray"]:
        import ml_dtypes  # noqa: F401  (teaches numpy the name bfloat16)
        import numpy as np

        rows = self.spec.shape[0]  # fewer than there are where the vocabulary is cut
        for whole in self._read(self.spec.name, self.piece):
            piece, rows = whole[:rows], rows - len(whole)
            del whole
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
            self._sha.update(piece.view(np.uint8).data)
            yield piece
            if rows <= 0:
                break
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
        """What the manifest says of it, once it was read."""
        record = {
            "sha256": self._sha.hexdigest(),
            "shape": list(self.spec.shape),
            "dtype": self._dtype,
        }
        return record if self._dtype == self._stored else record | {"cast_from": self._stored}


def _not_finite(piece: "np.ndarray") -> int:
    """How many values are NaN or infinite."""
    import numpy as np

    # numpy has no fast bfloat16. NaN and infinity are its largest bit patterns: of those without
    # a sign bit as signed numbers, of those with one as unsigned numbers. Nothing is allocated.
    if piece.dtype.name == "bfloat16" and piece.size:
        positive, negative = piece.view(np.int16).max(), piece.view(np.uint16).max()
        if positive < 0x7F80 and negative < 0xFF80:
            return 0
    return int(np.sum(~np.isfinite(piece)))


def _open_writer(
    plan: Plan,
    folder: Path,
    max_shard_size: int,
    room: Room,
    on_disk: Callable[[str, Path], None],
) -> Any:
    """A context manager whose ``write(name, chunks)`` takes the tensors of the plan in order."""
    specs = {w.binding.foreign: (w.binding.shape, w.dtype) for w in plan.writes}
    if plan.target.container == "safetensors":
        from griffin_eval.converters.safetensors_writer import SafetensorsWriter

        return SafetensorsWriter(folder, specs, max_shard_size=max_shard_size, on_disk=on_disk)
    if plan.target.container == "orbax":
        from griffin_eval.converters.orbax_writer import OrbaxWriter

        return OrbaxWriter(folder, specs, chunk=room.chunk)
    from griffin_eval.converters.torch_writer import TorchWriter

    return TorchWriter(folder / TORCH_FILE, specs)


def files_of(plan: Plan, max_shard_size: int) -> dict[str, str]:
    """The file or folder of the output that each tensor goes into, by its name in the output."""
    if plan.target.container == "safetensors":
        from griffin_eval.converters.safetensors_writer import SafetensorsWriter

        specs = {w.binding.foreign: (w.binding.shape, w.dtype) for w in plan.writes}
        shards = SafetensorsWriter("", specs, max_shard_size=max_shard_size).shards
        return {name: file for file, names in shards.items() for name in names}
    home = TORCH_FILE if plan.target.container == "torch" else "ocdbt database"
    return {write.binding.foreign: home for write in plan.writes}


def _write_companions(plan: Plan, folder: Path) -> None:
    for path in plan.companions:
        shutil.copyfile(path, folder / path.name)
    copied = {path.name for path in plan.companions}
    if "tokenizer.model" in copied and "tokenizer.json" not in copied:
        from griffin_eval.tokenizer import write_json  # only here: it may load transformers

        write_json(folder)
    raw = config_json(plan.config, plan.target, plan.writes[0].dtype)
    raw |= token_ids(plan.source.folder)
    (folder / CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n")


def config_json(config: GriffinConfig, target: Format, dtype: str) -> dict[str, Any]:
    """The config.json of a model in a format, but for the ids of its tokenizer."""
    if target.name == "hf":
        return to_huggingface(config) | {"dtype": dtype}
    return {"model_type": MODEL_TYPE, **dataclasses.asdict(config)}

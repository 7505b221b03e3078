"""From any format to any other, a tensor at a time, with a plan before and a proof after."""

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import CONFIG_FILE, FLOATS, MODEL_TYPE, Checkpoint
from griffin_eval.converters.formats import Format, check_expressible
from griffin_eval.converters.huggingface_config import to_huggingface, token_ids
from griffin_eval.converters.manifest import chunks, write_manifest
from griffin_eval.converters.naming import SAME, Binding, bind
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.hints import nearest
from griffin_eval.layout import ParamSpec

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

# What a tokenizer and generation need, copied as they are.
COMPANIONS = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
TORCH_FILE = "model.pt"
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


class Write(NamedTuple):
    """One tensor of the output: which parameters it holds, and in what dtype."""

    binding: Binding
    dtype: str
    cast_from: tuple[str, ...]  # what its parameters are stored in, where that is another dtype

    @property
    def nbytes(self) -> int:
        return sum(spec.size for spec in self.binding.canonical) * _BYTES[self.dtype]


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

    The empty ending is the rule for all parameters but Λ, which keeps its dtype unless named.

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
    config, notes = source.config, {}
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
    companions = [p for name in COMPANIONS if (p := source.folder / name).is_file()]
    return Plan(source, target, config, writes, companions, notes)


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
    max_shard_size: int = 5 * 10**9,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Carries out a plan.

    The output is written beside its destination and renamed when it is whole and on disk, so that
    the destination is never half-written. Memory: one tensor and a few chunks.

    Args:
        plan: from `make_plan`.
        destination: folder to write.
        overwrite: replace what is there.
        max_shard_size: bytes of a safetensors file.
        progress: called with the number of bytes that were written.

    Raises:
        CheckpointError: the destination exists, the disk is too small, or a value does not fit
            into its new dtype.
    """
    from griffin_eval.converters.output import SafeOutput, check_disk

    check_disk(plan.nbytes, destination)
    tensors: dict[str, dict[str, Any]] = {}
    with SafeOutput(destination, overwrite=overwrite, protect=[plan.source.folder]) as folder:
        with _open_writer(plan, folder, max_shard_size) as writer:
            for write in plan.writes:
                parameters = [_Parameter(plan, s, write.dtype) for s in write.binding.canonical]
                if write.binding.op is SAME:
                    pieces: Iterable[np.ndarray] = parameters[0].pieces()
                else:
                    whole = (parameter.whole() for parameter in parameters)
                    pieces = chunks(write.binding.op.to_foreign(*whole))
                writer.write(write.binding.foreign, _counted(pieces, progress))
                tensors |= {p.spec.name: p.record() for p in parameters}
        _write_companions(plan, folder)
        source = {
            "path": str(plan.source.path),
            "format": plan.source.format.name,
            "layout": plan.source.layout,
            "left_out": plan.source.left_out,
        }
        write_manifest(folder, plan.config, tensors, source, plan.target.name, plan.notes)


class _Parameter:
    """A parameter on its way: cast, checked and hashed chunk by chunk."""

    def __init__(self, plan: Plan, spec: ParamSpec, dtype: str):
        self.spec, self._dtype = spec, dtype
        self._stored = plan.source.dtypes[spec.name]
        self._read = plan.source.pieces
        self._sha = hashlib.sha256()

    def pieces(self) -> Iterator["np.ndarray"]:
        import ml_dtypes  # noqa: F401  (teaches numpy the name bfloat16)
        import numpy as np

        rows = self.spec.shape[0]  # fewer than there are where the vocabulary is cut
        for whole in self._read(self.spec.name):
            piece, rows = whole[:rows], rows - len(whole)
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
            if not_finite := _not_finite(piece):
                logger.warning("%s: %d values are NaN or infinite", self.spec.name, not_finite)
            self._sha.update(piece.view(np.uint8).data)
            yield piece
            if rows <= 0:
                break

    def whole(self) -> "np.ndarray":
        import numpy as np

        return np.concatenate(list(self.pieces()))

    def record(self) -> dict[str, Any]:
        """What the manifest says of it."""
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


def _counted(
    pieces: Iterable["np.ndarray"], progress: Callable[[int], None]
) -> Iterator["np.ndarray"]:
    for piece in pieces:
        yield piece
        progress(piece.nbytes)


def _open_writer(plan: Plan, folder: Path, max_shard_size: int):
    """A context manager whose ``write(name, chunks)`` takes the tensors of the plan in order."""
    specs = {w.binding.foreign: (w.binding.shape, w.dtype) for w in plan.writes}
    if plan.target.container == "safetensors":
        from griffin_eval.converters.safetensors_writer import SafetensorsWriter

        return SafetensorsWriter(folder, specs, max_shard_size=max_shard_size)
    if plan.target.container == "orbax":
        from griffin_eval.converters.orbax_writer import OrbaxWriter

        return OrbaxWriter(folder, specs)
    from griffin_eval.converters.torch_writer import TorchWriter

    return TorchWriter(folder / TORCH_FILE, specs)


def _write_companions(plan: Plan, folder: Path) -> None:
    for path in plan.companions:
        shutil.copyfile(path, folder / path.name)
    raw = config_json(plan.config, plan.target, plan.writes[0].dtype)
    raw |= token_ids(plan.source.folder)
    (folder / CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n")


def config_json(config: GriffinConfig, target: Format, dtype: str) -> dict[str, Any]:
    """The config.json of a model in a format, but for the ids of its tokenizer."""
    if target.name == "hf":
        return to_huggingface(config) | {"dtype": dtype}
    return {"model_type": MODEL_TYPE, **dataclasses.asdict(config)}

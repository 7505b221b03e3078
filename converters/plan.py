"""The plan of a conversion, known from headers alone."""

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from griffin_eval.arguments import parse_size
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.huggingface import token_ids
from griffin_eval.converters.containers.container import ContainerKind, Specs
from griffin_eval.converters.containers.registry import CONTAINERS
from griffin_eval.converters.formats import FORMATS, Format, check_expressible
from griffin_eval.converters.naming.tables import Binding, bind
from griffin_eval.converters.output.manifest import added, recorded
from griffin_eval.converters.source.companions import TOKENIZERS, companions, tokenizer_folder
from griffin_eval.converters.tensors import FLOATS, ITEM_BYTES, chunk_shape, part_chunks
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError, MissingExtraError
from griffin_eval.layout import ParamSpec, param_specs
from griffin_eval.messages import did_you_mean
from griffin_eval.sharding.split import DATA, MODEL, split_over

logger = logging.getLogger(__name__)

MAX_SHARD_SIZE = 5 * 10**9


class Write(NamedTuple):
    """One tensor of the output.

    Attributes:
        binding: Name, layout and parameters of the tensor.
        cast_from: Dtypes of the parameters in the source that differ from ``dtype``.
    """

    binding: Binding
    dtype: str
    cast_from: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.binding.shape) * ITEM_BYTES[self.dtype]


class Plan(NamedTuple):
    """Everything a conversion will do, known from headers alone.

    Attributes:
        companions: Files that are copied beside the tensors, by their path in the output.
        notes: Facts for the manifest.
        mesh: Sizes of the axes of a mesh whose devices will each read their own part, by name.
        recorded: Entries of the source's manifest, which parameters are checked against while they
            are read; empty if there is none.
        check: Whether other checksums of the source are checked, too.
    """

    source: Checkpoint
    target: Format
    config: GriffinConfig
    writes: list[Write]
    companions: Mapping[str, Path]
    notes: dict[str, Any]
    mesh: dict[str, int] | None = None
    recorded: Mapping[str, dict[str, Any]] = {}
    check: bool = True

    @property
    def nbytes(self) -> int:
        return sum(write.nbytes for write in self.writes)

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Parts along each dimension into which the devices of the mesh cut each tensor of the
        output, by its name there; empty without a mesh."""
        if self.mesh is None:
            return {}
        # Counts of parts are laid out as shapes are.
        return {
            write.binding.foreign: write.binding.op.foreign_shape(
                *(self._parts(spec, self.mesh) for spec in write.binding.canonical)
            )
            for write in self.writes
        }

    def grid(self, spec: ParamSpec, dtype: str) -> tuple[int, ...]:
        """Return the shape of a parameter's chunks, in canonical layout, that get a checksum each:
        the chunks of the mesh, else rows."""
        if self.mesh is None:
            return chunk_shape(spec.shape, ITEM_BYTES[dtype])
        return part_chunks(spec.shape, self._parts(spec, self.mesh), ITEM_BYTES[dtype])

    def _parts(self, spec: ParamSpec, mesh: dict[str, int]) -> tuple[int, ...]:
        """Return the number of parts along each dimension that a mesh cuts a parameter into."""
        axes = split_over(self.config, mesh[MODEL]).axes_in_training(spec, mesh[DATA])
        return tuple(1 if axis is None else mesh[axis] for axis in axes)

    @property
    def output(self) -> ContainerKind:
        """The kind of container that is written."""
        return CONTAINERS[self.target.container]

    @property
    def specs(self) -> Specs:
        """Shape and dtype of every tensor of the output, by its name there."""
        return {w.binding.foreign: (w.binding.shape, w.dtype) for w in self.writes}


def parse_dtypes(text: str | None) -> dict[str, str]:
    """Return the rules in ``bfloat16`` or ``bfloat16,recurrent_param=bfloat16``: name's ending ->
    dtype.

    An ending is one or more whole dotted names; the longest one that fits a parameter counts. The
    empty ending is the rule for all parameters but Λ and θ, which keep theirs unless named.
    ArgumentError for a text not of that form, an unknown dtype, or two rules with one ending.
    """
    rules: dict[str, str] = {}
    for part in text.split(",") if text is not None else []:
        ending, _, dtype = part.strip().rpartition("=")
        if dtype not in FLOATS:
            raise ArgumentError(
                f"unknown dtype {dtype!r}: expected {', '.join(FLOATS)}"
                f"{did_you_mean(dtype, FLOATS)}"
            )
        if ending in rules:
            raise ArgumentError(
                f"{text!r} states the dtype of {ending or 'all parameters'} twice: state it once"
            )
        rules[ending] = dtype
    return rules


def parse_shard_size(text: str | None, target: Format, option: str) -> int:
    """Return the bytes of a file of an output, by default `MAX_SHARD_SIZE`; ArgumentError, with the
    option's name, if the text is no size or the format has no shards."""
    if text is None:
        return MAX_SHARD_SIZE
    if not CONTAINERS[target.container].sharded:
        able = [f.name for f in FORMATS.values() if CONTAINERS[f.container].sharded]
        raise ArgumentError(
            f"{option} is for formats in shards ({', '.join(able)}), and {target.name} has none: "
            "leave it out"
        )
    return parse_size(text, option)


def make_plan(
    source: Checkpoint,
    target: Format,
    *,
    dtypes: Mapping[str, str] | None = None,
    vocab_size: int | None = None,
    mesh: dict[str, int] | None = None,
    check: bool = True,
) -> Plan:
    """Decide every tensor of an output, from headers alone.

    Args:
        dtypes: Rules from `parse_dtypes`; by default everything keeps the dtype it has.
        vocab_size: Number of leading rows of the embedding to keep; None for all.
        check: Whether the source is checked against its manifest and other checksums, if any.

    Raises:
        CheckpointError: the target cannot express the model; the source's manifest is damaged, or
            lacks a parameter of the source.
        ArgumentError: a vocabulary larger than the one there is, or without rows for all ids of the
            tokenizer; a mesh for a container whose tensors are not cut; a rule for the dtype of no
            parameter.
    """
    config, notes = source.config, dict(source.inspection.notes)
    if source.adapters:
        notes["adapters"] = [adapter.record() for adapter in source.adapters]
    if vocab_size is not None and vocab_size != config.vocab_size:
        if not 0 < vocab_size < config.vocab_size:
            raise ArgumentError(
                f"--vocab-size {vocab_size}: the model has {config.vocab_size} rows, and rows can "
                "only be dropped"
            )
        _check_ids(source, vocab_size)
        notes["vocab_rows_dropped"] = config.vocab_size - vocab_size
        config = dataclasses.replace(config, vocab_size=vocab_size)
    check_expressible(config, target)
    _check_rules(dtypes or {}, param_specs(config))
    if mesh is not None:
        check_chunked(target)
    writes = []
    for binding in bind(target.table, config):
        stored = [source.dtypes[spec.name] for spec in binding.canonical]
        wanted = {
            _output_dtype(spec, have, dtypes or {})
            for spec, have in zip(binding.canonical, stored, strict=True)
        }
        if len(wanted) > 1:
            names = " and ".join(spec.name for spec in binding.canonical)
            raise CheckpointError(
                f"{target.name} holds {names} in one tensor, but they are "
                f"{' and '.join(sorted(wanted))}: choose one with --dtype"
            )
        (dtype,) = wanted
        cast_from = tuple(have for have in stored if have != dtype)
        writes.append(Write(binding, dtype, cast_from))
    folders = (tokenizer_folder(source.folder), source.folder)
    beside = {name: path for folder in folders for name, path in companions(folder).items()}
    if config.vocab_size != source.config.vocab_size and beside.keys() & set(TOKENIZERS):
        _check_tokenizer(source, config.vocab_size)
    hashes = recorded(source) if check else {}
    if problems := added(source, hashes):
        raise CheckpointError(f"{problems[0]} (--no-check converts it as it is)")
    if not check:
        notes["source_not_checked"] = True
    return Plan(source, target, config, writes, beside, notes, mesh, hashes, check)


def _check_ids(source: Checkpoint, rows: int) -> None:
    """Raise ArgumentError if a special token that the source's files state would lose its row."""
    for key, ids in token_ids(source.folder).items():
        several = ids if isinstance(ids, list) else [ids]
        largest = max((each for each in several if each is not None), default=-1)
        if rows <= largest < source.config.vocab_size:
            raise ArgumentError(
                f"--vocab-size {rows}: {key} is {ids} in {source.folder}: keep {largest + 1} rows "
                "at least"
            )


def _check_tokenizer(source: Checkpoint, rows: int) -> None:
    """Raise ArgumentError if the tokenizer, which is copied, has tokens whose rows are dropped."""
    from griffin_eval.text.load import load_tokenizer  # only here: it may load transformers

    try:
        tokenizer = load_tokenizer(tokenizer_folder(source.folder))
    except (BadInput, MissingExtraError) as error:
        logger.warning("cannot tell whether the tokenizer fits %d rows: %s", rows, error)
        return
    if rows < tokenizer.vocab_size <= source.config.vocab_size:  # the tokenizer fits the source
        raise ArgumentError(
            f"--vocab-size {rows}: the tokenizer {tokenizer.name} has ids up to "
            f"{tokenizer.vocab_size - 1}: keep {tokenizer.vocab_size} rows at least"
        )


def _check_rules(rules: Mapping[str, str], names: Collection[str]) -> None:
    """Raise ArgumentError for a rule about the dtype of no parameter."""
    for ending, dtype in rules.items():
        if ending and not any(_fits(ending, name) for name in names):
            parts = (name.split(".") for name in names)
            known = dict.fromkeys(end for p in parts for end in (p[-1], ".".join(p[-2:])))
            raise ArgumentError(
                f"--dtype …,{ending}={dtype}: no parameter of this model has a name that ends with "
                f"{ending!r}{did_you_mean(ending, known)}"
            )


def _fits(ending: str, name: str) -> bool:
    """Return whether a parameter's name ends with a rule's ending, in whole dotted names."""
    return name == ending or (ending != "" and name.endswith(f".{ending}"))


def check_chunked(target: Format) -> None:
    """Raise ArgumentError if the tensors of a format are not cut into chunks."""
    if not CONTAINERS[target.container].chunked:
        able = [f.name for f in FORMATS.values() if CONTAINERS[f.container].chunked]
        raise ArgumentError(
            f"--chunks is for formats in chunks ({', '.join(able)}), and {target.name} has none"
        )


def _output_dtype(spec: ParamSpec, stored: str, rules: Mapping[str, str]) -> str:
    """Return the dtype of a parameter in the output: the longest rule that fits its name counts."""
    if endings := [ending for ending in rules if _fits(ending, spec.name)]:
        return rules[max(endings, key=len)]
    wanted = rules.get("", stored)
    is_narrower = ITEM_BYTES[wanted] <= ITEM_BYTES[stored]
    return stored if spec.keep_float32 and is_narrower else wanted

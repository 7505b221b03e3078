"""The names and layouts of other libraries, as declarative tables that read both ways.

A row maps one foreign tensor to one or two canonical ones by an operation that can be undone, or a
stack of such tensors, one per layer, to the layers that it holds. The same table converts in either
direction, gives the foreign names and shapes for a config, and supplies the text of refusals and
plans. Only tables for reading may cut tensors into parameters, change values, and have parameters
that are zeros (`griffin_eval.converters.naming.parameters`).
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.naming.ops import SAME, Change, Op, Shape
from griffin_eval.layout import ParamSpec, param_specs

_MAX_LAYERS = 10_000  # more than any model has


class NameRule(NamedTuple):
    """One row of a table: the parameters that a foreign tensor holds, and their layout in it.

    Attributes:
        foreign: Name of a tensor; ``{layer}`` is a layer's number, here and in ``canonical``.
            "" if there is no tensor: the parameters are zeros.
        canonical: Names of the parameters in the tensor.
        op: Layout of the parameters in the tensor, or of each in its part of a tensor that is cut.
        stack: Layers in one tensor, in the order of an additional first axis; a slice without an
            end reaches to the end of that axis. None: no such axis.
        layers: Layers with the numbers 0, 1, 2, … in the foreign name; None: layers 0, 1, 2, ….
        block: Kind of blocks that have such a tensor, ``recurrent`` or ``attention``; None: all
            blocks that have the parameters.
        cut: Axis along which the parameters are concatenated, in the layout of ``op``.
        change: Change of the values.
    """

    foreign: str
    canonical: tuple[str, ...]
    op: Op
    stack: "slice | Sequence[int] | None" = None
    layers: slice | None = None
    block: str | None = None
    cut: int | None = None
    change: Change | None = None


class Check(NamedTuple):
    """A tensor that is no parameter, but must have one ``value`` everywhere or, if that is None,
    be a copy of the parameter of its ``rule``."""

    rule: NameRule
    value: float | None


class Names(NamedTuple):
    """The naming of a trainer or of a user.

    Attributes:
        path: Path of the file, or the name of a trainer.
        ignore: Patterns of tensors that are left out.
        checks: Tensors that are compared with what is expected, and left out.
        config: Fields of the config.
        title: Name of the trainer.
        config_file: Whether a config.json is read.
        differs: Computations of the trainer that this model does not have.
    """

    path: Path
    rows: tuple[NameRule, ...]
    ignore: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    config: Mapping[str, Any] = {}
    title: str = ""
    config_file: bool = True
    differs: tuple[str, ...] = ()

    def ignored(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names that a pattern fits, each with the reason why it is left out."""
        return {
            name: f"ignored by {self.path.name}"
            for name in names
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)
        }


_EVERY_BLOCK = GriffinConfig(  # has every kind of parameter, and no two equal sizes
    vocab_size=7,
    width=8,
    mlp_width=5,
    num_heads=2,
    num_layers=2,
    lru_width=12,
    gate_blocks=1,  # dense gates must fit, too
    complex_gates=True,
    block_pattern=("recurrent", "local_attention"),
    tie_embeddings=False,
    attention_bias=True,
)
HEAD = "lm_head.weight"  # a parameter only where it is not tied to the embedding
EMBEDDING = "model.embed_tokens.weight"
# Every canonical name that a row may have, and its shape in a small model.
TEMPLATES: dict[str, Shape] = {
    re.sub(r"\.[01]\.", ".{layer}.", name): spec.shape
    for name, spec in param_specs(_EVERY_BLOCK).items()
}


def _canonical(separator: str) -> tuple[NameRule, ...]:
    """Return rules for the canonical names, joined by another separator than a dot."""
    return tuple(NameRule(name.replace(".", separator), (name,), SAME) for name in TEMPLATES)


CANONICAL = _canonical(".")
CANONICAL_PATHS = _canonical("/")


class Binding(NamedTuple):
    """A row of a table, written out for one layer of a model.

    Attributes:
        foreign, shape: Name and shape of the whole foreign tensor.
        canonical: Parameters that it holds.
        op, cut, change: See `NameRule`.
        entry: Index along the leading layer axis if layers are stacked, else None.
    """

    foreign: str
    shape: Shape
    canonical: tuple[ParamSpec, ...]
    op: Op
    entry: int | None = None
    cut: int | None = None
    change: Change | None = None

    def part_shapes(self) -> list[Shape]:
        """Return the shapes of the parts of a tensor that is cut, of one layer."""
        return [self.op.foreign_shape(spec.shape) for spec in self.canonical]


def bind(table: Sequence[NameRule], config: GriffinConfig) -> list[Binding]:
    """Write a table out for a model, in canonical order. It must cover every parameter once, as
    all built-in tables do."""
    bindings = write_out(table, config)
    covered = [spec.name for binding in bindings for spec in binding.canonical]
    assert sorted(covered) == sorted(param_specs(config)), "a table must cover every parameter once"
    return bindings


def write_out(table: Sequence[NameRule], config: GriffinConfig) -> list[Binding]:
    """Write out a table that need not cover the parameters, in canonical order."""
    specs = param_specs(config)
    order = {name: i for i, name in enumerate(specs)}
    kinds = ["recurrent" if kind == "recurrent" else "attention" for kind in config.block_types]
    bindings = []
    for rule in table:
        layers = range(config.num_layers if "{layer}" in "".join(rule.canonical) else 1)
        stack = layers if rule.stack is None else rule.stack
        if isinstance(stack, slice):
            stack = range(*stack.indices(config.num_layers))
        if rule.layers is not None:
            stack = range(*rule.layers.indices(config.num_layers))
        written = [
            (layer, [name.replace("{layer}", str(layer)) for name in rule.canonical])
            for layer in layers
            if layer in stack and rule.block in (None, kinds[layer])
        ]
        # Skip layers whose kind of block lacks the parameters.
        written = [(i, names) for i, names in written if all(name in specs for name in names)]
        for layer, names in written:
            bound = tuple(specs[name] for name in names)
            number = layer if rule.layers is None else stack.index(layer)
            foreign, entry = rule.foreign.replace("{layer}", str(number)), None
            if rule.cut is None:
                shape = rule.op.foreign_shape(*(s.shape for s in bound))
            else:
                shape = _joined([rule.op.foreign_shape(s.shape) for s in bound], rule.cut)
            if rule.stack is not None:
                shape, entry = (len(stack), *shape), stack.index(layer)
            change = rule.change and rule.change.of(config.width)
            bindings.append(Binding(foreign, shape, bound, rule.op, entry, rule.cut, change))
    bindings.sort(key=lambda b: order[b.canonical[0].name])
    return bindings


def _joined(parts: Sequence[Shape], axis: int) -> Shape:
    """Return the shape of parts concatenated along an axis."""
    first = parts[0]
    return (*first[:axis], sum(part[axis] for part in parts), *first[axis + 1 :])


def _parts(rule: NameRule, shape: Shape) -> list[Shape] | None:
    """Return the shapes of a cut tensor's parts, in the tensor's layout; None if it cannot be cut.

    All parts have one length along the axis, except queries beside keys and values: these have
    as many as the model is wide.
    """
    assert rule.cut is not None
    if not rule.cut < len(shape):
        return None
    length, count = shape[rule.cut], len(rule.canonical)
    queries = [".q_proj." in name for name in rule.canonical]
    mixed = any(queries) and not all(queries)
    width = (shape[1 - rule.cut] if len(shape) == 2 else length) if mixed else 0
    each, left = divmod(max(0, length - width), count - mixed)
    if left:
        return None
    lengths = [width if query and mixed else each for query in queries]
    return [(*shape[: rule.cut], n, *shape[rule.cut + 1 :]) for n in lengths]


def canonical_shapes(table: Sequence[NameRule], stored: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes, by canonical name, of all tensors whose foreign names the table has."""
    shapes = {}
    for rule, name, layer in matches(table, stored):
        shape, layers = stored[name], [layer]
        if rule.stack is not None:
            if not shape:
                continue
            layers = stacked_layers(rule, shape[0])
            shape = shape[1:]
        if rule.layers is not None:
            layers = [str(rule.layers.start + rule.layers.step * int(layer[:18]))]
        parts = [shape] if rule.cut is None else _parts(rule, shape)
        if parts is not None and rule.op.rank in (None, len(shape)):
            try:
                found = [shape for part in parts for shape in rule.op.canonical_shapes(part)]
            except IndexError:
                continue
            for layer in layers:
                names = [canonical.replace("{layer}", str(layer)) for canonical in rule.canonical]
                shapes |= zip(names, found, strict=True)
    return shapes


def matches(table: Sequence[NameRule], names: Iterable[str]) -> list[tuple[NameRule, str, str]]:
    """Return every rule that fits a name, with the name and its layer number (or "")."""
    patterns = []
    for rule in table:
        if not rule.foreign:
            continue
        first, *others = re.escape(rule.foreign).split(re.escape("{layer}"))
        number = ["(?P<layer>[0-9]+)", *["(?P=layer)"] * len(others)]
        text = first + "".join(n + part for n, part in zip(number, others, strict=False))
        patterns.append((rule, re.compile(text)))
    return [
        (rule, name, match.groupdict().get("layer", ""))
        for name in names
        for rule, pattern in patterns
        if (match := pattern.fullmatch(name))
    ]


def stacked_layers(rule: NameRule, length: int) -> Sequence[int]:
    """Return the layers in a stack of ``length`` layers."""
    stack = rule.stack
    assert stack is not None
    if not isinstance(stack, slice):
        return stack
    end = stack.start + stack.step * min(length, _MAX_LAYERS) if stack.stop is None else stack.stop
    return range(stack.start, end, stack.step)


def foreign_name(table: Sequence[NameRule], canonical: str) -> str:
    """Return the foreign name of a parameter outside the layers; "" if the table lacks it."""
    return next((rule.foreign for rule in table if rule.canonical == (canonical,)), "")


def fit_stacks(table: Sequence[NameRule], stored: Mapping[str, Shape]) -> list[NameRule]:
    """Return the table with the layers of every stack that the container has, by their shapes."""
    return [
        rule._replace(stack=stacked_layers(rule, stored[rule.foreign][0]))
        if rule.stack is not None and stored.get(rule.foreign)
        else rule
        for rule in table
    ]


def place_stacks(
    table: Sequence[NameRule], stored: Mapping[str, Shape]
) -> tuple[Sequence[NameRule], list[str]]:
    """Recognise layers that are stacked along a first axis, where names leave no choice.

    Names without the number of a layer (``blocks/mlp_block/…``), all with a first axis of one
    length, hold all layers in order. Of numbered ones (``blocks.0`` to ``blocks.2``, as a scan
    over groups of three writes them) it is uncertain whether groups or blocks come first.

    Returns:
        The table for these tensors, and the names of stacked tensors whose layers are not
            certain.
    """

    def has_axis(rule: NameRule, name: str) -> bool:
        shapes = (TEMPLATES[canonical] for canonical in rule.canonical)
        return len(stored[name]) == 1 + len(rule.op.foreign_shape(*shapes))

    by_layer = [rule for rule in table if "{layer}" in rule.foreign]
    every = slice(0, None, 1)
    joined = [
        rule._replace(foreign=re.sub(r"[./]\{layer\}", "", rule.foreign), stack=every)
        for rule in by_layer
    ]
    numbered = [(rule, name) for rule, name, _ in matches(by_layer, stored)]
    together = [(rule, rule.foreign) for rule in joined if rule.foreign in stored]
    seen = numbered + together
    if not seen or not all(has_axis(rule, name) for rule, name in seen):
        return table, []
    if numbered or len({stored[name][0] for _, name in together}) > 1:
        return table, [name for _, name in seen]
    return [*(rule for rule in table if rule not in by_layer), *joined], []

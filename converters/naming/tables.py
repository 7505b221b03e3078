"""The names and layouts of other libraries, as declarative tables that read both ways.

A row maps one foreign tensor to one or two canonical ones by an operation that can be undone, or a
stack of such tensors, one per layer, to the layers that it holds. The same table converts in either
direction, says which foreign names and shapes a config asks for, and is what the refusals and the
plans are printed from.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.naming.ops import SAME, Op, Shape
from griffin_eval.layout import ParamSpec, param_specs

_MAX_LAYERS = 10_000  # more than any model has


class NameRule(NamedTuple):
    """One line of a table: which parameters a foreign tensor holds, and in what layout.

    Attributes:
        foreign: name of a tensor; ``{layer}`` stands for the number of a layer, in either name.
        canonical: the parameters that it holds.
        op: how they are laid out in it.
        stack: the layers that one tensor holds, in the order of a first axis that it has beyond
            what ``op`` says; a slice without an end goes as far as the tensor does. None: no such
            axis.
    """

    foreign: str
    canonical: tuple[str, ...]
    op: Op
    stack: "slice | Sequence[int] | None" = None


_EVERY_BLOCK = GriffinConfig(  # every parameter there is, and no two sizes are the same
    vocab_size=7,
    width=8,
    mlp_width=5,
    num_heads=2,
    num_layers=2,
    lru_width=12,
    gate_blocks=2,
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
    """The canonical names, joined otherwise."""
    return tuple(NameRule(name.replace(".", separator), (name,), SAME) for name in TEMPLATES)


CANONICAL = _canonical(".")
CANONICAL_PATHS = _canonical("/")


class Binding(NamedTuple):
    """A row of a table, written out for one layer of a model.

    Attributes:
        foreign: name of the foreign tensor.
        shape: shape of the whole foreign tensor.
        canonical: the parameters that it holds.
        op: their layout in it.
        entry: index along the leading layer axis if layers are stacked, else None.
    """

    foreign: str
    shape: Shape
    canonical: tuple[ParamSpec, ...]
    op: Op
    entry: int | None = None


def bind(table: Sequence[NameRule], config: GriffinConfig) -> list[Binding]:
    """Writes a table out for a model, in canonical order.

    Raises:
        AssertionError: the table does not cover the parameters exactly once each, which no built-in
            table can cause.
    """
    bindings = write_out(table, config)
    covered = [spec.name for binding in bindings for spec in binding.canonical]
    assert sorted(covered) == sorted(param_specs(config)), "a table must cover every parameter once"
    return bindings


def write_out(table: Sequence[NameRule], config: GriffinConfig) -> list[Binding]:
    """Writes out a table that need not cover the parameters, in canonical order."""
    specs = param_specs(config)
    order = {name: i for i, name in enumerate(specs)}
    bindings = []
    for rule in table:
        layers = range(config.num_layers if "{layer}" in "".join(rule.canonical) else 1)
        stack = layers if rule.stack is None else rule.stack
        if isinstance(stack, slice):
            stack = range(*stack.indices(config.num_layers))
        written = [
            (layer, [name.replace("{layer}", str(layer)) for name in rule.canonical])
            for layer in layers
            if layer in stack
        ]
        # The others are of the other kind of block.
        written = [(i, names) for i, names in written if all(name in specs for name in names)]
        for layer, names in written:
            bound = tuple(specs[name] for name in names)
            foreign, entry = rule.foreign.replace("{layer}", str(layer)), None
            shape = rule.op.foreign_shape(*(s.shape for s in bound))
            if rule.stack is not None:
                shape, entry = (len(stack), *shape), stack.index(layer)
            bindings.append(Binding(foreign, shape, bound, rule.op, entry))
    bindings.sort(key=lambda b: order[b.canonical[0].name])
    return bindings


def canonical_shapes(table: Sequence[NameRule], stored: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes by canonical name, of the tensors whose foreign name the table knows."""
    shapes = {}
    for rule, name, layer in matches(table, stored):
        shape, layers = stored[name], [layer]
        if rule.stack is not None:
            if not shape:
                continue
            layers = stacked_layers(rule, shape[0])
            shape = shape[1:]
        if rule.op.rank in (None, len(shape)):
            for layer in layers:
                names = [canonical.replace("{layer}", str(layer)) for canonical in rule.canonical]
                shapes |= zip(names, rule.op.canonical_shapes(shape), strict=True)
    return shapes


def matches(table: Sequence[NameRule], names: Iterable[str]) -> list[tuple[NameRule, str, str]]:
    """Every rule that a name fits, with the name and what stands there for ``{layer}``."""
    patterns = []
    for rule in table:
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
    """The layers in a stack of ``length`` layers."""
    stack = rule.stack
    assert stack is not None
    if not isinstance(stack, slice):
        return stack
    end = stack.start + stack.step * min(length, _MAX_LAYERS) if stack.stop is None else stack.stop
    return range(stack.start, end, stack.step)


def foreign_name(table: Sequence[NameRule], canonical: str) -> str:
    """The foreign name of a parameter that is of no layer; "" if a table does not name it."""
    return next((rule.foreign for rule in table if rule.canonical == (canonical,)), "")

"""How other libraries name and lay out the parameters: declarative tables that read both ways.

A row maps one foreign tensor to one or two canonical ones by an operation that can be undone, or a
stack of such tensors, one per layer, to the layers that it holds. The same table converts in either
direction, says which foreign names and shapes a config asks for, and is what the refusals and the
plans are printed from.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.manifest import fill
from griffin_eval.layout import ParamSpec, param_specs

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]

_MAX_LAYERS = 10_000  # more than any model has


class Op(NamedTuple):
    """A reversible change of layout.

    Attributes:
        name: for plans and messages.
        to_canonical: foreign array -> its canonical arrays.
        to_foreign: canonical arrays -> the foreign array.
        canonical_shapes: foreign shape -> canonical shapes.
        foreign_shape: canonical shapes -> foreign shape.
        rank: of the foreign array.
        parts: how many canonical arrays there are.
    """

    name: str
    to_canonical: Callable[["np.ndarray"], tuple["np.ndarray", ...]]
    to_foreign: Callable[..., "np.ndarray"]
    canonical_shapes: Callable[[Shape], tuple[Shape, ...]]
    foreign_shape: Callable[..., Shape]
    rank: int | None = None
    parts: int = 1


def _stack(*parts: "np.ndarray") -> "np.ndarray":
    import numpy as np

    out = np.empty((len(parts), *parts[0].shape), parts[0].dtype)
    for i, part in enumerate(parts):
        fill(out[i], part)
    return out


SAME = Op("as it is", lambda x: (x,), lambda x: x, lambda s: (s,), lambda s: s)
TRANSPOSE = Op(  # the axes in reverse, however many
    "transpose", lambda x: (x.T,), lambda x: x.T, lambda s: (s[::-1],), lambda s: s[::-1]
)
TAPS = Op(  # (K, L) <-> (L, 1, K)
    "taps last",
    lambda x: (x.T[:, None],),
    lambda x: x[:, 0].T,
    lambda s: ((s[1], 1, s[0]),),
    lambda s: (s[2], s[0]),
    2,
)
SPLIT = Op(  # (2, W, E) <-> gate (E, W), up (E, W)
    "split, transpose",
    lambda x: (x[0].T, x[1].T),
    lambda gate, up: _stack(gate.T, up.T),
    lambda s: (s[:0:-1], s[:0:-1]),
    lambda gate, up: (2, *gate[::-1]),
    3,
    2,
)
SPLIT_BIAS = Op(  # (2, 1, 1, E) <-> gate (E), up (E)
    "split",
    lambda x: (x[0, 0, 0], x[1, 0, 0]),
    lambda gate, up: _stack(gate, up)[:, None, None],
    lambda s: (s[3:], s[3:]),
    lambda gate, up: (2, 1, 1, *gate),
    4,
    2,
)


class Row(NamedTuple):
    """One line of a table.

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


def _deepmind(separator: str, kernel: str, linear: Op) -> tuple[Row, ...]:
    """DeepMind's names. Its two libraries differ in how paths are joined and in linear weights."""
    layer, temporal = "model.layers.{layer}.", "model.layers.{layer}.temporal_block."
    lru, mlp = temporal + "rg_lru.", "model.layers.{layer}.mlp_block."
    rows = [
        Row("embedder/input_embedding", ("model.embed_tokens.weight",), SAME),
        Row("lm_head/" + kernel, ("lm_head.weight",), linear),
        Row("final_norm/scale", ("model.final_norm.weight",), SAME),
        Row("blocks.{layer}/temporal_pre_norm/scale", (layer + "temporal_pre_norm.weight",), SAME),
        Row("blocks.{layer}/channel_pre_norm/scale", (layer + "channel_pre_norm.weight",), SAME),
        Row(f"blocks.{{layer}}/mlp_block/ffw_down/{kernel}", (mlp + "down_proj.weight",), linear),
        Row("blocks.{layer}/mlp_block/ffw_down/bias", (mlp + "down_proj.bias",), SAME),
        Row(
            "blocks.{layer}/mlp_block/ffw_up/w",
            (mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            SPLIT,
        ),
        Row(
            "blocks.{layer}/mlp_block/ffw_up/b",
            (mlp + "gate_proj.bias", mlp + "up_proj.bias"),
            SPLIT_BIAS,
        ),
        Row("blocks.{layer}/recurrent_block/conv_1d/w", (temporal + "conv_1d.weight",), TAPS),
        Row("blocks.{layer}/recurrent_block/conv_1d/b", (temporal + "conv_1d.bias",), SAME),
        Row("blocks.{layer}/recurrent_block/rg_lru/a_param", (lru + "recurrent_param",), SAME),
    ]
    for theirs, ours in (("input_gate", "input"), ("a_gate", "recurrent")):
        gate = f"blocks.{{layer}}/recurrent_block/rg_lru/{theirs}/"
        rows.append(Row(gate + "w", (f"{lru}{ours}_gate_weight",), SAME))
        rows.append(Row(gate + "b", (f"{lru}{ours}_gate_bias",), SAME))
    for name in ("linear_x", "linear_y", "linear_out"):
        path = f"blocks.{{layer}}/recurrent_block/{name}/"
        rows.append(Row(path + kernel, (f"{temporal}{name}.weight",), linear))
        rows.append(Row(path + "bias", (f"{temporal}{name}.bias",), SAME))
    for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("final", "o")):
        path = f"blocks.{{layer}}/attention_block/proj_{theirs}/"
        rows.append(Row(path + kernel, (f"{temporal}{ours}_proj.weight",), linear))
    rows.append(
        Row("blocks.{layer}/attention_block/proj_final/bias", (temporal + "o_proj.bias",), SAME)
    )
    return tuple(row._replace(foreign=row.foreign.replace("/", separator)) for row in rows)


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
)
HEAD = "lm_head.weight"  # no parameter: where a file has one, it must equal the embedding
EMBEDDING = "model.embed_tokens.weight"
# Every canonical name that a row may have, and its shape in a small model.
TEMPLATES: dict[str, Shape] = {
    re.sub(r"\.[01]\.", ".{layer}.", name): spec.shape
    for name, spec in param_specs(_EVERY_BLOCK).items()
}
TEMPLATES[HEAD] = TEMPLATES[EMBEDDING]


def _canonical(separator: str) -> tuple[Row, ...]:
    """The canonical names, joined otherwise."""
    return tuple(Row(name.replace(".", separator), (name,), SAME) for name in TEMPLATES)


CANONICAL = _canonical(".")
CANONICAL_PATHS = _canonical("/")
DEEPMIND_FLAX = (
    *_deepmind("/", "kernel", TRANSPOSE),
    Row(  # with lru_only_real=False, an option that the torch library lacks
        "blocks.{layer}/recurrent_block/rg_lru/a_imag_param",
        ("model.layers.{layer}.temporal_block.rg_lru.imaginary_param",),
        SAME,
    ),
)
DEEPMIND_TORCH = _deepmind(".", "weight", SAME)


class Binding(NamedTuple):
    """A row of a table, written out for one layer of a model.

    Attributes:
        foreign: name of the foreign tensor.
        shape: of all of it.
        canonical: the parameters that it holds.
        op: how they are laid out.
        entry: of its first axis, which holds them, if layers are stacked along that axis.
    """

    foreign: str
    shape: Shape
    canonical: tuple[ParamSpec, ...]
    op: Op
    entry: int | None = None


def bind(table: Sequence[Row], config: GriffinConfig) -> list[Binding]:
    """Writes a table out for a model, in canonical order.

    Raises:
        AssertionError: the table does not cover the parameters exactly once each, which no built-in
            table can cause.
    """
    bindings = write_out(table, config)
    covered = [spec.name for binding in bindings for spec in binding.canonical]
    assert sorted(covered) == sorted(param_specs(config)), "a table must cover every parameter once"
    return bindings


def write_out(table: Sequence[Row], config: GriffinConfig) -> list[Binding]:
    """The same of a table that need not cover the parameters."""
    specs = param_specs(config)
    order = {name: i for i, name in enumerate(specs)}
    bindings = []
    for row in table:
        layers = range(config.num_layers if "{layer}" in "".join(row.canonical) else 1)
        stack = layers if row.stack is None else row.stack
        if isinstance(stack, slice):
            stack = range(*stack.indices(config.num_layers))
        written = [
            (layer, [name.replace("{layer}", str(layer)) for name in row.canonical])
            for layer in layers
            if layer in stack
        ]
        # The others are of the other kind of block.
        written = [(i, names) for i, names in written if all(name in specs for name in names)]
        for layer, names in written:
            bound = tuple(specs[name] for name in names)
            foreign, entry = row.foreign.replace("{layer}", str(layer)), None
            shape = row.op.foreign_shape(*(s.shape for s in bound))
            if row.stack is not None:
                shape, entry = (len(stack), *shape), stack.index(layer)
            bindings.append(Binding(foreign, shape, bound, row.op, entry))
    bindings.sort(key=lambda b: order[b.canonical[0].name])
    return bindings


def canonical_shapes(table: Sequence[Row], found: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes by canonical name, of the tensors whose foreign name the table knows."""
    shapes = {}
    for row, name, layer in matches(table, found):
        shape, layers = found[name], [layer]
        if row.stack is not None:
            if not shape:
                continue
            layers = stacked_layers(row, shape[0])
            shape = shape[1:]
        if row.op.rank in (None, len(shape)):
            for layer in layers:
                names = [canonical.replace("{layer}", str(layer)) for canonical in row.canonical]
                shapes |= zip(names, row.op.canonical_shapes(shape), strict=True)
    return shapes


def matches(table: Sequence[Row], names: Iterable[str]) -> list[tuple[Row, str, str]]:
    """Every row that a name fits, with the name and what stands there for ``{layer}``."""
    patterns = []
    for row in table:
        first, *others = re.escape(row.foreign).split(re.escape("{layer}"))
        number = ["(?P<layer>[0-9]+)", *["(?P=layer)"] * len(others)]
        text = first + "".join(n + part for n, part in zip(number, others, strict=False))
        patterns.append((row, re.compile(text)))
    return [
        (row, name, match.groupdict().get("layer", ""))
        for name in names
        for row, pattern in patterns
        if (match := pattern.fullmatch(name))
    ]


def stacked_layers(row: Row, length: int) -> Sequence[int]:
    """The layers of a stack of so many."""
    stack = row.stack
    assert stack is not None
    if not isinstance(stack, slice):
        return stack
    end = stack.start + stack.step * min(length, _MAX_LAYERS) if stack.stop is None else stack.stop
    return range(stack.start, end, stack.step)


def fit_stacks(table: Sequence[Row], found: Mapping[str, Shape]) -> list[Row]:
    """The table with the layers of every stack that is found."""
    return [
        row._replace(stack=stacked_layers(row, found[row.foreign][0]))
        if row.stack is not None and found.get(row.foreign)
        else row
        for row in table
    ]


def place_stacks(
    table: Sequence[Row], found: Mapping[str, Shape]
) -> tuple[Sequence[Row], list[str]]:
    """Recognises layers that are stacked along a first axis, where names leave no choice.

    Names without the number of a layer (``blocks/mlp_block/…``), all with a first axis of one
    length, hold all layers in order. Of numbered ones (``blocks.0`` to ``blocks.2``, as a scan over
    groups of three leaves them) nobody can tell whether groups or blocks come first.

    Returns:
        The table for these tensors, and the names of stacked tensors whose layers are not certain.
    """

    def has_axis(row: Row, name: str) -> bool:
        shapes = (TEMPLATES[canonical] for canonical in row.canonical)
        return len(found[name]) == 1 + len(row.op.foreign_shape(*shapes))

    by_layer = [row for row in table if "{layer}" in row.foreign]
    every = slice(0, None, 1)
    joined = [
        row._replace(foreign=re.sub(r"[./]\{layer\}", "", row.foreign), stack=every)
        for row in by_layer
    ]
    numbered = [(row, name) for row, name, _ in matches(by_layer, found)]
    together = [(row, row.foreign) for row in joined if row.foreign in found]
    seen = numbered + together
    if not seen or not all(has_axis(row, name) for row, name in seen):
        return table, []
    if numbered or len({found[name][0] for _, name in together}) > 1:
        return table, [name for _, name in seen]
    return [*(row for row in table if row not in by_layer), *joined], []

"""How other libraries name and lay out the parameters: declarative tables that read both ways.

A row maps one foreign tensor to one or two canonical ones by an operation that can be undone. The
same table converts in either direction, says which foreign names and shapes a config asks for, and
is what the refusals and the plans are printed from.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.layout import ParamSpec, param_specs

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]


class Op(NamedTuple):
    """A reversible change of layout.

    Attributes:
        name: for plans and messages.
        to_canonical: foreign array -> its canonical arrays.
        to_foreign: canonical arrays -> the foreign array.
        canonical_shapes: foreign shape -> canonical shapes.
        foreign_shape: canonical shapes -> foreign shape.
        rank: of the foreign array.
    """

    name: str
    to_canonical: Callable[["np.ndarray"], tuple["np.ndarray", ...]]
    to_foreign: Callable[..., "np.ndarray"]
    canonical_shapes: Callable[[Shape], tuple[Shape, ...]]
    foreign_shape: Callable[..., Shape]
    rank: int | None = None


def _stack(*parts: "np.ndarray") -> "np.ndarray":
    import numpy as np

    return np.stack(parts)


SAME = Op("as it is", lambda x: (x,), lambda x: x, lambda s: (s,), lambda s: s)
TRANSPOSE = Op(
    "transpose", lambda x: (x.T,), lambda x: x.T, lambda s: (s[::-1],), lambda s: s[::-1], 2
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
)
SPLIT_BIAS = Op(  # (2, 1, 1, E) <-> gate (E), up (E)
    "split",
    lambda x: (x[0, 0, 0], x[1, 0, 0]),
    lambda gate, up: _stack(gate, up)[:, None, None],
    lambda s: (s[3:], s[3:]),
    lambda gate, up: (2, 1, 1, *gate),
    4,
)


class Row(NamedTuple):
    """One line of a table; ``{}`` stands for the number of a layer in either name."""

    foreign: str
    canonical: tuple[str, ...]
    op: Op


def _deepmind(separator: str, kernel: str, linear: Op) -> tuple[Row, ...]:
    """DeepMind's names. Its two libraries differ in how paths are joined and in linear weights."""
    layer, temporal = "model.layers.{}.", "model.layers.{}.temporal_block."
    lru, mlp = temporal + "rg_lru.", "model.layers.{}.mlp_block."
    rows = [
        Row("embedder/input_embedding", ("model.embed_tokens.weight",), SAME),
        Row("final_norm/scale", ("model.final_norm.weight",), SAME),
        Row("blocks.{}/temporal_pre_norm/scale", (layer + "temporal_pre_norm.weight",), SAME),
        Row("blocks.{}/channel_pre_norm/scale", (layer + "channel_pre_norm.weight",), SAME),
        Row(f"blocks.{{}}/mlp_block/ffw_down/{kernel}", (mlp + "down_proj.weight",), linear),
        Row("blocks.{}/mlp_block/ffw_down/bias", (mlp + "down_proj.bias",), SAME),
        Row(
            "blocks.{}/mlp_block/ffw_up/w",
            (mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            SPLIT,
        ),
        Row(
            "blocks.{}/mlp_block/ffw_up/b",
            (mlp + "gate_proj.bias", mlp + "up_proj.bias"),
            SPLIT_BIAS,
        ),
        Row("blocks.{}/recurrent_block/conv_1d/w", (temporal + "conv_1d.weight",), TAPS),
        Row("blocks.{}/recurrent_block/conv_1d/b", (temporal + "conv_1d.bias",), SAME),
        Row("blocks.{}/recurrent_block/rg_lru/a_param", (lru + "recurrent_param",), SAME),
    ]
    for theirs, ours in (("input_gate", "input"), ("a_gate", "recurrent")):
        gate = f"blocks.{{}}/recurrent_block/rg_lru/{theirs}/"
        rows.append(Row(gate + "w", (f"{lru}{ours}_gate_weight",), SAME))
        rows.append(Row(gate + "b", (f"{lru}{ours}_gate_bias",), SAME))
    for name in ("linear_x", "linear_y", "linear_out"):
        path = f"blocks.{{}}/recurrent_block/{name}/"
        rows.append(Row(path + kernel, (f"{temporal}{name}.weight",), linear))
        rows.append(Row(path + "bias", (f"{temporal}{name}.bias",), SAME))
    for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("final", "o")):
        path = f"blocks.{{}}/attention_block/proj_{theirs}/"
        rows.append(Row(path + kernel, (f"{temporal}{ours}_proj.weight",), linear))
    rows.append(Row("blocks.{}/attention_block/proj_final/bias", (temporal + "o_proj.bias",), SAME))
    return tuple(row._replace(foreign=row.foreign.replace("/", separator)) for row in rows)


def _canonical(separator: str) -> tuple[Row, ...]:
    """The canonical names, joined otherwise."""
    every_block = GriffinConfig(
        vocab_size=1,
        width=4,
        mlp_width=1,
        num_heads=1,
        num_layers=2,
        lru_width=1,
        gate_blocks=1,
        block_pattern=("recurrent", "local_attention"),
    )
    names = dict.fromkeys(re.sub(r"\.[01]\.", ".{}.", name) for name in param_specs(every_block))
    return tuple(Row(name.replace(".", separator), (name,), SAME) for name in names)


CANONICAL_PATHS = _canonical("/")
DEEPMIND_FLAX = _deepmind("/", "kernel", TRANSPOSE)
DEEPMIND_TORCH = _deepmind(".", "weight", SAME)


class Binding(NamedTuple):
    """A row of a table, written out for one layer of a model."""

    foreign: str
    shape: Shape  # of the foreign tensor
    canonical: tuple[ParamSpec, ...]
    op: Op


def bind(table: Sequence[Row] | None, config: GriffinConfig) -> list[Binding]:
    """Writes a table out for a model, in canonical order; without one, names are canonical.

    Raises:
        AssertionError: the table does not cover the parameters exactly once each, which no input
            can cause.
    """
    specs = param_specs(config)
    if table is None:
        return [Binding(s.name, s.shape, (s,), SAME) for s in specs.values()]
    order = {name: i for i, name in enumerate(specs)}
    bindings = []
    for row in table:
        layers = range(config.num_layers) if "{}" in row.foreign else [0]
        for layer in layers:
            names = [name.replace("{}", str(layer)) for name in row.canonical]
            if not all(name in specs for name in names):
                continue  # of the other kind of block
            bound = tuple(specs[name] for name in names)
            shape = row.op.foreign_shape(*(s.shape for s in bound))
            bindings.append(Binding(row.foreign.replace("{}", str(layer)), shape, bound, row.op))
    bindings.sort(key=lambda b: order[b.canonical[0].name])
    covered = [spec.name for binding in bindings for spec in binding.canonical]
    assert sorted(covered) == sorted(specs), "a naming table must cover every parameter once"
    return bindings


def canonical_shapes(table: Sequence[Row] | None, found: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes by canonical name, of the tensors whose foreign name the table knows."""
    if table is None:
        return dict(found)
    patterns = [
        (re.compile(re.escape(row.foreign).replace(r"\{\}", "([0-9]+)")), row) for row in table
    ]
    shapes = {}
    for name, shape in found.items():
        for pattern, row in patterns:
            match = pattern.fullmatch(name)
            if match and row.op.rank in (None, len(shape)):
                layer = match[1] if match.groups() else ""
                names = [canonical.replace("{}", layer) for canonical in row.canonical]
                shapes |= zip(names, row.op.canonical_shapes(shape), strict=True)
    return shapes

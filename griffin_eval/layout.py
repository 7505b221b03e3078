"""The table of parameters: canonical name, shape, logical axes and initialisation of each.

Names and shapes are those of transformers' RecurrentGemma (linear weights ``(out, in)``), so both
models read a Hugging Face file without renaming or transposing.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from griffin_eval.config import GriffinConfig

InitKind = Literal["normal", "zeros", "lambda", "theta"]


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter.

    Attributes:
        name: Canonical dotted name.
        axes: Logical name of each dimension, for sharding.
        init: ``normal`` (mean 0, deviation ``std``), ``zeros``, ``lambda``: the parameter Λ of the
            RG-LRU, such that a^c = sigmoid(-Λ)^c is uniform in [0.9, 0.999] (section 2.4), or
            ``theta``: the parameter θ of the CG-LRU, uniform in [0, π/10) as in DeepMind's code.
        constant: c of ``lambda``.
        keep_float32: Whether it stays in float32 (or wider) whatever the dtype of the model.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: InitKind = "normal"
    std: float = 0.0
    constant: float = 8.0
    keep_float32: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def param_specs(config: GriffinConfig) -> dict[str, ParamSpec]:
    """Return all parameters of the model in the order of the computation, by canonical name."""
    return {spec.name: spec for spec in _specs(config)}


def parameter_count(config: GriffinConfig, *, embedding: bool = True) -> int:
    """Return the number of parameters, with or without those of embedding and output head."""
    return sum(spec.size for spec in _specs(config) if embedding or "vocab" not in spec.axes)


def _specs(c: GriffinConfig) -> Iterator[ParamSpec]:
    # Weights have LeCun's "fan-in" deviations; the last layer of each branch is scaled by
    # 2 / num_layers, as in DeepMind's code.
    def linear(name: str, out: tuple[str, int], inp: tuple[str, int], *, scale=1.0, bias=True):
        yield ParamSpec(
            name=f"{name}.weight",
            shape=(out[1], inp[1]),
            axes=(out[0], inp[0]),
            std=math.sqrt(scale / inp[1]),
        )
        if bias and name.rpartition(".")[2] not in c.absent_biases:
            yield ParamSpec(name=f"{name}.bias", shape=(out[1],), axes=(out[0],), init="zeros")

    def norm(name: str):
        yield ParamSpec(name=f"{name}.weight", shape=(c.width,), axes=("width",), init="zeros")

    def recurrent(name: str):
        yield from linear(f"{name}.linear_y", lru, width)
        yield from linear(f"{name}.linear_x", lru, width)
        yield from linear(f"{name}.linear_out", width, lru, scale=last)
        conv_std = math.sqrt(0.01 / c.conv_width)
        yield ParamSpec(
            name=f"{name}.conv_1d.weight",
            shape=(c.lru_width, 1, c.conv_width),
            axes=("lru", "one", "tap"),
            std=conv_std,
        )
        if "conv_1d" not in c.absent_biases:
            yield ParamSpec(
                name=f"{name}.conv_1d.bias", shape=(c.lru_width,), axes=("lru",), init="zeros"
            )
        yield ParamSpec(
            name=f"{name}.rg_lru.recurrent_param",
            shape=(c.recurrent_channels,),
            axes=("channel",) if c.complex_gates else ("lru",),
            init="lambda",
            constant=c.lru_constant,
            keep_float32=True,
        )
        if c.complex_gates:
            yield ParamSpec(
                name=f"{name}.rg_lru.imaginary_param",
                shape=(c.recurrent_channels,),
                axes=("channel",),
                init="theta",
                keep_float32=True,
            )
        gate_in, gate_out = c.lru_width // c.gate_blocks, c.recurrent_channels // c.gate_blocks
        for gate in ("input", "recurrent"):
            yield ParamSpec(
                name=f"{name}.rg_lru.{gate}_gate_weight",
                shape=(c.gate_blocks, gate_in, gate_out),
                axes=("gate", "gate_in", "gate_out"),
                std=math.sqrt(1 / gate_in),
            )
            if f"{gate}_gate" in c.absent_biases:
                continue
            yield ParamSpec(
                name=f"{name}.rg_lru.{gate}_gate_bias",
                shape=(c.gate_blocks, gate_out),
                axes=("gate", "gate_out"),
                init="zeros",
            )

    def attention(name: str):
        keys = ("kv_heads" if c.num_kv_heads > 1 else "head_dim", c.kv_width)
        for map_name, out in (("q_proj", heads), ("k_proj", keys), ("v_proj", keys)):
            yield from linear(f"{name}.{map_name}", out, width, bias=c.attention_bias)
        yield from linear(f"{name}.o_proj", width, heads, scale=last)

    width, lru, mlp = ("width", c.width), ("lru", c.lru_width), ("mlp", c.mlp_width)
    heads = "heads", c.q_width
    last = 2.0 / c.num_layers
    yield ParamSpec(
        name="model.embed_tokens.weight",
        shape=(c.vocab_size, c.width),
        axes=("vocab", "width"),
        std=math.sqrt(1 / c.width),
    )
    for i, block_type in enumerate(c.block_types):
        layer = f"model.layers.{i}"
        yield from norm(f"{layer}.temporal_pre_norm")
        temporal = recurrent if block_type == "recurrent" else attention
        yield from temporal(f"{layer}.temporal_block")
        yield from norm(f"{layer}.channel_pre_norm")
        yield from linear(f"{layer}.mlp_block.gate_proj", mlp, width)
        yield from linear(f"{layer}.mlp_block.up_proj", mlp, width)
        yield from linear(f"{layer}.mlp_block.down_proj", width, mlp, scale=last)
    yield from norm("model.final_norm")
    if not c.tie_embeddings:
        yield ParamSpec(
            name="lm_head.weight",
            shape=(c.vocab_size, c.width),
            axes=("vocab", "width"),
            std=math.sqrt(1 / c.width),
        )


class ParamScope:
    """The parameters of a module and its submodules, by their names in the layout.

    ``scope / "linear_x"`` is the scope of a submodule, ``scope("weight")`` one parameter, and
    ``"bias" in scope`` says whether it exists. Both twins are built from this class.

    ``make`` reads, draws or describes the parameter of a spec. ``prefix`` begins the names of this
    module's parameters, and ends with a dot.
    """

    def __init__(
        self, specs: Mapping[str, ParamSpec], make: Callable[[ParamSpec], Any], prefix: str = ""
    ):
        self._specs, self._make, self._prefix = specs, make, prefix

    def __truediv__(self, name: str | int) -> "ParamScope":
        return ParamScope(self._specs, self._make, f"{self._prefix}{name}.")

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._specs

    def spec(self, name: str) -> ParamSpec:
        """Return the spec of a parameter."""
        return self._specs[self._prefix + name]

    def get(self, name: str) -> Any | None:
        """Return a parameter, or None if this module does not have it."""
        return self(name) if name in self else None

    def __call__(self, name: str) -> Any:
        return self._make(self.spec(name))

"""The architecture as a framework-independent frozen dataclass, and its published presets."""

import math
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from griffin_eval.errors import ArgumentError

Activation = Literal["gelu_pytorch_tanh", "gelu", "silu"]
BlockType = Literal["recurrent", "local_attention", "global_attention"]

# Other names in transformers for the same functions.
_OTHER_NAMES: dict[str, Activation] = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate"), "gelu_pytorch_tanh"),
    **{"gelu_python_tanh": "gelu_pytorch_tanh", "gelu_python": "gelu", "swish": "silu"},
}

GRIFFIN: tuple[BlockType, ...] = ("recurrent", "recurrent", "local_attention")
HAWK: tuple[BlockType, ...] = ("recurrent",)
MQA: tuple[BlockType, ...] = ("global_attention",)
LOCAL_MQA: tuple[BlockType, ...] = ("local_attention",)

# Fields that older files lack; their defaults apply then.
ADDED = (
    "complex_gates",
    "tie_embeddings",
    "num_kv_heads",
    "attention_bias",
    "hidden_activation",
    "head_dim",
    "absent_biases",
    "lru_constant",
)
# Linear maps that have a bias unless the config lists them as absent.
BIASED = (
    *("linear_y", "linear_x", "linear_out", "conv_1d", "input_gate", "recurrent_gate"),
    *("o_proj", "gate_proj", "up_proj", "down_proj"),
)


@dataclass(frozen=True, kw_only=True)
class GriffinConfig:
    """All parameters of the computation of a Griffin-family model (De et al., 2024).

    Attributes:
        vocab_size: Rows of the embedding, V.
        width: Model width, W (D in the paper).
        mlp_width: Expanded width of the gated MLP, E (3W in all published models).
        num_heads: Query heads, H.
        num_kv_heads: Heads of keys and of values, K, each of which serves H / K neighbouring query
            heads: 1 in all published models (MQA), H in multi-head attention.
        attention_bias: Whether the maps to queries, keys and values have biases.
        hidden_activation: Activation of the MLP and of the recurrent block's y-branch, by its name
            in transformers: GeLU by tanh (``gelu_pytorch_tanh``), exact GeLU (``gelu``) or
            ``silu``. Other names of the same functions, such as ``gelu_new``, become these.
        head_dim: Dimensions of a head, D; None for W / H.
        lru_constant: c of equation 3, a = sigmoid(-Λ)^(c r).
        absent_biases: Names in `BIASED` of maps without a bias.
        num_layers: Residual blocks.
        block_pattern: Temporal block types, cycled over the layers.
        lru_width: Width of the RG-LRU, L (D_RNN in the paper).
        gate_blocks: Diagonal blocks of the RG-LRU gates, G (paper: 16; RecurrentGemma: H).
        complex_gates: Whether the complex-gated CG-LRU of appendix B replaces the RG-LRU. It has
            L / 2 complex channels: real parts in the first half of its L numbers, imaginary parts
            in the second. DeepMind's ``lru_only_real=False``.
        visible_keys: Keys that a query of a local attention block sees, including its own.
            transformers' ``attention_window_size`` is this number, DeepMind's is one less.
        conv_width: Taps of the causal depthwise convolution.
        embedding_scale: Whether embeddings are multiplied by ``embedding_multiplier``.
        logits_soft_cap: c in ``c * tanh(logits / c)``; 0 for no cap.
        norm_eps: Constant added to the mean square in RMSNorm.
        rope_base: Longest RoPE wavelength over 2 pi.
        rope_fraction: Leading fraction of each head that RoPE rotates.
        tie_embeddings: Whether the embedding is also the output head.

    Raises:
        ArgumentError: Fields have invalid values; the message names all of them.
    """

    vocab_size: int
    width: int
    mlp_width: int
    num_heads: int
    num_layers: int
    lru_width: int
    gate_blocks: int
    complex_gates: bool = False
    block_pattern: tuple[BlockType, ...] = GRIFFIN
    visible_keys: int = 2048
    conv_width: int = 4
    embedding_scale: bool = True
    logits_soft_cap: float = 30.0
    norm_eps: float = 1e-6
    rope_base: float = 10_000.0
    rope_fraction: float = 0.5
    tie_embeddings: bool = True
    num_kv_heads: int = 1
    attention_bias: bool = False
    hidden_activation: Activation = "gelu_pytorch_tanh"
    head_dim: int | None = None
    absent_biases: tuple[str, ...] = ()
    lru_constant: float = 8.0

    def __post_init__(self):
        if isinstance(self.hidden_activation, str):
            name = _OTHER_NAMES.get(self.hidden_activation, self.hidden_activation)
            object.__setattr__(self, "hidden_activation", name)
        for name in ("block_pattern", "absent_biases"):
            if isinstance(getattr(self, name), list):  # JSON has no tuples
                object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = [
            f"{name} must be {expected}, found {value!r}"
            for name, (fits, expected) in _FIELDS.items()
            if not fits(value := getattr(self, name))
        ]
        if not problems:  # relations may divide by the fields
            problems = [sentence(self) for fits, sentence in _RELATIONS if not fits(self)]
        if problems:
            raise ArgumentError("invalid GriffinConfig: " + "; ".join(problems))
        if self.head_dim is not None and self.head_dim * self.num_heads == self.width:
            object.__setattr__(self, "head_dim", None)  # equal models have equal configs
        absent = tuple(name for name in BIASED if name in self.absent_biases)
        object.__setattr__(self, "absent_biases", absent)

    @property
    def attends(self) -> bool:
        """Whether any block has attention. Otherwise heads, their biases and RoPE are unused."""
        return set(self.block_types) != {"recurrent"}

    @property
    def head_size(self) -> int:
        """Dimensions of an attention head, D."""
        return self.head_dim or self.width // self.num_heads

    @property
    def q_width(self) -> int:
        """Total width of a token's queries: H D."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Total width of a token's keys, or of its values: K D."""
        return self.num_kv_heads * self.head_size

    @property
    def recurrent_channels(self) -> int:
        """Channels of the recurrence, each with its own gate: L, or L / 2 complex ones."""
        return self.lru_width // 2 if self.complex_gates else self.lru_width

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions of each head that RoPE rotates."""
        return int(self.head_size * self.rope_fraction)

    @property
    def block_types(self) -> tuple[BlockType, ...]:
        """Temporal block type of every layer."""
        return tuple(
            self.block_pattern[i % len(self.block_pattern)] for i in range(self.num_layers)
        )

    @property
    def embedding_multiplier(self) -> float:
        """sqrt(width) rounded to bfloat16, as in RecurrentGemma's training; 1.0 without a scale."""
        return _round_to_bfloat16(math.sqrt(self.width)) if self.embedding_scale else 1.0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 63


def _number(bounds: Callable[[float], bool], text: str) -> tuple[Callable[[Any], bool], str]:
    def fits(value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and abs(value) <= sys.float_info.max and bounds(value)

    return fits, f"a finite number {text}"


MAX_LAYERS = 10_000  # a limit, since the list of parameters is made before a file is read
_COUNT = (_is_count, "a positive integer below 2^63")

# Check of each field, and the expected value for the error message.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "vocab_size": _COUNT,
    "width": _COUNT,
    "mlp_width": _COUNT,
    "num_heads": _COUNT,
    "num_kv_heads": _COUNT,
    "absent_biases": (
        lambda names: isinstance(names, tuple) and all(name in BIASED for name in names),
        f"none or some of {', '.join(BIASED)}",
    ),
    "head_dim": (
        lambda value: value is None or _is_count(value),
        "None or a positive integer below 2^63",
    ),
    "num_layers": (
        lambda value: _is_count(value) and value <= MAX_LAYERS,
        f"a positive integer of at most {MAX_LAYERS}",
    ),
    "lru_width": _COUNT,
    "gate_blocks": _COUNT,
    "visible_keys": _COUNT,
    "conv_width": _COUNT,
    "block_pattern": (
        lambda pattern: bool(pattern) and all(t in get_args(BlockType) for t in pattern),
        f"one or more of {', '.join(get_args(BlockType))}",
    ),
    "norm_eps": _number(lambda x: x > 0, "above 0"),
    "lru_constant": _number(lambda x: x > 0, "above 0"),
    "rope_base": _number(lambda x: x > 1, "above 1"),
    "logits_soft_cap": _number(lambda x: x >= 0, "of at least 0"),
    "rope_fraction": _number(lambda x: 0 < x <= 1, "above 0, at most 1"),
    "complex_gates": (lambda value: isinstance(value, bool), "True or False"),
    "tie_embeddings": (lambda value: isinstance(value, bool), "True or False"),
    "attention_bias": (lambda value: isinstance(value, bool), "True or False"),
    "hidden_activation": (
        lambda value: isinstance(value, str) and value in get_args(Activation),
        f"one of {', '.join(get_args(Activation))}",
    ),
}


# Relations between fields that are valid on their own, with error messages.
_RELATIONS: tuple[tuple[Callable[[GriffinConfig], bool], Callable[[GriffinConfig], str]], ...] = (
    (
        lambda c: not c.attends or c.head_dim is not None or c.width % c.num_heads == 0,
        lambda c: f"num_heads ({c.num_heads}) must divide width ({c.width}) without a head_dim",
    ),
    (
        lambda c: not c.attends or c.num_heads % c.num_kv_heads == 0,
        lambda c: f"num_kv_heads ({c.num_kv_heads}) must divide num_heads ({c.num_heads})",
    ),
    (
        lambda c: not (c.complex_gates and c.lru_width % 2),
        lambda c: (
            f"lru_width ({c.lru_width}) must be even with complex_gates: half of it is imaginary "
            "parts"
        ),
    ),
    (
        lambda c: c.recurrent_channels % c.gate_blocks == 0,
        lambda c: (
            f"gate_blocks ({c.gate_blocks}) must divide {'half of ' if c.complex_gates else ''}"
            f"lru_width ({c.lru_width})"
        ),
    ),
    (
        lambda c: not c.attends or (c.rotary_dim > 0 and c.rotary_dim % 2 == 0),
        lambda c: (
            f"rope_fraction ({c.rope_fraction}) must select an even, positive number of the "
            f"{c.head_size} dimensions of a head"
        ),
    ),
)


def _round_to_bfloat16(value: float) -> float:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
    return struct.unpack("<f", struct.pack("<I", rounded & 0xFFFF0000))[0]


# Table 2 of the paper: width, lru_width, layers, heads. Only Griffin was trained at 14B, and the
# MQA baseline of the 7B row is called 6B there, since its blocks have fewer parameters.
_TABLE_2 = {
    "100m": (768, 1024, 12, 6),
    "200m": (1024, 1536, 12, 8),
    "400m": (1536, 2048, 12, 12),
    "1.3b": (2048, 2560, 24, 16),
    "3b": (3072, 4096, 24, 24),
    "7b": (4096, 5632, 32, 32),
    "14b": (5120, 8192, 40, 40),
}
_FAMILIES = {"griffin": GRIFFIN, "hawk": HAWK, "mqa": MQA}


def _paper(family: str, size: str) -> GriffinConfig:
    width, lru_width, layers, heads = _TABLE_2[size]
    return GriffinConfig(
        vocab_size=32_000,  # MassiveText's SentencePiece vocabulary; the paper does not say
        width=width,
        mlp_width=3 * width,
        num_heads=heads,
        num_layers=layers,
        lru_width=lru_width,
        gate_blocks=16,
        block_pattern=_FAMILIES[family],
        visible_keys=1025,  # a window of 1024 in DeepMind's counting
        embedding_scale=False,
        logits_soft_cap=0.0,
    )


def _recurrentgemma(width: int, heads: int, layers: int) -> GriffinConfig:
    return GriffinConfig(
        vocab_size=256_000,
        width=width,
        mlp_width=3 * width,
        num_heads=heads,
        num_layers=layers,
        lru_width=width,
        gate_blocks=heads,
        visible_keys=2049,  # a window of 2048 in the counting of DeepMind, which trained them
    )


PRESETS: dict[str, GriffinConfig] = {
    **{
        f"{family}-{'6b' if (family, size) == ('mqa', '7b') else size}": _paper(family, size)
        for family in _FAMILIES
        for size in _TABLE_2
        if family == "griffin" or size != "14b"
    },
    "recurrentgemma-2b": _recurrentgemma(2560, 10, 26),
    "recurrentgemma-9b": _recurrentgemma(4096, 16, 38),
}

"""The architecture, as one frozen dataclass that knows no framework, and its published presets."""

import math
import struct
from dataclasses import dataclass
from typing import Literal, get_args

from griffin_eval.errors import ArgumentError

BlockType = Literal["recurrent", "local_attention", "global_attention"]

GRIFFIN: tuple[BlockType, ...] = ("recurrent", "recurrent", "local_attention")
HAWK: tuple[BlockType, ...] = ("recurrent",)
MQA: tuple[BlockType, ...] = ("global_attention",)


@dataclass(frozen=True, kw_only=True)
class GriffinConfig:
    """Everything that fixes the computation of a Griffin-family model (De et al., 2024).

    Attributes:
        vocab_size: rows of the embedding, V.
        width: model width, W (D in the paper).
        mlp_width: expanded width of the gated MLP, E (3W in all published models).
        num_heads: query heads, H; keys and values have one head (MQA). ``head_dim = W / H``.
        num_layers: residual blocks.
        block_pattern: temporal block types, cycled over the layers.
        lru_width: width of the RG-LRU, L (D_RNN in the paper).
        gate_blocks: diagonal blocks of the RG-LRU gates, G (paper: 16; RecurrentGemma: H).
        complex_gates: the CG-LRU of appendix B (complex-gated) in the place of the RG-LRU: L / 2
            complex channels, whose real parts are one half of its L numbers, and imaginary parts
            the other. DeepMind's ``lru_only_real=False``.
        visible_keys: keys a query of a local attention block sees, itself included.
            transformers' ``attention_window_size`` is this number, DeepMind's is one less.
        conv_width: taps of the causal depthwise convolution.
        embedding_scale: multiply embeddings by ``embedding_multiplier``.
        logits_soft_cap: c in ``c * tanh(logits / c)``; 0 leaves the logits alone.
        norm_eps: added to the mean square in RMSNorm.
        rope_base: longest RoPE wavelength over 2 pi.
        rope_fraction: leading part of each head that RoPE rotates.

    Raises:
        ArgumentError: naming every field whose value cannot be, and what was expected.
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

    def __post_init__(self):
        if isinstance(self.block_pattern, list):  # as JSON has it
            object.__setattr__(self, "block_pattern", tuple(self.block_pattern))
        problems = []
        for name in (
            "vocab_size",
            "width",
            "mlp_width",
            "num_heads",
            "num_layers",
            "lru_width",
            "gate_blocks",
            "visible_keys",
            "conv_width",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{name} must be a positive integer, found {value!r}")
        if not self.block_pattern or any(t not in get_args(BlockType) for t in self.block_pattern):
            problems.append(
                f"block_pattern must be one or more of {', '.join(get_args(BlockType))}, "
                f"found {self.block_pattern!r}"
            )
        numbers = {
            "norm_eps": (lambda x: x > 0, "above 0"),
            "rope_base": (lambda x: x > 1, "above 1"),
            "logits_soft_cap": (lambda x: x >= 0, "of at least 0"),
            "rope_fraction": (lambda x: 0 < x <= 1, "above 0, at most 1"),
        }
        for name, (fits, bound) in numbers.items():
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and fits(value)):
                problems.append(f"{name} must be a finite number {bound}, found {value!r}")
        if not isinstance(self.complex_gates, bool):
            problems.append(f"complex_gates must be True or False, found {self.complex_gates!r}")
        if not problems:
            if self.width % self.num_heads:
                problems.append(f"num_heads ({self.num_heads}) must divide width ({self.width})")
            if self.complex_gates and self.lru_width % 2:
                problems.append(
                    f"lru_width ({self.lru_width}) must be even with complex_gates: half of it is "
                    "imaginary parts"
                )
            elif self.recurrent_channels % self.gate_blocks:
                half = "half of " if self.complex_gates else ""
                problems.append(
                    f"gate_blocks ({self.gate_blocks}) must divide {half}lru_width "
                    f"({self.lru_width})"
                )
            if self.rotary_dim % 2 or self.rotary_dim == 0:
                problems.append(
                    f"rope_fraction ({self.rope_fraction}) must select an even, positive number of "
                    f"the {self.head_dim} dimensions of a head"
                )
        if problems:
            raise ArgumentError("invalid GriffinConfig: " + "; ".join(problems))

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def recurrent_channels(self) -> int:
        """Channels of the recurrence, each with a gate of its own: L, or L / 2 complex ones."""
        return self.lru_width // 2 if self.complex_gates else self.lru_width

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of each head that RoPE rotates."""
        return int(self.head_dim * self.rope_fraction)

    @property
    def block_types(self) -> tuple[BlockType, ...]:
        """The temporal block type of every layer."""
        return tuple(
            self.block_pattern[i % len(self.block_pattern)] for i in range(self.num_layers)
        )

    @property
    def embedding_multiplier(self) -> float:
        """sqrt(width) rounded to bfloat16, as RecurrentGemma was trained; 1.0 without a scale."""
        return _round_to_bfloat16(math.sqrt(self.width)) if self.embedding_scale else 1.0


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
        visible_keys=1025,  # window 1024 as DeepMind's code counts it
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
        visible_keys=2049,  # window 2048 as DeepMind's code, which trained them, counts it
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

"""The formats a checkpoint can be in: a container, a naming, and what they cannot express."""

from collections.abc import Sequence
from typing import NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.naming.deepmind import DEEPMIND_FLAX, DEEPMIND_TORCH
from griffin_eval.converters.naming.tables import CANONICAL, CANONICAL_PATHS, NameRule
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.messages import did_you_mean


class Format(NamedTuple):
    """One format.

    Attributes:
        name: Name, as typed after ``--to``.
        container: Name in `griffin_eval.converters.containers.registry`.
        table: Names of the parameters.
        reader: Library that loads it.
        summary: A few words for a list of formats.
    """

    name: str
    container: str
    table: Sequence[NameRule]
    reader: str
    summary: str


FORMATS = {
    f.name: f
    for f in (
        Format(
            "hf", "safetensors", CANONICAL, "transformers", "safetensors that transformers loads"
        ),
        Format("griffin", "safetensors", CANONICAL, "", "safetensors, canonical names, any model"),
        Format("griffin-orbax", "orbax", CANONICAL_PATHS, "", "Orbax, canonical names, any model"),
        Format(
            "deepmind-flax",
            "orbax",
            DEEPMIND_FLAX,
            "DeepMind's recurrentgemma",
            "Orbax that DeepMind's recurrentgemma (JAX) restores",
        ),
        Format(
            "deepmind-torch",
            "torch",
            DEEPMIND_TORCH,
            "DeepMind's recurrentgemma in PyTorch",
            ".pt that DeepMind's recurrentgemma (PyTorch) loads",
        ),
    )
}


# Formats that are read and not written.
READ_ONLY = {
    f.name: f
    for f in (
        Format("gguf", "gguf", CANONICAL, "candle", "GGUF with canonical names, of candle"),
        Format("hf-torch", "torch", CANONICAL, "transformers", "torch.save with canonical names"),
    )
}


def formats_of(container: str) -> list[Format]:
    """Return the formats in a container, written or only read."""
    return [f for f in (*FORMATS.values(), *READ_ONLY.values()) if f.container == container]


def format_named(name: str) -> Format:
    """Return the format of this name that can be written; ArgumentError if there is none."""
    if name not in FORMATS:
        said = "is read, and not written" if name in READ_ONLY else "is unknown"
        raise ArgumentError(
            f"the format {name!r} {said}: expected one of {', '.join(FORMATS)}"
            f"{did_you_mean(name, FORMATS)}"
        )
    return FORMATS[name]


# Limits of readers: (config field, whether a config exceeds the limit, what the reader does).
_GATES = ("gate_blocks", lambda c: c.gate_blocks != c.num_heads, "it has num_heads of them")
_GLOBAL = (
    "block_pattern",
    lambda c: "global_attention" in c.block_types,
    "its attention is always local",
)
_BIASES = ("absent_biases", lambda c: bool(c.absent_biases), "its maps have biases")
_CONSTANT = ("lru_constant", lambda c: c.lru_constant != 8, "its constant is 8")
_COMPLEX = ("complex_gates", lambda c: c.complex_gates, "its recurrence is real")
_HALF = (
    "rope_fraction",
    lambda c: c.attends and c.rope_fraction != 0.5,
    "it rotates half of each head",
)
# Limits of every library but transformers.
_OF_TRANSFORMERS = (
    (
        "hidden_activation",
        lambda c: c.hidden_activation != "gelu_pytorch_tanh",
        "its activation is GeLU by tanh",
    ),
    (
        "attention_bias",
        lambda c: c.attends and c.attention_bias,
        "its queries, keys and values have no bias",
    ),
    (
        "head_dim",
        lambda c: c.attends and c.head_dim is not None,
        "its heads have width / num_heads dimensions",
    ),
    ("num_kv_heads", lambda c: c.attends and c.num_kv_heads != 1, "it has one head of keys"),
)
_DEEPMIND = (
    ("tie_embeddings", lambda c: not c.tie_embeddings, "its output head is the embedding"),
    *_OF_TRANSFORMERS,
    _GATES,
    _GLOBAL,
    _BIASES,
    _CONSTANT,
    ("conv_width", lambda c: c.conv_width != 4, "its convolution has 4 taps"),
    ("norm_eps", lambda c: c.norm_eps != 1e-6, "it adds 1e-6"),
    ("rope_base", lambda c: c.attends and c.rope_base != 10_000, "its base is 10000"),
    _HALF,
)
_TRANSFORMERS = (
    ("embedding_scale", lambda c: not c.embedding_scale, "it always scales embeddings"),
    (
        "logits_soft_cap",
        lambda c: c.logits_soft_cap == 0,
        "it always caps, and would divide by zero",
    ),
    ("lru_width", lambda c: c.lru_width != c.width, "its cache takes the width for it"),
    _GATES,
    _BIASES,
    _CONSTANT,
    _COMPLEX,
    _GLOBAL,
    (
        "block_pattern",
        lambda c: set(c.block_types) == {"recurrent"},
        "its cache needs an attention layer, and Hawk has none",
    ),
    (
        "num_layers",
        lambda c: c.num_layers > 100 * len(c.block_pattern),
        "it repeats block_pattern 100 times only",
    ),
)
_LIMITS = {
    "transformers": _TRANSFORMERS,
    "mlx_lm": (*_TRANSFORMERS, *_OF_TRANSFORMERS, _HALF),
    "DeepMind's recurrentgemma": _DEEPMIND,  # the JAX one, whose blocks have lru_only_real
    "DeepMind's recurrentgemma in PyTorch": (*_DEEPMIND, _COMPLEX),
    "": (),
}


def refusals(config: GriffinConfig, target: Format) -> list[str]:
    """Return why a format cannot hold a model: a clause for each field of the config."""
    return [
        f"{field}={getattr(config, field)!r}: {reason}"
        for field, asks, reason in _LIMITS[target.reader]
        if asks(config)
    ]


def limits(target: Format) -> list[tuple[str, str]]:
    """Return every limit of a format: the field of the config, and what its reader does instead."""
    return [(field, reason) for field, _, reason in _LIMITS[target.reader]]


def check_expressible(config: GriffinConfig, target: Format) -> None:
    """Raise CheckpointError if a format cannot hold a model, with each field of the config and the
    formats that can."""
    if problems := refusals(config, target):
        able = [f.name for f in FORMATS.values() if not refusals(config, f)]
        raise CheckpointError(
            f"{target.name} cannot hold this model, since {target.reader} cannot express "
            f"{'; '.join(problems)}. Formats that can: {', '.join(able)}"
        )

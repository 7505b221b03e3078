"""Tolerances, tiny models and weights of the parity tests.

An error is max |found - expected| / max |expected| over a whole array (logits, one leaf of a state,
the gradient of one parameter).
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from griffin_eval.config import BIASED, HAWK, GriffinConfig
from griffin_eval.layout import ParamSpec, param_specs

_OF_EITHER_TWIN = {
    # full forward passes in float32
    ("- transformers", "logits"): 2e-5,
    ("- deepmind-jax", "logits"): 2e-5,
    ("- deepmind-torch", "logits"): 2e-5,
    ("- equations", "logits"): 3e-5,
    ("- deepmind-jax", "logits, packed"): 1.5e-5,
    ("- deepmind-torch", "logits, packed"): 1.5e-5,
    ("- equations", "logits, packed"): 1.5e-5,
    ("- equations", "logits, long memories"): 1e-5,
    # other precisions
    ("- equations", "logits, float64"): 6e-14,
    # float64; norms over two channels, which random configs may have, amplify rounding errors
    ("- equations", "logits, any config"): 1e-11,
    ("- equations", "logits, bfloat16"): 1.5e-1,
    ("- equations", "state of a bfloat16 RG-LRU"): 1.5e-6,
    ("- longdouble", "rotation"): 1e-6,
    ("far - near", "hidden"): 2e-6,
    # gradients of the mean cross-entropy
    ("- transformers", "gradients"): 1e-4,
    ("- deepmind-jax", "gradients"): 6e-5,
    ("- deepmind-torch", "gradients"): 1e-4,
    ("- transformers", "gradient of Λ, bounded"): 8e-3,  # 1 - a * a has two bits in transformers
    ("- equations", "slope"): 3e-6,  # slope by a central difference
    # the same tokens in other chunks
    ("chunks - whole", "hidden"): 2e-5,
    ("chunks - whole", "state"): 1.2e-5,
    ("packed - alone", "hidden"): 1.5e-5,
    ("packed - alone", "state"): 1e-5,
    ("packed - padded", "hidden"): 1.5e-5,
    ("packed - padded", "state"): 1e-5,
    ("single - whole", "hidden"): 2e-5,
    # the recurrence alone
    **{
        (f"{impl} {operator} - reference", quantity): tolerance
        for impl in ("plain", "cpu")
        for (operator, quantity), tolerance in {
            ("scan", "float32"): 2e-6,
            ("scan", "gradients, float32"): 2e-6,
            ("scan", "float64"): 5e-15,
            ("scan", "gradients, float64"): 5e-15,
            ("rglru", "float32"): 4e-6,
            ("rglru", "gradients, float32"): 5e-6,
            ("rglru", "float64"): 5e-15,
            ("rglru", "gradients, float64"): 1e-14,
            ("cglru", "float32"): 3e-6,
            ("cglru", "gradients, float32"): 1e-5,
            ("cglru", "float64"): 5e-15,
            ("cglru", "gradients, float64"): 1.5e-14,
        }.items()
    },
}
# (pair, quantity) -> tolerance, at most ten times the largest error measured for either twin.
TOLERANCES: dict[tuple[str, str], float] = {
    **{
        (f"{twin} {pair}", quantity): tolerance
        for twin in ("torch", "jax")
        for (pair, quantity), tolerance in _OF_EITHER_TWIN.items()
    },
    # the lm-eval model: errors of log-likelihoods, relative above 1 nat and absolute below
    **{
        (f"{framework} {pair}", quantity): tolerance
        for framework in ("torch", "jax")
        for (pair, quantity), tolerance in {
            ("- equations", "log-probability of a token"): 3e-5,  # absolute
            ("- equations", "rolling log-likelihood"): 1e-6,
            ("- lm-eval hf", "log-likelihood"): 1e-6,
            ("bfloat16 - float32", "log-likelihood"): 2e-2,
            ("float16 - float32", "log-likelihood"): 3e-3,
        }.items()
    },
    **{
        (f"jax tpu {operator} - reference", quantity): tolerance
        for operator in ("scan", "rglru")
        for quantity, tolerance in (("float32", 1e-6), ("gradients, float32", 3e-6))
    },
    ("torch - jax", "gradients, float32"): 6e-5,
    ("torch - jax", "gradients, float64"): 1.5e-13,
}


def compare(record_parity: Callable, pair: str, quantity: str, actual, expected) -> None:
    """Assert that two arrays, or two sequences of arrays, agree within the table's tolerance."""
    if isinstance(actual, np.ndarray):
        actual, expected = [actual], [expected]
    errors = [relative_error(a, b) for a, b in zip(actual, expected, strict=True)]
    error = float(np.max(errors))  # unlike max, np.max propagates NaN
    record_parity(pair, quantity, error, TOLERANCES[pair, quantity])


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not actual.size:
        return 0.0
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    scale = np.abs(expected).max()
    return float(np.abs(actual - expected).max() / (scale if scale else 1.0))


BASE = GriffinConfig(
    vocab_size=61,
    width=32,
    mlp_width=80,
    num_heads=2,
    num_layers=3,
    lru_width=32,
    gate_blocks=2,
    visible_keys=8,
)
PAPER = replace(BASE, embedding_scale=False, logits_soft_cap=0.0, lru_width=48)
REVERSED = ("local_attention", "recurrent")

# Models that a public implementation supports; each name states the property under test.
RECURRENTGEMMA = {
    "attention last": BASE,
    "recurrent last": replace(BASE, num_layers=4),
    "attention first": replace(BASE, block_pattern=REVERSED, num_layers=2),
    "attention only": replace(BASE, block_pattern=("local_attention",), num_layers=2),
    "hawk": replace(BASE, block_pattern=HAWK, num_layers=2),
    "one head": replace(BASE, num_heads=1, gate_blocks=1),
    "window longer than the text": replace(BASE, visible_keys=64),
    "two visible keys": replace(BASE, visible_keys=2),
}
# Models that transformers cannot express.
PAPER_DIALECT = {
    "paper griffin": PAPER,
    "paper griffin, recurrent last": replace(PAPER, num_layers=5),
    "paper hawk": replace(PAPER, block_pattern=HAWK, num_layers=2),
    "lru narrower than width": replace(BASE, lru_width=20),
}
# Models that DeepMind's code cannot express.
TRANSFORMERS_ONLY = {
    "two taps": replace(BASE, conv_width=2),
    "six taps": replace(BASE, conv_width=6),
    "all dimensions rotated, other base": replace(BASE, rope_fraction=1.0, rope_base=100.0),
    "other epsilon and cap": replace(BASE, norm_eps=0.1, logits_soft_cap=5.0),
    "one visible key": replace(BASE, visible_keys=1),
    "a head of its own": replace(BASE, tie_embeddings=False),
    "grouped queries": replace(BASE, num_heads=4, gate_blocks=4, num_kv_heads=2),
    "several heads of keys": replace(BASE, num_kv_heads=2),
    "narrow heads": replace(BASE, head_dim=8),
    "heads wider than the model": replace(BASE, head_dim=24, num_kv_heads=2, attention_bias=True),
    "exact GeLU": replace(BASE, hidden_activation="gelu"),
    "SiLU": replace(BASE, hidden_activation="silu"),
    "biases of attention": replace(BASE, num_heads=4, gate_blocks=4, attention_bias=True),
}
# Models that no library can express.
REFERENCE_ONLY = {
    "every field changed": replace(
        PAPER,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        attention_bias=True,
        hidden_activation="silu",
        absent_biases=("linear_x", "conv_1d", "recurrent_gate", "o_proj", "down_proj"),
        lru_constant=5.0,
        tie_embeddings=False,
    ),
    "another constant": replace(PAPER, lru_constant=3.5),
    "no biases": replace(PAPER, absent_biases=BIASED),
    "three heads of a width of 32": replace(
        PAPER, block_pattern=REVERSED, num_layers=2, num_heads=3, head_dim=20
    ),
    "grouped queries, global": replace(
        PAPER, block_pattern=("global_attention",), num_layers=2, num_heads=4, num_kv_heads=2
    ),
    "mqa": replace(PAPER, block_pattern=("global_attention",), num_layers=2),
    "global attention among others": replace(
        BASE, block_pattern=("recurrent", "global_attention", "local_attention")
    ),
    "gates of many blocks": replace(PAPER, gate_blocks=12),
    "gates of one block": replace(PAPER, gate_blocks=1),
    "a quarter rotated": replace(BASE, rope_fraction=0.25),
    "one tap": replace(BASE, conv_width=1),
    "wide convolution": replace(PAPER, conv_width=7),
    "complex gates": replace(
        PAPER, complex_gates=True, block_pattern=HAWK, num_layers=2, gate_blocks=12
    ),
}
MODELS = RECURRENTGEMMA | PAPER_DIALECT | TRANSFORMERS_ONLY | REFERENCE_ONLY


def weights(config: GriffinConfig, seed: int = 0, slow: float = -5.0) -> dict[str, np.ndarray]:
    """Return float32 weights with which every part of the model affects the logits.

    Args:
        config: Architecture.
        seed: Seed of the generator.
        slow: Lower end of Λ. Below about -5 the libraries' ``1 - a * a`` is not exact.
    """
    rng = np.random.default_rng(seed)
    return {name: _draw(spec, rng, slow) for name, spec in param_specs(config).items()}


def _draw(spec: ParamSpec, rng: np.random.Generator, slow: float) -> np.ndarray:
    noise = rng.standard_normal(spec.shape)
    name = spec.name.rpartition("temporal_block.")[2]
    if spec.init == "lambda":
        value = rng.uniform(slow, 1.0, spec.shape)  # memory lengths from one token to many
    elif name == "model.final_norm.weight":
        value = 4.0 + 0.5 * noise  # large logits: the soft cap bends them
    elif name in ("model.embed_tokens.weight", "lm_head.weight"):
        value = spec.shape[-1] ** -0.5 * noise
    elif name.endswith(("bias", "norm.weight")):
        value = 0.3 * noise
    elif "conv_1d" in name:
        value = 0.5 * noise
    elif name.startswith(("q_proj", "k_proj")):
        value = 2.0 * spec.shape[-1] ** -0.5 * noise  # attention weights that differ between keys
    elif "gate_weight" in name:
        value = 1.5 * spec.shape[-2] ** -0.5 * noise
    else:
        value = 1.5 * spec.shape[-1] ** -0.5 * noise
    return value.astype(np.float32)


def tokens(config: GriffinConfig, batch: int, length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, batch, length])
    return rng.integers(config.vocab_size, size=(batch, length), dtype=np.int32)


@st.composite
def configs(draw):
    """Draw small valid configs of every kind."""
    heads, head_dim = draw(st.integers(1, 4)), 2 * draw(st.integers(1, 4))
    gates = draw(st.integers(1, 4))
    own = draw(st.sampled_from([None, None, 2, 4, 12]))
    types = st.sampled_from(("recurrent", "local_attention", "global_attention"))
    return GriffinConfig(
        vocab_size=draw(st.integers(1, 20)),
        width=heads * head_dim,
        mlp_width=draw(st.integers(1, 10)),
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        num_layers=draw(st.integers(1, 5)),
        lru_width=gates * draw(st.integers(1, 4)),
        gate_blocks=gates,
        block_pattern=tuple(draw(st.lists(types, min_size=1, max_size=4))),
        visible_keys=draw(st.integers(1, 9)),
        conv_width=draw(st.integers(1, 6)),
        embedding_scale=draw(st.booleans()),
        logits_soft_cap=draw(st.sampled_from([0.0, 5.0])),
        head_dim=own,
        lru_constant=draw(st.sampled_from([8.0, 1.0, 20.0])),
        absent_biases=tuple(draw(st.sets(st.sampled_from(BIASED)))) if draw(st.booleans()) else (),
        rope_fraction=draw(st.sampled_from([1.0] if (own or head_dim) % 4 else [0.5, 1.0])),
        tie_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        hidden_activation=draw(st.sampled_from(["gelu_pytorch_tanh", "gelu", "silu"])),
    )

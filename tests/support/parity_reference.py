"""The whole model in float64 numpy, one document at a time, close to the paper's equations.

It is slow and simple, and the oracle for models that no library supports (global attention, any
number of gate blocks, any share of rotated dimensions, any convolution width).
"""

import math

import ml_dtypes
import numpy as np

from griffin_eval.config import GriffinConfig


def reference_logits(
    config: GriffinConfig,
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    recurrent_cut: int = 0,
    attention_cut: int = 0,
) -> np.ndarray:
    """Return logits ``[T, V]`` after every token of one document ``[T]``.

    Recurrent blocks forget tokens before ``recurrent_cut``, attention those before
    ``attention_cut``.
    """
    p = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    embedding = p["model.embed_tokens.weight"]
    x = embedding[tokens]
    if config.embedding_scale:  # training rounded the factor to bfloat16
        x = x * float(np.sqrt(np.float32(config.width)).astype(ml_dtypes.bfloat16))
    for i, block_type in enumerate(config.block_types):
        layer = _below(p, f"model.layers.{i}.")
        temporal = _recurrent if block_type == "recurrent" else _attention
        cut = recurrent_cut if block_type == "recurrent" else attention_cut
        normed = _rms_norm(config, x, layer["temporal_pre_norm.weight"])
        x = x + temporal(config, _below(layer, "temporal_block."), normed, block_type, cut)
        normed = _rms_norm(config, x, layer["channel_pre_norm.weight"])
        x = x + _mlp(config, _below(layer, "mlp_block."), normed)
    head = embedding if config.tie_embeddings else p["lm_head.weight"]
    logits = _rms_norm(config, x, p["model.final_norm.weight"]) @ head.T
    cap = config.logits_soft_cap
    return cap * np.tanh(logits / cap) if cap else logits


def _below(p, prefix):
    return {
        name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)
    }


def _linear(p, name, x):
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)


def _rms_norm(config, x, weight):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.norm_eps) * (1 + weight)


def _activated(config, x):
    if config.hidden_activation == "silu":
        return x * _sigmoid(x)
    if config.hidden_activation == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def _mlp(config, p, x):
    gate = _activated(config, _linear(p, "gate_proj", x))
    return _linear(p, "down_proj", gate * _linear(p, "up_proj", x))


def _recurrent(config, p, x, block_type, cut):
    y_branch = _activated(config, _linear(p, "linear_y", x))
    x_branch = _conv(p, _linear(p, "linear_x", x), cut)
    y = rg_lru(_below(p, "rg_lru."), x_branch, cut, config.lru_constant)
    return _linear(p, "linear_out", y * y_branch)


def _conv(p, x, cut):
    taps = p["conv_1d.weight"][:, 0]  # [L, taps], the last one for the current token
    y = np.tile(p.get("conv_1d.bias", np.zeros(x.shape[1])), (len(x), 1))
    for t in range(len(x)):
        known = t + 1 - (cut if t >= cut else 0)
        for age in range(min(known, taps.shape[1])):
            y[t] += taps[:, -1 - age] * x[t - age]
    return y


def rg_lru(
    p: dict[str, np.ndarray], x: np.ndarray, cut: int = 0, constant: float = 8
) -> np.ndarray:
    """Return every h_t ``[T, L]`` of the RG-LRU over a document ``[T, L]`` (section 2.4), or of the
    CG-LRU (appendix B), whose channels are real parts and then imaginary ones."""

    def gate(name, x_t):
        w = p[f"{name}_gate_weight"]
        b = p.get(f"{name}_gate_bias", np.zeros((len(w), w.shape[2])))
        blocks = x_t.reshape(len(w), -1)
        return _sigmoid(np.stack([v @ m + c for v, m, c in zip(blocks, w, b, strict=True)]).ravel())

    angle, out = p.get("imaginary_param"), []
    inputs = x if angle is None else x[:, : len(angle)] + 1j * x[:, len(angle) :]
    h = np.zeros_like(inputs[0])
    for t, x_t in enumerate(inputs):
        r_t, i_t = gate("recurrent", x[t]), gate("input", x[t])
        log_a = log_decay(p, r_t, constant)
        a = np.exp(log_a if angle is None else log_a + 1j * angle * r_t)
        h = np.zeros_like(h) if t == cut else h
        if t == 0:
            h = i_t * x_t
        else:
            h = a * h + np.sqrt(-np.expm1(2 * log_a)) * (i_t * x_t)
        out.append(h if angle is None else np.concatenate([h.real, h.imag]))
    return np.stack(out)


def log_decay(p: dict[str, np.ndarray], r_t: np.ndarray, constant: float) -> np.ndarray:
    """Return log a_t ``[L]`` for the recurrence gate."""
    return -constant * np.logaddexp(0, p["recurrent_param"]) * r_t


def _attention(config, p, x, block_type, cut):
    length, heads = len(x), config.num_heads
    dim = config.head_dim or config.width // heads
    q = _linear(p, "q_proj", x).reshape(length, heads, dim)
    k, v = (_linear(p, f"{i}_proj", x).reshape(length, -1, dim) for i in "kv")
    q = np.stack([_rope(config, q[t], t) for t in range(length)])
    k = np.stack([_rope(config, k[t], t) for t in range(length)])
    mixed = np.empty_like(q)
    for t in range(length):
        first = 0 if block_type == "global_attention" else max(0, t + 1 - config.visible_keys)
        first = max(first, cut if t >= cut else 0)
        for head in range(heads):
            of_keys = head * config.num_kv_heads // heads
            scores = k[first : t + 1, of_keys] @ q[t, head] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            mixed[t, head] = weights / weights.sum() @ v[first : t + 1, of_keys]
    return _linear(p, "o_proj", mixed.reshape(length, -1))


def _rope(config, x, position):
    rotated = round(x.shape[-1] * config.rope_fraction)
    half = rotated // 2
    angle = position / config.rope_base ** (2 * np.arange(half) / rotated)
    first, second, rest = x[..., :half], x[..., half:rotated], x[..., rotated:]
    turned = (
        first * np.cos(angle) - second * np.sin(angle),
        second * np.cos(angle) + first * np.sin(angle),
    )
    return np.concatenate([*turned, rest], -1)

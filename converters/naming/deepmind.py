"""The names of DeepMind's two libraries."""

from griffin_eval.converters.naming.ops import SAME, SPLIT, SPLIT_BIAS, TAPS, TRANSPOSE, Op
from griffin_eval.converters.naming.tables import NameRule


def _deepmind(separator: str, kernel: str, linear: Op) -> tuple[NameRule, ...]:
    """DeepMind's names. Its two libraries differ in how paths are joined and in linear weights."""
    layer, temporal = "model.layers.{layer}.", "model.layers.{layer}.temporal_block."
    lru, mlp = temporal + "rg_lru.", "model.layers.{layer}.mlp_block."
    rows = [
        NameRule("embedder/input_embedding", ("model.embed_tokens.weight",), SAME),
        NameRule("lm_head/" + kernel, ("lm_head.weight",), linear),
        NameRule("final_norm/scale", ("model.final_norm.weight",), SAME),
        NameRule(
            "blocks.{layer}/temporal_pre_norm/scale", (layer + "temporal_pre_norm.weight",), SAME
        ),
        NameRule(
            "blocks.{layer}/channel_pre_norm/scale", (layer + "channel_pre_norm.weight",), SAME
        ),
        NameRule(
            f"blocks.{{layer}}/mlp_block/ffw_down/{kernel}", (mlp + "down_proj.weight",), linear
        ),
        NameRule("blocks.{layer}/mlp_block/ffw_down/bias", (mlp + "down_proj.bias",), SAME),
        NameRule(
            "blocks.{layer}/mlp_block/ffw_up/w",
            (mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            SPLIT,
        ),
        NameRule(
            "blocks.{layer}/mlp_block/ffw_up/b",
            (mlp + "gate_proj.bias", mlp + "up_proj.bias"),
            SPLIT_BIAS,
        ),
        NameRule("blocks.{layer}/recurrent_block/conv_1d/w", (temporal + "conv_1d.weight",), TAPS),
        NameRule("blocks.{layer}/recurrent_block/conv_1d/b", (temporal + "conv_1d.bias",), SAME),
        NameRule("blocks.{layer}/recurrent_block/rg_lru/a_param", (lru + "recurrent_param",), SAME),
    ]
    for theirs, ours in (("input_gate", "input"), ("a_gate", "recurrent")):
        gate = f"blocks.{{layer}}/recurrent_block/rg_lru/{theirs}/"
        rows.append(NameRule(gate + "w", (f"{lru}{ours}_gate_weight",), SAME))
        rows.append(NameRule(gate + "b", (f"{lru}{ours}_gate_bias",), SAME))
    for name in ("linear_x", "linear_y", "linear_out"):
        path = f"blocks.{{layer}}/recurrent_block/{name}/"
        rows.append(NameRule(path + kernel, (f"{temporal}{name}.weight",), linear))
        rows.append(NameRule(path + "bias", (f"{temporal}{name}.bias",), SAME))
    for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("final", "o")):
        path = f"blocks.{{layer}}/attention_block/proj_{theirs}/"
        rows.append(NameRule(path + kernel, (f"{temporal}{ours}_proj.weight",), linear))
    rows.append(
        NameRule(
            "blocks.{layer}/attention_block/proj_final/bias", (temporal + "o_proj.bias",), SAME
        )
    )
    return tuple(row._replace(foreign=row.foreign.replace("/", separator)) for row in rows)


DEEPMIND_FLAX = (
    *_deepmind("/", "kernel", TRANSPOSE),
    NameRule(  # with lru_only_real=False, an option that the torch library lacks
        "blocks.{layer}/recurrent_block/rg_lru/a_imag_param",
        ("model.layers.{layer}.temporal_block.rg_lru.imaginary_param",),
        SAME,
    ),
)
DEEPMIND_TORCH = _deepmind(".", "weight", SAME)

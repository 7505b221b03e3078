"""The names of DeepMind's two libraries."""

from griffin_eval.converters.naming.ops import SAME, SPLIT, SPLIT_BIAS, TAPS, TRANSPOSE, Op
from griffin_eval.converters.naming.tables import NameRule

_LAYER = "model.layers.{layer}."


def _deepmind(separator: str, kernel: str, linear: Op) -> tuple[NameRule, ...]:
    """Return DeepMind's names. Its libraries differ in the separator and in linear weights."""
    temporal, lru, mlp = "temporal_block.", "temporal_block.rg_lru.", "mlp_block."
    rows: dict[str, tuple[Op, *tuple[str, ...]]] = {
        "temporal_pre_norm/scale": (SAME, "temporal_pre_norm.weight"),
        "channel_pre_norm/scale": (SAME, "channel_pre_norm.weight"),
        f"mlp_block/ffw_down/{kernel}": (linear, f"{mlp}down_proj.weight"),
        "mlp_block/ffw_down/bias": (SAME, f"{mlp}down_proj.bias"),
        "mlp_block/ffw_up/w": (SPLIT, f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
        "mlp_block/ffw_up/b": (SPLIT_BIAS, f"{mlp}gate_proj.bias", f"{mlp}up_proj.bias"),
        "recurrent_block/conv_1d/w": (TAPS, f"{temporal}conv_1d.weight"),
        "recurrent_block/conv_1d/b": (SAME, f"{temporal}conv_1d.bias"),
        "recurrent_block/rg_lru/a_param": (SAME, f"{lru}recurrent_param"),
        "attention_block/proj_final/bias": (SAME, f"{temporal}o_proj.bias"),
    }
    for theirs, ours in (("input_gate", "input"), ("a_gate", "recurrent")):
        rows[f"recurrent_block/rg_lru/{theirs}/w"] = SAME, f"{lru}{ours}_gate_weight"
        rows[f"recurrent_block/rg_lru/{theirs}/b"] = SAME, f"{lru}{ours}_gate_bias"
    for name in ("linear_x", "linear_y", "linear_out"):
        rows[f"recurrent_block/{name}/{kernel}"] = linear, f"{temporal}{name}.weight"
        rows[f"recurrent_block/{name}/bias"] = SAME, f"{temporal}{name}.bias"
    for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("final", "o")):
        rows[f"attention_block/proj_{theirs}/{kernel}"] = linear, f"{temporal}{ours}_proj.weight"
    rules = [
        NameRule("embedder/input_embedding", ("model.embed_tokens.weight",), SAME),
        NameRule("lm_head/" + kernel, ("lm_head.weight",), linear),
        NameRule("final_norm/scale", ("model.final_norm.weight",), SAME),
    ]
    for foreign, (op, *names) in rows.items():
        rules.append(
            NameRule("blocks.{layer}/" + foreign, tuple(_LAYER + name for name in names), op)
        )
    return tuple(rule._replace(foreign=rule.foreign.replace("/", separator)) for rule in rules)


DEEPMIND_FLAX = (
    *_deepmind("/", "kernel", TRANSPOSE),
    NameRule(  # with lru_only_real=False, an option that the torch library lacks
        "blocks.{layer}/recurrent_block/rg_lru/a_imag_param",
        (_LAYER + "temporal_block.rg_lru.imaginary_param",),
        SAME,
    ),
)
DEEPMIND_TORCH = _deepmind(".", "weight", SAME)

"""The names of other trainers, whose checkpoints are read, and how they are recognised."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from griffin_eval.converters.naming.ops import (
    LAST_AXIS,
    MINUS_ONE,
    ONE_BLOCK,
    SAME,
    SCALE_BY,
    TAPS,
    Change,
)
from griffin_eval.converters.naming.tables import (
    EMBEDDING,
    HEAD,
    Check,
    NameRule,
    Names,
    foreign_name,
    matches,
)

_LAST_NORM, _INPUT_NORM, _MLP_NORM = (
    "model.final_norm.weight",
    "temporal_pre_norm",
    "channel_pre_norm",
)
_ONE_LESS = {"change": Change(MINUS_ONE)}  # norms that are stored as 1 + w
Rows = dict[str, str | tuple[str, ...]]  # names of parameters by names of tensors
_EVEN, _ODD = slice(0, None, 2), slice(1, None, 2)
# Models of other architectures: endings that only their tensors' names have, and the differences.
_OTHERS = (
    (
        ".rlgru_block.rglru.a",
        "Meta lingua's Hawk, which is another architecture: SiLU for GeLU, dense gates without "
        "biases, decays that all heads share, and a residual that is added twice",
    ),
)


def _rule(foreign: str, canonical: str | tuple[str, ...], **facts: Any) -> NameRule:
    """Return a rule; one with several canonical names cuts a tensor along its first axis."""
    names = (canonical,) if isinstance(canonical, str) else canonical
    cut = 0 if len(names) > 1 else None
    fields: dict[str, Any] = {"op": SAME, "cut": cut, **facts}
    return NameRule(foreign, names, **fields)


def _layers(prefix: str, where: str, rows: Rows, **facts: Any) -> list[NameRule]:
    """Return rules for tensors in every layer: ``prefix`` precedes the keys of ``rows``, ``where``
    (a module of a layer) the names of parameters; ``facts`` are other fields of all rules."""
    rules = []
    for key, names in rows.items():
        names = (names,) if isinstance(names, str) else names
        canonical = tuple(f"model.layers.{{layer}}.{where}{name}" for name in names)
        rules.append(_rule(prefix + key, canonical, **facts))
    return rules


def _zeros(*names: str) -> list[NameRule]:
    """Return rules for parameters of every layer that are zeros and absent from a checkpoint."""
    return [_rule("", f"model.layers.{{layer}}.{name}") for name in names]


def _linear(foreign: str, name: str, kinds: Collection[str] = ("weight", "bias")) -> Rows:
    return {f"{foreign}.{kind}": f"{name}.{kind}" for kind in kinds}


def _gates(foreign: str, name: str, weight: str, bias: str) -> Rows:
    return {f"{foreign}.{weight}": f"{name}_weight", f"{foreign}.{bias}": f"{name}_bias"}


def _hawk_pytorch() -> Names:
    """fattorib/hawk-pytorch: the state dict of its HawkModel, without the norm behind the
    recurrence that earlier versions could have (recc.norm.weight is refused).

    Read from its source, hawk/hawk.py. Norms are stored as 1 + w; no linear map has a bias.
    """
    layer, recurrence = "layers.{layer}.", "layers.{layer}.recc."
    block: Rows = {
        "input_xy.weight": ("linear_x.weight", "linear_y.weight"),
        "conv1d.b": "conv_1d.bias",
    }
    lru: Rows = {"rg_lru_a_param": "recurrent_param"}
    lru |= _gates("rg_lru_input_gate", "input_gate", "w", "b")
    lru |= _gates("rg_lru_a_gate", "recurrent_gate", "w", "b")
    mlp: Rows = {"gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight")}
    mlp |= {"resid_proj.weight": "down_proj.weight"}
    rules = [
        _rule("embed_tokens.weight", EMBEDDING),
        _rule("lm_head.weight", HEAD),
        _rule("norm.weight", _LAST_NORM, **_ONE_LESS),
        *_layers(layer, _INPUT_NORM, {"input_norm.weight": ".weight"}, **_ONE_LESS),
        *_layers(layer, _MLP_NORM, {"post_recurrent_norm.weight": ".weight"}, **_ONE_LESS),
        *_layers(recurrence, "temporal_block.", block),
        *_layers(recurrence, "temporal_block.", {"conv1d.w": "conv_1d.weight"}, op=TAPS),
        *_layers(recurrence, "temporal_block.", {"resid_proj.weight": "linear_out.weight"}),
        *_layers(recurrence, "temporal_block.rg_lru.", lru),
        *_layers(f"{layer}mlp.", "mlp_block.", mlp),
        *_zeros(*(f"temporal_block.linear_{n}.bias" for n in ("x", "y", "out"))),
        *_zeros(*(f"mlp_block.{n}_proj.bias" for n in ("gate", "up", "down"))),
    ]
    return Names(
        Path("hawk-pytorch"),
        tuple(rules),
        config={"embedding_scale": False, "logits_soft_cap": 0.0, "hidden_activation": "gelu"},
        title="hawk-pytorch's",
        differs=("its RG-LRU scales the first token of a text as every other one",),
    )


def _hippogriff() -> Names:
    """proger/hippogriff 0.0.3 (PyPI), with attention: the state dict of its GriffinLM.

    Read from its source, hippogriff.py. A block there is two here: attention, then recurrence, each
    with an MLP. Norms are stored as 1 + w; no linear map has a bias; gates are dense.
    """
    block, time = "backbone.{layer}.", "backbone.{layer}.time."
    attention: Rows = {"q.weight": "q_proj.weight", "kv.weight": ("k_proj.weight", "v_proj.weight")}
    attention |= {"output.weight": "o_proj.weight"}
    recurrence: Rows = {"input.weight": ("linear_y.weight", "linear_x.weight")}
    recurrence |= {**_linear("conv", "conv_1d"), "output.weight": "linear_out.weight"}
    gates: Rows = {
        f"gates.{n}": (f"recurrent_gate_{n}", f"input_gate_{n}") for n in ("weight", "bias")
    }
    mlp: Rows = {"grow.weight": ("gate_proj.weight", "up_proj.weight")}
    mlp |= {"shrink.weight": "down_proj.weight"}
    rules = [
        _rule("embedding.weight", EMBEDDING),
        _rule("lm_head.weight", HEAD),
        _rule("output_norm.gamma", _LAST_NORM, **_ONE_LESS),
        *_layers(f"{block}smqa.", "temporal_block.", attention, layers=_EVEN),
        *_layers(time, "temporal_block.", recurrence, layers=_ODD),
        *_layers(time, "temporal_block.rg_lru.", gates, layers=_ODD, op=ONE_BLOCK),
        *_layers(time, "temporal_block.rg_lru.", {"forget_base": "recurrent_param"}, layers=_ODD),
        *_zeros(*(f"temporal_block.linear_{n}.bias" for n in ("x", "y", "out"))),
        *_zeros("temporal_block.o_proj.bias"),
        *_zeros(*(f"mlp_block.{n}_proj.bias" for n in ("gate", "up", "down"))),
    ]
    for name, of_mlp, layers in (("smqa", "smqa_gmlp", _EVEN), ("time", "gmlp", _ODD)):
        for norm, ours in ((name, _INPUT_NORM), (of_mlp, _MLP_NORM)):
            row: Rows = {f"{norm}_norm.gamma": ".weight"}
            rules += _layers(block, ours, row, layers=layers, **_ONE_LESS)
        rules += _layers(f"{block}{of_mlp}.", "mlp_block.", mlp, layers=layers)
    return Names(
        Path("hippogriff"),
        tuple(rules),
        # The constant 8 of the RG-LRU, which may have been swept.
        checks=(Check(_rule(f"{time}alpha_log_scale", ()), 2.0794415416798357),),
        config={
            "embedding_scale": False,
            "logits_soft_cap": 0.0,
            "hidden_activation": "gelu",
            "norm_eps": 1e-30,  # none there; so small that no float32 notices
            "rope_fraction": 1.0,
        },
        title="hippogriff's",
        differs=(
            "it adds 1e-6 to 1 - a² under the root",
            "its RG-LRU scales the first token of a text as every other one",
            "its window reaches flash-attn as a negative number, which means none there",
        ),
    )


def _nemo() -> Names:
    """NVIDIA NeMo's MegatronGriffinModel: model_weights.ckpt of an unpacked .nemo file of one rank.

    Read from NeMo's source: nemo/collections/nlp/models/language_modeling/megatron/griffin, and
    scripts/checkpoint_converters/convert_griffin_hf_to_nemo.py. Norms are zero-centred there, as
    here.
    """
    layer = "model.decoder.layers.{layer}."
    recurrence, attention = f"{layer}recurrent_layer.", f"{layer}self_attention."
    block = _linear("linear_out", "linear_out") | _linear("conv_1d.conv_1d", "conv_1d")
    heads: Rows = {}
    mlp = _linear("linear_fc2", "down_proj")
    for kind in ("weight", "bias"):
        block[f"linear_in.{kind}"] = (f"linear_x.{kind}", f"linear_y.{kind}")
        heads[f"linear_qkv.{kind}"] = tuple(f"{n}_proj.{kind}" for n in "qkv")
        heads[f"linear_proj.{kind}"] = f"o_proj.{kind}"
        mlp[f"linear_fc1.{kind}"] = (f"gate_proj.{kind}", f"up_proj.{kind}")
    lru: Rows = {"a_param": "recurrent_param"} | _gates("input_gate", "input_gate", "w", "b")
    lru |= _gates("a_gate", "recurrent_gate", "w", "b")
    norm: Rows = {"layer_norm_weight": ".weight"}
    rules = [
        _rule("model.embedding.word_embeddings.weight", EMBEDDING),
        _rule("model.output_layer.weight", HEAD),
        _rule("model.decoder.final_layernorm.weight", _LAST_NORM),
        *_layers(f"{recurrence}linear_in.", _INPUT_NORM, norm, block="recurrent"),
        *_layers(f"{attention}linear_qkv.", _INPUT_NORM, norm, block="attention"),
        *_layers(f"{layer}mlp.linear_fc1.", _MLP_NORM, norm),
        *_layers(recurrence, "temporal_block.", block),
        *_layers(f"{recurrence}rg_lru.", "temporal_block.rg_lru.", lru),
        *_layers(attention, "temporal_block.", heads),
        *_layers(f"{layer}mlp.", "mlp_block.", mlp),
    ]
    return Names(
        Path("nemo"),
        tuple(rules),
        ignore=("*._extra_state",),  # scales of Transformer Engine for FP8
        config={"embedding_scale": True},
        title="NeMo's",
        differs=(
            "it adds 1e-6 to 1 - a² under the root, though not to weights that it only converted",
            "in float32 it multiplies embeddings by sqrt(width) as it is, not rounded to bfloat16",
        ),
    )


def _trtllm() -> Names:
    """TensorRT-LLM's checkpoint of RecurrentGemma, rank0.safetensors of one rank.

    Read from TensorRT-LLM's source: examples/models/core/recurrentgemma/convert_checkpoint.py. Its
    "gate" of an MLP is the branch without GeLU. The output head is the embedding as it was; the one
    that tokens are looked up in is multiplied by sqrt(width), and rounded.
    """
    layer = "transformer.layers.{layer}."
    recurrence, attention = f"{layer}recurrent.", f"{layer}attention."
    block: Rows = {"linear_y.weight": "linear_y.weight", "y_bias": "linear_y.bias"}
    block |= _linear("linear_x", "linear_x") | _linear("linear_out", "linear_out")
    lru: Rows = {"recurrent_param": "recurrent_param"}
    for gate in ("input_gate", "recurrent_gate"):
        lru |= _gates(gate, gate, "weight", "bias")
    mlp = _linear("fc", "gate_proj") | _linear("gate", "up_proj") | _linear("proj", "down_proj")
    heads: Rows = {"qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight")}
    rules = [
        _rule("lm_head.weight", EMBEDDING),
        _rule("transformer.ln_f.weight", _LAST_NORM, **_ONE_LESS),
        *_layers(layer, _INPUT_NORM, {"input_layernorm.weight": ".weight"}, **_ONE_LESS),
        *_layers(layer, _MLP_NORM, {"post_layernorm.weight": ".weight"}, **_ONE_LESS),
        *_layers(recurrence, "temporal_block.", block | {"conv1d.bias": "conv_1d.bias"}),
        *_layers(recurrence, "temporal_block.", {"conv1d.weight": "conv_1d.weight"}, op=LAST_AXIS),
        *_layers(f"{recurrence}rg_lru.", "temporal_block.rg_lru.", lru),
        *_layers(attention, "temporal_block.", heads | _linear("dense", "o_proj")),
        *_layers(f"{layer}mlp.", "mlp_block.", mlp),
    ]
    # A second, scaled embedding, in which tokens are looked up.
    twice = _rule(
        "transformer.vocab_embedding.weight",
        EMBEDDING,
        change=Change(SCALE_BY, "1/sqrt(width)"),
    )
    return Names(
        Path("trtllm"),
        tuple(rules),
        checks=(Check(twice, None),),
        config={"embedding_scale": True},
        title="TensorRT-LLM's",
        config_file=False,  # it has names of its own
    )


TRAINERS = {
    names.path.name: names for names in (_hawk_pytorch(), _hippogriff(), _nemo(), _trtllm())
}


def recognised(names: Collection[str]) -> str | None:
    """Return a clause that says whose tensors these seem to be, and what to do; None if nobody
    knows."""
    for end, whose in _OTHERS:
        if any(name.endswith(end) for name in names):
            return f"this looks like {whose}: it cannot be read"
    for shipped, table in TRAINERS.items():
        layered = [row for row in table.rows if "{layer}" in row.foreign]
        if foreign_name(table.rows, EMBEDDING) in names and matches(layered, names):
            return f"this looks like {table.title}: give --names {shipped} (names={shipped})"
    return None

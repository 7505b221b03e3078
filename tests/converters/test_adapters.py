"""Adapters merged while reading, against peft: unmerged, and merged where that is right."""

import warnings

import pytest
import torch
from adapters import LINEAR, load_adapted, logits, write_adapter, write_base
from parity import BASE, relative_error, tokens

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.overrides import Overrides

IDS = tokens(BASE, 2, 2 * BASE.visible_keys + 3)
GATES = ["rg_lru.input_gate_weight", "rg_lru.recurrent_gate_weight"]
# By name: what peft is told. Those that touch the embedding or the output head untie them, but for
# trained tokens, and `ensure_weight_tying`.
KINDS = {
    "lora": {"target_modules": LINEAR},
    "rslora": {"target_modules": LINEAR, "use_rslora": True},
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "patterns": {
        "target_modules": LINEAR,
        "rank_pattern": {"q_proj": 5, r"layers\.[01]\..*linear_[xy]": 2},
        "alpha_pattern": {"^model.layers.2.mlp_block.up_proj": 11, "down_proj": 0.5},
    },
    "bias of B": {"target_modules": ["linear_x", "o_proj"], "lora_bias": True},
    "biases of targets": {"target_modules": ["linear_x", "q_proj", "o_proj"], "bias": "lora_only"},
    "all biases": {"target_modules": ["linear_x"], "bias": "all"},
    "gates": {"target_modules": ["linear_x"], "target_parameters": GATES},
    "gates alone": {"target_modules": [], "target_parameters": [*GATES, "input_gate_bias"]},
    "taps": {"target_modules": ["q_proj"], "target_parameters": ["conv_1d.weight"]},
    "modules": {"target_modules": ["linear_x"], "modules_to_save": ["final_norm", "rg_lru"]},
    "regular expression": {"target_modules": r".*layers\.[02]\..*(q_proj|linear_y)"},
    "some layers": {"target_modules": ["up_proj"], "layers_to_transform": [1, 2]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 60, 7]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
    "embedding and head, tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "dora of embedding and head": {
        "target_modules": ["embed_tokens", "lm_head"],
        "use_dora": True,
    },
    "embedding as a parameter": {
        "target_modules": [],
        "target_parameters": ["embed_tokens.weight"],
    },
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved both": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "saved both, tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
}
UNTYING = {
    *("embedding", "head", "embedding and head", "dora of embedding and head"),
    *("embedding as a parameter", "saved embedding", "saved head", "saved both"),
}
MERGED_BY_PEFT = [  # rightly
    *("lora", "rslora", "dora", "patterns", "bias of B", "biases of targets", "all biases"),
    *("gates", "gates alone", "taps", "modules", "regular expression", "some layers"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_base(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """A folder of an adapter by its kind, each written once."""
    root = tmp_path_factory.mktemp("adapters")

    def get(kind, seed=0):
        folder = root / f"{kind}-{seed}"
        if not folder.exists():
            write_adapter(folder, base, seed, **KINDS[kind])
        return folder

    return get


def open_with(base, *adapters):
    """The base with adapters, given as folders or with weights."""
    pairs = (a if isinstance(a, tuple) else (a, 1.0) for a in adapters)
    return Checkpoint(base, Overrides(adapters=tuple(pairs)))


def torch_logits(checkpoint):
    from griffin_eval.model_torch.loading import load

    model = load(checkpoint)
    state = model.init_state(len(IDS))
    lengths = torch.full((len(IDS),), IDS.shape[1])
    with torch.no_grad():
        hidden, _ = model.step(torch.from_numpy(IDS), lengths, state)
        return model.logits(hidden).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_unmerged_adapter(base, adapters, kind):
    checkpoint = open_with(base, adapters(kind))
    expected = logits(load_adapted(base, adapters(kind)), IDS)
    assert relative_error(torch_logits(checkpoint), expected) < 5e-5
    assert relative_error(torch_logits(Checkpoint(base)), expected) > 1e-2
    assert checkpoint.config.tie_embeddings == (kind not in UNTYING)


def merged_state(base, adapter, dtype="auto"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_adapted(base, adapter, dtype).merge_and_unload()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("kind", MERGED_BY_PEFT)
def test_weights_are_those_that_peft_merges(base, adapters, kind):
    checkpoint, expected = open_with(base, adapters(kind)), merged_state(base, adapters(kind))
    assert checkpoint.dtypes.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(checkpoint.numpy(name), value.numpy()) < 1e-6, name

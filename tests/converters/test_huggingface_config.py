"""config.json as transformers writes and reads it, and the token ids in it."""

import dataclasses
import json
import traceback

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from slow import examples
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaRotaryEmbedding,
)

from griffin_eval.config import GRIFFIN, HAWK, PRESETS, GriffinConfig
from griffin_eval.converters.configs.huggingface import (
    generation_eos_ids,
    read_config,
    to_griffin_config,
    to_huggingface,
    token_ids,
)
from griffin_eval.errors import CheckpointError

# config.json of the published 2B model, written by version 4 of transformers.
PUBLISHED_2B = {
    "architectures": ["RecurrentGemmaForCausalLM"],
    "attention_bias": False,
    "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
    "conv1d_width": 4,
    "embeddings_scale_by_sqrt_dim": True,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 15360,
    "logits_soft_cap": 30.0,
    "lru_width": 2560,
    "model_type": "recurrent_gemma",
    "num_attention_heads": 10,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
AS_PUBLISHED = dataclasses.replace(PRESETS["recurrentgemma-2b"], visible_keys=2048)
NOT_A_KEY = object()


def changed(**changes):
    raw = {**PUBLISHED_2B, **changes}
    return {key: value for key, value in raw.items() if value is not NOT_A_KEY}


def read(**changes) -> GriffinConfig:
    return to_griffin_config(changed(**changes), source="here")


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1
    return message


@st.composite
def griffin_configs(draw, vocab_size=300_000, num_layers=40):
    """Draw configs that transformers can express."""
    heads = draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([4, 8, 16, 20]))
    blocks = st.lists(st.sampled_from(["recurrent", "local_attention"]), min_size=1, max_size=4)
    pattern = tuple(draw(blocks.filter(lambda b: "local_attention" in b)))
    return GriffinConfig(
        vocab_size=draw(st.integers(3, vocab_size)),
        width=heads * head_dim,
        mlp_width=draw(st.integers(1, 99)),
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        num_layers=draw(st.integers(len(pattern), num_layers)),
        lru_width=heads * head_dim,
        gate_blocks=heads,
        block_pattern=pattern,
        visible_keys=draw(st.integers(1, 4096)),
        conv_width=draw(st.integers(1, 8)),
        logits_soft_cap=draw(st.floats(0.5, 100)),
        norm_eps=draw(st.floats(1e-8, 1e-3)),
        rope_base=draw(st.floats(10, 1e7)),
        rope_fraction=draw(st.sampled_from([0.5, 1.0])),
        attention_bias=draw(st.booleans()),
        head_dim=draw(st.sampled_from([None, 12])),
        hidden_activation=draw(st.sampled_from(["gelu_pytorch_tanh", "gelu", "silu"])),
    )


fuzzed = settings(
    max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


# Round trips.


@fuzzed
@given(config=griffin_configs())
@example(config=PRESETS["recurrentgemma-2b"])
@example(config=PRESETS["recurrentgemma-9b"])
def test_round_trip_through_transformers(tmp_path, config):
    theirs = RecurrentGemmaConfig(**to_huggingface(config))
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path) == (config, json.loads((tmp_path / "config.json").read_text()))
    # transformers understands the layer types, too.
    newer = {"recurrent": "linear_attention", "attention": "sliding_attention"}  # version 5
    types = [newer.get(t, t) for t in theirs.layers_block_type]
    assert types == [
        newer["recurrent" if t == "recurrent" else "attention"] for t in config.block_types
    ]
    assert theirs.sliding_window == config.visible_keys
    inverse, _ = RecurrentGemmaRotaryEmbedding.compute_default_rope_parameters(theirs)
    exponents = torch.arange(0, config.rotary_dim, 2) / config.rotary_dim
    torch.testing.assert_close(inverse, 1 / config.rope_base**exponents)
    again = RecurrentGemmaConfig(**to_huggingface(read_config(tmp_path)[0]))
    assert again.to_dict() == theirs.to_dict()


def test_published_2b_is_the_preset_but_for_the_window():
    assert read() == AS_PUBLISHED
    assert to_griffin_config(to_huggingface(AS_PUBLISHED), source="here") == AS_PUBLISHED
    assert to_huggingface(PRESETS["recurrentgemma-2b"])["attention_window_size"] == 2049


def test_defaults_are_those_of_transformers(tmp_path):
    RecurrentGemmaConfig().save_pretrained(tmp_path)
    assert read_config(tmp_path)[0] == to_griffin_config(
        {"model_type": "recurrent_gemma"}, source="here"
    )


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"lru_width": None}, {}),
        ({"lru_width": 5120}, {"lru_width": 5120}),
        ({"intermediate_size": 9}, {"mlp_width": 4}),
        ({"logits_soft_cap": 7}, {"logits_soft_cap": 7.0}),
        ({"block_types": ["recurrent"]}, {"block_pattern": HAWK}),
        ({"block_types": NOT_A_KEY}, {"block_pattern": GRIFFIN}),
        (
            {"block_types": NOT_A_KEY, "_block_types": ["attention"]},
            {"block_pattern": ("local_attention",)},
        ),
        ({"_block_types": ["recurrent", "recurrent", "attention"]}, {}),
        (
            {"num_key_value_heads": None, "num_attention_heads": 1, "head_dim": 2560},
            {"num_heads": 1},
        ),
        # Without num_key_value_heads there are as many key heads as query heads.
        ({"num_key_value_heads": NOT_A_KEY}, {"num_kv_heads": 10}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 10}),
        ({"num_key_value_heads": 5}, {"num_kv_heads": 5}),
        ({"head_dim": 128}, {"head_dim": 128}),
        ({"attention_bias": True}, {"attention_bias": True}),
        ({"hidden_activation": "silu"}, {"hidden_activation": "silu"}),
        ({"hidden_activation": "gelu_new"}, {"hidden_activation": "gelu_pytorch_tanh"}),
        ({"sliding_window": 2048}, {}),
        # RoPE: nested keys take precedence over top-level keys, rope_scaling over rope_parameters.
        ({"rope_theta": 500}, {"rope_base": 500.0}),
        ({"partial_rotary_factor": 1}, {"rope_fraction": 1.0}),
        ({"rope_theta": NOT_A_KEY, "partial_rotary_factor": NOT_A_KEY}, {}),
        ({"rope_parameters": {"rope_theta": 700.0}}, {"rope_base": 700.0}),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, {"rope_fraction": 0.25}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, {"rope_base": 9.0}),
        (
            {"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": {"rope_theta": 7.0}},
            {"rope_base": 7.0},
        ),
        ({"rope_parameters": None, "rope_scaling": None}, {}),
    ],
)
def test_spellings(changes, fields):
    expected = dict(fields)
    if "num_heads" in fields:
        expected["gate_blocks"] = fields["num_heads"]
    assert read(**changes) == dataclasses.replace(AS_PUBLISHED, **expected)
    if "_block_types" in changes:  # version 5 of transformers ignores this key
        return
    raw = changed(**changes)
    raw["logits_soft_cap"] = float(raw["logits_soft_cap"])  # transformers refuses an integer
    theirs = RecurrentGemmaConfig(**raw)
    assert to_griffin_config(theirs.to_dict(), source="here") == read(**changes)


# Refused configs.


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"model_type": "gemma"}, "expected model_type 'recurrent_gemma', found 'gemma'"),
        ({"model_type": NOT_A_KEY}, "found none"),
        ({"hidden_size": 0}, "hidden_size must be a positive 32-bit integer, found 0"),
        ({"hidden_size": True}, "found True"),
        ({"hidden_size": 10**400}, "hidden_size must be a positive 32-bit integer"),
        ({"hidden_size": 2561, "head_dim": NOT_A_KEY}, "num_heads (10) must divide width (2561)"),
        ({"lru_width": 2561}, "gate_blocks (10) must divide lru_width (2561)"),
        ({"intermediate_size": 1}, "mlp_width must be a positive integer"),
        ({"num_key_value_heads": 4}, "num_kv_heads (4) must divide num_heads (10)"),
        ({"head_dim": 0}, "head_dim must be a positive 32-bit integer, found 0"),
        ({"sliding_window": 9}, "sliding_window must be attention_window_size (2048), found 9"),
        ({"hidden_activation": "relu"}, "hidden_activation must be one of gelu_pytorch_tanh, gelu"),
        ({"attention_bias": 0}, "attention_bias must be true or false, found 0"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings must be true or false, found None"),
        ({"embeddings_scale_by_sqrt_dim": False}, "transformers scales embeddings all the same"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be a positive, finite number, found 0.0"),
        ({"logits_soft_cap": {"__float__": "Infinity"}}, "logits_soft_cap must be"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive, finite number"),
        ({"block_types": []}, "block_types must be one or more of recurrent, attention, found []"),
        ({"block_types": ["recurrent", "full"]}, "found ['recurrent', 'full']"),
        ({"block_types": [["attention"]]}, "found [['attention']]"),
        ({"_block_types": ["attention"]}, "block_types and _block_types differ"),
        ({"num_hidden_layers": 301}, "at most 100 times the 3 block_types"),
        ({"rope_theta": None}, "rope_theta must be a positive, finite number, found None"),
        ({"rope_theta": 1.0}, "rope_base must be a finite number above 1"),
        ({"partial_rotary_factor": None}, "partial_rotary_factor must be"),
        (
            {"partial_rotary_factor": 1.5},
            "rope_fraction must be a finite number above 0, at most 1",
        ),
        ({"rope_parameters": {"partial_rotary_factor": None}}, "partial_rotary_factor must be"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_type must be 'default', found 'linear'",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_type must be 'default', found 'yarn'",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e6}}},
            "must be one flat object",
        ),
        ({"rope_parameters": [1]}, "rope_parameters must be one flat object, found [1]"),
    ],
)
def test_values_that_these_models_cannot_have(changes, fragment):
    message = refusal(read, **changes)
    assert message.startswith("here: ")
    assert fragment in message


def test_all_problems_are_listed_together():
    message = refusal(read, attention_bias="x", vocab_size=-1, rope_theta="x", block_types=3)
    for key in ("attention_bias", "vocab_size", "rope_theta", "block_types"):
        assert key in message


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"block_pattern": HAWK}, "block_pattern=('recurrent',): its cache needs"),
        ({"num_layers": 2}, "its cache needs an attention layer"),
        (
            {"block_pattern": ("local_attention", "global_attention")},
            "its attention is always local",
        ),
        ({"num_layers": 301}, "num_layers=301"),
    ],
)
def test_what_transformers_cannot_express(changes, fragment):
    config = dataclasses.replace(AS_PUBLISHED, **changes)
    message = refusal(to_huggingface, config)
    assert message.startswith("hf cannot hold this model")
    assert message.endswith("griffin-orbax") or "Formats that can: griffin" in message
    assert fragment in message


def test_what_would_not_be_read_again_is_not_written():
    for field, value in (("visible_keys", 1 << 40), ("rope_base", 1e31), ("norm_eps", 1e31)):
        config = dataclasses.replace(AS_PUBLISHED, **{field: value})
        assert "the config.json of hf: " in refusal(to_huggingface, config)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (None, "expected the config of a Hugging Face model, but the folder lacks it"),
        (b"", "config.json: expected a JSON object, found no JSON, at character 0"),
        (b"{", "found no JSON, at character 1"),
        (b"[]", "found a JSON list"),
        (b"\xff{}", "not UTF-8"),
        (b'{"a": 1, "a": 1}', "the key 'a' twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model_type": ' + b"[" * 300 + b"]" * 300 + b"}", "expected model_type"),
        (b"{}", "expected model_type 'recurrent_gemma', found none"),
    ],
)
def test_unreadable_configs(tmp_path, content, fragment):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    message = refusal(read_config, tmp_path)
    assert str(tmp_path / "config.json") in message
    assert fragment in message


# Token ids.


def test_token_ids(tmp_path):
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"

    def ids():
        written = token_ids(tmp_path)
        return generation_eos_ids(tmp_path), written["bos_token_id"], written["pad_token_id"]

    config.write_text('{"model_type": "recurrent_gemma"}')  # transformers' defaults
    assert ids() == ((1,), 2, 0)
    for other in ("{}", '{"model_type": "griffin"}', None):  # the defaults belong to RecurrentGemma
        config.write_text(other) if other else config.unlink()
        assert token_ids(tmp_path) == {} and generation_eos_ids(tmp_path) == ()
    config.write_text('{"eos_token_id": null, "bos_token_id": null, "pad_token_id": null}')
    assert ids() == ((), None, None)
    config.write_text('{"eos_token_id": [5, 6], "bos_token_id": 7, "pad_token_id": 8}')
    assert ids() == ((5, 6), 7, 8)
    generation.write_text('{"eos_token_id": [1, 107], "bos_token_id": null}')
    assert ids() == ((1, 107), 7, 8)
    generation.write_text('{"eos_token_id": 3, "bos_token_id": 4, "pad_token_id": 0}')
    assert ids() == ((3,), 4, 0)
    for bad in ("-1", '"1"', "[1, 2.0]", "true", "{}"):
        generation.write_text(f'{{"eos_token_id": {bad}}}')
        message = refusal(generation_eos_ids, tmp_path)
        assert f"{generation}: eos_token_id must be one or more token ids" in message
    generation.write_text("[]")
    assert "found a JSON list" in refusal(generation_eos_ids, tmp_path)

"""Fine-tunes that transformers saves keep their chat templates, added tokens, resized embeddings
and mixed dtypes in every format."""

import shutil
import warnings

import numpy as np
import pytest
import torch
from peers import recurrent_gemma
from slow import fast
from transformers import AutoTokenizer

from griffin_eval import convert, verify
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.huggingface import generation_eos_ids
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.overrides import Overrides
from griffin_eval.converters.plan import make_plan, parse_dtypes
from griffin_eval.errors import CheckpointError
from griffin_eval.model_torch.loading import load
from griffin_eval.runners.load import load_runner
from griffin_eval.text.load import load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
ADDED = ["<start_of_turn>", "<end_of_turn>", "<tool>"]
TALK = [{"role": "user", "content": " What is a <tool>? "}, {"role": "model", "content": "One."}]


@pytest.fixture(scope="module")
def tuned(checkpoint, tmp_path_factory):
    """Write a fine-tune with added tokens, a chat template, and embedding rows for the tokens."""
    folder = tmp_path_factory.mktemp("tuned")
    model = recurrent_gemma().from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(ADDED[2:])
    tokenizer.add_special_tokens({"additional_special_tokens": ADDED[:2]})
    tokenizer.chat_template = TEMPLATE
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    model.generation_config.eos_token_id = [
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<end_of_turn>"),
    ]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def to(target, source, destination):
    convert(source, destination, to=target)
    return destination


@pytest.mark.parametrize("target", fast(["hf", "griffin-orbax"], FORMATS))
def test_chat_template_and_added_tokens(tuned, target, tmp_path):
    theirs = AutoTokenizer.from_pretrained(tuned)
    ours = load_tokenizer(to(target, tuned, tmp_path / "out"))
    for prompt in (True, False):
        text = theirs.apply_chat_template(
            TALK, tokenize=False, add_generation_prompt=prompt, continue_final_message=not prompt
        )
        assert ours.apply_chat_template(TALK, add_generation_prompt=prompt) == text
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    for token in ADDED:
        assert ours.encode(token) == [theirs.convert_tokens_to_ids(token)]
    assert theirs.get_vocab() == AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()


def test_the_new_end_of_a_text_ends_it(tuned, tmp_path):
    for folder in (tuned, to("deepmind-torch", tuned, tmp_path / "out")):
        tokenizer = load_tokenizer(folder)
        (end,) = tokenizer.encode("<end_of_turn>")
        assert {tokenizer.eos_token_id, end} == set(generation_eos_ids(folder))


@pytest.mark.parametrize("rows", fast([1031], [1024, 1000, 1088, 1031]))
def test_embeddings_of_any_size(checkpoint, tmp_path, rows):
    model = recurrent_gemma().from_pretrained(checkpoint)
    model.resize_token_embeddings(rows)
    model.save_pretrained(tmp_path / "resized")
    resized = Checkpoint(tmp_path / "resized")
    assert resized.config.vocab_size == rows
    expected = model.get_input_embeddings().weight.detach().numpy()
    assert np.array_equal(resized.numpy("model.embed_tokens.weight"), expected)
    for target in FORMATS:
        out = to(target, tmp_path / "resized", tmp_path / target)
        assert verify(out, resized).same
        (out / "config.json").unlink()
        if target.startswith("deepmind"):  # DeepMind's shapes give the size of the vocabulary
            known = Overrides(visible_keys=128, embedding_scale=True, logits_soft_cap=30.0)
            assert Checkpoint(out, known).config.vocab_size == rows


@pytest.mark.parametrize("target", fast(["hf"], FORMATS))
def test_chat_templates_with_names(tuned, target, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    tokenizer.chat_template = {"default": TEMPLATE, "tools": "{{ messages | length }} tools"}
    source = tmp_path / "source"
    shutil.copytree(tuned, source)
    tokenizer.save_pretrained(source)
    again = AutoTokenizer.from_pretrained(to(target, source, tmp_path / "out"))
    assert again.chat_template == tokenizer.chat_template
    assert load_tokenizer(tmp_path / "out").apply_chat_template(
        TALK, add_generation_prompt=False
    ) == load_tokenizer(tuned).apply_chat_template(TALK, add_generation_prompt=False)


def mixed(checkpoint, folder, *, apart=()):
    """Write matrices in bfloat16, norms, biases and Λ in float32, and ``apart`` in float16."""
    model = recurrent_gemma().from_pretrained(checkpoint)
    for name, parameter in model.named_parameters():
        dtype = torch.bfloat16 if parameter.ndim > 1 else torch.float32
        parameter.data = parameter.data.to(torch.float16 if name.endswith(apart) else dtype)
    model.save_pretrained(folder)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("target", fast(["hf", "deepmind-flax"], FORMATS))
def test_every_tensor_keeps_its_dtype(checkpoint, tmp_path, target):
    saved = mixed(checkpoint, tmp_path / "mixed")
    opened = Checkpoint(to(target, tmp_path / "mixed", tmp_path / "out"))
    assert opened.dtypes.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(opened.torch(name), value) and opened.torch(name).dtype == value.dtype


def test_mixed_dtypes_are_loaded_as_transformers_loads_them(checkpoint, tmp_path):
    mixed(checkpoint, tmp_path / "mixed")
    model = recurrent_gemma().from_pretrained(tmp_path / "mixed", dtype=torch.float32)
    theirs = dict(model.named_parameters())
    for name, value in load(Checkpoint(tmp_path / "mixed"), torch.float32).named_parameters():
        assert torch.equal(value, theirs[name])
    assert load_runner(tmp_path / "mixed", framework="torch").dtype == "bfloat16"


def test_two_dtypes_in_one_tensor_are_asked_for(checkpoint, tmp_path):
    mixed(checkpoint, tmp_path / "mixed", apart=("layers.0.mlp_block.up_proj.weight",))
    opened = Checkpoint(tmp_path / "mixed")
    assert verify(Checkpoint(to("hf", tmp_path / "mixed", tmp_path / "hf")), opened).same
    with pytest.raises(CheckpointError, match="in one tensor, but they are bfloat16 and float16"):
        make_plan(opened, FORMATS["deepmind-flax"])
    plan = make_plan(opened, FORMATS["deepmind-flax"], dtypes=parse_dtypes("float32"))
    convert_checkpoint(plan, tmp_path / "out")
    assert set(Checkpoint(tmp_path / "out").dtypes.values()) == {"float32"}


def test_an_untied_fine_tune(checkpoint, tmp_path):
    """We read an untied output head of transformers, and transformers reads ours."""
    model = recurrent_gemma().from_pretrained(checkpoint, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1).add_(0.01)
    model.save_pretrained(tmp_path / "untied")
    opened = Checkpoint(tmp_path / "untied")
    assert not opened.config.tie_embeddings
    again = Checkpoint(to("griffin-orbax", tmp_path / "untied", tmp_path / "orbax"))
    assert verify(again, opened).same
    back = to("hf", tmp_path / "orbax", tmp_path / "back")
    loaded = recurrent_gemma().from_pretrained(back)
    for name, value in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), value), name
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    (tmp_path / "untied" / "model.safetensors").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recurrent_gemma().from_pretrained(checkpoint).save_pretrained(tmp_path / "tied")
    (tmp_path / "tied" / "config.json").write_bytes((back / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"1 missing \('lm_head.weight'\)"):
        Checkpoint(tmp_path / "tied")

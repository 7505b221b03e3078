"""Both kinds of tokenizers, on files made here from text that ships with Python."""

import json
import shutil
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from peers import recurrent_gemma
from safetensors.numpy import save_file
from sentencepiece_models import SPECIAL, TEXT, TURNS, train_sentencepiece
from slow import examples, fast, slow

from griffin_eval.config import PRESETS, GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.huggingface import to_huggingface
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.plan import make_plan
from griffin_eval.errors import ArgumentError, CheckpointError, MissingExtraError
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs
from griffin_eval.text.load import load_tokenizer
from griffin_eval.text.tokenizer import (
    check_vocabulary,
    default_add_bos,
    encode_with_bos,
    with_one_bos,
)

sentencepiece = pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")

# From version 5.24 on, transformers converts tokenizer.model differently.
CONVERTS_OTHERWISE = Version(transformers.__version__) >= Version("5.24")

GRIFFIN, RECURRENTGEMMA = PRESETS["griffin-100m"], PRESETS["recurrentgemma-2b"]
NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}

# RecurrentGemma's own template: BOS, turns, "model" for the assistant, no system role.
TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{% for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}
"""
CHAT = [{"role": "user", "content": " What is <b>yield</b>? "}]

# Arbitrary text, and the places where tokenizers usually part: special tokens, spaces, lines.
pieces = st.sampled_from(
    [
        *SPECIAL,
        *TURNS,
        "<mask>",
        "<0x0A>",
        "<bos",
        " ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "▁",
        "12",
        "def x",
    ]
)
texts = st.lists(st.text() | pieces, max_size=8).map("".join)
many = settings(max_examples=examples(60))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Return a folder with only tokenizer.model and a chat template, and sentencepiece's model."""
    folder = tmp_path_factory.mktemp("gemma")
    raw = train_sentencepiece(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder, raw


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """Return a folder that transformers saved, with byte-level BPE that puts <bos> in front, and
    transformers' tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=[*SPECIAL, *TURNS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    folder = tmp_path_factory.mktemp("bpe")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMES)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=["gemma", "bpe"])
def either(request):
    """Load each kind of tokenizer."""
    return load_tokenizer(request.getfixturevalue(request.param)[0])


# A folder with only tokenizer.model


def test_sentencepiece_ids_on_real_text(gemma):
    folder, raw = gemma
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(TEXT) == raw.encode(TEXT)
    assert tokenizer.decode(raw.encode(TEXT), skip_special_tokens=True) == TEXT


@many
@given(texts.filter(lambda text: not any(piece in text for piece in SPECIAL)))
def test_sentencepiece_ids_on_any_text(gemma, text):
    folder, raw = gemma
    assert load_tokenizer_once(folder).encode(text) == raw.encode(text)


@many
@given(texts)
def test_special_tokens_in_text_are_read_as_transformers_reads_them(gemma, text):
    # For Gemma's settings transformers' conversion is right and can be the reference, except for a
    # literal ▁, which it looks up before it replaces spaces by ▁.
    text = text.replace("▁", "_")
    if CONVERTS_OTHERWISE:  # transformers reads <0x41> in a text as the byte
        text = text.replace("<0x", "<0_")
    folder, _ = gemma
    tokenizer = load_tokenizer_once(folder)
    expected = auto_tokenizer_once(folder).encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == expected


OTHER_IDS = [
    {"add_dummy_prefix": True},
    {"remove_extra_whitespaces": True},
    {"model_type": "unigram"},
]
one_quickly = pytest.mark.parametrize(
    "changes", fast(OTHER_IDS[:1], OTHER_IDS), ids=lambda changes: next(iter(changes))
)


@one_quickly
def test_auto_tokenizer_gives_other_ids_where_ours_are_sentencepieces(tmp_path, changes):
    raw = train_sentencepiece(tmp_path, **changes)
    (tmp_path / "config.json").write_text('{"model_type": "recurrent_gemma"}')
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = raw.encode(TEXT)
    assert auto.encode(TEXT, add_special_tokens=False) != expected
    assert load_tokenizer(tmp_path).encode(TEXT) == expected


def test_sentencepiece_shows_and_hides_special_tokens(gemma):
    tokenizer = load_tokenizer(gemma[0])
    text = "<bos><start_of_turn>user\nx <unk><end_of_turn>\n<eos>"
    ids = tokenizer.encode(text)
    assert ids[0] == 2 and ids[-1] == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nx \n"


# A folder with tokenizer.json


@many
@given(texts)
def test_json_ids_are_transformers(bpe, text):
    folder, auto = bpe
    assert load_tokenizer_once(folder).encode(text) == auto.encode(text, add_special_tokens=False)


def test_json_ids_are_the_files_even_where_auto_tokenizer_rebuilds_it(bpe, tmp_path):
    source, right = bpe
    shutil.copy(source / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "recurrent_gemma"}')
    config = {"tokenizer_class": "GemmaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = right.encode(TEXT, add_special_tokens=False)
    assert auto.encode(TEXT, add_special_tokens=False) != expected and len(auto) == 801

    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(TEXT) == expected
    assert tokenizer.vocab_size == 800
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)
    assert tokenizer.adds_bos


def test_truncation_and_padding_of_the_file_are_off(bpe, tmp_path):
    from tokenizers import Tokenizer

    source, right = bpe
    changed = Tokenizer.from_file(str(source / "tokenizer.json"))
    changed.enable_truncation(8)
    changed.enable_padding(length=20, pad_token="<pad>")
    changed.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(source / "tokenizer_config.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a") == right.encode("a", add_special_tokens=False)
    assert tokenizer.encode(TEXT) == right.encode(TEXT, add_special_tokens=False)


# Both kinds


@many
@given(st.lists(texts, max_size=4))
def test_a_batch_is_its_texts(either, some):
    assert either.encode_batch(some) == [either.encode(text) for text in some]


@many
@given(text=texts)
def test_text_survives(either, text):
    assert either.decode(either.encode(text), skip_special_tokens=False) == text.replace(
        "▁", " " if "gemma" in either.name else "▁"
    )


def test_what_a_tokenizer_says_of_itself(either):
    assert (either.bos_token, either.bos_token_id) == ("<bos>", 2)
    assert (either.eos_token, either.eos_token_id) == ("<eos>", 1)
    assert (either.pad_token, either.pad_token_id) == ("<pad>", 0)
    assert either.adds_bos
    assert either.encode("") == []
    known, more = range(either.vocab_size), range(either.vocab_size + 5)
    for skip in (False, True):  # a model may have more rows, and generate their ids
        assert either.decode(more, skip_special_tokens=skip) == either.decode(
            known, skip_special_tokens=skip
        )


def test_the_name_follows_the_content(gemma, tmp_path):
    folder = tmp_path / gemma[0].name
    shutil.copytree(gemma[0], folder)
    name = load_tokenizer(folder).name
    assert name == load_tokenizer(gemma[0]).name
    assert "/" not in name
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    assert load_tokenizer(folder).name != name


# BOS


@pytest.mark.parametrize("text", ["a b", "<bos>a b", "<bos><bos>a b"])
def test_exactly_one_bos(either, text):
    ids = encode_with_bos(either, text, True)
    assert ids == [2, *either.encode("a b")]
    assert ids == with_one_bos(either, either.encode(text))
    assert encode_with_bos(either, text, False) == either.encode(text)


def test_spans_of_bytes_and_control_symbols(gemma):
    tokenizer = load_tokenizer(gemma[0])
    text = "a <bos>東🙂<eos>\n\nb"
    spans, tokens = tokenizer.spans(text), tokenizer.encode(text)
    assert len(spans) == len(tokens) and spans.dtype == "int64"
    assert (spans[1:, 0] >= spans[:-1, 1]).all() and spans[0, 0] == 0 and spans[-1, 1] == len(text)
    spelt = [text[begin:end] for begin, end in spans]
    assert spelt[tokens.index(tokenizer.bos_token_id)] == "<bos>"
    assert spelt[tokens.index(tokenizer.eos_token_id)] == "<eos>"
    begin = spelt.index("東")
    assert spelt[begin - 2 : begin + 5] == ["", "", "東", "", "", "", "🙂"]  # at their last bytes
    assert tokenizer.spans("").shape == (0, 2)


@pytest.mark.parametrize("kind", ["gemma", "bpe"])
def test_templates_reach_nothing_and_their_failures_are_one_sentence(kind, request, tmp_path):
    ran = tmp_path / "ran"
    shutil.copytree(request.getfixturevalue(kind)[0], folder := tmp_path / "model")
    for template in (
        f"{{{{ cycler.__init__.__globals__.os.mkdir('{ran}') }}}}",
        f"{{{{ lipsum.__globals__['os'].mkdir('{ran}') }}}}",
        f"{{{{ ''.__class__.__mro__[1].__subclasses__()[0].mkdir('{ran}') }}}}",
        "{{ messages.append(1) }}",
        "{% include '/etc/hostname' %}",
        "{{ 1 // 0 }}",
        "{{ 'a' + 1 }}",
        "{{ range(10**9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a'",
    ):
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(CheckpointError, match="the chat template refuses the messages"):
            load_tokenizer(folder).apply_chat_template(CHAT, add_generation_prompt=True)
    assert not ran.exists()


def test_default_add_bos(either, tmp_path, caplog):
    assert default_add_bos(either, RECURRENTGEMMA)
    assert default_add_bos(either, GRIFFIN)
    train_sentencepiece(tmp_path, bos_id=-1)
    without = load_tokenizer(tmp_path)
    assert without.bos_token_id is None
    assert not default_add_bos(without, GRIFFIN)
    assert not caplog.records
    assert not default_add_bos(without, RECURRENTGEMMA)
    assert "has no BOS token" in caplog.text
    with pytest.raises(ArgumentError, match="has no BOS"):
        encode_with_bos(without, "a", True)


def test_default_add_bos_of_other_models_follows_the_files(gemma, tmp_path):
    shutil.copy(gemma[0] / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    tokenizer = load_tokenizer(tmp_path)
    assert not default_add_bos(tokenizer, GRIFFIN)
    assert default_add_bos(tokenizer, RECURRENTGEMMA)


# Chat templates


CHATS = [
    (CHAT, True),
    ([*CHAT, {"role": "assistant", "content": "It"}], False),
    ([*CHAT, {"role": "assistant", "content": "It is."}, *CHAT], True),
]


@pytest.mark.parametrize("messages, generate", CHATS)
def test_chat_templates_render_as_in_transformers(either, bpe, messages, generate):
    expected = bpe[1].apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=generate,
        continue_final_message=not generate,
    )
    assert either.apply_chat_template(messages, add_generation_prompt=generate) == expected


def test_a_chat_prompt_as_text(either):
    assert either.apply_chat_template(CHAT, add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nWhat is <b>yield</b>?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_refused_system_message_is_left_out(either, caplog):
    system = {"role": "system", "content": "Be brief."}
    prompt = either.apply_chat_template([system, *CHAT], add_generation_prompt=True)
    assert prompt == either.apply_chat_template(CHAT, add_generation_prompt=True)
    assert "System role not supported" in caplog.text
    with pytest.raises(CheckpointError, match="refuses the messages: System role not supported"):
        either.apply_chat_template([system], add_generation_prompt=True)


@pytest.mark.parametrize(
    "template", ["{{ bos_token }}x", [{"name": "default", "template": "{{ bos_token }}x"}]]
)
def test_a_template_in_the_config(gemma, tmp_path, template):
    shutil.copy(gemma[0] / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template == "{{ bos_token }}x"
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True) == "<bos>x"


# Errors


def test_vocabulary_larger_than_the_models(either):
    check_vocabulary(either, either.vocab_size)
    check_vocabulary(either, either.vocab_size + 128)
    with pytest.raises(CheckpointError) as error:
        check_vocabulary(either, 700)
    assert f"ids up to {either.vocab_size - 1}" in str(error.value)
    assert "only 700 entries" in str(error.value) and "tokenizer=" in str(error.value)


@pytest.mark.parametrize("kind", ["gemma", "bpe"])
def test_a_damaged_config(request, tmp_path, kind):
    source, _ = request.getfixturevalue(kind)
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_config.json: expected a JSON object"):
        load_tokenizer(tmp_path)


def test_code_in_the_folder_is_neither_run_nor_asked_about(bpe, tmp_path):
    shutil.copy(bpe[0] / "tokenizer.json", tmp_path)
    config = {"auto_map": {"AutoTokenizer": ["a.B", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="custom code") as refused:
        load_tokenizer(tmp_path)
    said = str(refused.value)
    assert "remove auto_map to read tokenizer.json without it" in said
    assert "download" not in said
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path).encode("a") == load_tokenizer(bpe[0]).encode("a")


@pytest.mark.parametrize(
    "library, kind", [("transformers", "bpe"), ("sentencepiece", "gemma")], ids=str
)
def test_a_missing_library(request, monkeypatch, library, kind):
    folder, _ = request.getfixturevalue(kind)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        MissingExtraError, match=rf"{library} is not installed.*griffin-eval\[torch"
    ):
        load_tokenizer(folder)


# Files, subfolders and the hub


def test_a_file_or_a_subfolder(gemma, tmp_path):
    folder, raw = gemma
    shutil.copytree(folder, tmp_path / "model" / "text")
    by_file = load_tokenizer(folder / "tokenizer.model")
    by_subfolder = load_tokenizer(tmp_path / "model", subfolder="text")
    assert by_file.encode(TEXT) == by_subfolder.encode(TEXT) == raw.encode(TEXT)


def test_a_hub_id(gemma, monkeypatch):
    asked = {}

    def snapshot_download(repository, **arguments):
        asked.update(arguments, repository=repository)
        return str(gemma[0])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    tokenizer = load_tokenizer("some/model", revision="v2")
    assert tokenizer.name.startswith("some/model@")
    assert (asked["repository"], asked["revision"]) == ("some/model", "v2")
    assert "tokenizer.model" in asked["allow_patterns"]
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])


def test_what_is_no_tokenizer_is_named(gemma, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for source, arguments, said in (
        ("some/model", {}, "some/model.*could not be downloaded.*tokenizer="),
        ("./not/here", {}, "no such folder: './not/here'"),
        (gemma[0], {"revision": "v2"}, "revision='v2' applies to a hub id"),
        (tmp_path, {}, f"{tmp_path}.*tokenizer.json or tokenizer.model.*tokenizer="),
    ):
        with pytest.raises(CheckpointError, match=said):
            load_tokenizer(source, **arguments)
    for file in ("tokenizer.model", "tokenizer.json"):
        for content in ("", "{", "{}", "[]"):
            (tmp_path / file).write_text(content)
            with pytest.raises(CheckpointError, match=f"{file} cannot be read") as error:
                load_tokenizer(tmp_path)
            assert "\n" not in str(error.value)


# tokenizer.json made from tokenizer.model


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """Write a tiny model in Hugging Face's format with the tokenizers' vocabulary size."""
    config = GriffinConfig(
        vocab_size=1200,
        width=8,
        mlp_width=6,
        num_heads=2,
        num_layers=2,
        lru_width=8,
        gate_blocks=2,
        block_pattern=("recurrent", "local_attention"),
        visible_keys=8,
    )
    folder = tmp_path_factory.mktemp("model")
    values = {spec.name: initial_value(spec, 0) for spec in param_specs(config).values()}
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_huggingface(config)))
    return folder


def converted(source, destination, target):
    convert_checkpoint(make_plan(Checkpoint(source), FORMATS[target]), destination)
    return destination


@pytest.mark.parametrize(
    "changes",
    [{}, slow({"byte_fallback": False}), slow({"normalization_rule_name": "nmt_nfkc"})],
)
def test_a_json_with_the_same_ids_is_made(model_file, tmp_path, changes):
    if CONVERTS_OTHERWISE and "normalization_rule_name" in changes:
        pytest.skip("this transformers normalises otherwise, and no tokenizer.json is made")
    source = shutil.copytree(model_file, tmp_path / "source")
    raw = train_sentencepiece(source, **changes)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"tokenizer_class": "GemmaTokenizer", "model_max_length": 77}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    out = converted(source, tmp_path / "out", "hf")
    auto = transformers.AutoTokenizer.from_pretrained(out)
    assert auto.encode(TEXT, add_special_tokens=False) == raw.encode(TEXT)
    assert auto.encode("a")[0] == auto.bos_token_id == 2 and auto.encode("a").count(2) == 1
    assert (auto.eos_token_id, auto.pad_token_id, auto.model_max_length) == (1, 0, 77)
    assert len(auto) == raw.get_piece_size()
    again = load_tokenizer(out)
    assert again.encode(TEXT) == raw.encode(TEXT) and again.adds_bos
    assert auto.apply_chat_template(CHAT, tokenize=False).startswith("<bos><start_of_turn>user\n")


@one_quickly
def test_no_json_is_made_where_ids_would_differ(model_file, tmp_path, changes, caplog):
    source = shutil.copytree(model_file, tmp_path / "source")
    raw = train_sentencepiece(source, **changes)
    out = converted(source, tmp_path / "out", "hf")
    if CONVERTS_OTHERWISE and "model_type" not in changes:  # transformers knows these
        auto = transformers.AutoTokenizer.from_pretrained(out)
        assert auto.encode(TEXT, add_special_tokens=False) == raw.encode(TEXT)
        return
    assert not (out / "tokenizer.json").exists() and not (out / "tokenizer_config.json").exists()
    assert "tokenizer.model goes without a tokenizer.json" in caplog.text
    assert "gives other ids" in caplog.text
    assert load_tokenizer(out).encode(TEXT) == raw.encode(TEXT)


def test_a_json_without_bos_where_the_files_ask_for_none(gemma, model_file, tmp_path):
    source = shutil.copytree(model_file, tmp_path / "source")
    shutil.copy(gemma[0] / "tokenizer.model", source)
    (source / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    out = converted(source, tmp_path / "out", "hf")
    auto = transformers.AutoTokenizer.from_pretrained(out)
    assert auto.encode("a") == gemma[1].encode("a")
    assert not load_tokenizer(out).adds_bos


def test_a_model_that_cannot_be_read_is_copied_alone(
    gemma, model_file, tmp_path, caplog, monkeypatch
):
    source = shutil.copytree(model_file, tmp_path / "source")
    shutil.copy(gemma[0] / "tokenizer.model", source)
    for library in ("transformers", "sentencepiece"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            out = converted(source, tmp_path / library, "griffin")
        assert (out / "tokenizer.model").is_file() and not (out / "tokenizer.json").exists()
        assert f"{library} is not installed" in caplog.text
    (source / "tokenizer.model").write_text("no model")
    out = converted(source, tmp_path / "out", "hf")
    assert not (out / "tokenizer.json").exists()
    assert "goes without a tokenizer.json" in caplog.text


def test_transformers_loads_what_was_converted_from_another_format(gemma, model_file, tmp_path):
    model_class = recurrent_gemma()
    source = shutil.copytree(model_file, tmp_path / "source")
    shutil.copytree(gemma[0], source, dirs_exist_ok=True)
    generation = {"eos_token_id": [1, 7], "bos_token_id": 2, "max_length": 99}
    (source / "generation_config.json").write_text(json.dumps(generation))
    there = converted(source, tmp_path / "there", "deepmind-torch")
    out = converted(there, tmp_path / "out", "hf")

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == gemma[1].encode(TEXT)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nWhat is <b>yield</b>?<end_of_turn>\n<start_of_turn>model\n"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(model) is model_class
    assert model.generation_config.eos_token_id == [1, 7]
    assert (model.generation_config.bos_token_id, model.generation_config.max_length) == (2, 99)
    original = transformers.AutoModelForCausalLM.from_pretrained(model_file)
    for key, value in original.state_dict().items():
        assert value.equal(model.state_dict()[key]), key
    assert model.config.attention_window_size == original.config.attention_window_size == 8


# hypothesis runs a test many times in one fixture: load once.
_loaded = {}


def load_tokenizer_once(folder):
    if folder not in _loaded:
        _loaded[folder] = load_tokenizer(folder)
    return _loaded[folder]


def auto_tokenizer_once(folder):
    key = ("auto", folder)
    if key not in _loaded:
        _loaded[key] = transformers.AutoTokenizer.from_pretrained(folder)
    return _loaded[key]

"""The ids of BOS, EOS and padding for models without a config.json of RecurrentGemma."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_checkpoints import CONFIG, write_all
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from griffin_eval.api import open_checkpoint
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.overrides import Overrides
from griffin_eval.converters.plan import make_plan
from griffin_eval.evaluator import Evaluator
from griffin_eval.lm.model import GriffinLM

KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
GIVEN = {
    "visible_keys": CONFIG.visible_keys,
    "embedding_scale": CONFIG.embedding_scale,
    "logits_soft_cap": CONFIG.logits_soft_cap,
}


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    write_all(folder)
    return folder


@pytest.fixture
def bare(formats, tmp_path):
    """Copy a .pt file without a config."""
    folder = tmp_path / "bare"
    folder.mkdir()
    return Path(shutil.copy(formats / "deepmind-torch" / "model.pt", folder))


def write_tokenizer(folder: Path, end: int) -> None:
    """Write a tokenizer of letters whose only special token is </s>, with the id ``end``."""
    vocabulary = {letter: i for i, letter in enumerate("abcdefghij")} | {"</s>": end}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def converted(source: Path, destination: Path, target: str = "hf") -> dict[str, object]:
    """Convert a source and return the token ids in the output's config.json."""
    given = {} if source.is_dir() else GIVEN
    plan = make_plan(Checkpoint(source, Overrides(**given)), FORMATS[target])
    convert_checkpoint(plan, destination)
    raw = json.loads((destination / "config.json").read_text())
    return {key: raw[key] for key in KEYS}


@pytest.mark.parametrize("target", ["hf", "griffin"])
def test_they_are_those_of_the_tokenizer_beside_it(bare, target, tmp_path):
    write_tokenizer(bare.parent, 10)
    expected = {"bos_token_id": None, "eos_token_id": 10, "pad_token_id": None}
    assert converted(bare, tmp_path / "out", target) == expected
    if target == "hf":
        generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
        assert generation == {"eos_token_id": 10}
        config = AutoConfig.from_pretrained(tmp_path / "out")
        assert {key: getattr(config, key) for key in KEYS} == expected
    else:
        assert converted(tmp_path / "out", tmp_path / "again") == expected


def test_there_are_none_without_a_tokenizer(bare, tmp_path, caplog):
    assert set(converted(bare, tmp_path / "out").values()) == {None}
    write_tokenizer(bare.parent, 300)  # an id beyond the embedding's rows
    assert set(converted(bare, tmp_path / "other").values()) == {None}
    assert not caplog.messages
    (bare.parent / "tokenizer.json").write_text("{}")
    assert set(converted(bare, tmp_path / "damaged").values()) == {None}
    assert "the ids of BOS, EOS and padding stay unknown" in caplog.text


def test_gemmas_are_those_of_its_own_config_that_leaves_them_out(formats, tmp_path):
    folder = shutil.copytree(formats / "source", tmp_path / "source")
    write_tokenizer(folder, 10)
    assert list(converted(folder, tmp_path / "out").values()) == [2, 1, 0]


def test_texts_end_where_the_tokenizer_ends_them(bare):
    write_tokenizer(bare.parent, 10)
    evaluator = Evaluator(open_checkpoint(bare, **GIVEN), framework="torch", device="cpu")
    assert evaluator._model.eos_ids == {10}
    lm = GriffinLM(str(bare), framework="torch", **GIVEN)
    assert lm.opened.eos_ids == {10}

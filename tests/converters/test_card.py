"""The model card and generation_config.json beside weights that transformers loads."""

import json
import shlex

import pytest
from huggingface_hub import ModelCard
from peers import recurrent_gemma
from transformers import GenerationConfig
from typer.testing import CliRunner

from griffin_eval import convert, verify
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.states.weights_hash import weights_sha256

KNOWN = ["--visible-keys", "128", "--embedding-scale", "--logits-soft-cap", "30.0"]


def run(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output


def rows(folder):
    """Return the table of a card as a dict from the first column to the second."""
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["recurrent_gemma", "griffin"],
    }
    assert "[ai.google.dev/gemma/terms]" in card.text
    lines = [line for line in card.text.splitlines() if line.startswith("| ")]
    return {key.strip(): value.strip() for key, value in (x.split("|")[1:3] for x in lines[1:])}


def test_a_card_says_what_was_done_and_how_to_do_it_again(checkpoint, tmp_path):
    run("convert", checkpoint, tmp_path / "a flax", "--to", "deepmind-flax")
    (tmp_path / "a flax" / "tokenizer.json").unlink()  # its vocabulary exceeds --vocab-size
    options = ["--dtype", "bfloat16", "--vocab-size", "500", *KNOWN]
    run("convert", tmp_path / "a flax", tmp_path / "my model", "--to", "hf", *options)
    said = rows(tmp_path / "my model")
    assert said["made from"] == f"`{tmp_path}/a flax` (deepmind-flax, OCDBT, zarr)"
    assert "the first 500 rows of the vocabulary alone" in said["changes"]
    assert "cast from float32 to bfloat16" in said["changes"]
    assert said["SHA-256"].split("`")[1] == weights_sha256(Checkpoint(tmp_path / "my model"))
    command = shlex.split(said["made by"].split("`")[1])
    assert command[:2] == ["griffin-eval", "convert"]
    again = [str(tmp_path / "again") if w == str(tmp_path / "my model") else w for w in command]
    run(*again[1:])
    assert verify(tmp_path / "again", tmp_path / "my model").same
    assert rows(tmp_path / "again")["SHA-256"] == said["SHA-256"]


def test_the_card_of_the_source_is_kept(checkpoint, tmp_path):
    source = tmp_path / "source"
    run("convert", checkpoint, source, "--to", "hf")
    assert not (source / "README_source.md").exists()
    assert "The source had no card" in (source / "README.md").read_text()
    (source / "README.md").write_bytes(b"# Mine\xff")
    run("convert", source, tmp_path / "one", "--to", "hf")
    run("convert", tmp_path / "one", tmp_path / "two", "--to", "hf")
    for folder in ("one", "two"):
        assert (tmp_path / folder / "README_source.md").read_bytes() == b"# Mine\xff"
        assert "(README_source.md)" in (tmp_path / folder / "README.md").read_text()
    run("convert", source, tmp_path / "other", "--to", "griffin")
    assert not list((tmp_path / "other").glob("README*"))


def test_names_stay_text_in_a_card(checkpoint, tmp_path):
    source = tmp_path / "`x` | <b>\x1b[31m\n# y"
    convert(checkpoint, source, to="griffin")
    convert(source, tmp_path / "out", to="hf")
    said = rows(tmp_path / "out")["made from"]
    assert "\x1b" not in said and said.count("`") == 2 and "# y" in said
    assert rows(tmp_path / "out")["made by"].startswith("griffin-eval ")


@pytest.mark.parametrize("eos", [None, [1, 7]])
def test_generation_ends_as_it_did_at_the_source(checkpoint, tmp_path, eos):
    source = tmp_path / "source"
    run("convert", checkpoint, source, "--to", "griffin")
    (source / "generation_config.json").unlink(missing_ok=True)
    expected = json.loads((source / "config.json").read_text())
    if eos is not None:
        theirs = GenerationConfig(eos_token_id=eos, pad_token_id=0, max_new_tokens=9)
        theirs.save_pretrained(source)
        expected = theirs.to_dict()
    run("convert", source, tmp_path / "out", "--to", "hf")
    found = GenerationConfig.from_pretrained(tmp_path / "out")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(found, key) == expected.get(key), key
    assert found.max_new_tokens == (9 if eos else None)
    model = recurrent_gemma().from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == (eos or expected["eos_token_id"])

"""The checkpoints that ship: cards, sizes, and scores against the cards' numbers."""

import platform
from pathlib import Path

import pytest
from symbol_models import evaluate, points
from typer.main import get_command
from typer.testing import CliRunner

from griffin_eval.checkpoints import folder, names, scores
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError
from griffin_eval.training.recipes import MODELS, RECIPES


def test_they_are_small():
    sizes = [sum(file.stat().st_size for file in folder(name).iterdir()) for name in names()]
    assert max(sizes) < 2e6
    assert sum(sizes) < 12e6


@pytest.mark.parametrize("name", names())
def test_a_checkpoint_is_the_model_of_its_recipe_and_its_card_says_how_to_train_it(name):
    recipe, _, model = name.rpartition("_")
    checkpoint = Checkpoint(folder(name))
    assert checkpoint.config == RECIPES[recipe].config(model)
    assert not checkpoint.inspection.left_out
    card = (folder(name) / "README.md").read_text()
    (line,) = [line.strip() for line in card.splitlines() if "griffin-eval train" in line]
    train = get_command(app).commands["train"]
    given = train.make_context("train", line.split()[2:]).params
    assert (given["recipe"], given["model"]) == (recipe, model) and model in MODELS
    assert f"seed {given['seed']}, " in card


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_checkpoint_scores_what_its_card_says(name):
    said = scores(name)
    card = (folder(name) / "README.md").read_text()
    if f"Python {platform.python_version()}," not in card:  # these tasks read Python's own texts
        said = [score for score in said if not score["task"].startswith("griffin_longctx")]
    for task in {score["task"] for score in said}:
        mine = [score for score in said if score["task"] == task]
        arguments = {"pretrained": str(folder(name)), "framework": "torch", "dtype": "float32"}
        results = evaluate(
            "griffin", task, mine[0]["metadata"], model_args=arguments, batch_size=1, device="cpu"
        )
        found = points(results, task)
        for score in mine:
            # One answer in a few hundred may change with the machine's rounding.
            assert found[score["metric"]] == pytest.approx(score["value"], abs=0.021), score


def test_the_command_lists_them_and_says_where_they_are():
    def said(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["checkpoints", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    table = said()
    for name in names():
        assert name in table
        assert Path(said(name).strip()) == folder(name)
    done = CliRunner().invoke(app, ["checkpoints", "bytes_grifin"])
    assert isinstance(done.exception, ArgumentError)
    assert "did you mean 'bytes_griffin'?" in str(done.exception)
    with pytest.raises(ArgumentError, match="unknown shipped checkpoint 'x'"):
        folder("x")

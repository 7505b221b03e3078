"""Options of a run: queue files, learning rates by group, stages, and the last step."""

import dataclasses
import json
import re
import resource
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import griffin_eval
from slow import examples
from tiny_checkpoints import write_griffin
from typer.testing import CliRunner

from griffin_eval.api import convert
from griffin_eval.cli.main import app
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs
from griffin_eval.training.held_out import held_out_metrics
from griffin_eval.training.optimizer import make_optimizer, make_schedule
from griffin_eval.training.options import command, read_options, read_queue
from griffin_eval.training.recipes import RECIPES, Batch
from griffin_eval.training.run_folder import Run, prepare_folder, read_metrics
from griffin_eval.training.trainer import is_finished, train_model

ORDER = {"recipe": "selective_copy", "model": "griffin", "output": "run"}
TINY = {"length": 8, "rows": 4, "width": 16, "steps": 4, "schedule": "constant"}


def params_of(model: str) -> dict[str, np.ndarray]:
    specs = param_specs(RECIPES["selective_copy"].config(model))
    return {name: initial_value(spec, 0) + np.float32(0.5) for name, spec in specs.items()}


def changes_of(params, gradient: float, **settings) -> dict[str, np.ndarray]:
    """Return the first change of every parameter if all elements of its gradient are equal."""
    optimizer = make_optimizer(optax.constant_schedule(1e-2), **settings)
    gradients = {name: np.full_like(value, gradient) for name, value in params.items()}
    with jax.numpy_dtype_promotion("standard"):
        changes, _ = optimizer.update(gradients, optimizer.init(params), params)
    return {name: np.asarray(change) for name, change in changes.items()}


def test_weight_decay_spares_gates_biases_and_the_embedding_if_asked_to():
    params = params_of("griffin")
    changed = {n for n, change in changes_of(params, 0, decayed="linear").items() if change.any()}
    linear = {
        n for n in params if n.endswith(("proj.weight", "_x.weight", "_y.weight", "_out.weight"))
    }
    assert changed == linear
    before = {n for n, change in changes_of(params, 0).items() if change.any()}
    gates = {n for n in params if "gate_weight" in n or "gate_bias" in n}
    assert before == linear | gates | {"model.embed_tokens.weight"}


def test_recurrent_blocks_have_a_rate_of_their_own():
    params = params_of("griffin")
    changes = [changes_of(params, 1, recurrent_rate=factor) for factor in (1.0, 4.0)]
    attention = "model.layers.2.temporal_block."
    for name in params:
        in_block = ".temporal_block." in name and not name.startswith(attention)
        expected = changes[0][name] * (4.0 if in_block else 1.0)
        np.testing.assert_allclose(changes[1][name], expected, rtol=1e-6, err_msg=name)


def test_schedules_rise_and_end_as_they_say():
    recipe = dataclasses.replace(RECIPES["selective_copy"], steps=1000, learning_rate=0.5)
    for name, last in (("cosine", 0.05), ("constant", 0.5), ("falling", 0.0)):
        rate = make_schedule(dataclasses.replace(recipe, schedule=name))
        rates = np.array([rate(step) for step in range(0, 1001, 5)])
        assert rates[0] == 0 and rates.max() == pytest.approx(0.5)
        assert rates[-1] == pytest.approx(last, abs=1e-6), name
        assert name == "cosine" or (rates[15:181] == 0.5).all()
    for steps in (2, 20, 60, 76, 80, 100):
        rate = make_schedule(dataclasses.replace(recipe, schedule="falling", steps=steps))
        rates = np.array([rate(step) for step in range(steps + 1)])
        last = max(1, round(steps / 10))
        assert rates[-1] == 0 and rates.argmax() <= steps - last
    # A run can be extended: steps of a constant schedule do not depend on the number of steps.
    long = make_schedule(dataclasses.replace(recipe, schedule="constant", steps=9000))
    assert [float(long(s)) for s in range(0, 1000, 100)] == [
        rate_of(recipe, s) for s in range(0, 1000, 100)
    ]


def rate_of(recipe, step) -> float:
    return float(make_schedule(dataclasses.replace(recipe, schedule="constant"))(step))


def test_the_window_follows_the_length_if_asked_to():
    recipe = dataclasses.replace(RECIPES["selective_copy"], scale_window=True)
    shares = [
        (recipe.length_of(stage), recipe.config("griffin", stage).visible_keys)
        for stage in range(5)
    ]
    assert shares == [(32, 16), (64, 32), (128, 64), (256, 128), (256, 128)]
    assert recipe.config("griffin").visible_keys == 128
    fixed = dataclasses.replace(recipe, scale_window=False)
    assert {fixed.config("griffin", stage).visible_keys for stage in range(4)} == {128}


@settings(max_examples=examples(30))
@given(st.integers(0, 2**32), st.integers(1, 20))
def test_accuracies_are_split_by_view_and_by_answer(seed, window):
    rng = np.random.default_rng(seed)
    asked = np.zeros((6, 9), bool)
    asked[:, -3:] = True
    distance = np.where(asked, rng.integers(1, 20, asked.shape), 0).astype(np.int32)
    rights = rng.random(asked.shape) < 0.5
    batch = Batch(asked, asked, asked, asked, distance)
    losses = rng.random(6)
    found = held_out_metrics(lambda params, batch: (losses, rights), {}, [batch], window)
    assert found["test_loss"] == pytest.approx(losses.sum() / 18) and "by_row" not in found
    batch = batch._replace(weights=np.ones((6, 9)))
    alike = held_out_metrics(lambda params, batch: (losses, rights), {}, [batch], window)
    assert alike["by_row"] == pytest.approx(losses / 9, abs=1e-4)
    assert np.mean(alike["by_row"]) == pytest.approx(alike["test_loss"], abs=1e-4)
    answers = rights[:, -3:]
    assert found["accuracy"] == pytest.approx(answers.mean())
    assert found["sequences"] == pytest.approx(answers.all(1).mean())
    assert found["by_answer"] == pytest.approx(answers.mean(0), abs=1e-4)
    seen = distance[:, -3:] < window
    assert ("in_view" in found) == seen.any() and ("out_of_view" in found) == (~seen).any()
    if seen.any():
        assert found["in_view"] == pytest.approx(answers[seen].mean())
    if not seen.all():
        assert found["out_of_view"] == pytest.approx(answers[~seen].mean())


def test_a_run_ends_after_two_good_tests_or_its_last_step():
    lines = [{"step": s, "accuracy": a} for s, a in ((100, 0.99), (200, 0.5), (300, 0.995))]
    assert not is_finished(lines, 1000, 0.99)
    lines.append({"step": 400, "accuracy": 0.99})
    assert is_finished(lines, 1000, 0.99)
    assert not is_finished(lines, 1000, None) and not is_finished([], 1000, 0.99)
    assert is_finished(lines, 400, None)


@pytest.mark.slow
def test_a_run_is_made_longer_and_ends_where_a_long_one_does(tmp_path, monkeypatch, caplog):
    limit = "orbax.checkpoint.checkpoint_manager._WAIT_FOR_PREV_SAVE_WARNING_THRESHOLD_SECS"
    monkeypatch.setattr(limit, 0)  # unfiltered, every save would warn
    short, long = (order_of(tmp_path, "cut", steps=steps) for steps in (4, 8))
    whole = order_of(tmp_path, "whole", steps=8)
    train_model(short.run, short.output, save_every=2)
    train_model(long.run, long.output, save_every=2)
    train_model(whole.run, whole.output, save_every=2)
    assert "previous save" not in caplog.text
    lines = [read_metrics(each.output / "metrics.jsonl") for each in (long, whole)]
    for line in lines[0] + lines[1]:
        line.pop("seconds")
    assert lines[0] == lines[1] and lines[0][-1]["step"] == 8
    assert len(lines[0][-1]["gate"]) == len(lines[0][-1]["lambda"]) == 1  # recurrent layers
    cosine = order_of(tmp_path, "cosine", schedule="cosine", steps=2)
    train_model(cosine.run, cosine.output)
    with pytest.raises(CheckpointError, match="recipe.steps 2 there, 3 asked for"):
        train_model(order_of(tmp_path, "cosine", schedule="cosine", steps=3).run, cosine.output)


def order_of(folder: Path, name: str, **options) -> Any:
    """Return the options of a tiny run of one recurrent block."""
    output = folder / name
    run = read_options(ORDER | TINY | {"output": output} | options).run
    recipe = dataclasses.replace(run.recipe, layers=1)
    return SimpleNamespace(run=dataclasses.replace(run, recipe=recipe), output=output, until=None)


@pytest.mark.slow
def test_checkpoints_are_saved_and_kept_as_often_as_asked_for(tmp_path):
    kept = {}
    for keep in ("2", "all"):
        folder = tmp_path / keep
        options = ("induction_heads", "--model", "hawk", "--length", 8, "--rows", 1, "--width", 8)
        done = griffin_eval(
            *("train", *options, "--steps", 7, "--save-every", 2, "--keep", keep, "-o", folder)
        )
        assert done.returncode == 0, done.stderr
        assert [m["step"] for m in read_metrics(folder / "metrics.jsonl")] == [2, 4, 6, 7]
        kept[keep] = sorted(each.name for each in folder.iterdir() if each.name.isdecimal())
    assert kept == {"2": ["6", "7"], "all": ["2", "4", "6", "7"]}


@pytest.mark.slow
def test_a_folder_of_an_earlier_version_goes_on(tmp_path):
    """Its run.json has keys that no longer exist, and lacks keys of later versions."""
    short, long = (order_of(tmp_path, "run", steps=steps) for steps in (2, 4))
    train_model(short.run, short.output, save_every=2)
    file = short.output / "run.json"
    settings = json.loads(file.read_text())
    settings["recipe"] |= {"draw_held_out": None, "draw_of_stage": None, "text": None}
    del settings["recipe"]["recurrent_rate"]
    file.write_text(json.dumps(settings))
    assert train_model(long.run, long.output, save_every=2)["step"] == 4
    other = order_of(tmp_path, "run", steps=4, dtype="bfloat16")
    with pytest.raises(CheckpointError, match="dtype float32 there, bfloat16 asked for"):
        train_model(other.run, other.output)


@pytest.mark.slow
def test_stages_of_an_adaptive_recipe_wait_for_their_accuracy(tmp_path):
    recipe = dataclasses.replace(
        RECIPES["selective_copy"], length=32, tokens=64, width=16, layers=1, schedule="constant"
    )
    curriculum = ((0, 1 / 4), (0, 1 / 2))
    stages = {}
    for advance in (0.0, 1.1):
        changed = dataclasses.replace(recipe, curriculum=curriculum, advance=advance)
        run, folder = Run(recipe=changed, model="hawk", seed=0), tmp_path / str(advance)
        for steps in (4, 6):  # the second goes on, in the stage that the metrics say
            longer = dataclasses.replace(run, recipe=dataclasses.replace(changed, steps=steps))
            train_model(longer, folder, save_every=2)
        stages[advance] = [
            (m["stage"], m["length"]) for m in read_metrics(folder / "metrics.jsonl")
        ]
    assert stages == {0.0: [(0, 8), (1, 16), (2, 32)], 1.1: [(0, 8)] * 3}


def test_an_adaptive_run_goes_on_with_tests_as_often(tmp_path):
    for recipe, message in (("phonebook", "save_every 100 there, 50 asked for"), ("bytes", None)):
        run, folder = read_options(ORDER | {"recipe": recipe}).run, tmp_path / recipe
        prepare_folder(run, run.recipe.config("griffin"), folder, 100)
        prepare_folder(run, run.recipe.config("griffin"), folder, 100)
        refused = pytest.raises(CheckpointError, match=message) if message else nullcontext()
        with refused:
            prepare_folder(run, run.recipe.config("griffin"), folder, 50)


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_a_checkpoint(tmp_path):
    first = order_of(tmp_path, "first", steps=1)
    train_model(first.run, first.output)
    again = order_of(tmp_path, "again", **{"from": first.output}, steps=1, length=16, window=4)
    train_model(again.run, again.output)
    start, end = Checkpoint(first.output), Checkpoint(again.output)
    name = "model.embed_tokens.weight"
    moved = np.abs(end.numpy(name) - start.numpy(name)).max()
    assert moved == 0  # the first step has a learning rate of 0
    wider = order_of(tmp_path, "wider", **{"from": first.output}, lru_width=32)
    with pytest.raises(CheckpointError, match=r"linear_y.weight \[16, 16\] there, \[32, 16\] in"):
        train_model(wider.run, wider.output)
    assert not wider.output.exists()
    with pytest.raises(CheckpointError, match="from .*first there, None asked for"):
        train_model(order_of(tmp_path, "again", length=16, window=4).run, again.output)


def test_initial_weights_that_are_damaged_or_of_another_model_are_refused(tmp_path):
    config, file, source = config_of(tmp_path), "model.safetensors", tmp_path / "source"
    fields = {"embedding_scale": False, "hidden_activation": "silu", "logits_soft_cap": 0.0}
    other = dataclasses.replace(config, **fields, lru_constant=2.0)
    write_griffin(tmp_path / "other", other)
    first = {name: initial_value(spec, 0) for name, spec in param_specs(config).items()}
    write_griffin(
        tmp_path / "nan", config, first | {"model.final_norm.weight": np.full(16, np.nan)}
    )
    convert(write_griffin(source, config), tmp_path / "changed", to="griffin")
    (tmp_path / "changed" / file).write_bytes((tmp_path / "nan" / file).read_bytes())
    for name, message in (
        ("other", r"embedding_scale False there, True in this run.*lru_constant 2.0 there, 8.0 in"),
        ("nan", "found NaN or infinity in model.final_norm.weight: name another checkpoint"),
        ("changed", "griffin_manifest.json says"),
    ):
        run = order_of(tmp_path, "run", **{"from": tmp_path / name})
        with pytest.raises(CheckpointError, match=message):
            train_model(run.run, run.output)
        assert not run.output.exists()


def config_of(folder: Path) -> GriffinConfig:
    """Return the config of the model of `order_of`."""
    return order_of(folder, "run").run.recipe.config("griffin")


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_told_in_a_sentence(tmp_path, monkeypatch):
    command = ("train", "induction_heads", "--model", "hawk", "--length", 8, "--rows", 1)
    command += ("--width", 16, "--steps", 2, "--save-every", 1, "--output", tmp_path / "run")
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")  # its files are larger, too
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))  # bytes of a file
    try:
        done = griffin_eval(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode == 2
    sentence = rf"griffin-eval: {tmp_path}/run: the checkpoint of step 1 cannot be .*too large"
    assert re.search(sentence, done.stderr)
    assert "ERROR:absl" not in done.stderr  # Orbax's tracebacks of the same error
    assert griffin_eval(*command).returncode == 0
    assert [m["step"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_a_queue_with_a_run_that_cannot_be_is_refused(tmp_path):
    for line, message in (
        ('{"recipe": "copy"}', "model is missing"),
        (
            '{"recipe": "selective_copi", "model": "hawk", "output": "x"}',
            "did you mean 'selective_",
        ),
        ('{"recipe": "bytes", "model": "hawk", "output": "x", "step": 3}', "unknown field 'step'"),
        ('{"recipe": "bytes", "model": "hawk", "output": "x", "steps": 0}', "at least 1, found 0"),
        ('{"recipe": "bytes", "model": "hawk", "output": "x", "steps": "9"}', "found '9'"),
        ('{"recipe": "bytes", "model": "hawk", "output": "x", "until": 2}', "at most 1, found 2"),
        ('{"recipe": "bytes", "model": "hawk", "output": "x", "heads": 3}', "gate_blocks (3) must"),
        ('{"recipe": "bytes", "model": "hawk", "output": "x", "schedule": "step"}', "cosine or"),
        ('{"recipe": "bytes", "model": "hawk", "output": "a"}', "the output a too"),
        ("[1]", "expected a JSON object, found a JSON list"),
        ("{", "expected a JSON object, found no JSON"),
        ('{"recipe": "bytes", "recipe": "text"}', "found the key 'recipe' twice"),
        ("[" * 100_000, "found JSON nested too deeply"),
        ('{"seed": 1' + "0" * 5000 + "}", "found Exceeds the limit"),
        (
            '{"recipe": "bytes", "model": "hawk", "output": "x", "learning_rate": 1%s}'
            % ("0" * 400),
            "--learning-rate must be a number above 0",
        ),
    ):
        file = tmp_path / "queue.jsonl"
        file.write_text('{"recipe": "bytes", "model": "hawk", "output": "a"}\n\n' + line + "\n")
        with pytest.raises(ArgumentError) as error:
            read_queue(file)
        assert str(error.value).startswith(f"{file}, line 3: ") and message in str(error.value)


def test_a_queue_that_is_empty_or_missing_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ArgumentError, match="has no line"):
        read_queue(tmp_path / "empty")
    with pytest.raises(ArgumentError, match="No such file"):
        read_queue(tmp_path / "none")


def test_the_command_of_a_run_makes_the_same_run():
    orders = [
        ORDER,
        ORDER | TINY | {"recurrent_rate": 4, "scale_window": True, "curriculum": False},
        ORDER | {"recipe": "phonebook", "model": "hawk", "lru_width": 384, "decayed": "linear"},
        ORDER | {"length": 300},
        ORDER | {"length": 300, "rows": 5},
    ]
    for options in orders:
        run = read_options(options).run
        words = command(run.settings(100), run.recipe.steps).split()[2:]
        assert words[0] == options["recipe"]
        again: dict = {"recipe": words[0], "output": "run"}
        for word, value in zip(words[1:], [*words[2:], "--"], strict=True):
            if not word.startswith("--"):
                continue
            name = word.removeprefix("--").removeprefix("no-").replace("-", "_")
            given = not word.startswith("--no-") if value.startswith("--") else json_or_text(value)
            again[name] = given
        assert read_options(again).run == run
        assert read_options(again).save_every == 100


def test_the_command_of_a_run_that_ended_early_has_its_whole_schedule():
    settings = read_options(ORDER | {"schedule": "falling", "steps": 4500}).run.settings(100)
    assert "--steps 4500 --until 0.99" in command(settings, 4400, 0.99)
    settings = read_options(ORDER | {"schedule": "constant", "steps": 4500}).run.settings(100)
    assert "--steps 4400" in command(settings, 4400, 0.99)


def json_or_text(value: str):
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


@pytest.mark.slow
def test_a_queue_goes_on_after_an_error_of_ours_and_shows_it(tmp_path, monkeypatch):
    queue = tmp_path / "queue.jsonl"
    lines = [ORDER | TINY | {"output": str(tmp_path / name)} for name in ("a", "b")]
    queue.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def train(options, _method):
        return f"{1 // (options.output.name == 'b')}: done"

    monkeypatch.setattr("griffin_eval.cli.train._train", train)
    done = CliRunner().invoke(app, ["train", "--queue", str(queue)])
    assert done.exit_code == 1 and done.stdout == "1: done\n"
    assert "ZeroDivisionError" in done.stderr
    with pytest.raises(ZeroDivisionError):
        alone = ["train", "bytes", "--model", "hawk", "--output", str(tmp_path / "a")]
        raise CliRunner().invoke(app, alone).exception


def test_a_queue_makes_what_is_left_of_its_runs(tmp_path):
    queue = tmp_path / "queue.jsonl"
    lines = [
        ORDER | TINY | {"output": str(tmp_path / "a"), "steps": 2},
        ORDER | TINY | {"output": str(tmp_path / "taken")},
        ORDER | TINY | {"output": str(tmp_path / "taken" / "thesis.tex" / "run")},
        ORDER | TINY | {"output": str(tmp_path / "b"), "model": "hawk", "steps": 2},
    ]
    queue.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    for _ in range(2):
        done = griffin_eval("train", "--queue", queue)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "taken exists and is not a training run" in done.stderr
        assert "thesis.tex/run cannot be written: Not a directory" in done.stderr
        assert done.stdout.count("step 2, test loss") == 2
    assert [m["step"] for m in read_metrics(tmp_path / "b" / "metrics.jsonl")] == [2]
    assert "at length 8; curves" in done.stdout
    done = griffin_eval("train", "--until", 2, "--queue", queue)
    assert done.returncode == 2 and "line 1: --until must be a number above 0, at" in done.stderr

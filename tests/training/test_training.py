"""Training: drawn data, learnt models, and resumed runs, which end like uninterrupted ones."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import griffin_eval as in_this_process
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import griffin_eval
from slow import examples
from xla_options import QUICK_COMPILE

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.source.steps import FINISHED_FILE
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs
from griffin_eval.tasks.long_text import documents
from griffin_eval.tasks.phonebook.names import PEOPLE
from griffin_eval.tasks.symbols import sequences
from griffin_eval.training import byte_texts
from griffin_eval.training.batches import (
    DATA,
    batches,
    draw_batch,
    held_out_batches,
    processes_for,
)
from griffin_eval.training.optimizer import make_optimizer
from griffin_eval.training.recipes import RECIPES
from griffin_eval.training.run_folder import Run, lines_until, prepare_folder, read_metrics
from griffin_eval.training.step import Method, compile_update
from griffin_eval.training.trainer import train_model

SMALL = dict(layers=3, length=16, tokens=256, steps=40, curriculum=((20, 1 / 2),))


def small_run(model: str = "griffin", recipe: str = "induction_heads", **changes) -> Run:
    return Run(
        recipe=dataclasses.replace(RECIPES[recipe], **(SMALL | changes)), model=model, seed=1
    )


seeds = st.integers(0, 2**32)


@settings(max_examples=examples(30))
@given(seeds, st.integers(8, 300))
def test_questions_of_induction_heads_have_the_answer_that_follows_the_first_trigger(seed, length):
    row = DATA["induction_heads"].draws[-1](np.random.default_rng(seed), length)
    triggers = np.flatnonzero(row.tokens == sequences.TRIGGER)
    assert triggers[-1] == length - 1
    assert list(np.flatnonzero(row.scored)) == list(triggers[1:])
    answer = row.tokens[triggers[0] + 1]
    assert answer != sequences.TRIGGER
    assert (row.targets[row.scored] == answer).all()
    assert (row.tokens[triggers[:-1] + 1] == answer).all()
    assert (row.weights == row.scored).all()
    assert_distances_lead_to_the_targets(row)


@settings(max_examples=examples(30))
@given(seeds, st.integers(8, 300))
def test_selective_copying_asks_for_the_data_in_order_after_the_markers(seed, length):
    row = DATA["selective_copy"].draws[-1](np.random.default_rng(seed), length)
    data = row.tokens[(row.tokens != sequences.NOISE) & (row.tokens != sequences.MARKER)]
    assert list(row.targets[row.scored]) == list(data)
    assert (row.tokens[row.scored] == sequences.MARKER).all()
    assert row.scored.sum() == min(16, length // 4) == len(row.tokens) - length
    assert_distances_lead_to_the_targets(row)


def assert_distances_lead_to_the_targets(row):
    (at,) = np.nonzero(row.scored)
    assert (row.tokens[at - row.distance[at]] == row.targets[at]).all()
    assert (row.distance[~row.scored] == 0).all()


@settings(max_examples=examples(30))
@given(
    seeds,
    st.integers(200, 900),
    st.integers(1, 3),
    st.sampled_from([4, 64, PEOPLE]),
    st.sampled_from([1, 10]),
)
def test_phonebooks_ask_only_for_numbers_that_are_in_the_book(seed, length, fewest, people, digits):
    drawn = np.random.default_rng(seed)
    row = byte_texts.phonebook(drawn, length, fewest, people=people, digits=digits)
    tokens, targets, weights, asked = row[:4]
    assert_distances_lead_to_the_targets(row)
    assert tokens[0] == byte_texts.BOS
    assert (tokens[1:] == targets[:-1]).all()
    text = bytes((targets - byte_texts.FIRST).tolist()).decode()
    book, *others = text.split("\n\n")
    numbers = dict(line.split(": ") for line in book.splitlines())
    lines = [line for part in others for line in part.splitlines()]
    for line in lines[:-1]:  # the last may be cut off
        name, number = line.split(": ")
        assert numbers[name] == number
    assert fewest <= len(numbers) <= people
    assert {len(number) for number in numbers.values()} == {digits}
    assert len(others) < 2 or len(others[0].splitlines()) == 2
    where = np.array([c.isdigit() and i > len(book) for i, c in enumerate(text)])
    assert (asked == where).all()
    assert (weights[asked] == 1).all() and (weights[~asked] < 1).all()


def test_text_is_of_modules_that_no_task_reads():
    for _, text in documents.python_texts():
        middle = len(text) // 2
        assert text[middle : middle + 200].encode() not in byte_texts.corpus()
    for batch in held_out_batches(RECIPES["text"]):
        for row in batch.tokens:
            held = bytes((row[1:] - byte_texts.FIRST).tolist())
            assert held in byte_texts.held_out() and held not in byte_texts.corpus()


@pytest.mark.parametrize("name", RECIPES)
def test_rows_depend_on_seed_step_and_purpose_alone(name):
    recipe = dataclasses.replace(RECIPES[name], tokens=2048)
    batches = [
        draw_batch(recipe, 0, 9),
        draw_batch(recipe, 1, 9),
        draw_batch(recipe, 0, 10),
        *held_out_batches(recipe),
    ]
    again = draw_batch(recipe, 0, 9)
    assert all((a == b).all() for a, b in zip(batches[0], again, strict=True))
    rows = [row.tobytes() for batch in batches for row in batch.tokens]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("name", ["phonebook_lookup", "phonebook"])
def test_batches_that_other_processes_draw_are_the_same(name):
    """Stages may end after a number of steps, or when results decide so."""
    curriculum = ((5, 0.5), (3, 0.75))
    recipe = dataclasses.replace(RECIPES[name], tokens=512, steps=12, curriculum=curriculum)
    with batches(recipe, 3, processes=2) as take:
        for step in range(recipe.steps):
            stage = recipe.stage_at(step) if recipe.advance is None else int(step > 6)
            for drawn, wanted in zip(
                take(step, stage), draw_batch(recipe, 3, step, stage), strict=True
            ):
                np.testing.assert_array_equal(drawn, wanted)
    assert processes_for("cpu") == 0 < processes_for("gpu")


def test_the_curriculum_ends_with_the_whole_length():
    recipe = RECIPES["induction_heads"]
    lengths = [recipe.length_of(recipe.stage_at(step)) for step in range(recipe.steps)]
    assert lengths == sorted(lengths)
    assert lengths[0] == recipe.length // 8 and lengths[recipe.steps // 2] == recipe.length
    assert {b.tokens.shape[1] for b in held_out_batches(recipe)} == {recipe.length}


def test_the_byte_tokenizer_is_the_one_that_training_used(tmp_path):
    from transformers import AutoTokenizer

    from griffin_eval.text.load import load_tokenizer

    byte_texts.write_byte_tokenizer(tmp_path)
    text = "".join(map(chr, range(1, 600))) + "  two spaces\n\n日本語 🎉"
    ids = [byte_texts.FIRST + byte for byte in text.encode()]
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode(text) == ids
    assert theirs(text)["input_ids"] == [byte_texts.BOS, *ids]
    assert theirs.decode(ids) == text == ours.decode(ids, skip_special_tokens=True)


class Interrupted(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("model", ["griffin", "mqa"])
def test_a_run_lowers_the_loss_and_goes_on_to_the_same_state(model, tmp_path):
    run, whole, cut = small_run(model), tmp_path / "whole", tmp_path / "cut"
    train_model(run, whole, save_every=10)

    def interrupt(metrics):
        if metrics["step"] == 27:  # seven steps after the last checkpoint
            raise Interrupted

    with pytest.raises(Interrupted):
        train_model(run, cut, save_every=10, progress=interrupt)
    assert (whole / FINISHED_FILE).exists() and not (cut / FINISHED_FILE).exists()
    train_model(run, cut, save_every=10)
    assert (cut / FINISHED_FILE).exists()

    lines = [read_metrics(folder / "metrics.jsonl") for folder in (whole, cut)]
    for found in lines:
        assert [line["step"] for line in found] == [10, 20, 30, 40]
        for line in found:
            line.pop("seconds")
    assert lines[0] == lines[1]
    assert lines[0][-1]["loss"] < 0.85 * lines[0][0]["loss"]
    first, second = (Checkpoint(folder) for folder in (whole, cut))
    for name in param_specs(first.config):
        assert (first.numpy(name) == second.numpy(name)).all(), name
    optimizers = [restored_optimizer(folder) for folder in (whole, cut)]
    for ours, theirs in zip(*optimizers, strict=True):
        assert (ours == theirs).all()


def restored_optimizer(folder: Path) -> list:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder) as manager:
        items = ocp.args.Composite(optimizer=ocp.args.StandardRestore())
        return jax.tree.leaves(manager.restore(manager.latest_step(), args=items)["optimizer"])


def test_lines_of_steps_that_were_lost_are_removed(tmp_path):
    run = small_run("hawk", steps=4, layers=1)
    train_model(run, tmp_path / "run", save_every=2)
    file = tmp_path / "run" / "metrics.jsonl"
    with open(file, "a") as lines:
        lines.write(json.dumps({"step": 6, "loss": 0.0}) + '\n{"step": 8, "lo')
    last = train_model(run, tmp_path / "run", save_every=2)
    assert last["step"] == 4
    assert [line["step"] for line in read_metrics(file)] == [2, 4]
    kept = file.read_text()
    file.write_text(kept + '{"step": 6, "lo')  # the next line must not be glued to it
    train_model(run, tmp_path / "run", save_every=2)
    assert file.read_text() == kept
    file.write_text(kept.splitlines(keepends=True)[0])
    with pytest.raises(CheckpointError, match="no line of step 4"):
        train_model(run, tmp_path / "run", save_every=2)
    with pytest.raises(CheckpointError, match="recipe.steps 4 there, 3 asked for"):
        train_model(small_run("hawk", steps=3, layers=1), tmp_path / "run")


def test_a_last_update_that_spoils_the_weights_is_not_saved(tmp_path):
    folder = tmp_path / "run"
    run = small_run("hawk", steps=2, layers=1, learning_rate=1e30)
    with pytest.raises(ArgumentError, match="the .* is (nan|inf) at step 2; the checkpoint before"):
        train_model(run, folder, save_every=1)
    assert not (folder / "2").exists() and not (folder / "finished").exists()


def test_two_runs_in_one_folder_are_refused(tmp_path):
    folder, run = tmp_path / "run", small_run("hawk", steps=2, layers=1)

    def train_again(_metrics):
        with pytest.raises(CheckpointError, match="another process trains in .*run: wait until"):
            train_model(run, folder)

    assert train_model(run, folder, progress=train_again)["step"] == 2
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [2]


def test_a_continued_run_rewrites_no_file_partly(tmp_path, monkeypatch):
    folder, run = tmp_path / "run", small_run("hawk", steps=2, layers=1)
    train_model(run, folder, save_every=2)
    metrics, kept = folder / "metrics.jsonl", (folder / "metrics.jsonl").read_bytes()

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("griffin_eval.json_files.os.fsync", full)
    # This writes neither run.json nor config.json.
    prepare_folder(run, run.recipe.config("hawk"), folder, 2)
    assert [line["step"] for line in lines_until(metrics, 2)] == [2]
    metrics.write_bytes(kept + b'{"step": 4}\n')
    with pytest.raises(BadInput, match=r"metrics.jsonl cannot be written: No space left"):
        lines_until(metrics, 2)
    assert metrics.read_bytes() == kept + b'{"step": 4}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("recipe", ["bytes", "induction_heads"])
def test_a_disk_that_is_full_at_the_tokenizer_is_told_in_a_sentence(tmp_path, recipe):
    run, folder = small_run("hawk", recipe=recipe, steps=2, layers=1), tmp_path / "run"
    prepare_folder(run, run.recipe.config("hawk"), folder, 2)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(BadInput, match=r"tokenizer.json cannot be written: No space left"):
        prepare_folder(run, run.recipe.config("hawk"), folder, 2)


def test_a_damaged_run_is_refused(tmp_path):
    folder, run = tmp_path / "run", small_run("hawk", steps=2, layers=1)
    train_model(run, folder, save_every=2)
    for name, content, message in (
        (
            "run.json",
            b'{"recipe": "x"}',
            "belongs to another run .*model missing there, hawk asked",
        ),
        ("metrics.jsonl", b"{}\n", "line 1: expected a JSON object with the whole number step"),
        ("metrics.jsonl", b"3\n", "line 1: expected a JSON object .*, found 3"),
        ("metrics.jsonl", b"\xff\n", "metrics.jsonl: expected UTF-8, found other bytes at 0"),
        ("2/params/_METADATA", b"{", "run/2 cannot be read .*: remove this folder and run"),
    ):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            train_model(run, folder, save_every=2)
        (folder / name).write_bytes(whole)
    shutil.rmtree(folder / "2" / "optimizer")
    with pytest.raises(CheckpointError, match=r"run/2 cannot be read .*optimizer"):
        train_model(run, folder, save_every=2)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="other exists and is not a training run"):
        train_model(small_run(steps=2, layers=1), tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


@pytest.mark.ci
def test_the_command_trains_what_convert_reads(tmp_path):
    folder, flax, back = (tmp_path / name for name in ("run", "flax", "back"))
    done = griffin_eval(
        "train", "bytes", "--model", "griffin", "--steps", 2, "--length", 64, "-o", folder
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "step 2, test loss" in done.stdout
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    for arguments in (
        ("convert", folder, flax, "--to", "deepmind-flax"),
        ("convert", flax, back, "--to", "hf"),
        ("verify", folder, back),
    ):
        done = griffin_eval(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (back / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


REFUSED = [
    (("byte", "--model", "griffin"), "unknown recipe 'byte': expected one of"),
    (("bytes", "--model", "hawke"), "did you mean 'hawk'?"),
    (("bytes", "--model", "hawk", "--length", "7"), "--length must be at least 8, found 7"),
    (("text", "--model", "hawk", "--length", "5000000"), "bytes of the text of the recipe text"),
    (("bytes", "--model", "hawk", "--length", "50000000"), "--length must be below the"),
    (("bytes", "--model", "hawk", "--learning-rate", "0"), "a number above 0, found 0"),
    (("bytes", "--model", "hawk", "--learning-rate", "inf"), "above 0, found inf"),
    (("bytes", "--model", "hawk", "--dtype", "float16"), "float32 or bfloat16, found"),
    (("bytes", "--model", "hawk", "--pieces", "3"), "does not divide a step's 8 rows"),
    (("bytes", "--model", "hawk", "--mesh", "rows=2"), "axes data and model, each once, such as"),
    (("bytes", "--model", "hawk", "--mesh", "model=64"), "it takes 64 devices, and this"),
    (("bytes", "--model", "hawk", "--keep", "0"), "--keep must be all or at least 1"),
]


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path):
    for arguments, message in REFUSED:
        done = in_this_process("train", *arguments, "-o", tmp_path / "run")
        assert done.returncode == 2, done.stdout
        assert message in done.stderr and "Traceback" not in done.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_step_may_be_cut_computed_twice_or_rounded():
    recipe = dataclasses.replace(RECIPES["bytes"], **(SMALL | {"length": 64, "tokens": 512}))
    config, batch = recipe.config("griffin"), draw_batch(recipe, 0, 0)
    optimizer = make_optimizer(lambda step: 1e-3)
    methods = {
        "whole": (Method(), "float32"),
        "pieces": (Method(pieces=4), "float32"),
        "recompute": (Method(recompute=True), "float32"),
        "bfloat16": (Method(), "bfloat16"),
    }
    found, memory = {}, {}
    for name, (method, dtype) in methods.items():
        params = {n: jnp.asarray(initial_value(s, 0)) for n, s in param_specs(config).items()}
        state = optimizer.init(params)
        update, _ = compile_update(config, optimizer, method, dtype)
        compiled = update.lower(params, state, batch).compile(QUICK_COMPILE)
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
        params, _, loss, norm = compiled(params, state, batch)
        assert {value.dtype for value in params.values()} == {jnp.dtype("float32")}
        found[name] = float(loss), float(norm)
    np.testing.assert_allclose(found["pieces"], found["whole"], rtol=1e-4)
    np.testing.assert_allclose(found["recompute"], found["whole"], rtol=1e-4)
    np.testing.assert_allclose(found["bfloat16"], found["whole"], rtol=3e-2)
    assert found["bfloat16"] != found["whole"]
    assert memory["pieces"] < memory["whole"] and memory["recompute"] < memory["whole"]

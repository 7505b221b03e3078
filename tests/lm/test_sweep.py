"""`griffin-eval sweep`: every checkpoint of a training as one lm_eval command would evaluate it."""

import csv
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import lm_eval.tasks
import lm_eval.utils
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import traverse_util
from lm_eval.evaluator import simple_evaluate
from lm_eval.utils import sanitize_list
from safetensors.numpy import load_file, save_file
from slow import slow
from typer.testing import CliRunner

from griffin_eval import convert
from griffin_eval.checkpoints import folder as shipped
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.source.companions import COMPANIONS
from griffin_eval.converters.source.steps import steps_of
from griffin_eval.errors import BadInput, CheckpointError
from griffin_eval.lm import sweep as sweeps
from griffin_eval.lm.model import GriffinLM

STEPS = (9, 20, 100)
CHOICE = """
task: sweep_choice
dataset_path: json
dataset_kwargs: {data_files: DATA}
output_type: multiple_choice
test_split: train
fewshot_split: train
num_fewshot: 2
doc_to_text: "{{text}}"
doc_to_choice: [" yes", " no", " perhaps"]
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
SAID = """
task: sweep_said
dataset_path: json
dataset_kwargs: {data_files: DATA}
output_type: generate_until
test_split: train
doc_to_text: "{{text}}"
doc_to_target: "a"
generation_kwargs: {max_gen_toks: 5, until: ["\\n"], do_sample: true, temperature: 1.0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Return a training whose three checkpoints stock Orbax wrote, each with other weights."""
    run = tmp_path_factory.mktemp("training") / "run"
    run.mkdir()
    source = Checkpoint(shipped("bytes_griffin"))
    for name in ("config.json", *COMPANIONS):
        if (source.folder / name).is_file():
            shutil.copy(source.folder / name, run)
    noise = np.random.default_rng(0)
    with ocp.CheckpointManager(run) as manager:
        for step in STEPS:
            params = {}
            for name in source.dtypes:
                value = source.numpy(name).astype(np.float32)
                factor = 1 + noise.normal(size=value.shape) / step
                params[name] = jnp.asarray(value * factor, jnp.float32)
            nested = traverse_util.unflatten_dict(params, sep=".")
            manager.save(step, args=ocp.args.Composite(params=ocp.args.StandardSave(nested)))
        manager.wait_until_finished()
    return run


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    texts = ["import os", "def f(x):", "The value is", "class A:", "return"]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, text in (("choice", CHOICE), ("said", SAID)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return folder


@pytest.fixture(scope="module")
def only_these_tasks(task_folder):
    """lm_eval takes seconds to find all of its own tasks."""
    manager = lm_eval.tasks.TaskManager

    def make(include_path=None, metadata=None):
        return manager(include_path=str(task_folder), include_defaults=False, metadata=metadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.tasks, "TaskManager", make)
        # Its log would go on writing to what pytest has closed.
        patch.setattr(lm_eval.utils, "setup_logging", lambda: None)
        yield make


def run(*arguments, code=0, said=False):
    done = CliRunner().invoke(app, ["sweep", *map(str, arguments)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output if said else done.stdout


def options(output, framework="torch"):
    model_args = f"framework={framework},dtype=float32"
    return (
        *("--tasks", "sweep_choice,sweep_said", "--model_args", model_args, "-o", output),
        *("--limit", "3", "--log_samples"),
    )


@pytest.fixture(scope="module")
def swept(run_folder, only_these_tasks, tmp_path_factory):
    """Return the results of one sweep in PyTorch, and its output."""
    output = tmp_path_factory.mktemp("swept") / "results"
    return output, run(run_folder, *options(output))


def written(folder: Path) -> tuple[dict, dict]:
    """Return the results in a folder, and the samples by task."""
    (file,) = folder.rglob("results_*.json")
    samples = {
        path.name.rsplit("_", 1)[0].removeprefix("samples_"): [
            json.loads(line) for line in path.read_text().splitlines()
        ]
        for path in folder.rglob("samples_*.jsonl")
    }
    return json.loads(file.read_text()), samples


OF_ITEM = ("doc_id", "prompt_hash", "target_hash", "doc_hash", "filtered_resps", "arguments")


def same(mine, other):
    assert len(mine) == len(other) > 0
    for one, two in zip(mine, other, strict=True):
        for key in OF_ITEM:
            # lm_eval writes the numbers of answers as text.
            assert sanitize_list(one[key]) == sanitize_list(two[key]), key


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_equals_an_evaluation_of_each_checkpoint(
    framework, run_folder, only_these_tasks, request, tmp_path
):
    if framework == "torch":
        output, said = request.getfixturevalue("swept")
    else:
        output = tmp_path / "results"
        said = run(run_folder, *options(output, framework))
    assert [line.split(":")[0] for line in said.splitlines()[:-1]] == [*map(str, STEPS)]
    hashes, answers, compiled = set(), set(), set()
    for step in STEPS:
        found, samples = written(output / str(step))
        lm = GriffinLM(str(run_folder / str(step)), framework=framework, dtype="float32")
        alone = simple_evaluate(
            lm,
            tasks=["sweep_choice", "sweep_said"],
            limit=3,
            task_manager=only_these_tasks(),
        )
        assert json.loads(json.dumps(alone["results"])) == found["results"]
        for task in samples:
            mine = json.loads(json.dumps(alone["samples"][task], default=str))
            for sample in mine:  # lm_eval writes null there
                sample["arguments"] = None
            same([s | {"arguments": None} for s in samples[task]], mine)
        config = found["config"]
        assert config["model"] == "griffin"
        assert config["model_args"]["pretrained"] == str(run_folder / str(step))
        assert config["griffin_weights_sha256"] == lm.opened.weights_sha256
        assert config["griffin_tokens_computed"] == lm.stats.tokens_computed
        hashes.add(lm.opened.weights_sha256)
        compiled.add(config["griffin_compilations"])
        answers.add(json.dumps([s["filtered_resps"] for s in samples["sweep_said"]]))
    assert len(hashes) == len(STEPS) and len(answers) > 1
    assert len(compiled) == 1  # programs are the first checkpoint's
    assert (output / "figures" / "sweep_choice_acc_over_steps.png").is_file()


def evaluations(run_folder, output, find, watch=None):
    """Yield the outcomes of a sweep over the checkpoints that ``find`` gives."""
    arguments = ["--output_path", str(output), *options(output)[:4], *options(output)[6:]]
    config = sweeps.configuration(arguments, sweeps.targets_of_run(run_folder)[0])
    return sweeps.sweep(config, find, output, watch)


def evaluated(*arguments):
    return list(evaluations(*arguments))


def test_revisions_of_a_hub_id_and_a_list(run_folder, only_these_tasks, tmp_path, monkeypatch):
    """Each revision is downloaded by its name, and evaluated under it."""
    from griffin_eval.converters.source import hub

    def download(pretrained, revision, subfolder):
        assert pretrained == "org/model" and subfolder is None
        return run_folder / revision.removeprefix("step/")

    monkeypatch.setattr(hub, "download", download)
    output, named = tmp_path / "results", ["step/9", "step/20"]
    said = run("org/model", *options(output), "--revisions", ",".join(named))
    assert [line.split(":")[0] for line in said.splitlines()[:2]] == ["step__9", "step__20"]
    with open(output / "results.csv", encoding="utf-8", newline="") as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"9", "20"}
    assert list((output / "figures").glob("*_over_steps.png"))
    monkeypatch.undo()
    hashes = []
    for folder, revision in (("step__9", named[0]), ("step__20", named[1])):
        config = written(output / folder)[0]["config"]
        assert config["model_args"]["pretrained"] == "org/model"
        assert config["model_args"]["revision"] == config["model_revision"] == revision
        hashes.append(config["griffin_weights_sha256"])
    assert hashes == [
        GriffinLM(str(run_folder / step), framework="torch").opened.weights_sha256
        for step in ("9", "20")
    ]


def test_averaged_weights_are_an_item(run_folder, only_these_tasks, tmp_path):
    """A training that saves its averaged weights beside the others."""
    averaged = tmp_path / "run"
    shutil.copytree(run_folder, averaged, ignore=shutil.ignore_patterns("20", "100"))
    shutil.copytree(run_folder / "20" / "params", averaged / "9" / "ema_params")
    output = tmp_path / "results"
    given = [*options(output)]
    given[3] += ",item=ema_params"
    run(averaged, *given)
    config = written(output / "9")[0]["config"]
    alone = GriffinLM(str(run_folder / "20"), framework="torch", dtype="float32")
    assert config["griffin_weights_sha256"] == alone.opened.weights_sha256


def test_each_checkpoint_has_its_own_generation_settings(run_folder, tmp_path):
    other = tmp_path / "20"
    shutil.copytree(run_folder / "20", other)
    for name in ("config.json", *COMPANIONS):
        if (run_folder / name).is_file():
            shutil.copy(run_folder / name, tmp_path)
    settings = tmp_path / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [1, 7]}))
    opened = GriffinLM(str(run_folder / "9"), framework="torch").opened
    assert 7 not in opened.eos_ids
    assert 7 in opened.stage(str(other), None).model.eos_ids


def test_a_sweep_goes_on_where_it_was(run_folder, swept, tmp_path):
    output = shutil.copytree(swept[0], tmp_path / "results")
    before = {path: path.stat().st_mtime_ns for path in output.rglob("results_*.json")}
    shutil.rmtree(output / "20")
    again = run(run_folder, *options(output))
    assert again.count("it has results already") == 2 and "evaluated: 1, skipped: 2" in again
    kept = {path for path in before if path.relative_to(output).parts[0] != "20"}
    assert {path for path in before if path.exists()} == kept
    assert all(path.stat().st_mtime_ns == before[path] for path in kept)
    assert {path.name for path in output.glob("*/")} == {"9", "20", "100", "figures"}
    with pytest.raises(BadInput, match="a sweep with another limit"):
        run(run_folder, *options(output)[:-2], "2", "--log_samples")


def test_a_training_is_watched_to_its_end(run_folder, only_these_tasks, tmp_path, monkeypatch):
    """New checkpoints are evaluated, unfinished ones waited for, deleted ones named."""
    growing = tmp_path / "run"
    shutil.copytree(run_folder, growing, ignore=shutil.ignore_patterns("20", "100"))
    (growing / "20.orbax-checkpoint-tmp-7").mkdir()
    looks = []

    def next_look(seconds):
        looks.append(seconds)
        if len(looks) == 1:
            shutil.copytree(run_folder / "20", growing / "15")
        elif len(looks) == 2:
            shutil.copytree(run_folder / "100", growing / "100")

    monkeypatch.setattr(sweeps.time, "sleep", next_look)
    once = []

    def find():
        found = sweeps.targets_of_run(growing)
        if not once and any(target.name == "15" for target in found):
            once.append(shutil.rmtree(growing / "15"))  # between looking and reading
        return found

    outcomes = evaluated(run_folder, tmp_path / "results", find, sweeps.Watch(0.5, 100))
    assert [(o.target.name, o.reason) for o in outcomes] == [
        ("9", ""),
        ("15", "it was deleted meanwhile"),
        ("100", ""),
    ]
    assert len(looks) == 2


def test_results_of_another_training_are_not_taken(run_folder, swept, tmp_path):
    output, other = shutil.copytree(swept[0], tmp_path / "results"), tmp_path / "other"
    shutil.copytree(run_folder, other)
    assert "evaluated: 3, skipped: 0" in swept[1]
    assert "evaluated: 0, skipped: 3" in run(run_folder, *options(output))
    with pytest.raises(BadInput, match=f"has results of {run_folder}/9, not of {other}/9: choose"):
        run(other, *options(output))
    settings = json.loads((output / "sweep.json").read_text())
    (output / "sweep.json").write_text(json.dumps(settings | {"checkpoints": 5}))
    with pytest.raises(BadInput, match="expected an object as checkpoints, found 5"):
        run(run_folder, *options(output))


def test_steps_are_finished_checkpoints(run_folder, tmp_path):
    assert list(steps_of(run_folder)) == sorted(STEPS)
    for name in ("7", "8.orbax-checkpoint-tmp-1", "figures", "checkpoint-12"):
        (tmp_path / name).mkdir()
    for name in ("8.orbax-checkpoint-tmp-1", "checkpoint-12", "figures"):
        shutil.copy(Path(shipped("bytes_griffin")) / "model.safetensors", tmp_path / name)
    assert {step: path.name for step, path in steps_of(tmp_path).items()} == {12: "checkpoint-12"}
    shutil.copytree(tmp_path / "checkpoint-12", tmp_path / "12")
    with pytest.raises(CheckpointError, match="/12 and .*/checkpoint-12 hold the same step, 12"):
        steps_of(tmp_path)


def test_another_model_is_named(run_folder, checkpoint, only_these_tasks, tmp_path):
    done = run(run_folder / "9", checkpoint, *options(tmp_path / "results"), code=1, said=True)
    assert "no checkpoint of the same model" in done and "evaluated: 1, skipped: 0" in done


def test_a_diverged_and_a_damaged_checkpoint_are_named_and_the_others_evaluated(
    run_folder, only_these_tasks, tmp_path
):
    source, training = shipped("bytes_griffin"), tmp_path / "training"
    for step in (1, 2, 3, 4):
        convert(source, training / str(step), to="griffin")
    weights = load_file(training / "2" / "model.safetensors")
    name = next(name for name in weights if name.endswith("final_norm.weight"))
    weights[name] = np.full_like(weights[name], np.nan)
    save_file(weights, training / "2" / "model.safetensors")
    (training / "2" / "griffin_manifest.json").unlink()
    damaged = training / "3" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    results = tmp_path / "results"
    (results / "4").mkdir(parents=True)
    (results / "4" / "notes.txt").write_text("mine")
    for _ in range(2):  # the same command tries them again, and only them
        done = run(training, *options(results), code=1, said=True)
        assert "2: failed: " in done and "NaN" in done
        assert "3: failed: " in done and "has the SHA-256" in done
        assert "failed: 2; run the command again" in done
    assert "evaluated: 0, skipped: 2" in done
    assert {path.name for path in results.glob("*/")} == {"1", "4", "figures"}
    assert (results / "4" / "notes.txt").read_text() == "mine"
    same(written(results / "1")[1]["sweep_choice"], written(results / "4")[1]["sweep_choice"])


def test_a_bug_shows_its_traceback(run_folder, only_these_tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(GriffinLM, "loglikelihood", lambda *_, **__: [1].index(2))
    with pytest.raises(ValueError, match="2 is not in list") as raised:
        run(run_folder, *options(tmp_path / "results"))
    assert not isinstance(raised.value, BadInput)


REFUSED = [
    (["--limit", "3"], "before lm_eval's own options"),
    (["nowhere"], "expected the folder of a training"),
    (["EMPTY"], "has no checkpoints"),
    (["EMPTY", "--revisions", "a"], "of one hub id"),
    (["EMPTY", "--until", "3"], "add --watch"),
    (["a/b", "c/d", "--watch"], "expected the folder of one"),
    (["a", "a"], "a and a would share the folder 'a'"),
    (["a", "a/"], "a and a/ would share"),
    (["a/b", "c/b", "a__b"], "a/b and a__b would share"),
    (["org/model", "--revisions", "x,x"], "x and x would share"),
    (["RUN", "--model_args", "pretrained=x"], "pretrained="),
    (["RUN", "--use_cache", "x"], "use_cache"),
    (["RUN", "--model_args", "state=x"], "state=.*since it belongs to one checkpoint"),
    (["RUN", "--model_args", "state_cache=x"], "state_cache=.*since it belongs"),
]


def test_bad_input_is_one_sentence(run_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    known = {"EMPTY": tmp_path / "empty", "RUN": run_folder}
    for arguments, said in REFUSED:
        given = [known.get(word, word) for word in arguments]
        with pytest.raises(BadInput, match=said):
            run(*given, "--tasks", "sweep_choice", "-o", tmp_path / "results")
    assert not (tmp_path / "results").exists()

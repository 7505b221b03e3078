"""`griffin-eval run --freeze` and `--suite`: a run that asks what is pinned, or is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from griffin_eval.errors import BadInput
from griffin_eval.lm.suite import _hash, read_suite, run_frozen

TASK = """
task: frozen_choice
dataset_path: json
dataset_kwargs: {data_files: DATA}
output_type: multiple_choice
test_split: train
fewshot_split: train
num_fewshot: 1
doc_to_text: "{{text}}"
doc_to_choice: [" yes", " no"]
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 3}
"""
MODEL = ["--model", "dummy"]


@pytest.fixture
def task_folder(tmp_path, monkeypatch):
    """lm_eval takes seconds to find all of its own tasks."""
    manager = lm_eval.tasks.TaskManager

    def make(include_path=None, metadata=None, **_):
        return manager(include_path=include_path, include_defaults=False, metadata=metadata)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", make)
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_data(folder)
    (folder / "frozen.yaml").write_text(TASK.replace("DATA", str(folder / "data.jsonl")))
    return folder


def write_data(folder: Path, last: str = "return") -> None:
    texts = ["import os", "def f(x):", "The value is", last]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "data.jsonl").write_text("".join(lines))


def test_what_a_document_says_of_the_model_is_not_what_is_asked():
    """A phone book is the same one inside and outside of a window."""

    def asked(text="Isaac Li:", **document):
        return _hash([Instance("generate_until", document, (text, {}), 0, ("books", 0, 1))])

    one = asked(dataset_sha256="a", inside_window=True)
    assert one == asked(dataset_sha256="a", inside_window=False)
    others = [asked(dataset_sha256="b"), asked("Al:", dataset_sha256="a"), asked(question="a")]
    assert len({one, asked(question="b"), *others}) == 5


@pytest.fixture
def frozen(task_folder, tmp_path):
    file = tmp_path / "suite.json"
    asked = ["--tasks", "frozen_choice", "--include_path", str(task_folder), "--limit", "4"]
    run_frozen([*MODEL, *asked], suite=None, freeze=file)
    return file


def test_a_suite_pins_and_repeats_a_run(frozen, monkeypatch):
    pinned = read_suite(frozen)
    assert pinned.settings["seed"] == [0, 1234, 1234, 1234] and pinned.settings["limit"] == 4
    assert pinned.tasks["frozen_choice"]["version"] == "3"
    assert pinned.tasks["frozen_choice"]["requests"] == 8
    assert set(pinned.versions) == {"griffin_eval", "lm_eval", "datasets"}
    called, evaluate = [], evaluator.evaluate
    monkeypatch.setattr(
        evaluator, "evaluate", lambda *a, **named: called.append(named) or evaluate(*a, **named)
    )
    run_frozen(MODEL, suite=frozen, freeze=None)
    assert called[0]["limit"] == 4


def test_other_data_are_refused_before_the_model_answers(frozen, task_folder, monkeypatch):
    write_data(task_folder, "raise")
    model = get_model("dummy")
    monkeypatch.setattr(model, "loglikelihood", lambda *_: pytest.fail("the model was asked"))
    with pytest.raises(BadInput, match=r"frozen_choice does not ask what is pinned \(sha256"):
        run_frozen(MODEL, suite=frozen, freeze=None)


def change(file: Path, **parts) -> None:
    content = json.loads(file.read_text())
    for name, values in parts.items():
        content[name] |= values
    file.write_text(json.dumps(content))


DIFFERENCES = [
    ({"settings": {"limit": 3.0}}, r"requests 6, pinned 8; sha256"),
    ({"settings": {"num_fewshot": 0}}, r"\(sha256 \w+, pinned \w+\)"),
    ({"settings": {"seed": [0, 1, 2, 3]}}, r"\(sha256 \w+, pinned \w+\)"),
    ({"settings": {"colour": "red"}}, "not known: colour"),
    ({"versions": {"lm_eval": "0.1"}}, r"pinned to lm_eval 0\.1 \(here 0\.4"),
    ({"tasks": {"frozen_choice": {"version": "2"}}}, r"\(version 3, pinned 2"),
    ({"tasks": {"other": {"version": "2"}}}, "nothing asked for other, which is pinned"),
]


def test_what_differs_is_named(frozen):
    content = frozen.read_bytes()
    for parts, said in DIFFERENCES:
        frozen.write_bytes(content)
        change(frozen, **parts)
        with pytest.raises(BadInput, match=said):
            run_frozen(MODEL, suite=frozen, freeze=None)


def test_a_suite_says_what_is_asked(frozen):
    for arguments, said in (
        (["--limit", "2"], "leave out --limit"),
        (["--tasks", "a", "--seed", "3"], "leave out --tasks, --seed"),
        (["--config", "a.yaml"], "--config is not supported here"),
    ):
        with pytest.raises(BadInput, match=said):
            run_frozen([*MODEL, *arguments], suite=frozen, freeze=None)


def test_files_and_processes_that_cannot_be_used(frozen, tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="exists already"):
        run_frozen(MODEL, suite=None, freeze=frozen)
    with pytest.raises(BadInput, match="give one of them"):
        run_frozen(MODEL, suite=frozen, freeze=tmp_path / "new")
    for content in ("[]", "{}", '{"griffin_eval_suite": 1, "settings": 3}', "no JSON"):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(BadInput, match=r"other\.json"):
            run_frozen(MODEL, suite=tmp_path / "other.json", freeze=None)
    whole = json.loads(frozen.read_text())
    for part in ({"tasks": {"x": "text"}}, {"settings": whole["settings"] | {"tasks": 5}}):
        (tmp_path / "other.json").write_text(json.dumps(whole | part))
        with pytest.raises(BadInput, match=r"other\.json is no suite"):
            read_suite(tmp_path / "other.json")
    with pytest.raises(BadInput, match="is no folder: name another path"):
        run_frozen(MODEL, suite=None, freeze=frozen / "below" / "new")
    change_layout = json.loads(frozen.read_text()) | {"griffin_eval_suite": 2}
    frozen.write_text(json.dumps(change_layout))
    with pytest.raises(BadInput, match="layout 2"):
        read_suite(frozen)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BadInput, match="one process"):
        run_frozen(MODEL, suite=frozen, freeze=None)


def test_a_failed_run_writes_no_suite(task_folder, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("lost")

    monkeypatch.setattr(get_model("dummy"), "loglikelihood", fail)
    asked = ["--tasks", "frozen_choice", "--include_path", str(task_folder)]
    with pytest.raises(RuntimeError, match="lost"):
        run_frozen([*MODEL, *asked], suite=None, freeze=tmp_path / "suite.json")
    assert not (tmp_path / "suite.json").exists()


@pytest.mark.slow
def test_the_command(checkpoint, tmp_path):
    def run(*arguments) -> subprocess.CompletedProcess:
        words = [Path(sys.executable).with_name("griffin-eval"), "run", "--model", "griffin"]
        words += ["--model_args", f"pretrained={checkpoint}", *arguments]
        return subprocess.run([*map(str, words)], capture_output=True, text=True, env=os.environ)

    asked = ["--tasks", "griffin_pydoc_choice", "--limit", "2"]
    done = run(*asked, "--freeze", tmp_path / "suite.json")
    assert done.returncode == 0, done.stderr
    again = run("--suite", tmp_path / "suite.json", "--output_path", tmp_path / "results")
    assert again.returncode == 0, again.stderr
    assert list((tmp_path / "results").rglob("results_*.json"))
    change(tmp_path / "suite.json", versions={"datasets": "0"})
    refused = run("--suite", tmp_path / "suite.json")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr

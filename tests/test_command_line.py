"""The commands as a user types them, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=600,
    )


def evaluate(program: list[str], model: str, arguments: str, folder: Path, tasks: str) -> dict:
    """Runs an evaluation; gives task -> (metrics, responses of every request)."""
    done = run(
        *program,
        *("--model", model, "--model_args", arguments, "--tasks", tasks, "--limit", "3"),
        *("--batch_size", "1", "--device", "cpu", "--log_samples", "--output_path", str(folder)),
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(next(folder.rglob("results_*.json")).read_text())["results"]
    return {
        task: (
            {k: v for k, v in metrics.items() if isinstance(v, float)},
            [
                json.loads(line)["resps"]
                for line in next(folder.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()
            ],
        )
        for task, metrics in results.items()
    }


def test_stock_commands_agree(checkpoint, tmp_path):
    """`lm_eval --model griffin` and `lm_eval --model hf`: same metrics, texts and greedy flags."""
    tasks = "griffin_pydoc_choice,griffin_phonebook"
    ours = evaluate(["lm_eval"], "griffin", f"pretrained={checkpoint}", tmp_path / "a", tasks)
    theirs = evaluate(
        ["lm_eval"], "hf", f"pretrained={checkpoint},max_length=8192", tmp_path / "b", tasks
    )
    assert ours.keys() == theirs.keys() == set(tasks.split(","))
    for task in ours:
        assert ours[task][0] == pytest.approx(theirs[task][0], abs=1e-6, nan_ok=True)
        for mine, yours in zip(ours[task][1], theirs[task][1], strict=True):
            for (a,), (b,) in zip(mine, yours, strict=True):
                if isinstance(a, str):
                    assert a == b
                else:
                    assert float(a[0]) == pytest.approx(float(b[0]), rel=1e-4, abs=1e-4)
                    assert a[1] == b[1]


def test_griffin_eval_run_works_where_the_plugin_is_off(checkpoint, tmp_path):
    off = {"GRIFFIN_EVAL_NO_PLUGIN": "1"}
    common = ["--model", "griffin", "--tasks", "griffin_pydoc_rolling", "--limit", "1"]
    common += ["--model_args", f"pretrained={checkpoint},framework=jax"]
    refused = run("lm_eval", *common, **off)
    assert refused.returncode != 0
    done = run("griffin-eval", "run", *common, **off)
    assert done.returncode == 0, done.stderr
    assert "bits_per_byte" in done.stdout
    assert "griffin: jax on cpu:0 in float32" in done.stderr  # logged as lm_eval logs


def test_tasks_are_listed():
    done = run("lm_eval", "ls", "tasks")
    assert done.returncode == 0, done.stderr
    for task in ("griffin_phonebook", "griffin_pydoc_choice", "griffin_pydoc_rolling"):
        assert task in done.stdout


@pytest.mark.parametrize("task", ["griffin_pydoc_choice", "nowhere"])
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, task):
    done = run(
        *("griffin-eval", "run", "--model", "griffin", "--tasks", task),
        *("--model_args", f"pretrained={tmp_path / 'nowhere'}"),
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("griffin-eval: ") and "nowhere" in last


@pytest.mark.parametrize("arguments", [["frobnicate"], ["--frobnicate"]])
def test_usage_errors_exit_with_2(arguments):
    done = run("griffin-eval", *arguments)
    assert done.returncode == 2
    assert "frobnicate" in done.stderr and "Traceback" not in done.stderr


def test_help_and_version_import_no_framework():
    done = run("griffin-eval", "--version")
    assert done.returncode == 0 and done.stdout.strip()
    code = (
        "import sys; sys.argv = ['griffin-eval', '--help']\n"
        "from griffin_eval.cli import main\n"
        "try:\n main()\n"
        "except SystemExit as end:\n assert not end.code\n"
        "print('heavy:', {'torch', 'jax', 'lm_eval', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = run("python", "-c", code)
    assert "Usage" in done.stdout and "heavy: set()" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_demo_agrees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("python", "-m", "griffin_eval.demo", "--samples", "2", "--steps", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All three agree." in done.stdout
    assert (tmp_path / "demo-report" / "report.html").is_file()

"""The commands as a user types them, in separate processes."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import griffin_eval
from slow import ci, slow
from typer.main import get_command
from xla_options import QUICK_FLAGS

from griffin_eval.checkpoints import folder
from griffin_eval.cli.main import app

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
    """Run an evaluation; return (metrics, responses of every request) by task."""
    # Full compilation is not needed here: this test compares two programs.
    done = run(
        *program,
        *("--model", model, "--model_args", arguments, "--tasks", tasks, "--limit", "3"),
        *("--batch_size", "1", "--device", "cpu", "--log_samples", "--output_path", str(folder)),
        *("--metadata", json.dumps({"entries": [4, 8], "samples": 2, "queries": 1})),
        XLA_FLAGS=QUICK_FLAGS,
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


# test_lm compares the same in one process; README.md's blocks run the command with PyTorch.
@pytest.mark.parametrize("framework", [slow("torch"), ci("jax")])
def test_stock_commands_agree(checkpoint, tmp_path, framework):
    """`lm_eval --model griffin` and `--model hf` give the same metrics, texts and greedy flags."""
    tasks = "griffin_pydoc_choice,griffin_phonebook"
    arguments = f"pretrained={checkpoint},framework={framework}"
    ours = evaluate(["lm_eval"], "griffin", arguments, tmp_path / "a", tasks)
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


def rolling(checkpoint) -> list[str]:
    common = ["--model", "griffin", "--tasks", "griffin_pydoc_rolling", "--limit", "1"]
    return [*common, "--model_args", f"pretrained={checkpoint},framework=jax"]


@pytest.mark.slow
def test_lm_eval_does_not_know_us_where_the_plugin_is_off(checkpoint):
    refused = run("lm_eval", *rolling(checkpoint), GRIFFIN_EVAL_NO_PLUGIN="1")
    assert refused.returncode != 0


@pytest.mark.slow
def test_griffin_eval_run_works_where_the_plugin_is_off(checkpoint):
    done = run("griffin-eval", "run", *rolling(checkpoint), GRIFFIN_EVAL_NO_PLUGIN="1")
    assert done.returncode == 0, done.stderr
    assert "bits_per_byte" in done.stdout
    assert "griffin: jax on cpu:0 in float32" in done.stderr  # in lm_eval's log format


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("command", ["lm_eval", "griffin-eval run"])
def test_documents_that_cannot_be_fetched_are_one_sentence(command, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = run(
        *(*command.split(), "--model", "griffin", "--tasks", "squad_completion"),
        *("--model_args", f"pretrained={folder('bytes_griffin')}"),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("griffin")]
    assert len(said) == 1 and "HF_HOME" in said[0], done.stderr


@pytest.mark.parametrize("arguments", [["frobnicate"], ["--frobnicate"]])
def test_usage_errors_exit_with_2(arguments):
    done = griffin_eval(*arguments)
    assert done.returncode == 2
    assert "frobnicate" in done.stderr and "Traceback" not in done.stderr


def test_help_and_version_import_no_framework():
    done = run("griffin-eval", "--version")
    assert done.returncode == 0 and done.stdout.strip()
    code = (
        "import sys; sys.argv = ['griffin-eval', '--help']\n"
        "from griffin_eval.cli.main import main\n"
        "try:\n main()\n"
        "except SystemExit as end:\n assert not end.code\n"
        "print('heavy:', {'torch', 'jax', 'lm_eval', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = run("python", "-c", code)
    assert "Usage" in done.stdout and "heavy: set()" in done.stdout, done.stdout + done.stderr


def test_the_package_is_a_command_and_h_is_help():
    done = run("python", "-m", "griffin_eval", "-h")
    assert done.returncode == 0 and "python -m griffin_eval" in done.stdout
    for command in ("convert", "score", "sweep", "train"):
        assert griffin_eval(command, "-h").returncode == 0


def test_help_at_80_columns_cuts_no_name_and_has_an_example(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "…" not in griffin_eval("-h").stdout and "..." not in griffin_eval("-h").stdout[60:]
    commands = get_command(app).commands
    for name, command in commands.items():
        shown = "" if command.hidden or name == "run" else griffin_eval(name, "-h").stdout
        assert max(map(len, shown.splitlines()), default=0) <= 80
        words = set(re.findall(r"--?[a-z][\w-]*", shown))
        options = [p for p in command.params if not p.hidden and p.param_type_name == "option"]
        names = {word for p in options for word in p.opts}
        assert not shown or names <= words, name
        example = re.search(r"Example:\n    griffin-eval (.*)\n", shown)
        assert not shown or example is not None and example[1].startswith(name), name
        assert example is None or set(re.findall("--[a-z-]+", example[1])) <= names, name


@pytest.mark.parametrize("damaged", [False, True])
def test_a_closed_pipe_changes_no_exit_code(damaged, tmp_path):
    checkpoint = folder("bytes_griffin")
    if damaged:
        checkpoint = shutil.copytree(checkpoint, tmp_path / "copy")
        (checkpoint / "config.json").write_text('{"model_type": "griffin"}')
    command = [BIN / "griffin-eval", "inspect", checkpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == int(damaged)


def test_the_shell_completes_commands():
    words = {"_GRIFFIN_EVAL_COMPLETE": "complete_bash", "COMP_WORDS": "griffin-eval con"}
    assert run("griffin-eval", **words, COMP_CWORD="1").stdout.split() == ["convert"]


@pytest.mark.parametrize(
    ("option", "typed", "meant"),
    [("--to", "huggingface", "hf"), ("--to", "HF", "hf"), ("--to", "orbax", "griffin-orbax")]
    + [("--dtype", "half", "float16"), ("--dtype", "bf16", "bfloat16")],
)
def test_usual_names_of_formats_and_dtypes_are_recognised(option, typed, meant, tmp_path):
    options = {"--to": "hf", option: typed}
    words = [word for pair in options.items() for word in pair]
    done = griffin_eval("convert", folder("bytes_griffin"), tmp_path / "out", *words)
    assert done.returncode == 2 and f"(did you mean {meant!r}?)" in done.stderr


def test_stdin_is_a_text(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello there.")))
    done = griffin_eval("score", folder("bytes_griffin"), "-", "--csv")
    assert done.returncode == 0 and done.stdout.count('\n"-",') == 12


def parameters(command, path=("griffin-eval",)):
    """Yield the command-line name and help text of every option and argument in the help."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from parameters(inner, (*path, name))
    for parameter in command.params:
        if parameter.name != "help" and not getattr(parameter, "hidden", False):
            yield " ".join((*path, parameter.name)), getattr(parameter, "help", None) or ""


def test_every_option_has_a_help_text():
    texts = dict(parameters(get_command(app)))
    assert len(texts) > 80
    assert not [name for name, text in texts.items() if not re.fullmatch(r"\S+ .*\.", text)]

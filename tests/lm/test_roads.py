"""Every road to a model refuses the same things, before the first answer and in one sentence."""

import shutil
from pathlib import Path

import lm_eval.tasks
import numpy as np
import pytest
import typer
from lm_eval.api.instance import Instance
from safetensors.numpy import load_file, save_file
from typer.main import get_command

import griffin_eval
from griffin_eval.checkpoints import folder as shipped
from griffin_eval.cli.main import app
from griffin_eval.errors import BadInput
from griffin_eval.lm import sweep as sweeps
from griffin_eval.lm.model import GriffinLM

TEXT = "import os"
UsageError = typer.BadParameter.__mro__[1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return copies of a checkpoint with its manifest, each with one fault, by the fault's name."""
    root = tmp_path_factory.mktemp("roads")
    griffin_eval.convert(shipped("bytes_griffin"), root / "whole", to="griffin")

    def copy(name: str) -> Path:
        return shutil.copytree(root / "whole", root / name)

    for name, value in (("damaged", 1.0), ("diverged", np.nan)):
        file = copy(name) / "model.safetensors"
        weights = load_file(file)
        weights["model.final_norm.weight"][3] = value
        save_file(weights, file)
    (root / "diverged" / "griffin_manifest.json").unlink()
    for file in copy("mute").glob("tokenizer*"):
        file.unlink()
    tokenizer = copy("unmarked") / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.write_text(text.replace("<bos>", "<b>").replace("<eos>", "<e>"))
    (root / "unmarked" / "tokenizer_config.json").write_text("{}")
    (root / "state").write_text("no state")
    (root / "text").write_text(TEXT)
    return root


def command(name, *words):
    """Run a command in this process, as `griffin_eval.cli.ending` does, but for the exit code."""
    get_command(app).main([name, *map(str, words)], standalone_mode=False)


def options(arguments):
    names = {"pretrained": "", "check": ""}
    for name, value in arguments.items():
        if names.get(name, name):
            yield from (f"--{name.replace('_', '-')}", str(value))
    if arguments.get("check") is False:
        yield "--no-check"


def by_lm_eval(folder, out, **arguments):
    model = GriffinLM(str(folder), **arguments)
    model.loglikelihood([Instance("loglikelihood", {}, ("import", " os"), 0)], disable_tqdm=True)
    model.get_model_info()


def by_evaluator(folder, out, **arguments):
    griffin_eval.Evaluator(folder, **arguments).score([TEXT])


def by_score(folder, out, **arguments):
    command("score", folder, folder.parent / "text", *options(arguments))


def by_generate(folder, out, **arguments):
    command("generate", folder, TEXT, *options(arguments))


def by_read(folder, out, **arguments):
    command("read", folder, folder.parent / "text", "--save", out / "saved", *options(arguments))


def by_memory(folder, out, **arguments):
    command("memory", folder, "--tokens", "64", "--json", *options(arguments))


def by_serve(folder, out, **arguments):
    command("serve", folder, "--port", "0", *options(arguments))


def by_verify(folder, out, **arguments):
    command("verify", folder, "--logits", *options(arguments))


def by_sweep(folder, out, **arguments):
    words = ",".join(f"{name}={value}" for name, value in arguments.items())
    target = sweeps.Target("one", str(folder))
    config = sweeps.configuration(
        ["--tasks", "griffin_pydoc_choice", "--limit", "1", "--model_args", words], target
    )
    for outcome in sweeps.sweep(config, lambda: [target], out):
        assert outcome.failed
        raise BadInput(outcome.reason)


def by_load(folder, out, **arguments):
    griffin_eval.load(folder, **arguments)


ROADS = {
    name.removeprefix("by_"): road for name, road in list(globals().items()) if name[:3] == "by_"
}
PYTHON = {"lm_eval", "evaluator", "load"}
OF_TEXTS = ROADS.keys() - {"load", "verify"}
OF_STATES = {"lm_eval", "evaluator", "serve"}
DTYPES = ROADS.keys() - {"verify"}
# Each case: fault, folder, arguments, a part of the message, and the roads that meet it.
CASES = [
    (
        "other weights than the manifest's",
        "damaged",
        {},
        "(check=False in --model_args, or --no-check",
        ROADS,
    ),
    ("weights that are NaN", "diverged", {}, "final_norm.weight: 1 of 64 weights", DTYPES),
    ("no tokenizer", "mute", {}, "tokenizer=", OF_TEXTS),
    ("no BOS and no EOS", "unmarked", {}, "neither BOS nor EOS", OF_TEXTS - {"memory"}),
    ("unknown dtype", "whole", {"dtype": "float31"}, "did you mean 'float32'", DTYPES),
    ("unknown framework", "whole", {"framework": "pytorch"}, "did you mean 'torch'", DTYPES),
    ("unknown device", "whole", {"device": "cua:0"}, "cua:0", DTYPES - {"sweep"}),
    ("unknown argument", "whole", {"dtpe": "float32"}, "dtpe", ROADS),
    ("tokenizer elsewhere", "whole", {"tokenizer": "/nowhere"}, "/nowhere", OF_TEXTS),
    ("no saved state", "whole", {"state": "STATE"}, "is no safetensors file", OF_STATES),
    (
        "unknown preset",
        "whole",
        {"preset": "recurrentgemma-2"},
        "did you mean",
        ROADS.keys() - PYTHON,
    ),
]


def refusal(road, folder, out, arguments) -> str:
    """Return the sentence with which a road refuses, or the answer that came instead."""
    try:
        road(folder, out, **arguments)
    except (BadInput, UsageError) as error:
        return str(error)
    except TypeError as error:  # a function without that argument
        return str(error)
    except SystemExit as error:
        return f"ended with {error.code}"
    return "accepted"


@pytest.fixture
def nothing_is_served(monkeypatch):
    import uvicorn

    def run(server, sockets):
        for one in sockets:
            one.close()

    monkeypatch.setattr(uvicorn.Server, "run", run)


@pytest.fixture(autouse=True)
def no_other_tasks(monkeypatch):
    """lm_eval takes seconds to find all of its own tasks."""
    manager = lm_eval.tasks.TaskManager

    def make(include_path=None, metadata=None):
        tasks = str(Path(griffin_eval.__file__).parent / "tasks")
        return manager(include_path=tasks, include_defaults=False, metadata=metadata)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", make)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_every_road_refuses(case, folders, tmp_path, nothing_is_served):
    _, folder, arguments, said, roads = case
    known = {"STATE": str(folders / "state")}
    arguments = {name: known.get(value, value) for name, value in arguments.items()}
    messages = {
        name: refusal(ROADS[name], folders / folder, tmp_path / name, arguments)
        for name in sorted(roads)
    }
    wrong = {name: message for name, message in messages.items() if said not in message}
    assert not wrong
    assert not [name for name, message in messages.items() if "\n" in message]
    assert not list(tmp_path.rglob("results*.json"))


def test_every_road_takes_whole_weights_and_damaged_ones_unchecked(
    folders, tmp_path, nothing_is_served
):
    for name in sorted(ROADS.keys() - {"sweep", "verify"}):
        whole = refusal(ROADS[name], folders / "whole", tmp_path / name, {})
        damaged = refusal(ROADS[name], folders / "damaged", tmp_path / name, {"check": False})
        assert (name, whole, damaged) == (name, "accepted", "accepted")

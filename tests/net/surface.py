"""List everything that users of griffin-eval can see as sorted text, with one fact a line.

A change that only restructures the code leaves ``surface.txt`` as it is. The diff of that file
shows every command, option, task, metric, output key, route or name that a change adds or removes.

    python tests/net/surface.py          write surface.txt beside this file
    python tests/net/surface.py --check  print the difference and exit with 1 if there is one

--times prints the CPU time of each part.

The facts come from the griffin_eval that is installed for this interpreter. Its commands run on
small shipped checkpoints. Only names and defaults are recorded, no values.
"""

import contextlib
import csv
import dataclasses
import difflib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # PYTHONSAFEPATH may be set

from inputs import write_quantised  # noqa: E402

FILE = HERE / "surface.txt"

# The only undocumented names that this file uses. Update them when they move.
INTERNAL = {
    "app": "griffin_eval.cli.main:app",
    "model arguments": "griffin_eval.model_arguments:ModelArguments",
    "arguments of hf": "griffin_eval.model_arguments:INSTEAD",
    "metadata of tasks": "griffin_eval.tasks.metadata:KEYS",
    "written formats": "griffin_eval.converters.formats:FORMATS",
    "read formats": "griffin_eval.converters.formats:READ_ONLY",
    "shipped names": "griffin_eval.converters.naming.trainers:TRAINERS",
    "recipes": "griffin_eval.training.recipes:RECIPES",
}
# Names outside griffin_eval.__all__ that the blocks and texts of docs/ use.
DOCUMENTED = (
    "griffin_eval.checkpoints:folder",
    "griffin_eval.kernels.attention.api:choose",
    "griffin_eval.kernels.attention.api:local_attention",
    "griffin_eval.kernels.rglru.api:choose",
    "griffin_eval.kernels.rglru.api:linear_scan",
    "griffin_eval.kernels.rglru.api:rglru",
    "griffin_eval.runners.jax_time:read_over_time",
    "griffin_eval.sharding.mesh_jax:make_mesh",
    "griffin_eval.sharding.mesh_jax:make_time_mesh",
)
MODEL, SYMBOLS = "bytes_griffin", "induction_heads_griffin"  # names of shipped checkpoints
OF_SYMBOLS = ("griffin_induction_heads", "griffin_selective_copying")
RUN_TASKS = "griffin_phonebook,griffin_phonebook_counterfactual,griffin_smoke"
TEXT = "One two three, said the fox.\n" * 20

COMPLETION_FIELDS = {
    **{"model": MODEL, "max_tokens": 2, "temperature": 0, "top_p": 1, "top_k": 0, "seed": 1},
    **{"stop": ["x"], "n": 1, "user": "a", "stream": True, "best_of": 1, "presence_penalty": 0},
    **{"frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "logit_bias": {}, "suffix": ""},
    **{"tools": [], "tool_choice": "none", "functions": [], "response_format": {"type": "text"}},
    **{"store": False, "metadata": {}, "modalities": ["text"], "skip_special_tokens": True},
    **{"ignore_eos": False, "use_beam_search": False, "max_completion_tokens": 2, "echo": True},
    **{"logprobs": True, "top_logprobs": 1, "messages": [], "prompt": [[5, 6], [7, 8]]},
    **{"stream_options": {"include_usage": True}, "an_unknown_field": 1},
}
SHORT = {"max_tokens": 2}
MESSAGES = {"messages": [{"role": "user", "content": "a", "name": "b"}]}
BODIES = {  # the smallest accepted body of each POST route, and the fields to add to it in turn
    "/v1/completions": ({"prompt": "a"} | SHORT, COMPLETION_FIELDS | {"logprobs": 1}),
    "/v1/chat/completions": (MESSAGES | SHORT, COMPLETION_FIELDS | MESSAGES),
    "/generate": ({"prompt": "a"} | SHORT, COMPLETION_FIELDS),
    "/tokenize": ({"prompt": "a"}, {"model": MODEL, "add_special_tokens": False}),
    "/detokenize": ({"tokens": [5]}, {"model": MODEL}),
}


def main() -> None:
    """Write the facts, or compare them with the committed file."""
    options = {*sys.argv[1:]}
    if unknown := options - {"--check", "--times"}:
        sys.exit(f"unknown argument {min(unknown)}: use --check or --times")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        new = [line + "\n" for line in sorted(set(facts("--times" in options)))]
    old = FILE.read_text(encoding="utf-8").splitlines(True) if FILE.exists() else []
    changes = list(difflib.unified_diff(old, new, FILE.name, "this griffin-eval", n=1))
    if "--check" in options:
        sys.stdout.writelines(changes)
        sys.exit(1 if changes else 0)
    count = sum(line[0] in "+-" for line in changes[2:])
    FILE.write_text("".join(new), encoding="utf-8")
    print(f"{FILE}: {f'{count} changed lines' if count else 'unchanged'}")


def facts(timed: bool) -> Iterator[str]:
    """Yield every fact of all parts, in their order."""
    Path("text.txt").write_text(TEXT)
    for part in PARTS:
        before = sum(os.times()[:4])
        yield from part()
        if timed:
            print(f"{part.__name__}: {sum(os.times()[:4]) - before:.1f} s", file=sys.stderr)


def package() -> Iterator[str]:
    """Yield the requirements, entry points and environment variables."""
    metadata = importlib.metadata.distribution("griffin-eval")
    yield f"package requires-python {metadata.metadata['Requires-Python']}"
    for requirement in metadata.requires or ():
        name, _, extra = requirement.partition(" extra == ")
        name = name.removesuffix(" and").removesuffix(";")
        yield f"package {f'extra {extra.strip(chr(34))}' if extra else 'dependency'}: {name}"
    for entry in metadata.entry_points:
        yield f"package entry point {entry.group}: {entry.name} = {entry.value}"
    for folder in package_folders():
        for file in folder.rglob("*.py"):
            for name in re.findall(r"\bGRIFFIN_EVAL_[A-Z_]+\b", file.read_text(encoding="utf-8")):
                yield f"environment {name}"


def package_folders() -> set[Path]:
    """Return the folders of the package. An editable install keeps some outside the first one."""
    names = ("", ".converters", ".kernels", ".model_jax", ".model_torch")
    specs = (importlib.util.find_spec(f"griffin_eval{name}") for name in names)
    return {Path(place) for spec in specs if spec for place in spec.submodule_search_locations}


def command_line() -> Iterator[str]:
    """Yield the commands with their arguments and options."""
    import typer

    yield from command_facts(typer.main.get_command(internal("app")), "griffin-eval")


def command_facts(command: Any, path: str) -> Iterator[str]:
    """Yield the facts of a command and of the commands below it."""
    settings = [
        name
        for name in ("allow_extra_args", "ignore_unknown_options", "hidden", "deprecated")
        if getattr(command, name, False) or command.context_settings.get(name)
    ]
    yield " ".join(["command", path, *settings])
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        shown = "/".join(names) if names[0].startswith("-") else f"<{parameter.name}>"
        words = [type_of(parameter)]
        words += ["required"] if parameter.required else [f"default {plain(parameter.default)}"]
        repeated = parameter.nargs != 1 or getattr(parameter, "multiple", False)
        words += ["repeatable"] * repeated + ["hidden"] * getattr(parameter, "hidden", False)
        words += [f"environment {parameter.envvar}"] if parameter.envvar else []
        yield f"command {path} {shown}: {', '.join(words)}"
    for name, child in getattr(command, "commands", {}).items():
        yield from command_facts(child, f"{path} {name}")


def type_of(parameter: Any) -> str:
    """Return the type of a parameter with its choices or range."""
    kind = parameter.type_descriptor
    if kind.is_choice:
        return "|".join(map(str, kind.choices))
    info, name = kind.parameter_info, getattr(kind.annotation, "__name__", "")
    name = re.sub(r"[\w.]+\.", "", str(kind.annotation)) if "[" in str(kind.annotation) else name
    bounds = [f"{n} {v}" for n in ("min", "max") if (v := getattr(info, n, None)) is not None]
    return ", ".join([name, *bounds])


def choices() -> Iterator[str]:
    """Yield the values that options and arguments take by name, and the arguments of the model."""
    import griffin_eval
    from griffin_eval.checkpoints import names

    for kind in ("written formats", "read formats", "shipped names", "recipes"):
        yield from (f"name in {kind}: {name}" for name in internal(kind))
    yield from (f"name in presets: {name}" for name in griffin_eval.PRESETS)
    yield from (f"name in checkpoints: {name}" for name in names())
    yield from (f"name in metadata of tasks: {name}" for name in internal("metadata of tasks"))
    for field in dataclasses.fields(internal("model arguments")):
        empty = field.default is dataclasses.MISSING
        default = "no default" if empty else f"default {plain(field.default)}"
        yield f"model argument {field.name}: {default}"
    for name in internal("arguments of hf"):
        yield f"model argument {name}: refused with advice"


def conversions() -> Iterator[str]:
    """Yield the files of every format, and the keys in them."""
    for name in internal("written formats"):
        run("convert", checkpoint(), name, "--to", name)
        yield from files_of(f"convert --to {name}", Path(name))
    write_quantised(Path("hf"), Path("quantised"))
    report = json.loads(run("inspect", "quantised", "--json"))
    yield from key_facts("inspect --json of quantised", report)
    run("convert", checkpoint(), "merged", "--to", "hf", "--adapter", adapter())
    yield from files_of("convert --adapter", Path("merged"))
    report = json.loads(run("inspect", "hf", "--json", "--devices", "2"))
    yield from key_facts("inspect --json", report)
    run("read", checkpoint(), "text.txt", "--save", "state.safetensors", "--framework", "torch")
    yield from safetensors_facts("read --save", Path("state.safetensors"))


def adapter() -> str:
    """Write a LoRA adapter of one matrix, and return its folder."""
    import numpy as np
    from safetensors.numpy import save_file

    import griffin_eval

    module = "model.layers.1.mlp_block.up_proj"
    rows, columns = griffin_eval.open_checkpoint(checkpoint()).shapes[f"{module}.weight"]
    name, folder = f"base_model.model.{module}.lora", Path("adapter")
    tensors = {f"{name}_A.weight": np.ones((1, columns)), f"{name}_B.weight": np.ones((rows, 1))}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [module]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def files_of(what: str, folder: Path) -> Iterator[str]:
    """Yield the files at the top of a folder, and the keys of those that are JSON."""
    for path in folder.iterdir():
        yield f"file of {what}: {general(path.name)}{'/' * path.is_dir()}"
        if path.suffix == ".json" and path.name != "tokenizer.json":
            # All other JSON files have the same keys in every format.
            which = what if path.name == "config.json" else what.split()[0]
            yield from key_facts(f"{which} {path.name}", json.loads(path.read_text()))


def safetensors_facts(what: str, path: Path) -> Iterator[str]:
    """Yield the tensors of a file, and the keys of its metadata."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        yield from key_facts(f"{what} tensors", dict.fromkeys(file.keys()))
        metadata = file.metadata() or {}
    for name, text in metadata.items():
        with contextlib.suppress(ValueError):
            metadata[name] = json.loads(text)
    yield from key_facts(f"{what} metadata", metadata)


def analyses() -> Iterator[str]:
    """Yield the columns and keys of `score` and `memory`."""
    score = ("score", checkpoint(), "text.txt", "--framework", "torch", "--csv")
    yield from column_facts("score --csv", run(*score, "--states", "states"))
    yield from column_facts("score --csv --words", run(*score, "--words"))
    yield from safetensors_facts("score --states", Path("states/0.safetensors"))
    options = ("--framework", "torch", "--json")
    for name in (MODEL, "induction_heads_hawk"):
        memory = run("memory", checkpoint(name), "--tokens", "64", *options)
        yield from key_facts("memory --json", json.loads(memory))


def python() -> Iterator[str]:
    """Yield the names of the Python API, with signatures and public attributes."""
    import griffin_eval

    model = griffin_eval.Evaluator(checkpoint(), framework="torch")
    opened = griffin_eval.open_checkpoint(checkpoint())
    results = {
        "Evaluator": model,
        "Checkpoint": opened,
        "Comparison": griffin_eval.verify(opened, opened),
        "Score": model.score(["abc"])[0],
        "Continuation": model.generate(["abc"], max_new_tokens=1)[0],
        "GriffinConfig": model.config,
    }
    for name in griffin_eval.__all__:
        value = getattr(griffin_eval, name)
        yield from name_facts(f"python griffin_eval.{name}", value, results.get(name))
    for name in DOCUMENTED:
        yield from name_facts(f"python {name.replace(':', '.')}", resolve_name(name))
    for framework in ("torch", "jax"):
        loaded = griffin_eval.load(checkpoint(), framework=framework)
        for name in ("init_state", "step", "logits"):
            value = getattr(loaded, name)
            yield f"python griffin_eval.load in {framework}: {name}{signature(value)}"


def name_facts(name: str, value: Any, example: Any = None) -> Iterator[str]:
    """Yield the signature of a name, and the public attributes of an instance of a class."""
    if not callable(value):
        yield f"{name}: {type(value).__name__}"
        return
    yield f"{name}{signature(value)}"
    inherited = {*dir(tuple)} if isinstance(example, tuple) else set()
    for attribute in dir(example) if example is not None else ():
        if not attribute.startswith("_") and attribute not in inherited:
            member = inspect.getattr_static(value, attribute, None)
            is_method = callable(getattr(member, "__func__", member)) and inspect.isroutine(member)
            shown = signature(getattr(value, attribute)) if is_method else ""
            yield f"{name}.{attribute}{shown}"


def signature(function: Any) -> str:
    """Return the parameters of a function with their defaults, without types."""
    parameters = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else Shown(p))
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]
    return str(inspect.Signature(parameters))


class Shown:
    """A default value with a text that does not depend on addresses in memory."""

    def __init__(self, parameter: inspect.Parameter):
        self._text = plain(parameter.default)

    def __repr__(self) -> str:
        return self._text


def skip_tasks_of_lm_eval() -> None:
    """Keep lm_eval from reading its own 14,000 task files, which takes seconds."""
    from lm_eval.tasks import _index

    build, folder = _index.TaskIndex.build, Path(_index.__file__).parent

    def build_others(paths: Iterable[Path], **options: Any) -> Any:
        return build([path for path in paths if path != folder], **options)

    _index.TaskIndex.build = staticmethod(build_others)


def evaluation() -> Iterator[str]:
    """Yield the keys of the results, samples, token scores and suites of evaluations."""
    skip_tasks_of_lm_eval()
    arguments = (
        f"pretrained={checkpoint()},peft={adapter()},framework=torch,parity=check,"
        "token_scores=scores,token_states=True,state_cache=cache"
    )
    options = ("--tasks", RUN_TASKS, "--limit", "2", "--log_samples")
    options += ("--metadata", json.dumps({"entries": [4], "samples": 2, "lengths": [4]}))
    model = ("--model", "griffin", "--model_args", arguments, "--output_path", "results")
    run("run", *model, *options, "--freeze", "suite.json")
    yield from key_facts("run --freeze", json.loads(Path("suite.json").read_text()))
    for path in Path("results").rglob("*.json*"):
        lines = path.suffix == ".jsonl"
        what = "lm_eval samples_TASK.jsonl" if lines else "lm_eval results.json"
        for text in path.read_text().splitlines() if lines else [path.read_text()]:
            yield from key_facts(what, json.loads(text))
    for path in Path("scores").iterdir():
        if path.suffix == ".jsonl":
            for text in path.read_text().splitlines():
                yield from key_facts("token_scores= TASK.jsonl", json.loads(text))
        else:
            yield from safetensors_facts("token_states=", path)


def reports() -> Iterator[str]:
    """Yield the files, columns and keys of a sweep and of a report on it."""
    swept = ("griffin", "hf", "--model_args", "framework=torch", "--tasks", "griffin_pydoc_choice")
    run("sweep", *swept, "-o", "sweep", "--limit", "8", "--log_samples")
    one, other = (path.parent for path in sorted(Path("sweep").rglob("results_*.json")))
    run("report", str(one), "--against", str(other), "-o", "report")
    for folder in ("sweep", "report"):
        for path in Path(folder).iterdir():
            if path.is_file():
                yield f"file of {folder}: {path.name}"
            if path.suffix == ".csv":
                yield from column_facts(f"{folder} {path.name}", path.read_text())
            if path.suffix == ".json":
                yield from key_facts(f"{folder} {path.name}", json.loads(path.read_text()))


def tasks() -> Iterator[str]:
    """Yield the tasks, groups and tags with their settings and default metrics."""
    from lm_eval.tasks import TaskManager

    metadata = {"samples": 1, "train_length": 16}
    managers = {
        name: TaskManager(metadata=metadata | {"pretrained": checkpoint(name)})
        for name in (MODEL, SYMBOLS)
    }
    index = managers[MODEL].task_index
    for name in (name for name in index if name.startswith("griffin_")):
        config, kind = index[name].cfg or {}, index[name].kind.name.lower()
        yield f"task {name}: {'task' if kind == 'py_task' else kind}"
        yield from (f"task {name} tag: {tag}" for tag in named(config.get("tag")))
        if kind == "group":
            yield from (f"task {name} member: {task}" for task in config["task"])
            yield from (
                f"task {name} aggregate metric: {metric}"
                for metric in config.get("aggregate_metric_list", ())
            )
        elif kind != "tag":
            manager = managers[SYMBOLS if name in OF_SYMBOLS else MODEL]
            yield from task_facts(name, manager.load([name])["tasks"][name])


def named(names: str | list[str] | None) -> list[str]:
    """Return one name, several or none as a list."""
    return [names] if isinstance(names, str) else names or []


def task_facts(name: str, task: Any) -> Iterator[str]:
    """Yield the kind of output of a task, its settings that are set, and its metrics."""
    config = task.dump_config()
    yield f"task {name} output type: {config['output_type']}"
    yield f"task {name} shots: {config.get('num_fewshot')}"
    yield f"task {name} version: {task.VERSION}"
    for setting, value in (config.get("generation_kwargs") or {}).items():
        yield f"task {name} generation {setting}: {value!r}"
    yield from (f"task {name} column: {column}" for column in task.dataset["test"].column_names)
    chance = (config.get("metadata") or {}).get("chance", {})
    yield from (f"task {name} chance of: {general(metric)}" for metric in chance)
    directions, aggregations = task.higher_is_better(), task.aggregation()
    for metric, function in aggregations.items():
        if metric.removesuffix("_low").removesuffix("_high") in aggregations.keys() - {metric}:
            continue  # a bound, listed with its metric
        words = [getattr(function, "keywords", {}).get("kind") or plain(function)]
        words += ["with bounds"] * ({metric + "_low", metric + "_high"} <= aggregations.keys())
        direction = {True: "higher is better", False: "lower is better", None: "neither is better"}
        words.append(direction[directions.get(metric)])
        yield f"metric of {name}: {metric}, {', '.join(words)}"


def training() -> Iterator[str]:
    """Yield the files and keys of a training."""
    sizes = ("--length", "16", "--rows", "1", "--width", "16", "--steps", "1")
    run("train", "induction_heads", "--model", "griffin", "-o", "run", *sizes)
    yield from files_of("train", Path("run"))
    for text in Path("run/metrics.jsonl").read_text().splitlines():
        yield from key_facts("train metrics.jsonl", json.loads(text))


def server() -> Iterator[str]:
    """Yield the routes of the server, the fields that they take and the keys of their replies."""
    import uvicorn

    replies: list[str] = []

    def ask(self: Any, *_: Any, **__: Any) -> None:
        replies.extend(route_facts(self.config.app))

    state = ("--state", "state.safetensors")
    with mock.patch.object(uvicorn.Server, "run", ask):
        options = ("--tokenizer-info", "--chat-template", "plain", "--framework", "torch", *state)
        run("serve", checkpoint(), "--port", "0", "--served-model-name", MODEL, *options)
    yield from replies


def route_facts(app: Any) -> Iterator[str]:
    """Yield the facts of every route of an application."""
    from starlette.testclient import TestClient

    client = TestClient(app, "http://localhost", raise_server_exceptions=False)
    yield from key_facts("server unknown route", client.get("/unknown").json())
    for route in app.routes:
        path = route.path
        yield f"server {path}: {' '.join(sorted(route.methods))}"
        if "GET" in route.methods:
            reply = client.get(path.replace("{name:path}", MODEL))
            if reply.headers["content-type"].startswith("text/plain"):
                for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", reply.text, re.M):
                    yield f"server {path} metric {name}: {kind}"
            else:
                yield from key_facts(f"server {path} reply", reply.json())
            continue
        body, fields = BODIES.get(path, ({}, {}))
        for name, value in (body | fields).items():
            request = body | {name: value}
            if name == "stream_options":
                request |= {"stream": True, "logprobs": fields["logprobs"]}
            elif name == "top_logprobs":
                request["logprobs"] = fields["logprobs"]
            reply = client.post(path, json=request)
            yield f"server {path} field {name}: {reply.status_code}"
            kind, parts = "reply" if reply.status_code == 200 else "error", [reply.text]
            if reply.headers["content-type"].startswith("text/event-stream"):
                kind, parts = "event", re.findall("^data: ({.*)$", reply.text, re.M)
            for part in parts:
                yield from key_facts(f"server {path} {kind}", json.loads(part))


# Helpers


def internal(what: str) -> Any:
    """Return one of the names in `INTERNAL`."""
    return resolve_name(INTERNAL[what])


def checkpoint(name: str = MODEL) -> str:
    """Return the path of a shipped checkpoint."""
    from griffin_eval.checkpoints import folder

    return str(folder(name))


def run(*arguments: str) -> str:
    """Run a command of griffin-eval in this process, and return what it prints to stdout."""
    from typer.testing import CliRunner

    with mock.patch.object(sys, "argv", ["griffin-eval", *arguments]):
        result = CliRunner().invoke(internal("app"), [str(one) for one in arguments])
    if result.exception is not None and not (
        isinstance(result.exception, SystemExit) and result.exit_code == 1
    ):
        raise RuntimeError(f"griffin-eval {' '.join(arguments)} failed") from result.exception
    return result.stdout


def key_facts(what: str, value: Any) -> Iterator[str]:
    """Yield the keys of a JSON value as dotted paths."""
    for path in paths(value):
        path = re.sub(r"(?s)(?<=logprobs\.top_logprobs\[\]\.).+", "<token>", path)
        yield f"key of {what}: {path}"


def paths(value: Any, before: str = "") -> Iterator[str]:
    """Yield the dotted path of every key of a JSON value, with names of data replaced."""
    if isinstance(value, list):
        for item in value:
            yield from paths(item, f"{before}[]")
    elif isinstance(value, dict):
        for key, item in value.items():
            path = f"{before}.{general(key)}".removeprefix(".")
            yield path
            yield from paths(item, path)


def general(key: str) -> str:
    """Return a key with a word in the place of a parameter, task, point, layer or number."""
    if re.match(r"(model\.|lm_head)", key):
        return "<parameter>"
    key = re.sub(r"^griffin_(phonebook|pydoc)\w*$", "<task>", key)
    key = re.sub(r"@[\w.]+?(?=_low|_high|,|$)", "@x", key)
    return re.sub(r"^\d+$|(?<=^layers\.)\d+", "N", key)


def column_facts(what: str, text: str) -> Iterator[str]:
    """Yield the columns of a CSV text, with their places."""
    header = next(csv.reader(io.StringIO(text)))
    for place, name in enumerate(header, 1):
        yield f"column of {what}: {place:2} {name}"


def plain(value: Any) -> str:
    """Return a default value as text that is the same in every process."""
    if callable(value) or type(value).__repr__ is object.__repr__:
        return f"<{getattr(value, '__name__', type(value).__name__)}>"
    return str(value) if isinstance(value, Path) else repr(value)


def quiet() -> None:
    """Set the environment before libraries read it, and silence their output."""
    os.environ.update(
        JAX_PLATFORMS="cpu",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        COLUMNS="100",
        XLA_FLAGS="--xla_backend_optimization_level=0",  # compiles quickly
    )
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


# Later parts use files of earlier parts. `tasks` comes after `evaluation`, since tasks have more
# metrics in a process that has loaded the model.
PARTS = (
    package,
    command_line,
    choices,
    conversions,
    analyses,
    python,
    evaluation,
    reports,
    tasks,
    training,
    server,
)

if __name__ == "__main__":
    quiet()
    main()

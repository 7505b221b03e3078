"""Frozen suites: the exact questions of an lm_eval run, to be asked again or refused.

The file pins the settings that prompts depend on, seeds, library versions, and for each task its
version, its number of requests and their hash. The hash covers all documents and requests,
including few-shot examples and chat template, and is compared before the model reads anything.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from lm_eval._cli.harness import HarnessCLI
from lm_eval.api.task import Task
from lm_eval.config.evaluate_config import EvaluatorConfig

import griffin_eval
from griffin_eval.converters.files import existing_kind
from griffin_eval.errors import ArgumentError, BadInput
from griffin_eval.json_files import read_json, write_whole
from griffin_eval.sharding.launch import Launch

LAYOUT = 1  # version of the file's layout
_KEY = "griffin_eval_suite"
SETTINGS = (  # lm_eval's names of the settings that prompts and answers depend on
    "tasks",
    "num_fewshot",
    "limit",
    "samples",
    "metadata",
    "gen_kwargs",
    "system_instruction",
    "apply_chat_template",
    "fewshot_as_multiturn",
    "include_path",
    "seed",
)


class Suite(NamedTuple):
    """The content of a suite file."""

    settings: dict[str, Any]  # values of `SETTINGS`, as lm_eval's command line parses them
    versions: dict[str, str]  # versions of libraries
    tasks: dict[str, dict[str, Any]]  # ``version``, ``requests`` and ``sha256`` by task


def run_frozen(arguments: Sequence[str], *, suite: Path | None, freeze: Path | None) -> None:
    """Run lm_eval on the suite file ``suite``, or write the file ``freeze`` after the run.

    ``arguments`` are those of ``lm_eval run``; with ``suite`` none of `SETTINGS`. Raises BadInput
    if something differs from the suite, a file is no suite or exists already, or an argument
    conflicts with the suite.
    """
    if suite is not None and freeze is not None:
        raise ArgumentError("--suite runs a suite and --freeze writes one: give one of them")
    if Launch.of_environment().world_size > 1:
        raise ArgumentError("--suite and --freeze are for one process: start it without a launcher")
    if freeze is not None and existing_kind(freeze) is not None:
        raise ArgumentError(f"--freeze {freeze} exists already: name a new file")
    command = HarnessCLI()
    with mock.patch("sys.argv", ["lm_eval", "run", *arguments]):
        parsed = command.parse_args()
    if getattr(parsed, "config", None):
        raise ArgumentError("--config is not supported here: give its settings as options instead")
    given = {name: getattr(parsed, name, None) for name in SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    if "include_path" in given:
        given["include_path"] = os.path.abspath(given["include_path"])
    if suite is None:
        assert freeze is not None
        found: dict[str, dict[str, Any]] = {}
        with _hashing(found.__setitem__):
            command.execute(parsed)
        settings = {"seed": EvaluatorConfig().seed} | given
        _write(freeze, Suite(settings, _versions(), found))
        return
    if given:
        named = ", ".join(f"--{name}" for name in given)
        raise ArgumentError(f"{suite} has the settings of the run: leave out {named}")
    _execute_pinned(command, parsed, read_suite(suite), suite)


def _execute_pinned(
    command: HarnessCLI, parsed: argparse.Namespace, pinned: Suite, path: Path
) -> None:
    differ = [
        f"{name} {version} (here {_versions().get(name)})"
        for name, version in pinned.versions.items()
        if _versions().get(name) != version
    ]
    if differ:
        raise BadInput(f"{path} is pinned to {', '.join(differ)}: install these, or freeze it anew")
    missing = set(pinned.tasks)

    def compare(task: str, values: dict[str, Any]) -> None:
        expected = pinned.tasks.get(task)
        if expected != values:
            what = [
                f"{key} {values[key]}, pinned {(expected or {}).get(key)}"
                for key in values
                if values[key] != (expected or {}).get(key)
            ]
            raise BadInput(
                f"{path}: {task} does not ask what is pinned ({'; '.join(what)}): its data, the "
                "task, or the tokenizer or template that prompts depend on is another one"
            )
        missing.discard(task)

    for name, value in pinned.settings.items():
        setattr(parsed, name, value)
    with _hashing(compare):
        command.execute(parsed)
    if missing:
        raise BadInput(f"{path}: nothing asked for {', '.join(sorted(missing))}, which is pinned")


def read_suite(path: Path) -> Suite:
    """Return a suite that `run_frozen` wrote, or raise BadInput."""
    content = read_json(path)
    try:
        if content[_KEY] != LAYOUT:
            raise BadInput(f"{path} has layout {content[_KEY]}, and this version reads {LAYOUT}")
        suite = Suite(content["settings"], content["versions"], content["tasks"])
        parts = (*suite, *suite.tasks.values())
        if not all(isinstance(part, dict) and part for part in parts):
            raise TypeError
        if not isinstance(suite.settings["tasks"], str | list):
            raise TypeError
        unknown = sorted(set(suite.settings) - set(SETTINGS))
    except (KeyError, TypeError):
        raise BadInput(
            f"{path} is no suite: expected a file that griffin-eval run --freeze has written"
        ) from None
    if unknown:
        raise BadInput(f"{path} has settings that are not known: {', '.join(unknown)}")
    return suite


def _write(path: Path, suite: Suite) -> None:
    content = json.dumps({_KEY: LAYOUT} | suite._asdict(), indent=1, ensure_ascii=False)
    write_whole(path, f"{content}\n".encode())


def _versions() -> dict[str, str]:
    theirs = {name: importlib.metadata.version(name) for name in ("lm_eval", "datasets")}
    return {"griffin_eval": griffin_eval.__version__} | theirs


@contextmanager
def _hashing(note: Any) -> Iterator[None]:
    """Call ``note`` with the name and the pinned values of every task whose requests are built."""
    build = Task.build_all_requests

    def build_all_requests(task: Any, **arguments: Any) -> None:
        build(task, **arguments)
        values = {"version": str(task.VERSION), "requests": len(task.instances)}
        note(task.config.task, values | {"sha256": _hash(task.instances)})

    with mock.patch.object(Task, "build_all_requests", build_all_requests):
        yield


def _hash(instances: Sequence[Any]) -> str:
    whole, last = hashlib.sha256(), None
    for one in sorted(instances, key=lambda request: (request.doc_id, request.idx)):
        line = [one.doc_id, one.idx, one.request_type, one.arguments]
        if one.doc_id != last:  # metrics compare answers with values in the document
            # Documents of this package's tasks contain values of the model, such as its window.
            known = isinstance(one.doc, dict) and one.doc.get("dataset_sha256")
            line.append(known or one.doc)
        last = one.doc_id
        text = json.dumps(line, default=str, sort_keys=True, ensure_ascii=False)
        whole.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return whole.hexdigest()

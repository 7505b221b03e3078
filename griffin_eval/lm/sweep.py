"""Evaluates many checkpoints of one training in one process, each as ``lm_eval`` alone would.

Tasks are built, texts tokenised and programs compiled once, for the first checkpoint. The weights
of the next checkpoint are read while the current one is evaluated.
"""

import dataclasses
import functools
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from lm_eval import evaluator
from lm_eval._cli.harness import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.loggers import EvaluationTracker
from lm_eval.loggers.utils import add_env_info

from griffin_eval.converters.source.steps import steps_of
from griffin_eval.engine.scoring import NotFinite
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError
from griffin_eval.json_files import read_json, write_whole
from griffin_eval.lm.model import GriffinLM
from griffin_eval.opened import StagedModel

SETTINGS_FILE = "sweep.json"
REFUSED = {
    "use_cache": "every checkpoint needs answers of its own",
    "hf_hub_log_args": "push the results when the sweep is done",
    "wandb_args": "log the results when the sweep is done",
    "trackio_args": "log the results when the sweep is done",
}
# Fields that `simple_evaluate` takes under the same names, and the names of its seeds.
PASSED = (
    *("tasks", "num_fewshot", "batch_size", "max_batch_size", "device", "limit", "samples"),
    *("log_samples", "predict_only", "system_instruction", "apply_chat_template", "gen_kwargs"),
    *("metadata", "write_out", "check_integrity"),
)
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


class Target(NamedTuple):
    """A checkpoint to evaluate."""

    name: str  # name of its folder of results
    pretrained: str  # path or hub id, as in ``--model_args``
    revision: str | None = None


class Outcome(NamedTuple):
    """The outcome of a checkpoint."""

    target: Target
    seconds: float | None  # time of the evaluation; None if there was none
    reason: str = ""  # why there was none
    failed: bool = False  # whether the missing results are an error


class Watch(NamedTuple):
    """How to follow a training that is still running."""

    seconds: float  # interval of looking for new checkpoints
    until: int | None = None  # last step to evaluate
    finished: Callable[[], bool] = lambda: False  # whether the training has ended


def configuration(arguments: Sequence[str], first: Target) -> EvaluatorConfig:
    """Return the configuration of ``lm_eval run --model griffin`` with command line arguments.

    They exclude ``--model``, ``--output_path`` and ``pretrained=``. Raises ArgumentError for
    arguments that a sweep cannot use.
    """
    command = ["run", "--model", "griffin", *arguments]
    with mock.patch.object(sys, "argv", ["lm_eval", *command]):
        config = EvaluatorConfig.from_cli(HarnessCLI().parse_args())
    given: dict[str, Any] = dict(config.model_args or {})
    one_run = ("pretrained", "revision", "token_scores", "parity")
    for name in (*one_run, "state", "state_cache", "load"):
        if name in given:
            reason = "" if name in one_run else ", since it belongs to one checkpoint"
            raise ArgumentError(f"--model_args {name}=: a sweep does not take it{reason}")
    for name, reason in REFUSED.items():
        if getattr(config, name, None):
            raise ArgumentError(f"--{name}: a sweep does not take it, since {reason}")
    config.model_args = _model_arguments(first, given)
    config.metadata = _model_arguments(first, config.metadata or {})
    return config


def sweep(
    config: EvaluatorConfig,
    find: Callable[[], Sequence[Target]],
    output: Path,
    watch: Watch | None = None,
) -> Iterator[Outcome]:
    """Evaluate checkpoints one after the other, and yield the outcome of each.

    Args:
        config: Result of `configuration`.
        find: Function that returns the existing checkpoints in order.
        output: Folder for the folders of results; existing results are kept.
        watch: How to wait for more checkpoints; None evaluates the existing ones.

    Raises:
        BadInput: An argument or a task cannot be used. (For a checkpoint that cannot be used, an
            `Outcome` is yielded.)
    """
    settings = _settings(config)
    settings["checkpoints"] = _check_settings(settings, output)
    seen: set[str] = set()
    runner: _Runner | None = None

    def waiting() -> list[Target]:
        return [target for target in find() if target.name not in seen]

    with ThreadPoolExecutor(1) as reader:
        staged: tuple[Target, Future[StagedModel]] | None = None
        while True:
            if staged is None:
                ended = watch is None or watch.finished()  # asked before looking a last time
                target = next(iter(waiting()), None)
                if target is None:
                    if watch is None or ended or _reached(watch, seen):
                        return
                    time.sleep(watch.seconds)
                    continue
                seen.add(target.name)
                if _is_done(output / target.name):
                    _check_source(target, settings, output)
                    yield Outcome(target, None, "it has results already")
                    continue
                begin = time.perf_counter()
                try:
                    if runner is None:
                        runner = _Runner(config, target, wait_for_hash=watch is not None)
                    else:
                        runner.adopt(
                            target, runner.lm.opened.stage(target.pretrained, target.revision)
                        )
                except (BadInput, MemoryError, OSError) as error:
                    yield _skipped(target, error)
                    continue
            else:
                target, future = staged
                staged, begin = None, time.perf_counter()
                assert runner is not None
                try:
                    runner.adopt(target, future.result())
                except (BadInput, MemoryError, OSError) as error:
                    yield _skipped(target, error)
                    continue
            following = next((t for t in waiting() if not _is_done(output / t.name)), None)
            if following is not None:
                seen.add(following.name)
                staged = (
                    following,
                    reader.submit(runner.lm.opened.stage, following.pretrained, following.revision),
                )
            settings["checkpoints"][target.name] = _source(target)
            _write_settings(settings, output)
            try:
                runner.evaluate(output / target.name)
            except (NotFinite, CheckpointError, MemoryError) as error:
                yield Outcome(target, None, str(error) or "out of memory", failed=True)
                continue
            yield Outcome(target, time.perf_counter() - begin)


class _Runner:
    """A model, and the tasks that its checkpoints are evaluated on."""

    def __init__(self, config: EvaluatorConfig, first: Target, *, wait_for_hash: bool):
        given: Any = config.model_args
        device = {} if config.device is None else {"device": config.device}
        sizes = {"batch_size": config.batch_size, "max_batch_size": config.max_batch_size}
        sizes = {name: value for name, value in sizes.items() if value is not None}
        arguments = given | {"pretrained": first.pretrained} | sizes | device
        if first.revision is not None:
            arguments["revision"] = first.revision
        self.lm = GriffinLM(**arguments)
        self.lm.requests.remember()
        if wait_for_hash:  # the training may delete the files before the hash is needed
            _ = self.lm.opened.weights_sha256
        self._config, self._target = config, first
        self._tasks = config.process_tasks(config.metadata)
        tasks: Any = self._tasks
        tasks.load = _built_once(tasks.load)
        self._environment: dict[str, Any] = {}

    def adopt(self, target: Target, staged: StagedModel) -> None:
        self.lm.adopt(staged)
        self._target = target

    def _add_environment(self, results: dict[str, Any]) -> None:
        """Add lm_eval's description of the machine, which is slow to collect, from a cache."""
        if not self._environment:
            add_env_info(self._environment)
        results |= self._environment

    def evaluate(self, folder: Path) -> None:
        """Evaluate the current checkpoint; the folder appears when all results are written."""
        if folder.exists() and not folder.is_dir():
            raise ArgumentError(f"{folder} is a file: expected a folder for the results there")
        config = self._config
        given = _model_arguments(self._target, config.model_args)
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        tracker = EvaluationTracker(output_path=str(part))
        seeds: Any = config.seed or [None] * 4
        noted_once = mock.patch.object(evaluator, "add_env_info", self._add_environment)
        evaluate: Any = noted_once(evaluator.simple_evaluate)
        results: Any = evaluate(
            self.lm,
            model_args=given,
            evaluation_tracker=tracker,
            task_manager=self._tasks,
            fewshot_as_multiturn=bool(config.fewshot_as_multiturn),
            confirm_run_unsafe_code=bool(config.confirm_run_unsafe_code),
            **{name: getattr(config, name) for name in PASSED},
            **dict(zip(SEEDS, seeds, strict=True)),
        )
        # lm_eval does not fill these in for a model object.
        results["config"]["model"] = tracker.general_config_tracker.model_source = "griffin"
        for task in results["configs"].values():
            if "pretrained" in (task.get("metadata") or {}):
                task["metadata"] = _model_arguments(self._target, task["metadata"])
        samples = results.pop("samples", None) if config.log_samples else None
        tracker.save_results_aggregated(results, samples)
        for task, of_task in (samples or {}).items():
            tracker.save_results_samples(task, of_task)
        if not _is_done(part):  # lm_eval only logs errors of writing
            raise CheckpointError(f"{part}: lm_eval could not write results there; see its log")
        _move_into(part, folder)


def _move_into(part: Path, folder: Path) -> None:
    """Move finished results to a folder, which may exist. The aggregated results move last, since
    they mark the checkpoint as done."""
    if not folder.exists():
        part.rename(folder)
        return
    files = [path for path in part.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda path: path.name.startswith("results_")):
        destination = folder / file.relative_to(part)
        destination.parent.mkdir(parents=True, exist_ok=True)
        file.replace(destination)
    shutil.rmtree(part)


def _built_once(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `TaskManager.load` so that each task builds its requests once and returns them again
    with the random state after building, so that generation draws the same numbers."""

    def build_once(task: Any) -> None:
        build, states = task.build_all_requests, list[Any]()

        def build_all_requests(**arguments: Any) -> None:
            if not states:
                build(**arguments)
                states.extend([random.getstate(), np.random.get_state()])
                return
            for instance in task.instances:
                instance.resps, instance.filtered_resps = [], {}
            random.setstate(states[0])
            np.random.set_state(states[1])

        task.build_all_requests = build_all_requests

    @functools.cache
    def loaded(names: tuple[Any, ...]) -> Any:
        found = load(list(names))
        for task in found["tasks"].values():
            build_once(task)
        return found

    return lambda names: loaded(tuple(names))


def _model_arguments(target: Target, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return model arguments with the checkpoint, as a command for it alone would have them."""
    named = {"pretrained": target.pretrained}
    if target.revision is not None:
        named["revision"] = target.revision
    return named | {name: value for name, value in arguments.items() if name not in named}


def _settings(config: EvaluatorConfig) -> dict[str, Any]:
    """Return the settings that results depend on besides the checkpoint."""
    asked = dataclasses.asdict(config)
    for name in ("output_path", "show_config"):
        asked.pop(name, None)
    for name in ("model_args", "metadata"):
        own: Any = asked[name] or {}
        asked[name] = {k: v for k, v in own.items() if k not in ("pretrained", "revision")}
    return json.loads(json.dumps(asked, default=str, sort_keys=True))


def _check_settings(settings: dict[str, Any], output: Path) -> dict[str, str]:
    """Refuse a folder of another sweep; return the paths of the checkpoints it has results of."""
    file = output / SETTINGS_FILE
    if not file.exists():
        return {}
    known = read_json(file)
    differ = sorted(name for name in settings if settings[name] != known.get(name))
    if differ:
        raise ArgumentError(
            f"{output} has results of a sweep with another {', '.join(differ)}: choose another "
            "folder for --output, or the same settings"
        )
    if not isinstance(checkpoints := known.get("checkpoints", {}), dict):
        raise ArgumentError(
            f"{file}: expected an object as checkpoints, found {checkpoints!r:.100}; choose "
            "another folder for --output"
        )
    return checkpoints


def _source(target: Target) -> str:
    path = Path(target.pretrained)
    return str(path.resolve()) if path.exists() else f"{target.pretrained}@{target.revision}"


def _check_source(target: Target, settings: dict[str, Any], output: Path) -> None:
    """Check that existing results of this name are of this checkpoint, or raise ArgumentError."""
    known, mine = settings["checkpoints"].get(target.name), _source(target)
    if known not in (None, mine):
        raise ArgumentError(
            f"{output / target.name} has results of {known}, not of {mine}: choose another folder "
            "for --output"
        )


def _write_settings(settings: dict[str, Any], output: Path) -> None:
    write_whole(output / SETTINGS_FILE, f"{json.dumps(settings, indent=1)}\n".encode())


def _is_done(folder: Path) -> bool:
    return any(folder.rglob("results_*.json"))


def _reached(watch: Watch, seen: set[str]) -> bool:
    steps = [int(name) for name in seen if name.isdigit()]
    return watch.until is not None and bool(steps) and max(steps) >= watch.until


def _skipped(target: Target, error: Exception) -> Outcome:
    """Return the outcome of a checkpoint that was deleted meanwhile or cannot be read. Raise errors
    that are not about the checkpoint again."""
    if target.revision is None and not Path(target.pretrained).exists():
        return Outcome(target, None, "it was deleted meanwhile")
    if isinstance(error, ArgumentError):
        raise error
    return Outcome(target, None, str(error) or "out of memory", failed=True)


def targets_of_run(run: Path) -> list[Target]:
    """Return the finished checkpoints of a training, by step."""
    return [Target(str(step), str(folder)) for step, folder in steps_of(run).items()]


def targets_of_list(checkpoints: Sequence[str]) -> list[Target]:
    """Return checkpoints named by the last part of each path, or by the whole path if those are not
    distinct. Raises ArgumentError for a repeated path."""
    names = [Path(os.path.abspath(path)).name for path in checkpoints]
    if len(set(names)) < len(names):
        names = [path.strip("/").replace("/", "__") for path in checkpoints]
    return _distinct([Target(*pair) for pair in zip(names, checkpoints, strict=True)])


def targets_of_revisions(repository: str, revisions: Sequence[str]) -> list[Target]:
    """Return revisions of a repository on the hub as checkpoints. Raises ArgumentError for a
    repeated revision."""
    return _distinct([Target(r.replace("/", "__"), repository, r) for r in revisions])


def _distinct(targets: list[Target]) -> list[Target]:
    """Return the targets, or raise ArgumentError if two of them would share a folder of results."""
    first: dict[str, Target] = {}
    for target in targets:
        other = first.setdefault(target.name, target)
        if other is not target:
            both = [each.revision or each.pretrained for each in (other, target)]
            raise ArgumentError(
                f"{' and '.join(both)} would share the folder {target.name!r} of results: name "
                "each checkpoint once, and one of two with alike names in a sweep of its own"
            )
    return targets

"""Reader of lm_eval's output: files of results, and the samples beside them."""

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

from griffin_eval.report.estimates import MIN_ITEMS, interval_of, is_share, within_range
from griffin_eval.report.samples import ReportError, count_numbers, curve_point, right_or_wrong

NEEDED = ("results", "configs", "higher_is_better", "n-samples", "config")
# Arguments of the model that change no answer.
NO_SETTINGS = ("batch_size", "max_batch_size", "parity", "check", "on_merge")
NO_SETTINGS += ("state_budget", "state_cache", "state_cache_size", "token_scores", "token_states")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # memory address in the text of a function
_TIME = re.compile(r"results_(\d{4}-\d\d-\d\d)T(\d\d)-(\d\d)-(\d\d)")
_STEP = re.compile(r"(?:step|ckpt|checkpoint)?[-_]?(\d{1,18})")
_STEP_OF_REVISION = re.compile(r"(?:step|ckpt|checkpoint|iter)[-_/]?(\d{1,18})(?!\d)")
# Types of values in a file of results, as messages name them.
_KINDS = {dict: "an object", str: "a text", int: "an integer", float: "a number", NoneType: "null"}
_MAX_DIGITS = 300  # digits of an integer that a float can hold
# Names that trainers give to an Orbax item, a folder within the folder of its step.
_ITEMS = ("default", "state", "train_state", "params", "ema_params", "items")


class Point(NamedTuple):
    """A number of a run.

    Attributes:
        task: lm_eval's name of the task or group.
        quantity: Name of the measured quantity, such as ``exact_match``.
        x: Value on the horizontal axis of the curve, text for a named case, None for a quantity
            without a curve.
        value: The estimate; text such as ``>200`` if only a bound is known.
        low, high: Bounds of the 95% interval in the same form, None without one.
        documents: Number of documents behind the number; without samples the task's documents, or
            None for a point of a curve.
    """

    task: str
    quantity: str
    x: float | str | None
    value: float | str
    low: float | str | None
    high: float | str | None
    documents: int | None


class Evaluation(NamedTuple):
    """One file of results.

    Attributes:
        date: Day and time of its end from its name, or empty.
        seconds: Duration of the evaluation; None if unknown.
        items: Number of documents by task.
        config: Configuration of the model and of the call, as lm_eval writes it.
    """

    path: Path
    date: str
    seconds: float | None
    items: dict[str, int]
    config: dict[str, Any]


class Run(NamedTuple):
    """The answers of a model: one file of results, or several with different tasks.

    Attributes:
        path: Latest file.
        label: Name of the model in tables and figures, unique among the runs.
        config: Configuration of the model and of the call, as lm_eval writes it.
        higher_is_better: Direction by task and metric.
        metadata: Metadata by task.
        samples: File of samples by task, for the tasks that have one.
        evaluations: All files, by date.
        hidden: Tasks with an earlier result that is not shown.
        questions: Questions of each task as a text; equal texts mean equal questions.
    """

    path: Path
    label: str
    config: dict[str, Any]
    points: list[Point]
    higher_is_better: dict[tuple[str, str], bool | None]
    metadata: dict[str, dict[str, Any]]
    samples: dict[str, Path]
    evaluations: Sequence[Evaluation] = ()
    hidden: Sequence[str] = ()
    questions: Mapping[str, str] = MappingProxyType({})

    @property
    def items(self) -> dict[str, int]:
        """Number of documents by task."""
        return {task: n for each in self.evaluations for task, n in each.items.items()}

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the model by name."""
        return _arguments(self.config)

    @property
    def model(self) -> str:
        """lm_eval's name of the kind of model: griffin, hf."""
        return str(self.config["model"])

    @property
    def pretrained(self) -> str:
        """The checkpoint as the user named it; empty if unnamed."""
        path = str(self.arguments.get("pretrained", ""))
        return path.rstrip("/") or path

    @property
    def step(self) -> int | None:
        """The training step; None unless the checkpoint's folder or revision is named after one."""
        revision = self.arguments.get("revision")
        return step_of(self.pretrained) if revision is None else step_of_revision(str(revision))


def read(
    paths: Sequence[Path], labels: Sequence[str] = (), against: Path | None = None
) -> list[Run]:
    """Read files of results.

    Files of one model (equal weights, dtype, framework, device and settings) become one run with
    all tasks and the latest answer to each question.

    Args:
        paths: Files, or folders whose files of results are all read.
        labels: Names of the models in order, or of the files, which are then not merged. By
            default those of `make_labels`.
        against: File or folder that comes first and is not merged with the others.

    Raises:
        ReportError: A file is missing, incomplete or not from lm_eval, or the number of labels
            differs from that of models.
    """
    earlier = [] if against is None else _files(against)
    files = [file for path in paths for file in _files(path)]
    files = list(dict.fromkeys(file.resolve() for file in (*earlier, *files)))
    earlier = [file.resolve() for file in earlier]
    read_in = [_run(file, "", _read_file(file)) for file in files]
    if len(labels) == len(files):
        runs = read_in
    else:
        runs = _merged([run for run in read_in if run.path in earlier])
        runs += _merged([run for run in read_in if run.path not in earlier])
    if labels and len(labels) != len(runs):
        names = ", ".join(file.name for file in files)
        raise ReportError(
            f"{len(labels)} labels for {len(runs)} models in {len(files)} files of results "
            f"({names}): name each model or each file"
        )
    if len(set(labels)) < len(labels):
        raise ReportError(f"labels must differ, found {', '.join(labels)}")
    labels = labels or make_labels([run.config for run in runs], [run.path for run in runs])
    return [run._replace(label=label) for run, label in zip(runs, labels, strict=True)]


def _merged(runs: list[Run]) -> list[Run]:
    """Merge the runs of each model, unless their results for a task differ in limit, number of
    examples or metadata."""
    models: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.path.stem):
        own = models.setdefault(_identity(run.config), [])
        for index, other in enumerate(own):
            both = run.questions.keys() & other.questions.keys()
            if all(run.questions[task] == other.questions[task] for task in both):
                own[index] = _joined(other, run)
                break
        else:
            own.append(run)
    order = [run.path for run in runs]
    joined = [run for of_model in models.values() for run in of_model]
    return sorted(joined, key=lambda run: min(order.index(e.path) for e in run.evaluations))


def _joined(earlier: Run, later: Run) -> Run:
    again = {point.task for point in later.points}
    kept = [point for point in earlier.points if point.task not in again]
    hidden = [point.task for point in earlier.points if point.task in again]
    samples = {task: file for task, file in earlier.samples.items() if task not in again}
    return later._replace(
        points=[*kept, *later.points],
        higher_is_better=earlier.higher_is_better | later.higher_is_better,
        metadata=earlier.metadata | later.metadata,
        samples=samples | later.samples,
        evaluations=[*earlier.evaluations, *later.evaluations],
        hidden=list(dict.fromkeys([*earlier.hidden, *hidden])),
        questions={**earlier.questions, **later.questions},
    )


def _identity(config: dict[str, Any]) -> str:
    """Return a text that is equal for equal models: weights and all settings behind answers."""
    arguments = {name: str(value) for name, value in _settings(_arguments(config)).items()}
    keys = ("model", "griffin_weights_sha256", "model_sha", "model_dtype", "model_framework")
    keys += ("model_device", "model_state", "griffin_adapters")
    own = {key: config.get(key) for key in keys}
    return json.dumps([arguments, own], sort_keys=True, default=str)


def _settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a model without `NO_SETTINGS` and a slash that a shell has completed."""
    settings = {name: value for name, value in arguments.items() if name not in NO_SETTINGS}
    if isinstance(path := settings.get("pretrained"), str):
        settings["pretrained"] = path.rstrip("/") or path
    return settings


def _questions(content: dict[str, Any]) -> dict[str, str]:
    """Return the questions of each task and group as text."""
    call = {key: content["config"].get(key) for key in ("limit", "gen_kwargs", "fewshot_seed")}
    call |= {key: content.get(key) for key in ("chat_template_sha", "system_instruction_sha")}
    questions = {}
    for task in content["results"]:
        config = dict(content["configs"].get(task) or {})
        # lm_eval adds the arguments of the model.
        config["metadata"] = _settings(config.get("metadata") or {})
        own = [config, content["n-samples"].get(task), call]
        text = json.dumps(own, sort_keys=True, default=str)
        questions[task] = _ADDRESS.sub("", text)
    return questions


def step_of(pretrained: str) -> int | None:
    """Return the step in the name of a checkpoint's folder: ``12000`` or ``step_12000``.

    Numbers in the names of its parent folders are no steps, except above an Orbax item.
    """
    parts = Path(pretrained).parts
    index = _index_of_step(parts)
    match = None if index is None else _STEP.fullmatch(parts[index])
    return None if match is None else int(match[1])


def step_of_revision(revision: str) -> int | None:
    """Return the step in a revision: ``step1000-tokens4B`` or ``stage1/iter_500``."""
    if match := _STEP_OF_REVISION.search(revision):
        return int(match[1])
    return step_of(revision)


def make_labels(configs: Sequence[dict[str, Any]], files: Sequence[Path]) -> list[str]:
    """Return unique labels of the runs: those of `differing`, with limit or date if these match."""
    labels = differing(configs)
    limits = [config.get("limit") for config in configs]
    for marks in (
        ["all items" if limit is None else f"limit {limit:g}" for limit in limits],
        [_date_of(file) for file in files],
        [file.stem for file in files],
    ):
        count = Counter(labels)
        useful = {
            label
            for label in count
            if len({m for one, m in zip(labels, marks, strict=True) if one == label}) > 1
        }
        labels = [
            f"{label} ({mark})" if label in useful else label
            for label, mark in zip(labels, marks, strict=True)
        ]
    return labels


def _date_of(file: Path) -> str:
    match = _TIME.match(file.stem)
    return f"{match[1]} {match[2]}:{match[3]}:{match[4]}" if match else ""


def differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the model of each run, and those of its arguments that differ between runs.

    A checkpoint is named by the last part of its path, or by as many as make all names unique.
    """
    described = []
    given = [_arguments(config) for config in configs]
    parts = _parts_needed({Path(str(one.get("pretrained", ""))) for one in given})
    for config, arguments in zip(configs, given, strict=True):
        path = Path(str(arguments.get("pretrained", "")))
        name = str(Path(*path.parts[-parts:])) if path.name else str(config["model"])
        own = {key: value for key, value in arguments.items() if key != "pretrained"}
        told = {
            "pretrained": name,
            "model": config["model"],
            "framework": config.get("model_framework"),
            "dtype": str(config.get("model_dtype") or "").removeprefix("torch.") or None,
        }
        described.append(own | {key: value for key, value in told.items() if value})
    keys = ["pretrained", "model", "framework", "dtype"]
    keys += sorted({key for one in described for key in one} - set(keys))
    shown = [k for k in keys if len({str(one.get(k)) for one in described}) > 1] or ["pretrained"]
    return [" ".join(_shown(key, one[key]) for key in shown if key in one) for one in described]


def without_step(run: Run) -> dict[str, Any]:
    """Return the configuration that all steps of a training share.

    It lacks the revision, or else the part of the checkpoint's path that `step_of` reads.
    """
    arguments, path = dict(run.arguments), run.pretrained
    if arguments.get("tokenizer") == path:
        del arguments["tokenizer"]
    if arguments.pop("revision", None) is None:
        parts = list(Path(path).parts)
        if (index := _index_of_step(parts)) is not None:
            del parts[index]
        path = os.path.join("", *parts)
    return run.config | {"model_args": arguments | {"pretrained": path}}


def _index_of_step(parts: Sequence[str]) -> int | None:
    """Return the index of the part of a path that is named after a step."""
    index = len(parts) - 1
    if index > 0 and parts[index] in _ITEMS:
        index -= 1
    return index if index >= 0 and _STEP.fullmatch(parts[index]) else None


def x_of(text: str) -> float | str:
    """Return the x of a metric ``quantity@x``: a number, or the name of a case."""
    try:
        return float(text)
    except ValueError:
        return text


def _parts_needed(paths: set[Path]) -> int:
    """Return the number of last path parts that make all paths distinct."""
    longest = max((len(path.parts) for path in paths), default=0)
    each = (n for n in range(1, longest) if len({p.parts[-n:] for p in paths}) == len(paths))
    return next(each, max(longest, 1))


def _shown(key: str, value: Any) -> str:
    if key == "pretrained" and str(value).isdigit():
        return f"step {value}"
    return str(value) if key in ("pretrained", "model", "framework", "dtype") else f"{key}={value}"


def _arguments(config: dict[str, Any]) -> dict[str, Any]:
    given: Any = config.get("model_args") or {}
    if not isinstance(given, str):
        return given
    parts = (part.partition("=") for part in given.split(",") if part)
    return {name: value for name, _, value in parts}


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ReportError(f"{path}: there is no such file or folder")
    if path.is_file():
        return [path]
    files = [
        file
        for file in sorted(path.rglob("results_*.json"))
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise ReportError(f"{path}: no results_*.json in it; lm_eval --output_path writes them")
    return files


def _read_file(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_int=_integer)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ReportError(f"{file}: not a whole JSON file ({error})") from None
    missing = list(NEEDED)
    if isinstance(content, dict):
        missing = [key for key in NEEDED if not isinstance(content.get(key), dict)]
    if not missing and "model" not in content["config"]:
        missing = ["config.model"]
    if missing:
        raise ReportError(
            f"{file}: expected results of lm_eval 0.4.13 or later, found none of its "
            f"{', '.join(missing)}"
        )
    for key, value, kinds in _typed(content):
        if not isinstance(value, kinds):
            expected = " or ".join(_KINDS[kind] for kind in kinds)
            raise ReportError(
                f"{file}: expected {expected} as {key}, found {value!r:.100}; evaluate again, or "
                "leave the file out"
            )
    return content


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _typed(content: dict[str, Any]) -> Iterator[tuple[str, Any, tuple[type, ...]]]:
    """Yield the key of each value that a report reads, the value, and its expected types. A value
    within another one comes after it."""
    for part in ("results", "configs", "n-samples"):
        for task, value in content[part].items():
            yield f"{part}.{task}", value, (dict,)
    for task, config in content["configs"].items():
        yield f"configs.{task}.metadata", config.get("metadata"), (dict, NoneType)
    for task, sizes in content["n-samples"].items():
        yield f"n-samples.{task}.effective", sizes.get("effective"), (int, NoneType)
    for task, metrics in content["higher_is_better"].items():
        yield f"higher_is_better.{task}", metrics, (dict, NoneType)
    config = content["config"]
    yield "config.model_args", config.get("model_args"), (dict, str, NoneType)
    yield "config.limit", config.get("limit"), (int, float, NoneType)


def _run(file: Path, label: str, content: dict[str, Any]) -> Run:
    date = file.stem.removeprefix("results_")
    samples = {}
    for task in content["configs"]:
        name = f"samples_{task}_{date}.jsonl"
        beside = os.path.join(file.parent, name)
        if os.path.basename(name) == name and os.path.isfile(beside):  # reject paths in task names
            samples[task] = Path(beside)
    metadata = {
        task: dict(config.get("metadata") or {}) for task, config in content["configs"].items()
    }
    better = {
        (task, curve_point(metric)): higher
        for task, metrics in content["higher_is_better"].items()
        for metric, higher in (metrics or {}).items()
    }
    points = list(_points(content, samples))
    seconds = None
    with contextlib.suppress(TypeError, ValueError):
        seconds = float(content.get("total_evaluation_time_seconds", "unknown"))
    sizes = content["n-samples"]
    items = {task: sizes.get(task, {}).get("effective") or 0 for task in content["configs"]}
    config = content["config"]
    done = Evaluation(file, _date_of(file), seconds, items, config)
    asked = _questions(content)
    return Run(file, label, config, points, better, metadata, samples, [done], (), asked)


def _points(content: dict[str, Any], samples: dict[str, Path]) -> Iterator[Point]:
    for task, metrics in content["results"].items():
        documents = content["n-samples"].get(task, {}).get("effective")
        counts: Counter[str] = Counter()
        if task in samples and any("@" in curve_point(key.partition(",")[0]) for key in metrics):
            counts = count_numbers(samples[task])
        for key, value in metrics.items():
            name, comma, filter_name = key.partition(",")
            if not comma or name.endswith(("_stderr", "_low", "_high")):
                continue
            if not _is_estimate(value) or (name.isdecimal() and value == -1):
                continue
            quantity, at, x = curve_point(name).partition("@")
            if filter_name != "none":
                quantity += f" ({filter_name})"
            items = counts.get(f"{curve_point(name)},{filter_name}", documents)
            bounded = f"{name}_low,{filter_name}" in metrics
            if bounded:
                low, high = (
                    metrics.get(f"{name}{bound},{filter_name}") for bound in ("_low", "_high")
                )
                low, high = (b if _is_estimate(b) else None for b in (low, high))
                low, high = within_range(quantity, (low, high))
            else:
                error = metrics.get(f"{name}_stderr,{filter_name}")
                # Without a bootstrapped error, the answers themselves give the spread of a share.
                if not isinstance(error, int | float):
                    has_share = task in samples and is_share(quantity)
                    is_exact = has_share and right_or_wrong(samples[task], key)
                    error = 0.0 if is_exact else None
                low, high = interval_of(quantity, value, error, items)
            if items is not None and items < MIN_ITEMS:
                low = high = None
            if at and not counts:
                items = None  # each point may have a part of the documents
            yield Point(task, quantity, x_of(x) if at else None, value, low, high, items)


def _is_estimate(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith(("<", ">"))
    return isinstance(value, int | float) and not isinstance(value, bool)

"""Reads what lm_eval wrote: files of results, and the samples beside them."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from griffin_eval.errors import BadInput

NEEDED = ("results", "configs", "higher_is_better", "n-samples", "config")
# The fields of a sample that identify its item in all runs. The document does not: its row may have
# columns that depend on the model. A sample of each filter is of the same item.
ITEM = ("doc_id", "prompt_hash", "target_hash")
_STEP = re.compile(r"(?:step|ckpt|checkpoint)?[-_]?(\d{1,18})")
_STEP_OF_REVISION = re.compile(r"(?:step|ckpt|checkpoint|iter)[-_/]?(\d{1,18})(?!\d)")
# Names that trainers give to the folder of an Orbax item, which lies in the folder of its step.
_ITEMS = ("default", "state", "train_state", "params", "ema_params", "items")


class ReportError(BadInput):
    """A file of results or samples that cannot be used in a report."""


class Point(NamedTuple):
    """A number of a run.

    Attributes:
        task: lm_eval's name of the task or group.
        quantity: what was measured, such as ``exact_match``.
        x: value on the horizontal axis of the curve; text for a named case, None for a quantity
            that is a single number.
        value: the estimate; text such as ``>200`` where only a bound is known.
        low, high: bounds of its 95% interval, None without one; text as in ``value``.
        documents: number of documents of the task.
    """

    task: str
    quantity: str
    x: float | str | None
    value: float | str
    low: float | str | None
    high: float | str | None
    documents: int | None


class Run(NamedTuple):
    """One file of results.

    Attributes:
        path: the file.
        label: name of the run in tables and figures, unique among the runs.
        config: configuration of the model and of the call, as lm_eval writes it.
        points: all numbers.
        higher_is_better: by task and metric.
        metadata: metadata by task.
        samples: file of samples by task, for the tasks that have one.
    """

    path: Path
    label: str
    config: dict[str, Any]
    points: list[Point]
    higher_is_better: dict[tuple[str, str], bool | None]
    metadata: dict[str, dict[str, Any]]
    samples: dict[str, Path]

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
        """The checkpoint, as it was given; empty if it was not."""
        return str(self.arguments.get("pretrained", ""))

    @property
    def step(self) -> int | None:
        """The training step; None unless the checkpoint's folder or revision is named after one."""
        revision = self.arguments.get("revision")
        return step_of(self.pretrained) if revision is None else step_of_revision(str(revision))


def read(paths: Sequence[Path], labels: Sequence[str] = ()) -> list[Run]:
    """Reads files of results.

    Args:
        paths: files, or folders of which all files of results are read.
        labels: names of the runs in order; empty for those of `make_labels`.

    Raises:
        ReportError: a file that lm_eval did not write, or not to its end; no file; or another
            number of labels than of files.
    """
    files = [file for path in paths for file in _files(path)]
    files = list(dict.fromkeys(file.resolve() for file in files))
    contents = [_read_file(file) for file in files]
    if labels and len(labels) != len(files):
        names = ", ".join(file.name for file in files)
        raise ReportError(f"{len(labels)} labels for {len(files)} files of results ({names})")
    if len(set(labels)) < len(labels):
        raise ReportError(f"labels must differ, found {', '.join(labels)}")
    labels = labels or make_labels([content["config"] for content in contents], files)
    return [_run(*each) for each in zip(files, labels, contents, strict=True)]


def step_of(pretrained: str) -> int | None:
    """The step in the name of a checkpoint's folder, such as ``12000`` or ``step_12000``.

    Numbers in the names of folders above it are no steps, except above an Orbax item.
    """
    parts = Path(pretrained).parts
    index = _index_of_step(parts)
    match = None if index is None else _STEP.fullmatch(parts[index])
    return None if match is None else int(match[1])


def step_of_revision(revision: str) -> int | None:
    """The step in a revision's name, such as ``step1000-tokens4B`` or ``stage1/iter_500``."""
    if match := _STEP_OF_REVISION.search(revision):
        return int(match[1])
    return step_of(revision)


def make_labels(configs: Sequence[dict[str, Any]], files: Sequence[Path]) -> list[str]:
    """Unique labels of the runs: those of `differing`, and the file where these are equal."""
    labels = differing(configs)
    if len(set(labels)) < len(labels):  # the same model, at another time or on other tasks
        labels = [f"{label} ({file.stem})" for label, file in zip(labels, files, strict=True)]
    return labels


def differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """The model of each run, and those of its arguments that differ between runs.

    A checkpoint is named by the last part of its path, or by as many as tell all of them apart.
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
    """The configuration of a run, without what names its step: what all steps of a training share.

    The revision is left out, or else the part of the checkpoint's path that `step_of` reads.
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


def read_samples(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The samples of a task, by filter and then by the fields of `ITEM`.

    Raises:
        ReportError: a line that is no sample of lm_eval.
    """
    samples: dict[str, dict[str, dict[str, Any]]] = {}
    with file.open("rb") as lines:  # as text they would also end at U+2028, which a sample may hold
        for number, line in enumerate(lines, 1):
            try:
                sample = json.loads(line)
                key = " ".join(str(sample[part]) for part in ITEM)
                samples.setdefault(str(sample["filter"]), {})[key] = sample
            except (ValueError, KeyError, TypeError):
                raise ReportError(
                    f"{file}, line {number}: expected a sample as lm_eval --log_samples writes it; "
                    "the file may be cut off"
                ) from None
    return samples


def _index_of_step(parts: Sequence[str]) -> int | None:
    """Return the index of the part of a path that is named after a step."""
    index = len(parts) - 1
    if index > 0 and parts[index] in _ITEMS:
        index -= 1
    return index if index >= 0 and _STEP.fullmatch(parts[index]) else None


def x_of(text: str) -> float | str:
    """The x of a metric ``quantity@x``: a number, or the name of a case."""
    try:
        return float(text)
    except ValueError:
        return text


def _parts_needed(paths: set[Path]) -> int:
    """As many last parts of paths as tell them apart."""
    longest = max((len(path.parts) for path in paths), default=0)
    each = (n for n in range(1, longest) if len({p.parts[-n:] for p in paths}) == len(paths))
    return next(each, max(longest, 1))


def _shown(key: str, value: Any) -> str:
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
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
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
    return content


def _run(file: Path, label: str, content: dict[str, Any]) -> Run:
    date = file.stem.removeprefix("results_")
    samples = {}
    for task in content["configs"]:
        name = f"samples_{task}_{date}.jsonl"
        beside = os.path.join(file.parent, name)
        if os.path.basename(name) == name and os.path.isfile(beside):  # no task leads elsewhere
            samples[task] = Path(beside)
    metadata = {
        task: dict(config.get("metadata") or {}) for task, config in content["configs"].items()
    }
    better = {
        (task, metric): higher
        for task, metrics in content["higher_is_better"].items()
        for metric, higher in (metrics or {}).items()
    }
    points = list(_points(content))
    return Run(file, label, content["config"], points, better, metadata, samples)


def _points(content: dict[str, Any]) -> Iterator[Point]:
    for task, metrics in content["results"].items():
        documents = content["n-samples"].get(task, {}).get("effective")
        for key, value in metrics.items():
            name, comma, filter_name = key.partition(",")
            if not comma or name.endswith(("_stderr", "_low", "_high")):
                continue
            if not _is_estimate(value):
                continue
            quantity, at, x = name.partition("@")
            if filter_name != "none":
                quantity += f" ({filter_name})"
            low, high = (metrics.get(f"{name}{bound},{filter_name}") for bound in ("_low", "_high"))
            error = metrics.get(f"{name}_stderr,{filter_name}")
            if low is None and isinstance(error, int | float):
                low, high = value - 1.96 * error, value + 1.96 * error
            low, high = (b if _is_estimate(b) else None for b in (low, high))
            yield Point(task, quantity, x_of(x) if at else None, value, low, high, documents)


def _is_estimate(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith(("<", ">"))
    return isinstance(value, int | float) and not isinstance(value, bool)

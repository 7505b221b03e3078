"""The samples of ``--log_samples``: lm_eval's answers to each item of a task."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from griffin_eval.errors import BadInput

# Fields of a sample that identify its item in all runs and filters. The document itself does not,
# since its row may have columns that depend on the model.
ITEM = ("doc_id", "prompt_hash", "target_hash")


class ReportError(BadInput):
    """A file of results or samples that a report cannot use."""


def read_samples(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the samples of a task, by filter and then by the fields of `ITEM`."""
    samples: dict[str, dict[str, dict[str, Any]]] = {}
    with file.open("rb") as lines:  # text mode would also end lines at a sample's U+2028
        for number, line in enumerate(lines, 1):
            try:
                sample = json.loads(line)
                key = " ".join(str(sample[part]) for part in ITEM)
                samples.setdefault(str(sample["filter"]), {})[key] = _with_curves(sample)
            except (ValueError, KeyError, TypeError):
                raise ReportError(
                    f"{file}, line {number}: expected a sample as lm_eval --log_samples writes it; "
                    "the file may be cut off"
                ) from None
    return samples


def curve_point(metric: str) -> str:
    """Return the name of a metric; ``score@4096`` for RULER's metrics, which are named after the
    lengths of prompts."""
    return f"score@{metric}" if metric.isdecimal() else metric


def _with_curves(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with `curve_point` as the names of its metrics, without RULER's -1 for a
    length that its prompt does not have."""
    names = [name for name in sample.get("metrics", ()) if name.isdecimal()]
    if not names:
        return sample
    scores = {curve_point(name): sample[name] for name in names if sample.get(name, -1) != -1}
    others = [name for name in sample["metrics"] if name not in names]
    return {**sample, **scores, "metrics": [*others, *scores]}


def right_or_wrong(file: Path, key: str) -> bool:
    """Return whether each sample of a metric and filter is 0 or 1, as the items of a share are."""
    name, _, filter_name = key.partition(",")
    found = read_samples(file).get(filter_name, {}).values()
    return all(sample.get(name) in (0, 1) for sample in found)


def count_numbers(file: Path) -> "Counter[str]":
    """Return the number of samples with a number for each metric, by metric and filter."""
    counts: Counter[str] = Counter()
    for filter_name, samples in read_samples(file).items():
        for sample in samples.values():
            for name in sample.get("metrics", ()):
                counts[f"{name},{filter_name}"] += sample.get(name) is not None
    return counts

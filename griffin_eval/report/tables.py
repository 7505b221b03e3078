"""The tables of a report, as headings and rows of text, and the CSV files with every digit."""

import csv
import io
import math
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from griffin_eval.json_files import write_whole
from griffin_eval.report.labels import bounded
from griffin_eval.report.paired import Difference, not_compared
from griffin_eval.report.results import Point, Run
from griffin_eval.report.verdicts import Verdict

RESULTS_FILE, PAIRED_FILE, VERDICTS_FILE = "results.csv", "paired.csv", "verdicts.csv"
THROUGHPUT = (
    "tokens_requested",
    "tokens_computed",
    "saved_ratio",
    "states_evicted",
    "tokens_per_second",
    "compilations",
    "peak_memory_bytes",
)


class Table(NamedTuple):
    """A table.

    Attributes:
        title: heading of the table.
        headings: headings of its columns.
        rows: texts of its cells.
        note: a remark for the reader; may be empty.
    """

    title: str
    headings: Sequence[str]
    rows: list[list[str]]
    note: str = ""


def write_results(runs: list[Run], file: Path) -> None:
    """Writes a CSV file with a line for each number of each run."""
    columns = ["run", "file", "model", "pretrained", "framework", "dtype", "step"]
    columns += [*Point._fields, "higher_is_better"]
    rows = []
    for run in runs:
        framework, dtype = run.config.get("model_framework"), run.config.get("model_dtype")
        who = [run.label, run.path, run.model, run.pretrained, framework, dtype, run.step]
        for point in run.points:
            name = point.quantity if point.x is None else f"{point.quantity}@{_text(point.x)}"
            rows.append([*who, *point, run.higher_is_better.get((point.task, name))])
    _write(file, columns, rows)


def write_differences(differences: list[Difference], file: Path) -> None:
    """Writes a CSV file with a line for each comparison of two runs."""
    _write(file, Difference._fields, differences)


def run_table(runs: list[Run]) -> Table:
    """The runs: their models, checkpoints and devices.

    lm_eval records the device that was asked for, cuda:0 by default, and not the one that other
    models ran on: theirs is left empty.
    """
    headings = ["run", "model", "checkpoint", "framework", "dtype", "device", "window", "weights"]
    rows = []
    for run in runs:
        c = run.config
        hash_ = str(c.get("griffin_weights_sha256") or c.get("model_sha") or "")[:12]
        told = [c.get("model_framework"), c.get("model_dtype"), c.get("model_device")]
        told = [str(each or "").removeprefix("torch.") for each in told]
        rows.append(
            [
                run.label,
                run.model,
                run.pretrained,
                *told,
                str(c.get("model_visible_keys") or ""),
                hash_,
            ]
        )
    return Table("Runs", headings, rows)


def number_table(runs: list[Run]) -> Table:
    """Every number with its interval if it has one, and a column for each run."""
    keys = dict.fromkeys((p.task, p.quantity, p.x) for run in runs for p in run.points)
    points = [{(p.task, p.quantity, p.x): p for p in run.points} for run in runs]
    rows = []
    for key in keys:
        task, quantity, x = key
        cells = [_estimate(own.get(key)) for own in points]
        rows.append([task, quantity, "" if x is None else _text(x), *cells])
    note = "Beside a number the bounds of its interval of 95%, where one is known."
    return Table("Numbers", ["task", "quantity", "at", *(r.label for r in runs)], rows, note)


def difference_table(runs: list[Run], differences: list[Difference]) -> Table | None:
    """The runs compared item by item, with a note on those that could not be; None without both."""
    rows = [
        [
            d.task,
            d.metric,
            f"{d.run} − {d.baseline}",
            str(d.items),
            bounded(d.mean, d.low, d.high),
            f"{d.largest:.3g}",
            "" if d.gained is None else f"+{d.gained} −{d.lost}",
            "" if d.p is None else f"{d.p:.2g}",
        ]
        for d in differences
    ]
    headings = ["task", "metric", "runs", "items", "mean difference", "largest", "flips", "p"]
    note = (
        "Over the items that both runs have. Flips: right in the first run only, and in the second "
        "only; p: McNemar's exact test of no difference, which takes items as independent."
    )
    lacking = not_compared(runs, differences)
    if lacking:
        told = "; ".join(f"{task}: {run} and {baseline}" for task, run, baseline in lacking)
        note += f" Not compared, since they have no item in common: {told}."
    return Table("Item by item", headings, rows, note) if rows or lacking else None


def write_verdicts(found: list[Verdict], file: Path) -> None:
    """Writes a CSV file with a line for each verdict."""
    _write(file, Verdict._fields, found)


def verdict_table(found: list[Verdict]) -> Table | None:
    """A verdict for each task; None if there are none."""
    rows = [
        [
            v.verdict,
            v.task,
            v.metric,
            str(v.items),
            f"{v.mean:+.4g}",
            f"{v.p:.2g}",
            f"{v.detectable:.2g}" if math.isfinite(v.detectable) else "none",
        ]
        for v in found
    ]
    headings = ["verdict", "task", "metric", "items", "difference", "p", "could have seen"]
    note = (
        "The run against the one of --against, over the items that both have. p: of no difference, "
        "corrected for the number of tasks (Holm); below 0.05 there is a verdict. Could have seen: "
        "the smallest difference that would have had a verdict with a probability of 80%."
    )
    return Table("Verdicts", headings, rows, note) if rows else None


def published_scores() -> dict[str, Any]:
    """Return the contents of ``published.toml``."""
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def published_table(runs: list[Run]) -> Table | None:
    """Published and measured scores in percent; None if no run has any of the benchmarks."""
    published = published_scores()
    benchmarks = published["benchmarks"]
    measured = []
    for run in runs:
        scores = {
            (p.task, p.quantity): p.value
            for p in run.points
            if p.x is None and not isinstance(p.value, str)
        }
        own = [scores.get((each["task"], each["metric"])) for each in benchmarks.values()]
        if any(score is not None for score in own):
            measured.append([run.label, "measured", *map(_percent, own)])
    if not measured:
        return None
    rows = list(measured)
    for row in published["published"]:
        scores = [row["scores"].get(name) for name in benchmarks]
        percents = (_percent(score and score / 100) for score in scores)
        rows.append([row["model"], row["source"], *percents])
    note = " ".join(f"{name}: {text}" for name, text in published["sources"].items())
    return Table("Published scores", ["model", "source", *benchmarks], rows, note)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def throughput_table(runs: list[Run]) -> Table | None:
    """Counts of the engine; None if no run has them."""
    rows = []
    for run in runs:
        counted = [run.config.get(f"griffin_{name}") for name in THROUGHPUT]
        if any(value is not None for value in counted):
            rows.append([run.label, *("" if v is None else _text(v) for v in counted)])
    headings = ["run", *(name.replace("_", " ") for name in THROUGHPUT)]
    return Table("Work", headings, rows) if rows else None


def parity_table(runs: list[Run]) -> Table | None:
    """Differences between the frameworks (``parity=check``); None if no run measured them."""
    rows = [
        [run.label, name.replace("_", " "), _text(value)]
        for run in runs
        for name, value in (run.config.get("griffin_parity") or {}).items()
    ]
    return Table("Parity of the frameworks", ["run", "what", "found"], rows) if rows else None


def _estimate(point: Point | None) -> str:
    return "" if point is None else bounded(point.value, point.low, point.high)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _write(file: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    write_whole(file, text.getvalue().encode())

"""The tables of a report as headings and rows of text, and CSV files with all digits."""

import csv
import io
import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from griffin_eval.json_files import write_whole
from griffin_eval.report.labels import at_x, bounded, chart_title, task_words, y_label
from griffin_eval.report.paired import Difference, not_compared
from griffin_eval.report.results import Point, Run
from griffin_eval.report.verdicts import Verdict

RESULTS_FILE, PAIRED_FILE, VERDICTS_FILE = "results.csv", "paired.csv", "verdicts.csv"
MARKDOWN_FILE = "results.md"
THROUGHPUT = (
    "tokens_requested",
    "tokens_computed",
    "saved_ratio",
    "states_evicted",
    "tokens_per_second",
    "compilations",
    "peak_memory_bytes",
)
MAX_TASKS = 3  # tasks that a cell names


class Table(NamedTuple):
    """A table of texts, with a note for the reader that may be empty."""

    title: str
    headings: Sequence[str]
    rows: list[list[str]]
    note: str = ""


def write_results(runs: list[Run], file: Path) -> None:
    """Write a CSV file with a line for each number of each run."""
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
    """Write a CSV file with a line for each comparison of two runs."""
    _write(file, Difference._fields, differences)


def run_table(runs: list[Run]) -> Table:
    """Return the table of models with checkpoints, settings, devices and dates.

    lm_eval records the requested device (cuda:0 by default) rather than the one in use, so the
    device of models other than griffin stays empty.
    """
    headings = ["name", "model", "checkpoint", "framework", "dtype", "device", "window", "weights"]
    headings += ["evaluated", "tasks", "items"]
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
                max((each.date for each in run.evaluations), default=""),
                str(len(run.items)),
                f"{sum(run.items.values()):,}",
            ]
        )
    again = [f"{run.label}: {', '.join(run.hidden)}" for run in runs if run.hidden]
    note = "Window: keys that local attention sees."
    if again:
        note += f" Asked more than once, of which the latest is shown: {'; '.join(again)}."
    return Table("Models", headings, rows, note)


def write_markdown(runs: list[Run], file: Path) -> None:
    """Write a Markdown file with a table for each metric: a row for each point, a column for each
    model, and the 95% interval in brackets."""
    points = [{(p.task, p.quantity, p.x): p for p in run.points} for run in runs]
    keys = dict.fromkeys(key for own in points for key in own)
    lines = ["In brackets: 95% confidence intervals.", ""]
    for task, quantity in dict.fromkeys((task, quantity) for task, quantity, _ in keys):
        xs = [x for t, q, x in keys if (t, q) == (task, quantity)]
        curve = isinstance(xs[0], int | float)
        title = f"{task_words(task)}: {y_label(quantity)}"
        lines += [f"### {_plain(chart_title(runs, task, quantity) if curve else title)}", ""]
        lines.append(f"| | {' | '.join(_plain(run.label) for run in runs)} |")
        lines.append("|---" * (len(runs) + 1) + "|")
        for x in xs:
            cells = [_estimate(own.get((task, quantity, x))) for own in points]
            cells = [re.sub("([<>])", r"\\\1", cell) for cell in cells]  # bounds such as >200
            words = at_x(runs, task, quantity, x) or "all items"
            lines.append(f"| {_plain(words)} | {' | '.join(cells)} |")
        lines.append("")
    write_whole(file, "\n".join(lines).encode(errors="replace"))


def _plain(text: str) -> str:
    """Escape a text so that Markdown shows it unchanged in one cell."""
    return re.sub(r"([\\|<>*_`\[\]])", r"\\\1", " ".join(text.split()))


def number_table(runs: list[Run]) -> Table:
    """Return the table of every number with its interval, with a column for each run."""
    keys = dict.fromkeys((p.task, p.quantity, p.x) for run in runs for p in run.points)
    points = [{(p.task, p.quantity, p.x): p for p in run.points} for run in runs]
    rows = []
    for key in keys:
        task, quantity, x = key
        cells = [_estimate(own.get(key)) for own in points]
        rows.append([task, quantity, "" if x is None else _text(x), *cells])
    note = "Brackets: 95% confidence interval, where there are enough items for one."
    return Table("Results", ["task", "metric", "x", *(r.label for r in runs)], rows, note)


def difference_table(runs: list[Run], differences: list[Difference]) -> Table | None:
    """Return the table of paired comparisons, with a note on runs without common items, or None."""
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
        "Over the items that both runs have. Flips: + right in the left run only, − right in the "
        "right one only; p: McNemar's exact test of no difference, which takes items as "
        "independent."
    )
    lacking = not_compared(runs, differences)
    if lacking:
        told = "; ".join(f"{task}: {run} and {baseline}" for task, run, baseline in lacking)
        note += f" Not compared, since they have no item in common: {told}."
    return Table("Paired comparison", headings, rows, note) if rows or lacking else None


def write_verdicts(verdicts: list[Verdict], file: Path) -> None:
    """Write a CSV file with a line for each verdict."""
    _write(file, Verdict._fields, verdicts)


def verdict_table(verdicts: list[Verdict]) -> Table | None:
    """Return the table of verdicts, or None if there are none."""
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
        for v in verdicts
    ]
    headings = ["verdict", "task", "metric", "items", "difference", "p", "smallest detectable"]
    note = (
        "The run against the one of --against, over the items that both have. p: probability of "
        "such a difference by chance, corrected for the number of tasks (Holm); below 0.05 the run "
        "is better or worse. Smallest detectable: the difference that this many items show with a "
        "probability of 80%."
    )
    return Table("Verdicts", headings, rows, note) if rows else None


def published_scores() -> dict[str, Any]:
    """Return the contents of ``published.toml``."""
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def published_table(runs: list[Run]) -> Table | None:
    """Return published and measured scores in percent, or None without a measured one."""
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


def compute_table(runs: list[Run]) -> Table | None:
    """Return the table of times and token counts of each evaluation, or None without any."""
    rows = []
    for run in runs:
        for each in run.evaluations:
            counted = [each.config.get(f"griffin_{name}") for name in THROUGHPUT]
            if each.seconds is None and not any(value is not None for value in counted):
                continue
            tasks = ", ".join([*each.items][:MAX_TASKS]) + ", …" * (len(each.items) > MAX_TASKS)
            count, seconds = sum(each.items.values()), ["", ""]
            if each.seconds:
                seconds = [f"{each.seconds:,.1f}", f"{count / each.seconds:.3g}"]
            numbers = ["" if value is None else _number(value) for value in counted]
            rows.append([run.label, tasks, f"{count:,}", *seconds, *numbers])
    headings = ["model", "tasks", "items", "seconds", "items per second"]
    headings += [name.replace("_", " ") for name in THROUGHPUT]
    note = (
        "Seconds: the whole evaluation as lm_eval measured it, with the loading of the model. "
        "Tokens are known of --model griffin alone."
    )
    return Table("Compute", headings, rows, note) if rows else None


def parity_table(runs: list[Run]) -> Table | None:
    """Return the table of ``parity=check``, or None if no run measured it."""
    rows = [
        [run.label, name.replace("_", " "), _text(value)]
        for run in runs
        for name, value in (run.config.get("griffin_parity") or {}).items()
    ]
    return Table("Parity of the frameworks", ["run", "what", "found"], rows) if rows else None


def _estimate(point: Point | None) -> str:
    return "" if point is None else bounded(point.value, point.low, point.high)


def _number(value: Any) -> str:
    """Return a count with thousands separators, or another number with three digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _write(file: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    write_whole(file, text.getvalue().encode(errors="replace"))

"""The report as one HTML page that contains its figures and tables and needs no network."""

from collections.abc import Sequence
from pathlib import Path

import jinja2
import matplotlib

from griffin_eval.drawing import Files
from griffin_eval.json_files import write_whole
from griffin_eval.report import tables
from griffin_eval.report.agreement import Agreement
from griffin_eval.report.answers import answers
from griffin_eval.report.charts import Chart
from griffin_eval.report.curves import Marks, draw_controls, draw_curves, draw_over_steps
from griffin_eval.report.flips import flips
from griffin_eval.report.heatmaps import draw_heatmaps
from griffin_eval.report.paired import differences
from griffin_eval.report.results import Run
from griffin_eval.report.verdicts import Verdict

TEMPLATE = Path(__file__).with_name("page.html.j2")
MAX_MODELS = 8  # models that the top of the page names


def write(
    page: Path,
    title: str,
    runs: list[Run],
    judged: list[Verdict],
    equal: Sequence[Agreement],
    files: Files,
    train_length: int | None,
) -> int:
    """Write the page, the figures, and the tables beside it; return the number of figures."""
    compared = differences(runs)
    folder = page.parent
    folder.mkdir(parents=True, exist_ok=True)
    tables.write_results(runs, folder / tables.RESULTS_FILE)
    tables.write_markdown(runs, folder / tables.MARKDOWN_FILE)
    if compared:
        tables.write_differences(compared, folder / tables.PAIRED_FILE)
    if judged:
        tables.write_verdicts(judged, folder / tables.VERDICTS_FILE)
    with matplotlib.rc_context({"text.parse_math": False}):  # names may contain a $
        charts = draw_all(runs, files, train_length)
        first = answers(runs, charts, compared, judged, files, train_length)
    shown = [
        tables.verdict_table(judged),
        tables.run_table(runs),
        tables.published_table(runs),
        tables.number_table(runs),
        tables.difference_table(runs, compared),
        tables.parity_table(runs),
        tables.compute_table(runs),
    ]
    leading = [answer.chart for answer in first if answer.chart is not None]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    html = template.render(
        title=title,
        models=[model_line(run) for run in runs[:MAX_MODELS]],
        more_models=max(len(runs) - MAX_MODELS, 0),
        equal=equal,
        answers=first,
        tables=[table for table in shown if table is not None],
        charts=[chart for chart in charts if chart not in leading],
        flips=flips(runs),
    )
    write_whole(page, html.encode(errors="replace"))  # names of folders may not be UTF-8
    return len({chart.name for chart in (*charts, *leading)})


def draw_all(runs: list[Run], files: Files, train_length: int | None) -> list[Chart]:
    """Draw every curve of the runs, over its own axis and over training steps."""
    known = {run.label: run.config.get("model_visible_keys") for run in runs}
    with_window = [label for label, keys in known.items() if keys]
    sizes = {known[label] for label in with_window}
    alone = len(with_window) == 1 < len(runs)
    window = f"{with_window[0]}'s window" if alone else "window"
    marks = Marks(sizes.pop() if len(sizes) == 1 else None, train_length, window)
    return [
        *draw_controls(runs, files),
        *draw_heatmaps(runs, files),
        *draw_curves(runs, files, marks),
        *draw_over_steps(runs, files),
    ]


def model_line(run: Run) -> tuple[str, str]:
    """Return the name of a model, and its kind, checkpoint, date and number of items."""
    kind = [run.config.get("model_framework"), run.config.get("model_dtype")]
    known = [run.model, *(str(each).removeprefix("torch.") for each in kind if each)]
    date = max((each.date for each in run.evaluations), default="")
    items = run.items
    facts = [
        run.pretrained,
        ", ".join(known),
        f"{sum(items.values()):,} items of {len(items)} task{'s' * (len(items) != 1)}",
        date.partition(" ")[0],
    ]
    if run.hidden:
        facts.append(f"asked again, the latest shown: {', '.join(run.hidden)}")
    return run.label, "; ".join(fact for fact in facts if fact)

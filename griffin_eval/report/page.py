"""The report as one HTML page that needs no network: it holds its figures and tables."""

from collections.abc import Sequence
from pathlib import Path

import jinja2

from griffin_eval.report.answers import Answer
from griffin_eval.report.charts import Chart
from griffin_eval.report.tables import Table

TEMPLATE = Path(__file__).with_name("page.html.j2")


def render(
    title: str, answers: Sequence[Answer], tables: Sequence[Table], charts: Sequence[Chart]
) -> str:
    """The page as HTML.

    Args:
        answers: what stands first.
        tables: the details, folded.
        charts: the other figures, folded.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(title=title, answers=answers, tables=tables, charts=charts)

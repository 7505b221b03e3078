"""The results of a benchmark: tables and notes, printed as text or JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.timing import number, spread

Row = Mapping[str, Any]  # cells by heading: text, numbers, or a list with a number for each round


@dataclass
class Report:
    """The results of one run: rows of each table by its title, and lines below the tables."""

    tables: dict[str, Sequence[Row]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def show(self, as_json: bool) -> None:
        """Print everything, lists of numbers as median and range."""
        if as_json:
            typer.echo(json.dumps({"tables": self.tables, "notes": self.notes}, indent=1))
            return
        for title, rows in self.tables.items():
            table = _rich_table(title, rows)
            whole = Console(width=10_000).measure(table).maximum  # no cell is cut
            Console(width=max(Console().width, whole)).print(table)
        for note in self.notes:
            typer.echo(note)


def _rich_table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title)
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    for heading in headings:
        text = any(isinstance(row.get(heading), str) for row in rows)
        table.add_column(heading, justify="left" if text else "right", no_wrap=text)
    for row in rows:
        table.add_row(*(_cell(row.get(heading)) for heading in headings))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return spread(value)
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)

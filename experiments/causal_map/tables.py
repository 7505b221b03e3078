"""The tables that `experiments.causal_map` prints."""

from typing import Any

from rich.console import Console
from rich.table import Table

TITLES = {
    "sufficient": "put into the other document, the part takes this share of the answer along",
    "necessary": "with the part taken away, this share of the answer goes",
}


def print_map(facts: dict[str, Any]) -> None:
    """Print the findings about one checkpoint."""
    if facts["symbols"] is None:
        axis = "tokens after the fact"
        columns = ["end" if tokens is None else f"{tokens:,}" for tokens in facts["distances"]]
    else:
        axis, columns = "before the first marker; symbol", [*map(str, facts["symbols"])]
    for side, title in TITLES.items():
        table = _table(f"{facts['checkpoint']}, {side}: {title}", axis, columns)
        if side == "necessary":
            table.add_column("not written", justify="right")
        for row in reversed(facts["components"]):
            written = [_shown(row["not_written"])] if side == "necessary" else []
            table.add_row(row["component"], *map(_shown, row[side]), *written)
        _print_whole(table)
    if facts["keys_hidden"]:
        ages = [f"{one['from']:,}-{one['to']:,}" for one in facts["keys_hidden"][0]["ages"]]
        title = "share lost where no query sees the keys of these numbers of tokens before it"
        table = _table(title, "age", ages)
        for row in reversed(facts["keys_hidden"]):
            table.add_row(row["component"], *(_shown(one["lost"]) for one in row["ages"]))
        _print_whole(table)
    print(
        f"{facts['task']}: right after {facts['accuracy']:.0%} of the unchanged documents. Used "
        f"are {facts['answered']} of {facts['pairs']} pairs, those right in both documents; 95 % "
        "intervals over them."
    )
    if control := facts.get("control"):
        print(
            f"control, with the answers of other pairs: {control['without_0']} of "
            f"{control['cells']} intervals leave 0 out (one in 20 by chance); the largest share is "
            f"{control['largest']:.2f}."
        )


def _table(title: str, first: str, columns: list[str]) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _print_whole(table: Table) -> None:
    """Print a table without truncating cells, even in a narrow terminal."""
    width = Console(width=10_000).measure(table).maximum
    Console(width=max(Console().width, width)).print(table)


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    if cell["low"] is None:
        return f"{cell['value']:z.2f}"
    return f"{cell['value']:z.2f} ± {(cell['high'] - cell['low']) / 2:.2f}"

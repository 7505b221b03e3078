"""The tables that `experiments.causal_map` prints."""

from typing import Any

from benchmarks.report import Report

TITLES = {
    "sufficient": "put into the other document, the part takes this share of the answer along",
    "necessary": "with the part taken away, this share of the answer goes",
}


def report_of(facts: dict[str, Any]) -> Report:
    """Return the findings about one checkpoint as tables."""
    report, columns = Report(), column_names(facts)
    axis = "tokens after the fact" if facts["symbols"] is None else "symbol, before the marker"
    for side, title in TITLES.items():
        report.tables[f"{facts['checkpoint']}, {side}: {title}"] = [
            {axis: row["component"]}
            | dict(zip(columns, map(_shown, row[side]), strict=True))
            | ({"not written": _shown(row["not_written"])} if side == "necessary" else {})
            for row in reversed(facts["components"])
        ]
    if facts["keys_hidden"]:
        title = "share lost where no query sees the keys of these numbers of tokens before it"
        report.tables[title] = [
            {"age": row["component"]}
            | {f"{one['from']:,}-{one['to']:,}": _shown(one["lost"]) for one in row["ages"]}
            for row in reversed(facts["keys_hidden"])
        ]
    report.notes.append(
        f"{facts['task']}: right after {facts['accuracy']:.0%} of the unchanged documents. Used "
        f"are {facts['answered']} of {facts['pairs']} pairs, those right in both documents; 95 % "
        "intervals over them."
    )
    if control := facts.get("control"):
        report.notes.append(
            f"control, with the answers of other pairs: {control['without_0']} of "
            f"{control['cells']} intervals leave 0 out (one in 20 by chance); the largest share is "
            f"{control['largest']:.2f}."
        )
    return report


def column_names(facts: dict[str, Any]) -> list[str]:
    """Return the symbols, or the distances from the fact."""
    if facts["symbols"] is not None:
        return [*map(str, facts["symbols"])]
    return ["end" if tokens is None else f"{tokens:,}" for tokens in facts["distances"]]


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    if cell["low"] is None:
        return f"{cell['value']:z.2f}"
    return f"{cell['value']:z.2f} ± {(cell['high'] - cell['low']) / 2:.2f}"

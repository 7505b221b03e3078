"""The command ``report``."""

import math
from pathlib import Path
from typing import Annotated

import typer

from griffin_eval.errors import ArgumentError, MissingExtraError


def report(
    results: Annotated[
        list[Path], typer.Argument(help="Files results_*.json of lm_eval, or folders with them.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")],
    labels: Annotated[
        str | None,
        typer.Option(help="Names of the runs, in order: A,B,…; those that differ by default."),
    ] = None,
    train_length: Annotated[
        int | None,
        typer.Option(help="Length of the training sequences in tokens, to be marked.", min=1),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "griffin-eval report",
    overwrite: Annotated[bool, typer.Option(help="Replacement of an existing report.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Earlier run to judge one run by: a verdict a task, exit code 1 if worse."
        ),
    ] = None,
    detect: Annotated[
        float | None,
        typer.Option(help="Difference that --against must be able to see, else exit code 1."),
    ] = None,
) -> None:
    """Compare runs of lm_eval: one HTML page, figures as PNG and SVG, all numbers as CSV.

    Runs are models, frameworks, dtypes, or steps of one training, of --model griffin, hf or any
    other. The first one with samples of a task (lm_eval --log_samples) is what the others are
    compared with item by item. With --against one run is judged by another, for CI.
    """
    from importlib.util import find_spec

    for library in ("matplotlib", "jinja2", "scipy"):
        if find_spec(library) is None:
            raise MissingExtraError(library, "torch")
    from griffin_eval.report import tables
    from griffin_eval.report.answers import answers
    from griffin_eval.report.figures import draw_all
    from griffin_eval.report.page import render
    from griffin_eval.report.paired import differences
    from griffin_eval.report.results import read
    from griffin_eval.report.verdicts import unseen, verdicts

    page = output / "report.html"
    if output.exists() and not output.is_dir():
        raise ArgumentError(f"--output {output} is a file: expected a folder")
    if page.exists() and not overwrite:
        raise ArgumentError(f"{page} exists already: choose another folder, or --overwrite")
    if detect is not None and (against is None or not 0 < detect < math.inf):
        raise ArgumentError(f"--detect {detect}: expected a number above 0, and --against with it")
    files = results if against is None else [against, *results]
    runs = read(files, [label.strip() for label in labels.split(",")] if labels else [])
    judged = []
    if against is not None:
        if len(runs) != 2:
            raise ArgumentError(
                f"--against compares one run with one other, found {len(runs)} files of results: "
                f"{', '.join(str(run.path) for run in runs)}"
            )
        judged = verdicts(runs[1], runs[0])
    compared = differences(runs)
    output.mkdir(parents=True, exist_ok=True)
    tables.write_results(runs, output / tables.RESULTS_FILE)
    if compared:
        tables.write_differences(compared, output / tables.PAIRED_FILE)
    if judged:
        tables.write_verdicts(judged, output / tables.VERDICTS_FILE)
    charts = draw_all(runs, output / "figures", train_length)
    shown = [
        tables.verdict_table(judged),
        tables.run_table(runs),
        tables.published_table(runs),
        tables.number_table(runs),
        tables.difference_table(runs, compared),
        tables.parity_table(runs),
        tables.throughput_table(runs),
    ]
    first = answers(runs, charts, compared, judged, output / "figures", train_length)
    leading = [answer.chart for answer in first if answer.chart is not None]
    rest = [chart for chart in charts if chart not in leading]
    html = render(title, first, [t for t in shown if t is not None], rest)
    page.write_text(html, encoding="utf-8")
    drawn = len({chart.name for chart in (*charts, *leading)})
    typer.echo(f"{page}: runs: {len(runs)}, figures: {drawn}")
    for one in judged:
        could = f"{one.detectable:.2g}" if math.isfinite(one.detectable) else "none"
        typer.echo(
            f"{one.task}: {one.verdict} ({one.metric} {one.mean:+.4g}, p {one.p:.2g}; could have "
            f"seen {could})"
        )
    small = [] if detect is None else unseen(judged, detect)
    for one in small:
        typer.echo(f"{one.task}: too few items to see a difference of {detect:g}", err=True)
    if small or any(one.verdict == "worse" for one in judged):
        raise typer.Exit(1)


def power(
    results: Annotated[
        Path | None, typer.Argument(help="Results of an earlier run, with logged samples.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Run of another model on the same items.")
    ] = None,
    items: Annotated[int | None, typer.Option(help="Number of items planned.", min=1)] = None,
    difference: Annotated[float | None, typer.Option(help="Difference to be seen.")] = None,
    score: Annotated[
        float | None, typer.Option(help="Share of right answers expected, without results.")
    ] = None,
    correlation: Annotated[
        float, typer.Option(help="Correlation of two models' answers to an item.", max=1)
    ] = 0.0,
    cluster_size: Annotated[
        int, typer.Option(help="Number of items in a cluster, without results.", min=1)
    ] = 1,
    within: Annotated[
        float, typer.Option(help="Correlation of items in a cluster.", min=0, max=1)
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Tell before a run how small a difference it can show, and how many items one takes.

    With results of an earlier run the spread of its items is used, with --against the spread of the
    difference between two runs; without results, --items and --score. A difference counts as seen
    with a probability of 80% at a level of 5% (Miller, arXiv 2411.00640), one task by itself.

    griffin-eval power --items 500 --score 0.6 --difference 0.03
    """
    import json
    from importlib.util import find_spec

    from rich.console import Console
    from rich.table import Table

    if find_spec("scipy") is None:
        raise MissingExtraError("scipy", "torch")
    from griffin_eval.report.power import assumed_spread, plans, spreads
    from griffin_eval.report.results import read

    if difference is not None and not 0 < difference < math.inf:
        raise ArgumentError(f"--difference {difference}: expected a number above 0")
    if results is None:
        if against is not None:
            raise ArgumentError("--against needs RESULTS, the run that it is compared with")
        if items is None or score is None or not 0 < score < 1:
            raise ArgumentError(
                f"expected RESULTS of an earlier run, or --items and a --score between 0 and 1, "
                f"found --items {items} and --score {score}"
            )
        if not -1 <= correlation < 1:
            raise ArgumentError(
                f"--correlation {correlation}: expected a number from -1 to below 1"
            )
        found = [assumed_spread(items, score, correlation, cluster_size, within)]
    else:
        if score is not None or cluster_size > 1 or within:
            raise ArgumentError(
                "--score, --cluster-size and --within are for a plan without RESULTS, "
                "which tell them"
            )
        runs = read([results] if against is None else [results, against], [])
        if len(runs) != (1 if against is None else 2):
            raise ArgumentError(f"expected one file of results each, found {len(runs)} in all")
        found = spreads(runs[0], runs[1] if against else None, correlation)
    rows = plans(found, items, difference)
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=2))
        return
    table = Table()
    for heading in ("task", "metric") * (results is not None):
        table.add_column(heading)
    for heading in ("items", "clusters", "smallest difference", "items needed"):
        table.add_column(heading, justify="right")
    for row in rows:
        needed = "-" if row.needed is None else f"{row.needed:,}"
        least = f"{row.smallest:.3g}" if math.isfinite(row.smallest) else "none"
        names = (row.task, row.metric) * (results is not None)
        table.add_row(*names, f"{row.items:,}", f"{row.clusters:,}", least, needed)
    Console(width=max(Console().width, 80)).print(table)

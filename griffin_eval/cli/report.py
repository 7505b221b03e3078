"""The command ``report``."""

import math
from pathlib import Path
from typing import Annotated

import typer

from griffin_eval.cli.options import (
    FigureFormat,
    FigureTitles,
    FigureWidth,
    check_figures_folder,
    figure_files,
)
from griffin_eval.errors import ArgumentError, MissingExtraError


def report(
    results: Annotated[
        list[Path], typer.Argument(help="Files results_*.json of lm_eval, or folders with them.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the report.")],
    labels: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names, one for each model, or one for each file to keep files "
            "apart (default: the settings that differ)."
        ),
    ] = None,
    train_length: Annotated[
        int | None,
        typer.Option(help="Length of the training sequences in tokens, to mark in figures.", min=1),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "griffin-eval report",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing report.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Earlier run to judge one model against, task by task; exit code 1 if a task is "
            "worse."
        ),
    ] = None,
    detect: Annotated[
        float | None,
        typer.Option(
            help="Change that --against must be able to detect; exit code 1 if it cannot."
        ),
    ] = None,
    expect_equal: Annotated[
        str | None,
        typer.Option(
            help="Model that all others must equal, by name or lm_eval's name such as hf; exit "
            "code 1 if answers differ.",
            metavar="NAME",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(help="Largest relative difference of log-likelihoods that counts as equal."),
    ] = 1e-5,
    formats: FigureFormat = "png,svg",
    width: FigureWidth = None,
    figure_titles: FigureTitles = True,
) -> None:
    """Compare models by their lm_eval results, on an HTML page with figures and tables.

    Models may differ in weights, framework, dtype or settings, be steps of one training, and run
    under --model griffin, hf or any other. With lm_eval --log_samples they are also compared item
    by item. For CI, --against judges one model by another, and --expect-equal requires equal
    answers.
    """
    from importlib.util import find_spec

    for library in ("matplotlib", "jinja2", "scipy"):
        if find_spec(library) is None:
            raise MissingExtraError(library, "torch")
    from griffin_eval.report.agreement import agreements
    from griffin_eval.report.page import write
    from griffin_eval.report.results import read
    from griffin_eval.report.verdicts import unseen, verdicts

    page = output / "report.html"
    check_figures_folder(output, formats)
    if page.exists() and not overwrite:
        raise ArgumentError(f"{page} exists already: choose another folder, or --overwrite")
    if detect is not None and (against is None or not 0 < detect < math.inf):
        raise ArgumentError(f"--detect {detect}: expected a number above 0, and --against with it")
    if not 0 <= tolerance < math.inf:
        raise ArgumentError(f"--tolerance {tolerance}: expected a number of 0 or more")
    names = [label.strip() for label in labels.split(",")] if labels else []
    runs = read(results, names, against)
    judged = []
    if against is not None:
        if len(runs) != 2:
            raise ArgumentError(
                f"--against compares one model with one other, found {len(runs)} of them: "
                f"{', '.join(str(run.path) for run in runs)}"
            )
        judged = verdicts(runs[1], runs[0])
    equal = agreements(runs, expect_equal)
    files = figure_files(output / "figures", formats, width, titles=figure_titles)
    drawn = write(page, title, runs, judged, equal, files, train_length)
    typer.echo(f"{page}: models: {len(runs)}, figures: {drawn}")
    for one in judged:
        could = f"{one.detectable:.2g}" if math.isfinite(one.detectable) else "none"
        typer.echo(
            f"{one.task}: {one.verdict} ({one.metric} {one.mean:+.4g}, p {one.p:.2g}; smallest "
            f"detectable change: {could})"
        )
    unequal = [] if expect_equal is None else [e for e in equal if not e.within(tolerance)]
    for each in equal if expect_equal is not None else ():
        typer.echo(f"{'not equal' if each in unequal else 'equal'}: {each.sentence}")
        for note in each.notes:
            typer.echo(f"  {note}")
    small = [] if detect is None else unseen(judged, detect)
    for one in small:
        typer.echo(f"{one.task}: too few items to detect a change of {detect:g}", err=True)
    if small or unequal or any(one.verdict == "worse" for one in judged):
        raise typer.Exit(1)


def power(
    results: Annotated[
        Path | None, typer.Argument(help="Results of an earlier run, with logged samples.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Run of another model on the same items.")
    ] = None,
    items: Annotated[int | None, typer.Option(help="Number of items planned.", min=1)] = None,
    difference: Annotated[float | None, typer.Option(help="Difference to detect.")] = None,
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
    """Compute before a run the smallest difference it can show, or the items a difference needs.

    The spread of items is that of RESULTS, an earlier run; of the difference between two runs with
    --against; or assumed from --items and --score. A difference is seen with a probability of 80%
    at a level of 5% (Miller, arXiv 2411.00640), in one task alone.
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
    if not -1 <= correlation < 1:
        raise ArgumentError(f"--correlation {correlation}: expected a number from -1 to below 1")
    if results is None:
        if against is not None:
            raise ArgumentError("--against needs RESULTS, the run that it is compared with")
        if items is None or score is None or not 0 < score < 1:
            raise ArgumentError(
                f"expected RESULTS of an earlier run, or --items and a --score between 0 and 1, "
                f"found --items {items} and --score {score}"
            )
        found = [assumed_spread(items, score, correlation, cluster_size, within)]
    else:
        if score is not None or cluster_size > 1 or within:
            raise ArgumentError(
                "--score, --cluster-size and --within are for a plan without RESULTS, which "
                "provide these numbers"
            )
        if against is not None and correlation:
            raise ArgumentError(
                "--correlation is for a plan without --against, which measures it: leave one out"
            )
        runs = read([results], [], against)[::-1]
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

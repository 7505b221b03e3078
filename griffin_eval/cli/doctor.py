"""The commands ``doctor`` and ``checkpoints``: what is installed, and what ships."""

import json
import logging
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from griffin_eval.cli.options import JsonOnly


def doctor(as_json: JsonOnly = False) -> None:
    """Show what a bug report needs; exit code 1 if a self-test fails.

    Versions and devices, the kernel for each dtype and why it is chosen, the kernels' self-test,
    and the caches with commands to empty them.
    """
    from griffin_eval import doctor as facts

    logging.disable(logging.WARNING)  # the table shows fallbacks
    installed = facts.frameworks()
    if as_json:
        if not _print_json(installed):
            raise typer.Exit(1)
        return
    console = Console(width=max(Console().width, 100))
    _print_versions(console, facts.versions(), facts.machine())
    table = Table(title="kernels on the default device", title_justify="left")
    for heading in ("framework", "operator", "dtypes", "runs", "why"):
        table.add_column(heading, no_wrap=heading in ("framework", "operator", "runs"))
    for kernel in (kernel for framework in installed for kernel in facts.kernels(framework)):
        dtypes = ", ".join(kernel.dtypes)
        table.add_row(kernel.framework, kernel.operator, dtypes, kernel.name, kernel.reasons)
    console.print(table)
    with Console(stderr=True).status("self-test"):
        tests = [test for framework in installed for test in facts.self_tests(framework)]
    failed = [test for test in tests if not test.passed]
    _line(console, f"self-test: {len(tests) - len(failed)} of {len(tests)} passed")
    for test in failed:
        _line(console, f"FAILED: {test.name}: {test.detail}")
    table = Table(title="caches; each may be deleted, and is filled again", title_justify="left")
    for heading in ("holds", "files", "size", "empty it with"):
        table.add_column(heading, no_wrap=heading == "holds")
    for cache in facts.caches():
        command = f"rm -r {cache.folder}" if cache.entries else f"(empty: {cache.folder})"
        table.add_row(cache.holds, str(cache.entries), decimal(cache.nbytes), command)
    console.print(table)
    if failed:
        raise typer.Exit(1)


def _print_json(installed: list[str]) -> bool:
    """Print all facts, and return whether every self-test passed."""
    from griffin_eval import doctor as facts

    versions, missing = facts.versions()
    tests = [test for framework in installed for test in facts.self_tests(framework)]
    found = {
        "versions": versions,
        "not_installed": missing,
        "machine": facts.machine(),
        "kernels": [k._asdict() for framework in installed for k in facts.kernels(framework)],
        "self_tests": [test._asdict() for test in tests],
        "caches": [cache._asdict() | {"folder": str(cache.folder)} for cache in facts.caches()],
    }
    typer.echo(json.dumps(found, indent=1))
    return all(test.passed for test in tests)


def _print_versions(
    console: Console, versions: tuple[dict[str, str], list[str]], machine: dict[str, str]
) -> None:
    installed, missing = versions
    table = Table(show_header=False, title="griffin-eval doctor", title_justify="left")
    table.add_row("versions", ", ".join(f"{name} {each}" for name, each in installed.items()))
    table.add_row("not installed", ", ".join(missing) or "nothing")
    for name, fact in machine.items():
        table.add_row(name, fact)
    console.print(table)


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def checkpoints(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of the checkpoint to print the path of (default: list all)."),
    ] = None,
    as_json: JsonOnly = False,
) -> None:
    """List the small trained checkpoints that ship with this package, or print the path of one.

    lm_eval --model griffin --model_args pretrained=$(griffin-eval checkpoints NAME)
    """
    from griffin_eval.checkpoints import folder, names, scores

    if as_json:
        listed = names() if name is None else [name]
        found = [
            {"name": each, "path": str(folder(each)), "scores": scores(each)} for each in listed
        ]
        typer.echo(json.dumps(found, indent=1))
        return
    if name is not None:
        typer.echo(folder(name))
        return
    table = Table(title=f"in {folder(names()[0]).parent}; each has a card, README.md")
    for heading in ("name", "measured"):
        table.add_column(heading)
    for each in names():
        measured = [f"{s['task']} {s['metric']} {s['value']:.3f}" for s in scores(each)]
        table.add_row(each, "\n".join(measured))
    Console(width=max(Console().width, 100)).print(table)

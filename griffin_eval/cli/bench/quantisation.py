"""The command ``bench quantize``."""

import json
from typing import Annotated

import typer
from rich.console import Console

from griffin_eval.cli.bench.evaluation import tell


def bench_quantize(
    checkpoints: Annotated[
        str | None,
        typer.Option(help="Names of checkpoints that ship, bytes_griffin,…; by default all."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Number of bytes of a text that a language model reads.", min=1)
    ] = 16384,
    as_json: Annotated[bool, typer.Option("--json", help="Printed JSON, nothing else.")] = False,
) -> None:
    """Quantise one group of parameters alone: divergence of next tokens, and bits of a target."""
    from griffin_eval.checkpoints import folder, names
    from griffin_eval.runners.load import choose_framework

    chosen = names() if checkpoints is None else checkpoints.split(",")
    for name in chosen:
        folder(name)
    choose_framework("torch")
    from griffin_eval.bench.quantisation import measure, print_results

    rows = []
    for name in chosen:
        tell(name)
        rows += measure(name, tokens)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        print_results(Console(width=max(Console().width, 150)), rows)

"""The command ``bench model``."""

import json
from typing import Annotated

import typer
from rich.console import Console

from griffin_eval.cli_bench import tell
from griffin_eval.errors import ArgumentError


def bench_model(
    width: Annotated[int, typer.Option(help="Of the model.")] = 512,
    layers: Annotated[int, typer.Option(help="Residual blocks.")] = 6,
    heads: Annotated[int, typer.Option(help="Of attention, and blocks of a gate.")] = 4,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 32_000,
    window: Annotated[int, typer.Option(help="Keys that attention sees.")] = 512,
    tokens: Annotated[int, typer.Option(help="Of the document that is read.", min=2)] = 4096,
    batches: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,16",
    steps: Annotated[int, typer.Option(help="Tokens decoded in a round.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="Measurements of each, in turn.", min=1)] = 5,
    implementations: Annotated[
        str, typer.Option(help="Which, ours or others', at least one of ours.")
    ] = "torch,jax,transformers,deepmind-torch,deepmind-jax",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Read and decode on the CPU, beside transformers and DeepMind's code; speed over its limit.

    Exit code 1 if the logits differ.
    """
    from griffin_eval.bench_eval import Failed
    from griffin_eval.bench_model import NEEDS, TWINS, Bench, make_config, print_results
    from griffin_eval.hints import nearest

    rows = batches.split(",")
    if not all(row.isdecimal() and int(row) for row in rows):
        raise ArgumentError(f"--batches {batches!r}: expected numbers of rows such as 1,16")
    config = make_config(width=width, layers=layers, heads=heads, vocab_size=vocab, window=window)
    chosen = implementations.split(",")
    for name in chosen:
        if name not in NEEDS:
            raise ArgumentError(
                f"unknown implementation {name!r}: expected some of {', '.join(NEEDS)}"
                f"{nearest(name, NEEDS)}"
            )
    bench = Bench(config, tokens, sorted({int(row) for row in rows}), steps, chosen)
    if not set(TWINS) & set(chosen) - set(bench.absent):
        raise ArgumentError("limits need one of ours, torch or jax, chosen and installed")
    try:
        found = bench.run(rounds, tell)
    except Failed as error:
        typer.echo(f"a measurement failed: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_results(Console(width=max(Console().width, 120)), found)
    if not found["agree"]:
        raise typer.Exit(1)

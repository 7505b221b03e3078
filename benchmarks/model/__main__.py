"""The command ``bench model``."""

import json
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.evaluation.__main__ import tell
from benchmarks.failures import measuring
from benchmarks.products import Dtype
from griffin_eval.arguments import positive_integers
from griffin_eval.cli.ending import run_command
from griffin_eval.converters.codecs.encode import ENCODINGS, encoding_named
from griffin_eval.errors import ArgumentError


def bench_model(
    width: Annotated[int, typer.Option(help="Model width.")] = 512,
    layers: Annotated[int, typer.Option(help="Number of residual blocks.")] = 6,
    heads: Annotated[
        int, typer.Option(help="Number of attention heads, and of blocks of a gate.")
    ] = 4,
    vocab: Annotated[int, typer.Option(help="Vocabulary size in tokens.")] = 32_000,
    visible_keys: Annotated[int, typer.Option(help="Number of keys that attention sees.")] = 512,
    tokens: Annotated[
        int, typer.Option(help="Length in tokens of the document that is read.", min=2)
    ] = 4096,
    batches: Annotated[
        str, typer.Option(help="Batch sizes: numbers of rows decoded together.")
    ] = "1,16",
    steps: Annotated[int, typer.Option(help="Number of tokens decoded in a round.", min=1)] = 32,
    rounds: Annotated[
        int, typer.Option(help="Number of measurements of each, in turn.", min=1)
    ] = 5,
    implementations: Annotated[
        str,
        typer.Option(
            help="Implementations to measure; at least one of torch and jax, this package's."
        ),
    ] = "torch,jax,transformers,deepmind-torch,deepmind-jax",
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")] = "float32",
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Quantised weights, which torch-quantised and jax-quantised leave so and all "
            f"others dequantise: {', '.join(ENCODINGS)}."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Printed JSON, nothing else.")] = False,
) -> None:
    """Read and decode on the CPU, beside transformers and DeepMind's code; speed over its limit.

    Exit code 1 if the logits differ.
    """
    from benchmarks.model.run import (
        NEEDS,
        QUANTISED,
        TWINS,
        Bench,
        make_config,
        print_results,
    )
    from griffin_eval.messages import did_you_mean

    rows = positive_integers("--batches", batches, "numbers of rows such as 1,16")
    config = make_config(
        width=width, layers=layers, heads=heads, vocab_size=vocab, visible_keys=visible_keys
    )
    chosen, known = implementations.split(","), [n for n in NEEDS if n not in QUANTISED.values()]
    for name in chosen:
        if name not in known:
            raise ArgumentError(
                f"unknown implementation {name!r}: expected some of {', '.join(known)}"
                f"{did_you_mean(name, known)}"
            )
    encoding = None if quantize is None else encoding_named(quantize)
    bench = Bench(config, tokens, rows, steps, chosen, dtype, encoding)
    if not set(TWINS) & set(chosen):
        raise ArgumentError("limits need one of ours, torch or jax, chosen and installed")
    with measuring():
        found = bench.run(rounds, tell)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_results(Console(width=max(Console().width, 120)), found)
    if not found["agree"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_model))

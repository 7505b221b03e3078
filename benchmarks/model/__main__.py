"""The command ``python -m benchmarks.model``."""

from typing import Annotated

import typer

from benchmarks.commands import AsJson, Pythons, Rounds, interpreters, measuring
from benchmarks.products import Dtype
from griffin_eval.arguments import positive_integers
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError


def main(
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
    rounds: Rounds = 5,
    implementations: Annotated[
        str,
        typer.Option(
            help="Implementations to measure; at least one of torch and jax, this package's."
        ),
    ] = "torch,jax,transformers,deepmind-torch,deepmind-jax",
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")] = "float32",
    python: Pythons = None,
    as_json: AsJson = False,
) -> None:
    """Time reading and decoding on the CPU beside transformers, DeepMind's code and the limits.

    Exit code 1 if the logits differ.
    """
    from benchmarks.model.run import FRAMEWORKS, NEEDS, Bench, make_config
    from benchmarks.report import Report
    from griffin_eval.messages import did_you_mean

    rows = positive_integers("--batches", batches, "numbers of rows such as 1,16")
    config = make_config(
        width=width, layers=layers, heads=heads, vocab_size=vocab, visible_keys=visible_keys
    )
    chosen = implementations.split(",")
    for name in chosen:
        if name not in NEEDS:
            raise ArgumentError(
                f"unknown implementation {name!r}: expected some of {', '.join(NEEDS)}"
                f"{did_you_mean(name, list(NEEDS))}"
            )
    if not set(FRAMEWORKS) & set(chosen):
        raise ArgumentError("limits need one of ours: add torch or jax to --implementations")
    report = Report()
    pythons = interpreters(python)
    with measuring():
        agree = Bench(config, tokens, rows, steps, chosen, dtype, pythons).run(rounds, report)
    report.show(as_json)
    if not agree:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))

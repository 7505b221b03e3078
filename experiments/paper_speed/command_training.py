"""The command ``bench training``."""

from typing import Annotated, Any

import typer

from benchmarks.commands import tell
from experiments.paper_speed.options import (
    AsJson,
    Device,
    Layers,
    Output,
    Rounds,
    VisibleKeys,
    Vocab,
    report,
)
from griffin_eval.arguments import positive_integers
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError


def bench_training(
    widths: Annotated[str, typer.Option(help="Model widths, each with all three models.")] = "512",
    layers: Layers = 6,
    head_dim: Annotated[int, typer.Option(help="Width of an attention head.", min=1)] = 128,
    vocab: Vocab = 8192,
    visible_keys: VisibleKeys = 1024,
    lengths: Annotated[
        str, typer.Option(help="Lengths of the sequences in tokens.")
    ] = "256,512,1024,2048,4096,8192",
    tokens: Annotated[
        int, typer.Option(help="Number of tokens of a step; the lengths divide it.", min=1)
    ] = 8192,
    rounds: Rounds = 3,
    device: Device = "cpu",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Training steps of Griffin, Hawk and an MQA Transformer in JAX (section 4.3).

    Every step reads as many tokens, in many short sequences or few long ones.
    """
    from griffin_eval.runners.load import choose_framework

    choose_framework("jax")
    from experiments.paper_speed import tables, training
    from experiments.paper_speed.claims import training_claims

    times = positive_integers("--lengths", lengths, "numbers of tokens such as 256,8192")
    if uneven := [length for length in times if tokens % length]:
        raise ArgumentError(
            f"--lengths {uneven[0]}: expected lengths that divide --tokens {tokens}"
        )
    models = training.make_widths(
        positive_integers("--widths", widths, "model widths such as 256,512"),
        layers=layers,
        head_dim=head_dim,
        vocab_size=vocab,
        visible_keys=visible_keys,
    )

    def measure() -> dict[str, Any]:
        return training.measure(models, times, tokens, rounds=rounds, device=device, say=tell)

    report(measure, training_claims, tables.print_training, "draw_training", output, as_json)


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_training))

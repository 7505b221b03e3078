"""The command ``bench latency``."""

from typing import Annotated, Any

import typer

from benchmarks.commands import tell
from experiments.paper_speed.options import (
    AsJson,
    Device,
    Frameworks,
    Heads,
    Layers,
    Memory,
    Output,
    Rounds,
    Steps,
    VisibleKeys,
    Vocab,
    Width,
    chosen_frameworks,
    report,
)
from griffin_eval.arguments import ordered, parse_size, positive_integers
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError

LARGEST = "largest"


def bench_latency(
    width: Width = 512,
    layers: Layers = 6,
    heads: Heads = 4,
    vocab: Vocab = 32_000,
    visible_keys: VisibleKeys = 1024,
    prompts: Annotated[
        str, typer.Option(help="Numbers of tokens that have been read before.")
    ] = "0,4096",
    sampled: Annotated[
        str, typer.Option(help="Numbers of tokens that are sampled.")
    ] = "128,512,2048,4096,16384",
    batches: Annotated[
        str,
        typer.Option(
            help="Batch sizes; largest is the most rows of which every model holds the longest "
            "text in --memory."
        ),
    ] = "1,8,16,largest",
    memory: Memory = "4GB",
    frameworks: Frameworks = "torch,jax",
    steps: Steps = 16,
    rounds: Rounds = 3,
    device: Device = "cpu",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time to sample with Griffin, Hawk and an MQA Transformer of one size (section 5).

    Decoding steps are timed at several contexts and summed; beside them stand the bytes that a step
    reads and the byte model of appendix F, and at the end the paper's claims.
    """
    from experiments.paper_speed import decoding, latency, tables
    from experiments.paper_speed.claims import latency_claims
    from experiments.paper_speed.models import make_models
    from experiments.paper_speed.throughput import largest_batches

    models = make_models(
        width=width, layers=layers, heads=heads, vocab_size=vocab, visible_keys=visible_keys
    )
    chosen = chosen_frameworks(frameworks)
    lengths = positive_integers("--sampled", sampled, "numbers of tokens such as 128,4096")
    begins = _prompts(prompts)
    longest = max(begins) + max(lengths)
    most = min(largest_batches(models, longest, parse_size(memory, "--memory")).values())
    names = [str(most) if name == LARGEST else name for name in batches.split(",")]
    rows = positive_integers(
        "--batches", ",".join(names), f"numbers of rows such as 1,16, or {LARGEST}"
    )
    if rows[-1] > most:
        raise ArgumentError(
            f"--batches {rows[-1]}: --memory {memory} holds {most} rows of {longest} tokens of "
            "every model: expected fewer rows or more memory"
        )

    def measure() -> dict[str, Any]:
        contexts = latency.contexts_to_measure(models, begins, lengths)
        points = [(batch, context) for batch in rows for context in contexts]
        wanted = dict.fromkeys(models, points)
        measured = decoding.measure(
            models, chosen, wanted, steps=steps, rounds=rounds, device=device, say=tell
        )
        return latency.results(measured, begins, lengths, rows)

    report(measure, latency_claims, tables.print_latency, "draw_latency", output, as_json)


def _prompts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ArgumentError(f"--prompts {text!r}: expected numbers of tokens such as 0,4096")
    return ordered([int(part) for part in parts])


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_latency))

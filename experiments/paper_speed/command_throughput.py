"""The command ``bench throughput``."""

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
from griffin_eval.arguments import parse_size, positive_integers
from griffin_eval.cli.ending import run_command


def bench_throughput(
    width: Width = 512,
    layers: Layers = 6,
    heads: Heads = 4,
    vocab: Vocab = 32_000,
    visible_keys: VisibleKeys = 1024,
    sampled: Annotated[
        str, typer.Option(help="Numbers of tokens that are sampled, from an empty prompt.")
    ] = "512,1024,2048,4096",
    memory: Memory = "1GB",
    frameworks: Frameworks = "torch,jax",
    steps: Steps = 16,
    rounds: Rounds = 3,
    device: Device = "cpu",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second of Griffin, Hawk and an MQA Transformer of one size (section 5).

    Every model samples with the largest batch of which weights, caches and logits fit into memory.
    """
    from experiments.paper_speed import decoding, tables, throughput
    from experiments.paper_speed.claims import throughput_claims
    from experiments.paper_speed.models import make_models

    models = make_models(
        width=width, layers=layers, heads=heads, vocab_size=vocab, visible_keys=visible_keys
    )
    chosen = chosen_frameworks(frameworks)
    lengths = positive_integers("--sampled", sampled, "numbers of tokens such as 512,4096")
    budget = parse_size(memory, "--memory")
    wanted: dict[str, list[tuple[int, int]]] = {name: [] for name in models}
    for length in lengths:
        batches = throughput.largest_batches(models, length, budget)
        for name, points in wanted.items():
            for batch in throughput.batches_to_measure(batches, name):
                contexts = throughput.contexts_to_measure(models, length)
                points += [(batch, context) for context in contexts]

    def measure() -> dict[str, Any]:
        measured = decoding.measure(
            models, chosen, wanted, steps=steps, rounds=rounds, device=device, say=tell
        )
        return throughput.results(measured, budget, lengths)

    report(measure, throughput_claims, tables.print_throughput, "draw_throughput", output, as_json)


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_throughput))

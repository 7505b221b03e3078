"""The tables that `bench latency`, `bench throughput` and `bench training` print."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from griffin_eval.bench.paper import predictions
from griffin_eval.bench.paper.claims import Claim
from griffin_eval.bench.paper.models import TITLES
from griffin_eval.bench.peers import left_out

STEPPED = (
    "Time is the sum of decoding steps measured at their contexts, on straight lines between them."
)


def print_latency(console: Console, found: dict[str, Any], claims: Sequence[Claim]) -> None:
    """Prints the results of `griffin_eval.bench.paper.latency`."""
    rates = found["rates"]
    _line(console, _machine(found))
    headings = ("s", "spread", "ms a token", "speed over MQA", "model, s", "model's", "MB a step")
    headings += ("GB/s", "of reading", "GFLOP/s")
    for batch, prompt in dict.fromkeys((r["batch"], r["prompt"]) for r in found["latencies"]):
        rows = [r for r in found["latencies"] if (r["batch"], r["prompt"]) == (batch, prompt)]
        table = _table(
            f"time to sample, {found['dtype']}, batch {batch}, prompt of {prompt} tokens",
            ("sampled", "model", "framework"),
            headings,
        )
        for row in rows:
            table.add_row(
                f"{row['sampled']:,}",
                TITLES[row["model"]],
                row["framework"],
                f"{row['seconds']:.3g}",
                f"{row['fastest']:.3g} - {row['slowest']:.3g}",
                f"{1e3 * row['seconds_per_token']:.2f}",
                f"{row['mqa_over_seconds']:.2f}x",
                f"{row['modelled_seconds']:.3g}",
                f"{row['mqa_over_modelled_seconds']:.2f}x",
                f"{row['bytes_per_step'] / 1e6:.0f}",
                f"{row['bandwidth'] / 1e9:.1f}",
                f"{row['of_bandwidth']:.0%}",
                f"{row['flops'] / 1e9:.0f}",
            )
        console.print(table)
    for crossing in found["crossings"]:
        _line(
            console,
            f"{TITLES[crossing['model']]}, {crossing['framework']}, batch {crossing['batch']}, "
            f"prompt {crossing['prompt']}: faster than the MQA Transformer "
            f"{_from(crossing['faster_from'])}; by the model "
            f"{_from(crossing['modelled_faster_from'])}",
        )
    for name, batch in found["compute_bound_from_batch"].items():
        bounds = {b["batch"]: b["cache_bound_from"] for b in found["bounds"] if b["model"] == name}
        told = ", ".join(f"{_from(n, 'context')} at batch {rows}" for rows, n in bounds.items())
        _line(
            console,
            f"{TITLES[name]}: products outweigh bytes from {batch or 'no'} rows on at an empty "
            f"context; caches outweigh parameters {told}",
        )
    _line(console, STEPPED)
    _line(
        console,
        f"model: the bytes of parameters and caches at {rates['bandwidth'] / 1e9:.1f} GB/s, or "
        f"the products at {rates['flops'] / 1e9:.0f} GFLOP/s, whichever takes longer (appendix F)",
    )
    _print_absent(console, found)
    _print_predicted_latency(console)
    _print_claims(console, claims)


def print_throughput(console: Console, found: dict[str, Any], claims: Sequence[Claim]) -> None:
    """Prints the results of `griffin_eval.bench.paper.throughput`."""
    _line(console, _machine(found))
    table = _table(
        f"largest batch in {found['memory'] / 1e9:g} GB, {found['dtype']}, empty prompt",
        ("sampled", "model", "framework"),
        ("batch", "weights, MB", "states, MB", "logits, MB", "tokens/s", "spread", "over MQA")
        + ("at MQA's batch", "model, tokens/s", "model's", "bound by", "GB/s", "GFLOP/s"),
    )
    for row in found["throughputs"]:
        table.add_row(
            f"{row['sampled']:,}",
            TITLES[row["model"]],
            row["framework"],
            f"{row['batch']:,}",
            *(f"{row[kind] / 1e6:,.0f}" for kind in ("weights", "states", "logits")),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['slowest']:,.0f} - {row['fastest']:,.0f}",
            f"{row['over_mqa']:.2f}x",
            f"{row['over_mqa_at_its_batch']:.2f}x",
            f"{row['modelled_tokens_per_second']:,.0f}",
            f"{row['modelled_over_mqa']:.2f}x",
            row["bound_by"],
            f"{row['bandwidth'] / 1e9:.1f}",
            f"{row['flops'] / 1e9:.0f}",
        )
    console.print(table)
    _line(console, STEPPED)
    _print_absent(console, found)
    _print_predicted_throughput(console)
    _print_claims(console, claims)


def print_training(console: Console, found: dict[str, Any], claims: Sequence[Claim]) -> None:
    """Prints the results of `griffin_eval.bench.paper.training`."""
    _line(console, _machine(found))
    table = _table(
        f"training step of {found['tokens']:,} tokens, JAX, {found['dtype']}",
        ("width", "length", "model"),
        ("million parameters", "s", "spread", "over MQA", "over MQA at the shortest", "model's")
        + ("TFLOP", "of products", "prefill, s", "prefill over MQA"),
    )
    for row in found["steps"]:
        table.add_row(
            f"{row['width']}",
            f"{row['length']:,}",
            TITLES[row["model"]],
            f"{row['parameters'] / 1e6:.1f}",
            f"{row['seconds']:.3g}",
            f"{row['fastest']:.3g} - {row['slowest']:.3g}",
            f"{row['over_mqa']:.2f}",
            f"{row['over_mqa_at_shortest']:.2f}",
            f"{row['modelled_over_mqa_at_shortest']:.2f}",
            f"{row['flops'] / 1e12:.3g}",
            f"{row['of_products']:.0%}",
            f"{row['prefill_seconds']:.3g}",
            f"{row['prefill_over_mqa']:.2f}",
        )
    console.print(table)
    _line(console, "model: products of matrices alone, of causal attention those that are seen")
    lengths = found["presets"][0]["lengths"]
    table = _table(
        "the paper's sizes, counted: Griffin over the MQA Transformer",
        ("size",),
        ("parameters, Griffin", "MQA", *(f"FLOPs at {length}" for length in lengths)),
    )
    for preset in found["presets"]:
        table.add_row(
            preset["size"],
            *(f"{preset['parameters'][name] / 1e9:.2f} B" for name in ("griffin", "mqa")),
            *(f"{ratio:.3f}" for ratio in preset["flops_over_mqa"]),
        )
    console.print(table)
    _print_claims(console, claims)


def _print_predicted_latency(console: Console) -> None:
    table = _table(
        f"byte model of the {predictions.SIZE.upper()} presets in bfloat16, batch "
        f"{predictions.BATCH}: MQA's time over theirs (below 1: MQA is faster); nothing was run",
        ("prompt", "sampled"),
        ("Griffin", "Hawk"),
    )
    for row in predictions.latencies():
        over = [f"{row['mqa_over'][name]:.2f}" for name in ("griffin", "hawk")]
        table.add_row(f"{row['prompt']:,}", f"{row['sampled']:,}", *over)
    console.print(table)


def _print_predicted_throughput(console: Console) -> None:
    table = _table(
        f"byte model of the {predictions.SIZE.upper()} presets in bfloat16, weights and caches in "
        f"{predictions.MEMORY / 1e9:.3g} GB: throughput over MQA's; nothing was run",
        ("sampled",),
        ("batch, Griffin", "Hawk", "MQA", "bytes alone, Griffin", "Hawk")
        + (f"with {predictions.TPU_V3_INTENSITY} FLOPs a byte, Griffin", "Hawk"),
    )
    for row in predictions.throughputs():
        table.add_row(
            f"{row['sampled']:,}",
            *(f"{row['batches'][name]:,}" for name in ("griffin", "hawk", "mqa")),
            *(
                f"{row[kind][name]:.2f}"
                for kind in ("bytes", "tpu_v3")
                for name in ("griffin", "hawk")
            ),
        )
    console.print(table)


def _print_claims(console: Console, claims: Iterable[Claim]) -> None:
    table = Table(title="the paper's claims, here")
    for heading in ("claim", "says", "holds", "found"):
        table.add_column(heading)
    for claim in claims:
        table.add_row(*claim)
        table.add_section()
    console.print(table)


def _print_absent(console: Console, found: dict[str, Any]) -> None:
    for name, reason in found["absent"].items():
        _line(console, left_out(name, reason))


def _table(title: str, names: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title)
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _machine(found: dict[str, Any]) -> str:
    return (
        f"on {found['device']}, {found['threads']} threads, medians of the rounds and their range"
    )


def _from(tokens: int | None, what: str = "sampled") -> str:
    if tokens is None:
        return "never" if what == "context" else "at no length measured"
    return f"from {tokens:,} {'tokens of context' if what == 'context' else 'sampled tokens'} on"


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)

"""The tables that `bench latency`, `bench throughput` and `bench training` print."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers import left_out
from experiments.paper_speed import predictions
from experiments.paper_speed.claims import Claim
from experiments.paper_speed.decoding import PEER
from experiments.paper_speed.models import TITLES

STEPPED = (
    "Time is the sum of decoding steps measured at their contexts, on straight lines between them."
)


def print_latency(console: Console, found: dict[str, Any], claims: Sequence[Claim]) -> None:
    """Prints the results of `experiments.paper_speed.latency`."""
    rates = found["rates"]
    _line(console, _machine(found))
    headings = (
        "s",
        "range",
        "ms\na token",
        "speed\nover MQA",
        "byte\nmodel, s",
        "speed by\nthe model",
    )
    headings += ("MB\na step", "GB/s", "of best\nreading", "GFLOP/s")
    for batch, prompt in dict.fromkeys((r["batch"], r["prompt"]) for r in found["latencies"]):
        rows = [r for r in found["latencies"] if (r["batch"], r["prompt"]) == (batch, prompt)]
        table = _table(
            f"time to sample, {found['dtype']}, batch {batch}, prompt of {prompt} tokens",
            ("sampled", "model", "framework"),
            headings,
        )
        for row in sorted(rows, key=lambda row: (row["framework"] == PEER, row["sampled"])):
            table.add_row(
                f"{row['sampled']:,}",
                TITLES[row["model"]],
                row["framework"],
                f"{row['seconds']:.3g}",
                f"{row['fastest']:.3g}-{row['slowest']:.3g}",
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
    _print_crossings(console, found)
    _line(console, STEPPED)
    _line(
        console,
        f"model: the bytes of parameters and caches at {rates['bandwidth'] / 1e9:.1f} GB/s, or "
        f"the products at {rates['flops'] / 1e9:.0f} GFLOP/s, whichever takes longer (appendix F)",
    )
    _print_absent(console, found)
    _print_predicted_latency(console, found)
    _print_claims(console, claims)


def print_throughput(console: Console, found: dict[str, Any], claims: Sequence[Claim]) -> None:
    """Prints the results of `experiments.paper_speed.throughput`."""
    _line(console, _machine(found))
    table = _table(
        f"largest batch in {found['memory'] / 1e9:g} GB, {found['dtype']}, empty prompt",
        ("sampled", "model", "framework"),
        ("batch", "weights\nMB", "states\nMB", "logits\nMB", "tokens/s", "range", "over\nMQA")
        + ("over MQA at\nits batch", "byte model\ntokens/s", "over MQA by\nthe model", "bound by"),
    )
    for row in found["throughputs"]:
        table.add_row(
            f"{row['sampled']:,}",
            TITLES[row["model"]],
            row["framework"],
            f"{row['batch']:,}",
            *(f"{row[kind] / 1e6:,.0f}" for kind in ("weights", "states", "logits")),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['slowest']:,.0f}-{row['fastest']:,.0f}",
            f"{row['over_mqa']:.2f}x",
            f"{row['over_mqa_at_its_batch']:.2f}x",
            f"{row['modelled_tokens_per_second']:,.0f}",
            f"{row['modelled_over_mqa']:.2f}x",
            row["bound_by"],
        )
    console.print(table)
    _line(console, STEPPED)
    _print_absent(console, found)
    _print_predicted_throughput(console, found)
    _print_claims(console, claims)


def print_training(console: Console, found: dict[str, Any], claims: Sequence[Claim]) -> None:
    """Prints the results of `experiments.paper_speed.training`."""
    _line(console, _machine(found))
    table = _table(
        f"training step of {found['tokens']:,} tokens, JAX, {found['dtype']}",
        ("width", "length", "model"),
        ("million\nparameters", "s", "range", "over\nMQA", "over MQA at\nthe shortest")
        + (
            "the same by\nproducts",
            "TFLOP",
            "of best\nproducts",
            "prefill\ns",
            "prefill\nover MQA",
        ),
    )
    for row in found["steps"]:
        table.add_row(
            f"{row['width']}",
            f"{row['length']:,}",
            TITLES[row["model"]],
            f"{row['parameters'] / 1e6:.1f}",
            f"{row['seconds']:.3g}",
            f"{row['fastest']:.3g}-{row['slowest']:.3g}",
            f"{row['over_mqa']:.2f}",
            f"{row['over_mqa_at_shortest']:.2f}",
            f"{row['modelled_over_mqa_at_shortest']:.2f}",
            f"{row['flops'] / 1e12:.3g}",
            f"{row['of_products']:.0%}",
            f"{row['prefill_seconds']:.3g}",
            f"{row['prefill_over_mqa']:.2f}",
        )
    console.print(table)
    _line(
        console,
        "by products: matrix products alone; those of attention with the keys that queries see",
    )
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


def _print_crossings(console: Console, found: dict[str, Any]) -> None:
    """From where on Griffin and Hawk are faster, and from where on what bounds a step."""
    table = _table(
        "sampled tokens from which it is faster than the MQA Transformer",
        ("batch", "prompt", "framework", "model"),
        ("measured", "by the model"),
    )
    for row in found["crossings"]:
        table.add_row(
            f"{row['batch']:,}",
            f"{row['prompt']:,}",
            row["framework"],
            TITLES[row["model"]],
            *(_count(row[kind], "none here") for kind in ("faster_from", "modelled_faster_from")),
        )
    console.print(table)
    batches = list(dict.fromkeys(bound["batch"] for bound in found["bounds"]))
    table = _table(
        "what bounds a step, from the sizes and rates alone",
        ("model",),
        ("products, from rows (empty context)",)
        + tuple(f"caches, from tokens (batch {batch:,})" for batch in batches),
    )
    for name, rows in found["compute_bound_from_batch"].items():
        bounds = [b["cache_bound_from"] for b in found["bounds"] if b["model"] == name]
        table.add_row(TITLES[name], *(_count(number, "never") for number in (rows, *bounds)))
    console.print(table)


def _print_predicted_latency(console: Console, found: dict[str, Any]) -> None:
    table = _table(
        f"{predictions.SIZE.upper()} presets, bfloat16, batch {predictions.BATCH}, byte model",
        ("prompt", "sampled"),
        ("Griffin", "Hawk"),
    )
    for row in found["predictions"]:
        over = [f"{row['mqa_over'][name]:.2f}" for name in ("griffin", "hawk")]
        table.add_row(f"{row['prompt']:,}", f"{row['sampled']:,}", *over)
    console.print(table)
    _line(console, "MQA's time over theirs (below 1 MQA is faster); nothing was run")


def _print_predicted_throughput(console: Console, found: dict[str, Any]) -> None:
    memory = f"{predictions.MEMORY / 1e9:.3g} GB"
    table = _table(
        f"{predictions.SIZE.upper()} presets, bfloat16, {memory}, byte model",
        ("sampled",),
        ("batch,\nGriffin", "Hawk", "MQA", "bytes alone,\nGriffin", "Hawk")
        + (f"{predictions.TPU_V3_INTENSITY} FLOPs a byte,\nGriffin", "Hawk"),
    )
    for row in found["predictions"]:
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
    _line(
        console,
        "throughput over MQA's with the largest batch of weights and caches; nothing was run; "
        f"{predictions.TPU_V3_INTENSITY} FLOPs a byte: what a TPU-v3 does while "
        "it reads one (appendix F.2)",
    )


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
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _machine(found: dict[str, Any]) -> str:
    return (
        f"on {found['device']}, {found['threads']} threads, medians of the rounds and their range"
    )


def _count(number: int | None, otherwise: str) -> str:
    return otherwise if number is None else f"{number:,}"


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)

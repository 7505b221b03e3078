"""The tables that `experiments.paper_speed` prints."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from experiments.paper_speed import predictions
from experiments.paper_speed.decoding import PEER

WIDTH = 200  # columns that the widest table takes
Findings = Mapping[str, Any]

# Columns are keys of ``--json``, each with a format, or with ``bytes`` for sizes.
LATENCY = """batch prompt sampled model framework seconds:.3g fastest:.3g slowest:.3g
mqa_over_seconds:.2f modelled_seconds:.3g mqa_over_modelled_seconds:.2f bytes_per_step:bytes
bytes_per_second:bytes of_bandwidth:.0%"""
THROUGHPUT = """sampled model framework batch weights:bytes states:bytes logits:bytes
tokens_per_second:.0f slowest:.0f fastest:.0f over_mqa:.2f over_mqa_at_its_batch:.2f
modelled_tokens_per_second:.0f modelled_over_mqa:.2f bound_by"""
TRAINING = """width length model parameters:.3g seconds:.3g fastest:.3g slowest:.3g over_mqa:.2f
over_mqa_at_shortest:.2f modelled_over_mqa_at_shortest:.2f flops:.3g of_products:.0%
prefill_seconds:.3g prefill_over_mqa:.2f"""
PRESETS = """size griffin_parameters:.3g mqa_parameters:.3g flops_over_mqa_at_2048:.3f
flops_over_mqa_at_4096:.3f flops_over_mqa_at_8192:.3f"""
PREDICTED_THROUGHPUT = """sampled griffin_batch hawk_batch mqa_batch griffin_by_bytes:.2f
hawk_by_bytes:.2f griffin_on_tpu_v3:.2f hawk_on_tpu_v3:.2f"""
BYTE_MODEL = (
    "Time is the sum of decoding steps at their contexts, on straight lines between them. The "
    "byte model has the bytes of parameters and caches at {bandwidth} a second, or the products at "
    "{flops:.0f} GFLOP/s, whichever takes longer (appendix F)."
)


def print_latency(console: Console, findings: Findings) -> None:
    """Print the results of `experiments.paper_speed.latency`."""
    rows = sorted(
        findings["latencies"],
        key=lambda row: (row["batch"], row["prompt"], row["framework"] == PEER, row["sampled"]),
    )
    _print(console, f"time to sample, {_measured(findings)}", rows, LATENCY)
    _print_rates(console, findings)
    rows = [
        {"model": name, "products_bound_from_rows": rows}
        | {
            f"caches_bound_batch_{bound['batch']}_from_tokens": bound["cache_bound_from"]
            for bound in findings["bounds"]
            if bound["model"] == name
        }
        for name, rows in findings["compute_bound_from_batch"].items()
    ]
    _print(console, "bounds of a step, from the sizes and rates alone", rows, " ".join(rows[0]))
    size = f"{predictions.SIZE.upper()} presets in bfloat16, {predictions.BATCH} rows"
    title = f"MQA's time over theirs by the byte model, {size}; nothing was run"
    _print(console, title, findings["predictions"], "prompt sampled griffin:.2f hawk:.2f")
    _print_claims(console, findings)


def print_throughput(console: Console, findings: Findings) -> None:
    """Print the results of `experiments.paper_speed.throughput`."""
    title = f"largest batch in {decimal(findings['memory'])}, {_measured(findings)}"
    _print(console, title, findings["throughputs"], THROUGHPUT)
    _print_rates(console, findings)
    memory = f"{predictions.SIZE.upper()} presets in bfloat16, {decimal(predictions.MEMORY)}"
    title = f"throughput over MQA's by the byte model, {memory}; nothing was run"
    _print(console, title, findings["predictions"], PREDICTED_THROUGHPUT)
    _print_claims(console, findings)


def print_training(console: Console, findings: Findings) -> None:
    """Print the results of `experiments.paper_speed.training`."""
    title = f"training step of {findings['tokens']:,} tokens in JAX, {_measured(findings)}"
    _print(console, title, findings["steps"], TRAINING)
    title = "the paper's sizes, counted: Griffin over the MQA Transformer"
    _print(console, title, findings["presets"], PRESETS)
    _print_claims(console, findings)


PRINTERS = {"latency": print_latency, "throughput": print_throughput, "training": print_training}


def _print(console: Console, title: str, rows: Iterable[Mapping[str, Any]], columns: str) -> None:
    table = Table(title=title)
    formats = [column.partition(":")[::2] for column in columns.split()]
    for key, _ in formats:
        table.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row[key], format_) for key, format_ in formats))
    console.print(table)


def _cell(value: Any, format_: str) -> str:
    if value is None:
        return "never"
    return decimal(int(value)) if format_ == "bytes" else format(value, format_)


def _measured(findings: Findings) -> str:
    where = f"{findings['dtype']} on {findings['device']}, {findings['threads']} threads"
    return f"{where}; medians of the rounds and their range"


def _print_rates(console: Console, findings: Findings) -> None:
    bandwidth, flops = findings["rates"]["bandwidth"], findings["rates"]["flops"]
    text = BYTE_MODEL.format(bandwidth=decimal(int(bandwidth)), flops=flops / 1e9)
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _print_claims(console: Console, findings: Findings) -> None:
    table = Table(title="the paper's claims, here", show_lines=True)
    for heading in ("claim", "says", "holds", "found"):
        table.add_column(heading)
    for claim in findings["claims"]:
        table.add_row(*claim.values())
    console.print(table)

"""The command ``python -m experiments.paper_speed``."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.filesize import decimal

from benchmarks.commands import AsJson, Figures, Rounds, measuring
from benchmarks.report import Report
from experiments.paper_speed.models import SMALL, TINY, make_models
from griffin_eval.arguments import parse_size, positive_integers
from griffin_eval.cli.ending import run_command
from griffin_eval.cli.options import check_figures_folder
from griffin_eval.errors import ArgumentError
from griffin_eval.runners.load import choose_framework

PROMPTS, SAMPLED, BATCHES = [0, 4096], [128, 512, 2048, 4096, 16_384], [1, 8, 16]
LENGTHS = [512, 1024, 2048, 4096]  # numbers of sampled tokens for a throughput
TINY_LENGTHS, TINY_MEMORY = [8, 32], "2MB"

Frameworks = Annotated[
    Literal["both", "torch", "jax"],
    typer.Option(help="Frameworks; torch has transformers' RecurrentGemma beside it."),
]
Memory = Annotated[
    str, typer.Option(help="Memory for weights, caches and logits, such as 500MB or 4GB.")
]
Device = Annotated[str, typer.Option(help="Device, as the frameworks name it.")]
Tiny = Annotated[
    bool, typer.Option("--tiny", help="Measure models of width 64 on short texts, for a try.")
]

app = typer.Typer(
    help="Measure the paper's claims on speed with Griffin, Hawk and an MQA Transformer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def latency(
    memory: Memory = "4GB",
    frameworks: Frameworks = "both",
    rounds: Rounds = 3,
    device: Device = "cpu",
    tiny: Tiny = False,
    output: Figures = None,
    as_json: AsJson = False,
) -> None:
    """Time to sample tokens after a prompt (section 5.1).

    Decoding steps are timed at several contexts and summed, with 1, 8 and 16 rows and with the
    largest batch for which every model fits into --memory. The table compares them with the byte
    model of appendix F.
    """
    from experiments.paper_speed import decoding, sampling
    from experiments.paper_speed.byte_model import largest_batches

    prompts, sampled, batches = ([0], TINY_LENGTHS, [1]) if tiny else (PROMPTS, SAMPLED, BATCHES)
    models = make_models(TINY if tiny else SMALL)
    budget = parse_size(TINY_MEMORY if tiny else memory, "--memory")
    largest = largest_batches(models, prompts[-1] + sampled[-1], budget)
    batches = sorted({*batches, min(largest.values())})
    contexts = sampling.latency_contexts(models, prompts, sampled)
    points = dict.fromkeys(models, [(batch, n) for batch in batches for n in contexts])
    check_figures_folder(output)
    with measuring():
        measured = decoding.measure(models, _chosen(frameworks), points, rounds, device)
    findings = sampling.latency_results(measured, prompts, sampled, batches)
    _report("latency", "time to sample", "latencies", findings, output, as_json)


@app.command()
def throughput(
    memory: Memory = "1GB",
    frameworks: Frameworks = "both",
    rounds: Rounds = 3,
    device: Device = "cpu",
    tiny: Tiny = False,
    output: Figures = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second with the largest batch that fits into memory (section 5.2)."""
    from experiments.paper_speed import decoding, sampling

    models, lengths = make_models(TINY if tiny else SMALL), TINY_LENGTHS if tiny else LENGTHS
    budget = parse_size(TINY_MEMORY if tiny else memory, "--memory")
    points = sampling.throughput_points(models, lengths, budget)
    check_figures_folder(output)
    with measuring():
        measured = decoding.measure(models, _chosen(frameworks), points, rounds, device)
    findings = sampling.throughput_results(measured, budget, lengths)
    title = f"largest batch in {decimal(budget)}"
    _report("throughput", title, "throughputs", findings, output, as_json)


@app.command()
def training(
    widths: Annotated[str, typer.Option(help="Model widths, multiples of 128.")] = "512",
    lengths: Annotated[
        str, typer.Option(help="Lengths of the sequences in tokens, which divide 8192.")
    ] = "256,512,1024,2048,4096,8192",
    rounds: Rounds = 3,
    device: Device = "cpu",
    tiny: Tiny = False,
    output: Figures = None,
    as_json: AsJson = False,
) -> None:
    """Time of a training step in JAX (section 4.3).

    Every step reads equally many tokens, in many short sequences or few long ones.
    """
    from experiments.paper_speed import training as steps

    choose_framework("jax")
    tokens, size = (64, TINY) if tiny else (8192, SMALL._replace(vocab_size=8192))
    times = positive_integers("--lengths", "16,64" if tiny else lengths, "such as 256,8192")
    if uneven := [length for length in times if tokens % length]:
        raise ArgumentError(f"--lengths {uneven[0]}: expected lengths that divide {tokens}")
    chosen = positive_integers("--widths", "64" if tiny else widths, "such as 256,512")
    if narrow := [width for width in chosen if width % size.head_dim]:
        raise ArgumentError(f"--widths {narrow[0]}: expected multiples of {size.head_dim}")
    models = {width: make_models(size._replace(width=width)) for width in chosen}
    check_figures_folder(output)
    with measuring():
        findings = steps.measure(models, times, tokens, rounds, device)
    title = f"training step of {tokens:,} tokens in JAX"
    _report("training", title, "steps", findings, output, as_json)


def _chosen(frameworks: str) -> list[str]:
    names = ["torch", "jax"] if frameworks == "both" else [frameworks]
    return [choose_framework(name) for name in names]


def _report(
    kind: str, title: str, rows: str, findings: dict[str, Any], output: Path | None, as_json: bool
) -> None:
    """Print the findings of a command, with the table of ``rows`` and claims; draw figures."""
    from experiments.paper_speed import claims

    findings["claims"] = [claim._asdict() for claim in claims.JUDGES[kind](findings)]
    if as_json:
        typer.echo(json.dumps(findings, indent=1))
    else:
        table_of(title, rows, findings).show(False)
    if output is not None:
        from experiments.paper_speed import figures

        for path in figures.PAINTERS[kind](findings, output):
            typer.echo(str(path), err=as_json)


def table_of(title: str, rows: str, findings: dict[str, Any]) -> Report:
    """Return the table of the rows, with rates, bounds and claims below."""
    where = f"{findings['dtype']} on {findings['device']}, {findings['threads']} threads"
    headed = [{key.replace("_", " "): cell for key, cell in row.items()} for row in findings[rows]]
    report = Report({f"{title}, {where}; medians of the rounds and their range": headed})
    if "rates" in findings:
        bandwidth, flops = (rate / 1e9 for rate in findings["rates"].values())
        report.notes.append(f"byte model: {bandwidth:.0f} GB/s, or {flops:.0f} GFLOP/s (F)")
    for name, batch in findings.get("compute_bound_from_batch", {}).items():
        bound = "never" if batch is None else f"from {batch} rows on"
        report.notes.append(f"{name}: products bound a step {bound}")
    for claim in findings["claims"]:
        report.notes.append("claim {name}, {says}: {holds}; {found}".format(**claim))
    return report


if __name__ == "__main__":
    run_command(app)

"""The commands convert, inspect and verify."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from griffin_eval.converters.formats import FORMATS, format_named, limits
from griffin_eval.errors import ArgumentError

Preset = Annotated[
    str | None, typer.Option(help="A preset that supplies what neither config nor shapes say.")
]
Item = Annotated[str | None, typer.Option(help="Which item of an Orbax checkpoint to read.")]
VisibleKeys = Annotated[int | None, typer.Option(help="Keys that local attention sees.")]
EmbeddingScale = Annotated[bool | None, typer.Option(help="Whether embeddings are scaled.")]
SoftCap = Annotated[float | None, typer.Option(help="Soft cap of the logits; 0 for none.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]


def _open(path: str, revision: str | None, *overrides):
    from griffin_eval.converters.checkpoint import Checkpoint, Overrides
    from griffin_eval.converters.resolve import resolve

    return Checkpoint(resolve(path, revision=revision), Overrides(*overrides))


@contextmanager
def _bar(what: str, total: int):
    """A progress bar in bytes on a terminal, nothing in a pipe; gives the function to call."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.update(task, advance=nbytes)


def _size(text: str, option: str) -> int:
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    unit = text.lstrip("0123456789.").strip().upper()
    number = text[: len(text) - len(text.lstrip("0123456789."))]
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError):
        size = 0
    if size < 1:
        raise ArgumentError(f"{option} {text!r}: expected a size such as 500MB or 5GB")
    return size


def _print_formats(wanted: bool) -> None:
    if not wanted:
        return
    console = Console(width=max(Console().width, 100))
    table = Table(title="formats")
    for heading in ("--to", "what it is", "what it cannot hold"):
        table.add_column(heading)
    for target in FORMATS.values():
        found = "\n".join(f"{field}: {reason}" for field, reason in limits(target))
        table.add_row(target.name, target.summary, found or "(nothing)")
    console.print(table)
    raise typer.Exit


def convert(
    source: Annotated[str, typer.Argument(help="Folder, .pt file or hub id.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="Such as bfloat16, or bfloat16,recurrent_param=bfloat16."),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Keep so many leading rows.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a safetensors file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DESTINATION.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan only.")] = False,
    preset: Preset = None,
    item: Item = None,
    visible_keys: VisibleKeys = None,
    embedding_scale: EmbeddingScale = None,
    logits_soft_cap: SoftCap = None,
    revision: Revision = None,
    help_formats: Annotated[
        bool,
        typer.Option(
            "--help-formats", callback=_print_formats, is_eager=True, help="Formats and limits."
        ),
    ] = False,
) -> None:
    """Convert a checkpoint to another format, with a manifest that proves what was written."""
    from griffin_eval.converters.convert import convert as carry_out
    from griffin_eval.converters.convert import make_plan, parse_dtypes

    target, shard = format_named(to), _size(max_shard_size, "--max-shard-size")
    checkpoint = _open(
        source, revision, preset, item, visible_keys, embedding_scale, logits_soft_cap
    )
    typer.echo(f"{source}: {checkpoint.format.name} ({checkpoint.layout})")
    for name, reason in checkpoint.left_out.items():
        typer.echo(f"left out: {name} ({reason})")
    plan = make_plan(checkpoint, target, dtypes=parse_dtypes(dtype), vocab_size=vocab_size)
    if dry_run:
        table = Table(title=f"{checkpoint.format.name} to {to}")
        for heading in ("writes", "shape", "from", "layout", "dtype", "bytes"):
            table.add_column(heading, justify="right" if heading == "bytes" else "left")
        for write in plan.writes:
            names = "\n".join(spec.name for spec in write.binding.canonical)
            dtypes = (
                " ".join((*write.cast_from, "→", write.dtype)) if write.cast_from else write.dtype
            )
            shape = "×".join(map(str, write.binding.shape))
            table.add_row(
                write.binding.foreign,
                shape,
                names,
                write.binding.op.name,
                dtypes,
                str(write.nbytes),
            )
        Console(width=max(Console().width, 160)).print(table)
        typer.echo(f"{len(plan.writes)} tensors, {plan.nbytes} bytes on disk before compression")
        typer.echo(f"copied beside them: {', '.join(p.name for p in plan.companions) or 'nothing'}")
        return
    with _bar("converting", plan.nbytes) as progress:
        carry_out(plan, destination, overwrite=overwrite, max_shard_size=shard, progress=progress)
    typer.echo(f"{destination}: {to}, {len(plan.writes)} tensors, {plan.nbytes} bytes")


def inspect(
    path: Annotated[str, typer.Argument(help="Folder, .pt file or hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    preset: Preset = None,
    item: Item = None,
    visible_keys: VisibleKeys = None,
    embedding_scale: EmbeddingScale = None,
    logits_soft_cap: SoftCap = None,
    revision: Revision = None,
) -> None:
    """Show format, config, dtypes and tensors of a checkpoint."""
    import dataclasses
    from collections import Counter

    from griffin_eval.layout import parameter_count

    checkpoint = _open(path, revision, preset, item, visible_keys, embedding_scale, logits_soft_cap)
    tensors = [
        {
            "name": binding.foreign,
            "shape": list(binding.shape),
            "parameters": [spec.name for spec in binding.canonical],
            "dtype": checkpoint.dtypes[binding.canonical[0].name],
        }
        for binding in checkpoint.bindings
    ]
    config = dataclasses.asdict(checkpoint.config)
    facts = {
        "format": checkpoint.format.name,
        "layout": checkpoint.layout,
        "parameters": parameter_count(checkpoint.config),
        "parameters_without_embedding": parameter_count(checkpoint.config, embedding=False),
        "dtypes": dict(Counter(checkpoint.dtypes.values())),
        "tokenizer": [p.name for p in sorted(checkpoint.folder.glob("tokenizer*"))],
        "left_out": checkpoint.left_out,
    }
    if as_json:
        typer.echo(json.dumps({**facts, "config": config, "tensors": tensors}, indent=1))
        return
    console = Console(width=max(Console().width, 120))
    for name, value in {**facts, **config}.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    table = Table()
    for heading in ("tensor", "shape", "dtype", "parameters"):
        table.add_column(heading)
    for tensor in tensors:
        shape = "×".join(map(str, tensor["shape"]))
        table.add_row(tensor["name"], shape, tensor["dtype"], "\n".join(tensor["parameters"]))
    console.print(table)


def verify(
    one: Annotated[str, typer.Argument(help="Folder, .pt file or hub id.")],
    other: Annotated[str, typer.Argument(help="Another, in any format.")],
    preset: Preset = None,
    item: Item = None,
    visible_keys: VisibleKeys = None,
    embedding_scale: EmbeddingScale = None,
    logits_soft_cap: SoftCap = None,
) -> None:
    """Compare two checkpoints tensor by tensor; exit code 1 if they are not the same."""
    from griffin_eval.converters.verify import compare
    from griffin_eval.layout import param_specs

    overrides = (preset, item, visible_keys, embedding_scale, logits_soft_cap)
    a, b = (_open(path, None, *overrides) for path in (one, other))
    total = sum(spec.size for spec in param_specs(a.config).values()) * 4
    with _bar("comparing", total) as progress:
        result = compare(a, b, progress)
    for field in result.config:
        typer.echo(f"config differs in {field}")
    for difference in result.tensors:
        typer.echo(f"{difference.name}: {difference.what}, at most by {difference.largest:.3g}")
    count = result.compared - len(result.tensors)
    typer.echo(
        f"{one} ({a.format.name}) and {other} ({b.format.name}): "
        f"{count} of {result.compared} parameters are the same bit for bit"
    )
    if not result.same:
        raise typer.Exit(1)


bench = typer.Typer(help="Measure, beside peers and limits taken in the same run.")


@bench.callback()
def _bench() -> None:
    pass


@bench.command(name="convert")
def bench_convert(
    directory: Annotated[Path, typer.Argument(help="Where to write; about 6 times the model.")],
    preset: Annotated[str, typer.Option(help="Whose shapes.")] = "recurrentgemma-2b",
    rounds: Annotated[int, typer.Option(help="Measurements of each, in turn with cp.")] = 3,
) -> None:
    """Convert a model of a preset's shapes every way; time over cp, and memory."""
    from griffin_eval.bench_convert import run
    from griffin_eval.config import PRESETS
    from griffin_eval.hints import nearest

    if preset not in PRESETS:
        raise ArgumentError(
            f"unknown preset {preset!r}: expected one of {', '.join(PRESETS)}"
            f"{nearest(preset, PRESETS)}"
        )
    run(Console(width=max(Console().width, 100)), preset, directory, rounds)


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    for command in (convert, inspect, verify):
        app.command()(command)
    app.add_typer(bench, name="bench")

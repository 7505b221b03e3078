"""The command ``convert``."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from griffin_eval.arguments import option
from griffin_eval.cli.options import progress_bar, takes_options
from griffin_eval.converters.formats import FORMATS, format_named, limits
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import printable
from griffin_eval.model_arguments import CHECKPOINT, FIELDS, parse_arguments
from griffin_eval.sharding.split import parse_mesh

if TYPE_CHECKING:
    from griffin_eval.converters.plan import Plan


def _print_formats(value: bool) -> None:
    if not value:
        return
    console = Console(width=max(Console().width, 100))
    table = Table(title="formats")
    for heading in ("--to", "what it is", "what it cannot hold"):
        table.add_column(heading)
    for target in FORMATS.values():
        limited = "\n".join(f"{field}: {reason}" for field, reason in limits(target))
        table.add_row(target.name, target.summary, limited or "(nothing)")
    console.print(table)
    raise typer.Exit


def _retired(flag: str, kind: type, instead: str) -> Any:
    """Return a hidden option whose use raises an error that names the replacement."""

    def refuse(value: str | bool | None) -> None:
        if value:
            raise ArgumentError(f"{flag} was removed: {instead}")

    default = False if kind is bool else None
    return option("", None, default, kind=kind, flag=flag, hidden=True, callback=refuse)


OPTIONS = {
    **{name: FIELDS[name] for name in ("peft", "check", *CHECKPOINT)},
    "help_formats": option(
        "Print the formats and their limits.",
        None,
        False,
        kind=bool,
        flag="--help-formats",
        callback=_print_formats,
        is_eager=True,
    ),
    "quantize": _retired(
        "--quantize",
        str,
        "convert to hf, and quantise that with mlx_lm.convert or with transformers and "
        "bitsandbytes",
    ),
    "max_memory": _retired(
        "--max-memory", str, "leave it out; small pieces of two tensors are held at a time"
    ),
    "resume": _retired("--resume", bool, "run the command again without it, from the beginning"),
}


@takes_options("options", OPTIONS)
def convert(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(help="Folder, .pt or .gguf file, hub id, or gs:// or s3:// URL of Orbax."),
    ],
    destination: Annotated[
        str, typer.Argument(help="Folder to write; for Orbax also a gs:// or s3:// URL.")
    ],
    to: Annotated[str, typer.Option(help=f"Format to write: {', '.join(FORMATS)}.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the tensors: bfloat16, or bfloat16,recurrent_param=float32. The longest "
            "matching ending of a parameter's name takes precedence."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Number of leading vocabulary rows to keep.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Largest size of a safetensors file, 5GB by default.")
    ] = None,
    chunks: Annotated[
        str | None,
        typer.Option(help="Mesh whose devices each read whole chunks: model=8,data=2."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DESTINATION if it holds only a checkpoint.")
    ] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(help="Repository, organisation/name, to upload an hf output to."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan without writing anything.")
    ] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Convert a checkpoint to another format, with a manifest that proves what was written."""
    from griffin_eval.converters.convert import convert_checkpoint
    from griffin_eval.converters.output.publish import check_repository, push
    from griffin_eval.converters.plan import make_plan, parse_dtypes, parse_shard_size
    from griffin_eval.opened import open_checkpoint

    if push_to_hub is not None and to != "hf":
        raise ArgumentError(f"--push-to-hub is for --to hf, which transformers loads, not {to}")
    target = format_named(to)
    shard = parse_shard_size(max_shard_size, target, "--max-shard-size")
    told = {name: value for name, value in options.items() if name in FIELDS}
    arguments = parse_arguments(told | {"pretrained": source})
    checkpoint = open_checkpoint(arguments)
    layout = checkpoint.inspection.layout
    typer.echo(printable(f"{source}: {checkpoint.format.name} ({layout})"))
    for name, reason in checkpoint.inspection.left_out.items():
        typer.echo(printable(f"left out: {name} ({reason})"))
    for merged in checkpoint.adapters:
        typer.echo(printable(f"merged: {merged.folder}, times {merged.weight:g}"))
    plan = make_plan(
        checkpoint,
        target,
        dtypes=parse_dtypes(dtype),
        vocab_size=vocab_size,
        mesh=None if chunks is None else parse_mesh(chunks, "--chunks"),
        check=arguments.check,
    )
    if dry_run:
        _print_plan(plan, shard)
        return
    if push_to_hub is not None:
        check_repository(push_to_hub)
    with progress_bar("converting", plan.nbytes) as progress:
        convert_checkpoint(
            plan,
            destination,
            overwrite=overwrite,
            max_shard_size=shard,
            progress=progress,
            command=_command_line(context),
        )
    typer.echo(
        f"{printable(str(destination))}: {to}, {len(plan.specs)} tensors, {plan.nbytes} bytes"
    )
    if push_to_hub is not None:
        typer.echo(f"pushed to {push(Path(os.path.expanduser(destination)), push_to_hub)}")


def _command_line(context: typer.Context) -> str:
    """Return the command as typed, quoted for a shell."""
    options, arguments = [], []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[parameter.name or ""]
        if parameter.param_type_name == "argument":
            arguments.append(str(value))
        elif isinstance(value, bool):
            options.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for each in value if isinstance(value, list | tuple) else [value]:
                options += [parameter.opts[0], str(each)]
    return shlex.join(["griffin-eval", "convert", *arguments, *options])


def _print_plan(plan: "Plan", max_shard_size: int) -> None:
    files = plan.output.output_files(plan.specs, max_shard_size)
    table = Table(title=f"{plan.source.format.name} to {plan.target.name}")
    for heading in ("writes", "shape", "from", "layout", "dtype", "bytes", "file"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left")
    for write in plan.writes:
        binding, dtype = write.binding, write.dtype
        table.add_row(
            binding.foreign,
            "×".join(map(str, binding.shape)),
            "\n".join(spec.name for spec in binding.canonical),
            binding.op.name,
            " ".join((*write.cast_from, "→", dtype)) if write.cast_from else dtype,
            str(write.nbytes),
            files[binding.foreign],
        )
    Console(width=max(Console().width, 200)).print(table)
    typer.echo(f"{len(plan.specs)} tensors in {len(set(files.values()))} files")
    compressed = ", less what compression saves" * plan.output.compressed
    typer.echo(f"disk: {plan.nbytes} bytes{compressed}")
    typer.echo(printable(f"copied beside them: {', '.join(plan.companions) or 'nothing'}"))

"""The command ``inspect``."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from griffin_eval.cli.options import CheckpointPath, JsonOnly, takes_model_options
from griffin_eval.messages import printable


@takes_model_options()
def inspect(
    path: CheckpointPath,
    devices: Annotated[
        int | None,
        typer.Option(help="Number of devices; shows how the model would be split.", min=1),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Print a table of the tensors, too.")
    ] = False,
    as_json: JsonOnly = False,
    *,
    options: dict[str, Any],
) -> None:
    """Show what a checkpoint is and what is wrong with it; exit code 1 if anything is.

    Shows format, size, dtypes, and each config field with its source; fields left at their defaults
    are only in --json. Weights are not read.
    """
    from griffin_eval.converters.containers.container import NothingThere
    from griffin_eval.converters.describe import describe, describe_split
    from griffin_eval.converters.inspection import inspect as inspect_checkpoint
    from griffin_eval.errors import CheckpointError
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.opened import find_checkpoint

    arguments = parse_arguments(options | {"pretrained": path})
    folder = find_checkpoint(arguments)
    try:
        inspection = inspect_checkpoint(folder, arguments.overrides)
    except NothingThere:
        raise
    except CheckpointError as error:  # the checkpoint exists but cannot be opened
        facts = {"problems": [str(error)]}
    else:
        facts = describe(inspection)
        if devices is not None and inspection.config is not None and not facts["problems"]:
            facts["split"] = describe_split(inspection, devices)
        inspection.container.close()
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        _print_facts(facts, tensors)
    if facts["problems"]:
        raise typer.Exit(1)


def _print_facts(facts: dict[str, Any], tensors: bool) -> None:
    console = Console(width=max(Console().width, 120))

    def line(text: str) -> None:
        console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    apart = (
        "config",
        "config_from",
        "tensors",
        "warnings",
        "problems",
        "left_out",
        "notes",
        "quantised",
        "split",
    )
    for name, value in facts.items():
        if name not in apart:
            line(f"{name}: {_in_words(name, value)}")
    if quantised := facts.get("quantised"):
        for scheme, found in quantised["schemes"].items():
            line(
                f"quantised: {found['parameters']} parameters with {found['elements']:,} elements, "
                f"{scheme}: {found['bits']:.2f} bits an element"
            )
        line(f"not quantised: {', '.join(quantised['left_alone']) or 'nothing'}")
    for name, value in facts.get("config", {}).items():
        origin = facts["config_from"][name]
        if origin != "default":
            line(f"{name}: {'unknown' if origin is None else f'{value} ({origin})'}")
    table = Table()
    for heading in ("tensor", "shape", "dtype", "parameters"):
        table.add_column(heading)
    for tensor in facts.get("tensors", []) if tensors else []:
        shape = "×".join(map(str, tensor["shape"]))
        name = escape(printable(tensor["name"]))
        table.add_row(name, shape, tensor["dtype"], "\n".join(tensor["parameters"]))
    if table.row_count:
        console.print(table)
    if "split" in facts:
        split = facts["split"]
        each, every = split["bytes_a_device"] / 1e6, split["bytes"] / 1e6
        whole = (
            f"; whole on each: {', '.join(split['whole'])}, {split['whole_bytes'] / 1e6:,.1f} MB"
        )
        line(
            f"split over {split['devices']} devices: {each:,.1f} MB of {every:,.1f} MB on each"
            f"{whole if split['whole'] else ''}"
        )
    for name, reason in facts.get("left_out", {}).items():
        line(f"left out: {name} ({reason})")
    for name, text in facts.get("notes", {}).items():
        line(f"{name}: {text}")
    for kind in ("warning", "problem"):
        for text in facts.get(f"{kind}s", []):
            line(f"{kind}: {text}")


def _in_words(name: str, value: Any) -> str:
    """Return a fact as text."""
    if value is None:
        return "unknown"
    if name == "dtypes":
        return ", ".join(f"{count} tensors in {dtype}" for dtype, count in value.items())
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)

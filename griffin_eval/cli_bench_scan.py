"""The command ``bench scan``."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from griffin_eval.cli_bench import tell
from griffin_eval.errors import ArgumentError


def bench_scan(
    target: Annotated[
        str, typer.Option(help="cpu, cuda, or TPUs to compile for, such as v5e,v6e.")
    ] = "cpu",
    lengths: Annotated[str, typer.Option(help="Tokens, on the CPU.")] = "8192,64",
    width: Annotated[int, typer.Option(help="Of the RG-LRU, on the CPU.", min=1)] = 2560,
    gates: Annotated[int, typer.Option(help="Blocks of its gates.", min=1)] = 10,
    rounds: Annotated[int, typer.Option(help="Measurements of each, in turn.", min=1)] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """The scan and the RG-LRU alone, beside other implementations and the limit.

    On a CPU or a GPU times are measured; for a TPU, which need not be there, the kernels are
    compiled, and what the compiler says of them is printed.
    """
    rows: list[Any]
    if target == "cpu":
        from griffin_eval.bench_scan import measure, table
        from griffin_eval.runners import choose_framework

        parts = lengths.split(",")
        if not all(part.isdecimal() and int(part) for part in parts):
            raise ArgumentError(f"--lengths {lengths!r}: expected numbers of tokens such as 8192")
        if width % gates:
            raise ArgumentError(f"--gates {gates} must divide --width {width}")
        for framework in ("torch", "jax"):
            choose_framework(framework)
        rows = measure(
            [int(part) for part in parts],
            width,
            gates,
            rounds,
            tell,
        )
        rows = rows if not as_json else [row._asdict() for row in rows]
    elif target == "cuda":
        from griffin_eval.bench_scan_gpu import measure, table

        rows = measure()
    else:
        from griffin_eval.bench_scan_tpu import measure, table

        rows = measure(target.split(","))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        Console(width=max(Console().width, 120)).print(table(rows))

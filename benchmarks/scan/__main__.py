"""The command ``python -m benchmarks.scan``."""

import json
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError


def bench_scan(
    target: Annotated[
        str, typer.Option(help="Device: cpu, cuda, or TPUs to compile for, such as v5e,v6e.")
    ] = "cpu",
    lengths: Annotated[
        str | None, typer.Option(help="Numbers of tokens: 8192,64 on the CPU, 8192 for TPUs.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="RG-LRU width; 2560, or published models' for TPUs.", min=1)
    ] = None,
    gates: Annotated[
        int | None, typer.Option(help="Number of blocks of the gates, dividing the width.", min=1)
    ] = None,
    rounds: Annotated[int, typer.Option(help="Number of interleaved rounds.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Time the scan and the RG-LRU beside other implementations and the roofline.

    For a TPU, which need not be present, the kernels are compiled and the compiler's figures are
    printed. Peers that are missing or broken are left out.
    """
    from benchmarks.peers import left_out
    from griffin_eval.runners.load import choose_framework

    sized = bool(lengths or width or gates)
    sizes = _sizes(lengths or ("8192,64" if target == "cpu" else "8192"), width, gates)
    terminal = Console(stderr=True, quiet=not Console(stderr=True).is_terminal)
    tell = partial(terminal.print, highlight=False, markup=False)
    rows: list[Any]
    if target == "cpu":
        for framework in ("torch", "jax"):
            choose_framework(framework)
        from benchmarks.scan import cpu as bench

        rows = bench.measure(*sizes, rounds, tell)
    elif target == "cuda":
        from benchmarks.scan import gpu as bench

        shapes = [(1, time, sizes[1]) for time in sizes[0]] if sized else bench.SHAPES
        rows = bench.measure(shapes, rounds=rounds, tell=tell)
    else:
        choose_framework("jax")
        from benchmarks.scan import tpu as bench

        chosen = [bench.shape_of(time, *sizes[1:]) for time in sizes[0]] if sized else bench.SHAPES
        rows = bench.measure(target.split(","), chosen, tell=tell)
    if as_json:
        rows = [row._asdict() if target == "cpu" else row for row in rows]
        typer.echo(json.dumps(rows, indent=2))
    else:
        title, headings, cells = bench.table(rows)
        table = Table(title=title)
        for heading in headings:
            table.add_column(heading, no_wrap=True)
        for row in cells:
            table.add_row(*row)
        Console(width=max(Console().width, 160)).print(table)
    for name, reason in bench.absent_peers().items():
        typer.echo(left_out(name, reason), err=as_json)


def _sizes(lengths: str, width: int | None, gates: int | None) -> tuple[list[int], int, int]:
    """Return tokens, width and number of blocks of the gates."""
    parts = lengths.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentError(f"--lengths {lengths!r}: expected numbers of tokens such as 8192")
    width, gates = width or 2560, gates or 10
    if width % gates:
        raise ArgumentError(f"--gates {gates} must divide --width {width}")
    return [int(part) for part in parts], width, gates


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_scan))

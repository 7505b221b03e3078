"""The command ``bench scan``."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.evaluation.__main__ import tell
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError

LENGTHS, WIDTH, GATES = (8192, 64), 2560, 10  # on the CPU


def bench_scan(
    target: Annotated[
        str, typer.Option(help="Device: cpu, cuda, or TPUs to compile for, such as v5e,v6e.")
    ] = "cpu",
    lengths: Annotated[
        str | None, typer.Option(help="Numbers of tokens: 8192,64 on the CPU, 8192 for TPUs.")
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            help="RG-LRU width: 2560 on the CPU, those of published models for TPUs.", min=1
        ),
    ] = None,
    gates: Annotated[
        int | None, typer.Option(help="Number of blocks of the gates, dividing the width.", min=1)
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Number of measurements of each, in turn.", min=1)
    ] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Printed JSON, nothing else.")] = False,
) -> None:
    """The scan and the RG-LRU alone, beside other implementations and the roofline.

    On a CPU or a GPU times are measured; for a TPU, which need not be there, the kernels are
    compiled, and what the compiler says of them is printed. Peers that are not installed or do not
    work are left out.
    """
    from benchmarks.peers import left_out
    from griffin_eval.runners.load import choose_framework

    rows: list[Any]
    if target == "cpu":
        from benchmarks.scan import cpu as bench

        sizes = _sizes(lengths, width, gates)
        for framework in ("torch", "jax"):
            choose_framework(framework)
        rows = bench.measure(*sizes, rounds, tell)
    elif target == "cuda":
        from benchmarks.scan import gpu as bench

        rows = bench.measure(tell=tell)
    else:
        choose_framework("jax")
        from benchmarks.scan import tpu as bench

        shapes = bench.SHAPES
        if lengths or width or gates:
            times, width, gates = _sizes(lengths or "8192", width, gates)
            shapes = [bench.shape_of(time, width, gates) for time in times]
        rows = bench.measure(target.split(","), shapes, tell=tell)
    absent = [left_out(name, reason) for name, reason in bench.absent_peers().items()]
    if as_json:
        rows = [row._asdict() if target == "cpu" else row for row in rows]
        typer.echo(json.dumps(rows, indent=2))
    else:
        Console(width=max(Console().width, 160)).print(bench.timing_table(rows))
    for line in absent:
        typer.echo(line, err=as_json)


def _sizes(lengths: str | None, width: int | None, gates: int | None) -> tuple[list[int], int, int]:
    """Tokens, width and blocks of the gates, with defaults where none are given."""
    parts = lengths.split(",") if lengths is not None else [str(length) for length in LENGTHS]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentError(f"--lengths {lengths!r}: expected numbers of tokens such as 8192")
    width, gates = width or WIDTH, gates or GATES
    if width % gates:
        raise ArgumentError(f"--gates {gates} must divide --width {width}")
    return [int(part) for part in parts], width, gates


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_scan))

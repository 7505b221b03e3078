"""The command ``python -m benchmarks.scan``."""

from typing import Annotated

import typer

from benchmarks.commands import AsJson, Rounds
from benchmarks.peers import left_out
from benchmarks.report import Report
from griffin_eval.arguments import positive_integers
from griffin_eval.cli.ending import run_command
from griffin_eval.errors import ArgumentError
from griffin_eval.runners.load import choose_framework


def bench_scan(
    target: Annotated[
        str,
        typer.Option(
            help="Device: cpu, cuda, or devices to compile for, such as v5e,v6e or sm_90."
        ),
    ] = "cpu",
    lengths: Annotated[
        str | None, typer.Option(help="Numbers of tokens: 8192,64 on the CPU, else 8192.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="RG-LRU width; 2560, or published models' for TPUs.", min=1)
    ] = None,
    gates: Annotated[
        int | None, typer.Option(help="Number of blocks of the gates, dividing the width.", min=1)
    ] = None,
    rounds: Rounds = 5,
    as_json: AsJson = False,
) -> None:
    """Time the scan and the RG-LRU beside other implementations and the roofline.

    For a TPU, or a GPU by its compute capability, the kernels are compiled, without the device, and
    the compiler's figures are printed. Peers that are missing or broken are left out.
    """
    sized = bool(lengths or width or gates)
    text = lengths or ("8192,64" if target == "cpu" else "8192")
    times = positive_integers("--lengths", text, "numbers of tokens such as 8192")
    width, gates = width or 2560, gates or 10
    if width % gates:
        raise ArgumentError(f"--gates {gates} must divide --width {width}")
    report = Report()
    if target == "cpu":
        for framework in ("torch", "jax"):
            choose_framework(framework)
        from benchmarks.scan import cpu

        absent = cpu.measure(times, width, gates, rounds, report)
    elif target == "cuda":
        from benchmarks.scan import gpu

        shapes = [(1, time, width) for time in times] if sized else gpu.SHAPES
        title = "medians of the rounds; bandwidth over that of a copy"
        report.tables[title] = gpu.measure(shapes, rounds=rounds)
        absent = gpu.absent()
    elif target.startswith("sm_"):
        choose_framework("torch")
        from benchmarks.scan import gpu_compiler

        shapes = [(time, width, gates) for time in times]
        gpu_compiler.measure(target.split(","), shapes, report)
        absent = {}
    else:
        choose_framework("jax")
        from benchmarks.scan import tpu

        shapes = [tpu.shape_of(time, width, gates) for time in times] if sized else tpu.SHAPES
        absent = tpu.measure(target.split(","), shapes, report)
    report.notes += [left_out(name, reason) for name, reason in absent.items()]
    report.show(as_json)


if __name__ == "__main__":
    run_command(lambda: typer.run(bench_scan))

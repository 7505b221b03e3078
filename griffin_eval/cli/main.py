"""The ``griffin-eval`` command."""

import atexit
import gc
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

import griffin_eval
from griffin_eval.cli.bench.convert import bench_convert
from griffin_eval.cli.bench.evaluation import bench_eval
from griffin_eval.cli.bench.latency import bench_latency
from griffin_eval.cli.bench.model import bench_model
from griffin_eval.cli.bench.pauses import bench_pauses
from griffin_eval.cli.bench.quantisation import bench_quantize
from griffin_eval.cli.bench.scan import bench_scan
from griffin_eval.cli.bench.serving import bench_serve
from griffin_eval.cli.bench.shard import bench_shard
from griffin_eval.cli.bench.sweep import bench_sweep
from griffin_eval.cli.bench.throughput import bench_throughput
from griffin_eval.cli.bench.training import bench_training
from griffin_eval.cli.checkpoints import checkpoints
from griffin_eval.cli.convert import convert
from griffin_eval.cli.doctor import doctor
from griffin_eval.cli.inspect import inspect
from griffin_eval.cli.map import causal_map
from griffin_eval.cli.memory import memory
from griffin_eval.cli.read import read
from griffin_eval.cli.report import report
from griffin_eval.cli.score import score
from griffin_eval.cli.serve import serve
from griffin_eval.cli.sweep import sweep
from griffin_eval.cli.train import train
from griffin_eval.cli.verify import verify
from griffin_eval.errors import (
    BadInput,
    MissingExtraError,
    ProcessLost,
    raised_by_lm_eval,
    unreachable_data,
)
from griffin_eval.messages import printable
from griffin_eval.process import share_processor, tune_process

app = typer.Typer(
    name="griffin-eval",
    help="Convert and evaluate Griffin, Hawk and RecurrentGemma checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(griffin_eval.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Printed version number."),
    ] = False,
) -> None:
    pass


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def run(
    context: typer.Context,
    suite: Annotated[
        Path | None, typer.Option(help="Frozen suite to run, in place of --tasks.")
    ] = None,
    freeze: Annotated[
        Path | None, typer.Option(help="New file for what this run asks, as a suite.")
    ] = None,
) -> None:
    """Evaluate: lm_eval's own command line, also where its plugin start-up file is disabled.

    Takes what `lm_eval run` takes: griffin-eval run --model griffin --model_args pretrained=DIR
    --tasks griffin_phonebook; and --freeze FILE or --suite FILE.
    """
    tune_process()
    from griffin_eval._plugin import install

    install()
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise MissingExtraError("lm-eval", "torch") from None
    sys.argv = ["lm_eval", "run", *context.args]
    try:
        if suite is not None or freeze is not None:
            from lm_eval.utils import setup_logging

            from griffin_eval.lm.suite import run_frozen

            setup_logging()
            run_frozen(context.args, suite=suite, freeze=freeze)
        else:
            cli_evaluate()
    except ValueError as error:
        if not raised_by_lm_eval(error):
            raise
        logging.getLogger("lm_eval").debug("where it was raised:", exc_info=True)
        raise BadInput(error) from error


bench = typer.Typer(help="Benchmarks against peers and limits measured in the same run.")
bench.command(name="convert")(bench_convert)
bench.command(name="eval")(bench_eval)
bench.command(name="model")(bench_model)
bench.command(name="quantize")(bench_quantize)
bench.command(name="scan")(bench_scan)
bench.command(name="serve")(bench_serve)
bench.command(name="pauses")(bench_pauses)
bench.command(name="shard")(bench_shard)
bench.command(name="sweep")(bench_sweep)
bench.command(name="latency")(bench_latency)
bench.command(name="throughput")(bench_throughput)
bench.command(name="training")(bench_training)
app.add_typer(bench, name="bench")
for command in (
    convert,
    inspect,
    verify,
    checkpoints,
    memory,
    read,
    report,
    score,
    serve,
    train,
    doctor,
):
    app.command()(command)
app.command(name="map")(causal_map)
app.command(context_settings={"ignore_unknown_options": True})(sweep)


def main() -> None:
    """Runs a command; bad input ends with one sentence on stderr and exit code 2."""
    share_processor()
    # Else Python looks through all of torch and JAX for cycles as it ends.
    atexit.register(gc.freeze)
    try:
        app()
    except (BadInput, MissingExtraError) as error:
        print(f"griffin-eval: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        unreachable = unreachable_data(error)
        if unreachable is not None:
            print(f"griffin-eval: {unreachable}", file=sys.stderr)
            sys.exit(1)
        if error.filename is None:
            raise
        print(f"griffin-eval: {error.filename}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, ProcessLost) as error:  # the engine's says for which request
        print(f"griffin-eval: {error or 'out of memory'}", file=sys.stderr)
        sys.exit(1)

"""The ``griffin-eval`` command."""

import logging
import sys
from typing import Annotated

import typer

import griffin_eval
from griffin_eval.cli_bench import bench_eval
from griffin_eval.cli_bench_model import bench_model
from griffin_eval.cli_bench_scan import bench_scan
from griffin_eval.cli_checkpoints import checkpoints
from griffin_eval.cli_converters import bench, register
from griffin_eval.cli_memory import memory
from griffin_eval.cli_report import report
from griffin_eval.cli_train import train
from griffin_eval.errors import BadInput, MissingExtraError

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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
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
def run(context: typer.Context) -> None:
    """Evaluate: lm_eval's own command line, also where its plugin start-up file is disabled.

    Takes what `lm_eval run` takes: griffin-eval run --model griffin --model_args pretrained=DIR
    --tasks griffin_phonebook
    """
    from griffin_eval._plugin import install

    install()
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise MissingExtraError("lm-eval", "torch") from None
    sys.argv = ["lm_eval", "run", *context.args]
    try:
        cli_evaluate()
    except ValueError as error:  # lm_eval's word for a task or an argument that does not exist
        logging.getLogger("lm_eval").debug("where it was raised:", exc_info=True)
        raise BadInput(error) from error


register(app)
bench.command(name="eval")(bench_eval)
bench.command(name="model")(bench_model)
bench.command(name="scan")(bench_scan)
app.command()(checkpoints)
app.command()(memory)
app.command()(report)
app.command()(train)


def main() -> None:
    """Runs a command; bad input ends with one sentence on stderr and exit code 2."""
    try:
        app()
    except (BadInput, MissingExtraError) as error:
        print(f"griffin-eval: {error}", file=sys.stderr)
        sys.exit(2)
    except MemoryError as error:  # the engine's says for which request
        print(f"griffin-eval: {error or 'out of memory'}", file=sys.stderr)
        sys.exit(1)

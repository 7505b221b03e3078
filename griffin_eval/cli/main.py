"""The ``griffin-eval`` command."""

import logging
import sys
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer

import griffin_eval
from griffin_eval.cli.convert import convert
from griffin_eval.cli.doctor import checkpoints, doctor
from griffin_eval.cli.ending import run_command
from griffin_eval.cli.generate import generate
from griffin_eval.cli.inspect import inspect
from griffin_eval.cli.memory import memory
from griffin_eval.cli.options import PanelledCommand
from griffin_eval.cli.read import read
from griffin_eval.cli.report import power, report
from griffin_eval.cli.score import score
from griffin_eval.cli.serve import serve
from griffin_eval.cli.sweep import sweep
from griffin_eval.cli.train import train
from griffin_eval.cli.verify import verify
from griffin_eval.errors import (
    INTERRUPTED,
    ArgumentError,
    BadInput,
    MissingExtraError,
    raised_by_lm_eval,
)
from griffin_eval.process import tune_process

app = typer.Typer(
    name="griffin-eval",
    help="Convert and evaluate Griffin, Hawk and RecurrentGemma checkpoints.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables truncate option names at 80 columns
)


def _version(value: bool) -> None:
    if value:
        typer.echo(griffin_eval.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command(
    short_help="Evaluate: lm_eval's own command line.",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def run(
    context: typer.Context,
    suite: Annotated[
        Path | None, typer.Option(help="Frozen suite to run, instead of --tasks.")
    ] = None,
    freeze: Annotated[
        Path | None, typer.Option(help="New file for the frozen suite of this run.")
    ] = None,
) -> None:
    """Evaluate: lm_eval's own command line, also if its plugin start-up file is disabled.

    Takes the arguments of `lm_eval run`: griffin-eval run --model griffin --model_args
    pretrained=DIR --tasks griffin_phonebook; and --freeze FILE or --suite FILE.
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
    except KeyboardInterrupt:
        typer.echo(f"\ngriffin-eval: {INTERRUPTED}", err=True)
        raise
    except ValueError as error:
        if not raised_by_lm_eval(error):
            raise
        logging.getLogger("lm_eval").debug("where it was raised:", exc_info=True)
        raise BadInput(error) from error


def _moved(name: str, home: str) -> None:
    """Add a hidden command that names the new home of a command that moved."""

    @app.command(
        name=name,
        hidden=True,
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
    )
    def moved() -> None:
        raise ArgumentError(
            f"griffin-eval {name} is no longer part of the package: run python -m {home} "
            f"from a checkout of griffin-eval's repository"
        )


def _add(
    command: Callable[..., None],
    example: str,
    summary: str | None = None,
    context_settings: dict[str, Any] | None = None,
) -> None:
    """Add a command, with an example after the first paragraph of its help."""
    first, _, rest = cleandoc(command.__doc__ or "").partition("\n\n")
    shown = f"\b\nExample:\n  griffin-eval {example}"
    app.command(
        cls=PanelledCommand,
        help="\n\n".join([first, shown, rest]).strip(),
        short_help=summary or first,  # typer's default is cut at the terminal's width
        context_settings=context_settings,
    )(command)


_moved(
    "bench",
    "benchmarks.evaluation (also .model, .scan, .convert, .serving, .shard), or "
    "experiments.paper_speed for latency, throughput and training,",
)
_moved("map", "experiments.causal_map")
_add(convert, "convert google/recurrentgemma-2b folder --to griffin")
_add(inspect, "inspect folder --tensors")
_add(verify, "verify google/recurrentgemma-2b folder")
_add(checkpoints, "checkpoints bytes_griffin")
_add(memory, "memory google/recurrentgemma-2b --output figures")
_add(read, "read google/recurrentgemma-2b book.txt --save book.state")
_add(report, "report results --output report")
_add(power, "power --items 500 --score 0.6 --difference 0.03")
_add(generate, 'generate google/recurrentgemma-2b "Once upon a time"')
_add(score, "score google/recurrentgemma-2b text.txt --csv > tokens.csv")
_add(serve, "serve google/recurrentgemma-2b --port 8000")
_add(train, "train induction_heads --model griffin --output run")
_add(doctor, "doctor")
_add(
    sweep,
    "sweep training --tasks griffin_phonebook --output sweep",
    summary="Evaluate all checkpoints of a training in one process.",
    context_settings={"ignore_unknown_options": True},
)


def main() -> None:
    """Run the command that the arguments name."""
    run_command(app)

"""The command ``sweep``."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from griffin_eval.errors import ArgumentError, BadInput, MissingExtraError, raised_by_lm_eval
from griffin_eval.process import tune_process

LOOK_AGAIN = 5.0  # seconds between two searches for new checkpoints


def sweep(
    run: Annotated[
        list[str],
        typer.Argument(
            help="Folder of a training, or several checkpoints; then options of lm_eval run.",
            metavar="RUN [OPTION OF LM_EVAL]...",
        ),
    ],
    tasks: Annotated[str, typer.Option(help="Tasks, as lm_eval takes them: A,B,….")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the results.")],
    model_args: Annotated[
        str,
        typer.Option(
            "--model_args", help="Arguments of lm_eval --model griffin, without pretrained=."
        ),
    ] = "",
    revisions: Annotated[
        str | None, typer.Option(help="Branches, tags or commits of a hub id: A,B,….")
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Keep running, and evaluate checkpoints as they are saved."),
    ] = False,
    until: Annotated[int | None, typer.Option(help="Step after which --watch ends.", min=0)] = None,
) -> None:
    """Evaluate all checkpoints of a training in one process, and draw the learning curves.

    Results are those of one lm_eval command for each checkpoint. The same command continues a sweep
    that was interrupted.
    """
    for library in ("lm_eval", "matplotlib", "scipy"):
        if find_spec(library) is None:
            raise MissingExtraError(library.replace("_", "-"), "torch")
    first_option = next((i for i, word in enumerate(run) if word.startswith("-")), len(run))
    named, options = run[:first_option], run[first_option:]
    if not named:
        raise ArgumentError("name the folder of the training before lm_eval's own options")
    if output.exists() and not output.is_dir():
        raise ArgumentError(f"--output {output} is a file: expected a folder")
    if until is not None and not watch:
        raise ArgumentError("--until needs --watch: add --watch")
    tune_process()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # lm_eval's command line sets it too
    from griffin_eval._plugin import install

    install()
    from lm_eval.utils import setup_logging

    setup_logging()
    from griffin_eval.converters.source.steps import FINISHED_FILE
    from griffin_eval.lm import sweep as sweeps
    from griffin_eval.sharding.launch import Launch

    if Launch.of_environment().world_size > 1 or "JAX_COORDINATOR_ADDRESS" in os.environ:
        raise ArgumentError(
            "sweep runs in one process: start it without a launcher, and name the devices with "
            "tensor_parallel_size= or data_parallel_size= in --model_args"
        )
    folder = Path(named[0])
    if revisions is not None:
        if len(named) > 1 or folder.exists():
            raise ArgumentError(
                f"--revisions names revisions of one hub id, found {', '.join(named)}: expected a "
                "name such as google/recurrentgemma-2b"
            )
        fixed = sweeps.targets_of_revisions(named[0], revisions.split(","))
    elif len(named) > 1:
        fixed = sweeps.targets_of_list(named)
    else:
        fixed = None
        if not folder.is_dir():
            raise ArgumentError(
                f"{folder}: expected the folder of a training, found no folder; for revisions of a "
                "hub id, name them with --revisions"
            )
    if watch and fixed is not None:
        raise ArgumentError("--watch follows a training: expected the folder of one")

    def find() -> list[Any]:
        return sweeps.targets_of_run(folder) if fixed is None else fixed

    targets = find()
    if not targets and not watch:
        raise ArgumentError(
            f"{folder} has no checkpoints: expected folders named after steps, such as 12000 or "
            "checkpoint-12000"
        )
    following = sweeps.Watch(LOOK_AGAIN, until, (folder / FINISHED_FILE).exists) if watch else None
    # lm_eval requires an output path if samples are logged.
    arguments = ["--tasks", tasks, "--output_path", str(output), *options]
    if model_args:
        arguments += ["--model_args", model_args]
    first = targets[0] if targets else sweeps.Target("", str(folder))
    count = skipped = failed = 0
    try:
        config = sweeps.configuration(arguments, first)
        for outcome in sweeps.sweep(config, find, output, following):
            if outcome.failed:
                failed += 1
                typer.echo(f"{outcome.target.name}: failed: {outcome.reason}", err=True)
            elif outcome.seconds is None:
                skipped += 1
                typer.echo(f"{outcome.target.name}: skipped, since {outcome.reason}")
            else:
                count += 1
                typer.echo(f"{outcome.target.name}: {outcome.seconds:.1f} s")
            if watch:
                _draw(output)
    except ValueError as error:
        if not raised_by_lm_eval(error):
            raise
        raise BadInput(error) from error
    figures = _draw(output)
    typer.echo(f"{output}: evaluated: {count}, skipped: {skipped}, learning curves: {figures}")
    if failed:
        typer.echo(f"{output}: failed: {failed}; run the command again to retry them", err=True)
        raise typer.Exit(1)


def _draw(output: Path) -> int:
    """Draw the learning curves of all results so far, and write their numbers as CSV."""
    from griffin_eval.drawing import Files
    from griffin_eval.report.curves import draw_over_steps
    from griffin_eval.report.results import read
    from griffin_eval.report.tables import RESULTS_FILE, write_results

    files = sorted(output.glob("[!.]*/**/results_*.json"))
    if not files:
        return 0
    runs = read(files)
    write_results(runs, output / RESULTS_FILE)
    return len(list(draw_over_steps(runs, Files(output / "figures"))))

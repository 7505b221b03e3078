"""The checkpoints of a training: folders named after steps in the folder of its run."""

from pathlib import Path

from griffin_eval.converters.containers.orbax.find import step_number
from griffin_eval.converters.containers.registry import CONTAINERS
from griffin_eval.errors import CheckpointError

FINISHED_FILE = "finished"  # in the folder of a run of ``griffin-eval train`` that has ended


def steps_of(run: Path) -> dict[int, Path]:
    """Return the finished checkpoints in a folder, by step, in increasing order: folders named
    after a step (``12000``, ``step_12000``, ``checkpoint-12000``) with a checkpoint of any
    container. Beside steps that are named by a number alone, others, such as ``backup_20260102``,
    are no steps. One that is deleted meanwhile is left out. CheckpointError if two have one
    step."""
    steps: dict[int, Path] = {}
    for folder in run.iterdir():
        number = step_number(folder)
        if number is not None and folder.is_dir() and _holds_checkpoint(folder):
            if number in steps:
                one, other = sorted((steps[number], folder))
                raise CheckpointError(
                    f"{one} and {other} hold the same step, {number}: move one of them away"
                )
            steps[number] = folder
    numbered = {step: folder for step, folder in steps.items() if folder.name.isdecimal()}
    return dict(sorted((numbered or steps).items()))


def _holds_checkpoint(folder: Path) -> bool:
    try:
        return any(kind.looks_like(folder) for kind in CONTAINERS.values())
    except OSError:
        return False

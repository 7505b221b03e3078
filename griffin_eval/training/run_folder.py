"""The folder of a training run: its settings, metrics and checkpoints."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.configs.huggingface import CONFIG_FILE
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.source.steps import FINISHED_FILE
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import read_json
from griffin_eval.messages import first_line
from griffin_eval.training.batches import DATA
from griffin_eval.training.options import Run
from griffin_eval.training.recipes import Recipe
from griffin_eval.training.step import Params

logger = logging.getLogger(__name__)

RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"


def prepare_folder(run: Run, config: GriffinConfig, folder: Path) -> None:
    """Create the folder of a run, or check that it belongs to this run.

    Raises:
        CheckpointError: The folder belongs to another run, or to none.
    """
    file, settings = folder / RUN_FILE, run.settings()
    if file.is_file():
        differing = _differing(read_json(file), settings)
        if differing:
            raise CheckpointError(
                f"{folder} belongs to another run ({'; '.join(differing)}): name another folder"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not a training run: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FINISHED_FILE).unlink(missing_ok=True)
    file.write_text(json.dumps(settings, indent=2) + "\n")
    raw = config_json(config, FORMATS["griffin-orbax"], "float32")
    (folder / CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n")
    DATA[run.recipe.name].write_tokenizer(folder)


def _differing(stored: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return a phrase for each setting that differs; missing settings have their default."""
    defaults = {f"recipe.{field.name}": field.default for field in dataclasses.fields(Recipe)}
    there, here = (
        defaults | {"from": None, "dtype": "float32"} | traverse_util.flatten_dict(fields, sep=".")
        for fields in (stored, expected)
    )
    return [
        f"{key} {there[key]} there, {here[key]} asked for"
        for key in here
        if there.get(key) != here[key]
    ]


def save(
    folder: Path,
    manager: ocp.CheckpointManager,
    metrics: dict[str, Any],
    params: Params,
    state: Any,
) -> None:
    """Write a checkpoint, and the line of metrics of its step."""
    step = metrics["step"]
    try:
        # Metrics first: a later run removes a line without a checkpoint, but cannot add one.
        with open(folder / METRICS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        # Orbax warns at every save, since it mistakes the wait below for a slow earlier save.
        logging.getLogger("absl").addFilter(_is_no_wait_warning)
        manager.save(step, args=_items(ocp.args.StandardSave, params, state))
        manager.wait_until_finished()  # the next step donates the arrays
    except (OSError, ValueError) as error:  # Orbax raises ValueError for TensorStore's errors
        raise CheckpointError(
            f"{folder}: the checkpoint of step {step} cannot be written ({first_line(error)}): "
            "free disk space and run the command again, which continues from the one before"
        ) from error


def _is_no_wait_warning(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Waiting for previous save")


def restore(
    manager: ocp.CheckpointManager, step: int, params: Params, state: Any
) -> tuple[Params, Any]:
    """Return parameters and optimizer state of a checkpoint, sharded like the given ones."""
    items = manager.restore(step, args=_items(ocp.args.StandardRestore, params, state))
    restored: Any = traverse_util.flatten_dict(items["params"], sep=".")
    leaves = [items["optimizer"][str(i)] for i in range(len(jax.tree.leaves(state)))]
    return restored, jax.tree.unflatten(jax.tree.structure(state), leaves)


def _items(arguments: Callable[[Any], Any], params: Params, state: Any) -> ocp.args.Composite:
    """Return Orbax's arguments: nested parameters, and leaves of the optimizer state by number."""
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
    nested = traverse_util.unflatten_dict(params, sep=".")
    return ocp.args.Composite(params=arguments(nested), optimizer=arguments(leaves))


def lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the lines of metrics up to a checkpoint's step, and remove later ones from the file.

    Raises:
        CheckpointError: The file has no line of that step.
    """
    lines = read_metrics(path) if path.is_file() else []
    kept = [line for line in lines if line["step"] <= step]
    if step and (not kept or kept[-1]["step"] != step):
        raise CheckpointError(
            f"{path} has no line of step {step}, whose checkpoint exists: restore the file, or "
            "name another folder"
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    return kept


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``, without incomplete ones, which cause a warning."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            logger.warning("%s: an incomplete line is left out", path)
    return lines

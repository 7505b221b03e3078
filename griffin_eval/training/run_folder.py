"""The folder of a training run: its settings, metrics and checkpoints."""

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.configs.huggingface import CONFIG_FILE
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.files import lock_folder, writing
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.source.steps import FINISHED_FILE
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import read_file, read_json, write_whole
from griffin_eval.messages import brief, first_line
from griffin_eval.training.batches import DATA
from griffin_eval.training.options import Run
from griffin_eval.training.recipes import Recipe
from griffin_eval.training.step import Params

logger = logging.getLogger(__name__)

RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
_RESTORE = "restore the file, or name another folder"


def prepare_folder(run: Run, config: GriffinConfig, folder: Path, save_every: int) -> None:
    """Create the folder of a run, or check that it belongs to this run with its tests.

    Raises:
        CheckpointError: The folder belongs to another run, or to none.
    """
    file, settings = folder / RUN_FILE, run.settings(save_every)
    if file.is_file():
        differing = _differing(read_json(file), settings)
        if differing:
            raise CheckpointError(
                f"{folder} belongs to another run ({'; '.join(differing)}): name another folder"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not a training run: name another folder")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    (folder / FINISHED_FILE).unlink(missing_ok=True)
    _write_if_changed(file, json.dumps(settings, indent=2) + "\n")
    raw = config_json(config, FORMATS["griffin-orbax"], "float32")
    _write_if_changed(folder / CONFIG_FILE, json.dumps(raw, indent=2) + "\n")
    with writing(folder / "tokenizer.json"):
        DATA[run.recipe.name].write_tokenizer(folder)


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Lock the folder of a run while a block runs, since two runs would mix their metrics.

    Raises:
        CheckpointError: Another process trains in this folder.
    """
    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        raise CheckpointError(
            f"another process trains in {folder}: wait until it ends, or name another folder"
        ) from None
    try:
        yield
    finally:
        os.close(lock)


def _write_if_changed(path: Path, text: str) -> None:
    """Write a file unless it holds this text, so that a full disk does not stop a continued run."""
    content = text.encode()
    if not path.is_file() or read_file(path) != content:
        with writing(path):
            write_whole(path, content)


def _differing(stored: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return a phrase for each setting that differs; missing settings have their default."""
    defaults = {
        f"recipe.{field.name}": field.default
        for field in dataclasses.fields(Recipe)
        if field.default is not dataclasses.MISSING
    }
    # Earlier versions did not store save_every.
    defaults |= {"from": None, "dtype": "float32", "save_every": expected.get("save_every")}
    there, here = (
        defaults | traverse_util.flatten_dict(fields, sep=".") for fields in (stored, expected)
    )
    return [
        f"{key} {there.get(key, 'missing')} there, {here[key]} asked for"
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
        logging.getLogger("absl").addFilter(_is_worth_printing)
        manager.save(step, args=_items(ocp.args.StandardSave, params, state))
        manager.wait_until_finished()  # the next step donates the arrays
    except (OSError, ValueError) as error:  # Orbax raises ValueError for TensorStore's errors
        raise CheckpointError(
            f"{folder}: the checkpoint of step {step} cannot be written ({first_line(error)}): "
            "free disk space and run the command again, which continues from the one before"
        ) from error


def _is_worth_printing(record: logging.LogRecord) -> bool:
    """Return False for two kinds of Orbax's messages: a warning at every save, since it mistakes
    waiting for the end of a save for a slow earlier one, and tracebacks of errors, which it also
    raises."""
    return not record.exc_info and not str(record.msg).startswith("Waiting for previous save")


def restore(
    manager: ocp.CheckpointManager, step: int, params: Params, state: Any
) -> tuple[Params, Any]:
    """Return parameters and optimizer state of a checkpoint, sharded like the given ones.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    try:
        items = manager.restore(step, args=_items(ocp.args.StandardRestore, params, state))
    except (OSError, ValueError, KeyError) as error:  # KeyError: an item is missing
        reason, *_ = first_line(error).partition(" [tensorstore_spec")
        raise CheckpointError(
            f"{manager.directory / str(step)} cannot be read ({reason}): remove this "
            "folder and run the command again, which continues from the checkpoint before it"
        ) from error
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
        CheckpointError: The file has no line of that step, or cannot be read.
    """
    lines = read_metrics(path) if path.is_file() else []
    kept = [line for line in lines if line["step"] <= step]
    if step and (not kept or kept[-1]["step"] != step):
        raise CheckpointError(
            f"{path} has no line of step {step}, whose checkpoint exists: {_RESTORE}"
        )
    _write_if_changed(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``, without incomplete ones, which cause a warning.

    Raises:
        CheckpointError: The file is not UTF-8, or a line is not an object with a ``step``.
    """
    try:
        text = read_file(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: expected UTF-8, found other bytes at {error.start}: {_RESTORE}"
        ) from None
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            logger.warning("%s: an incomplete line is left out", path)
            continue
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise CheckpointError(
                f"{path}, line {number}: expected a JSON object with the whole number step, found "
                f"{brief(value)}: {_RESTORE}"
            )
        lines.append(value)
    return lines

"""The folder of a training run: its settings, metrics and checkpoints."""

import dataclasses
import hashlib
import json
import logging
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
from griffin_eval.training.recipes import Recipe
from griffin_eval.training.step import Params

logger = logging.getLogger(__name__)

RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
NAMES_IN_FILE = {"visible_keys": "window"}  # fields of a recipe that run.json calls otherwise
CHECKPOINTS_KEPT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The settings that determine a run. A run is resumed only with the same settings.

    Attributes:
        recipe: the recipe with its final steps, learning rate and length.
        model: one of `griffin_eval.training.recipes.MODELS`.
        seed: seed of the weights and of the data.
        start: folder of a checkpoint whose weights the run begins with; None for random ones.
        dtype: of weights and activations as a step computes with them. The weights that are kept,
            gradients and the optimizer are float32.
    """

    recipe: Recipe
    model: str
    seed: int
    start: Path | None = None
    dtype: str = "float32"

    def settings(self) -> dict[str, Any]:
        """The contents of ``run.json``, in which the hash stands for a text.

        The number of steps is among them where earlier steps depend on it.
        """
        fields = dataclasses.asdict(self.recipe)
        recipe = {
            NAMES_IN_FILE.get(name, name): value
            for name, value in fields.items()
            if not callable(value)
        }
        if self.recipe.text is not None:
            recipe["text"] = hashlib.sha256(self.recipe.text()).hexdigest()
        if self.recipe.schedule == "constant":
            del recipe["steps"]
        settings = {"recipe": recipe, "model": self.model, "seed": self.seed}
        if self.start is not None:
            settings["from"] = str(self.start)
        if self.dtype != "float32":
            settings["dtype"] = self.dtype
        return json.loads(json.dumps(settings))


def prepare_folder(run: Run, config: GriffinConfig, folder: Path) -> None:
    """Creates the folder of a run, or checks that it is of this run.

    Raises:
        CheckpointError: the folder is of another run, or of none.
    """
    file, wanted = folder / RUN_FILE, run.settings()
    if file.is_file():
        differing = _differing(read_json(file), wanted)  # a field newer than the file: its default
        if differing:
            raise CheckpointError(
                f"{folder} is of another run ({'; '.join(differing)}): name another folder"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there and no run: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FINISHED_FILE).unlink(missing_ok=True)
    file.write_text(json.dumps(wanted, indent=2) + "\n")
    raw = config_json(config, FORMATS["griffin-orbax"], "float32")
    (folder / CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n")
    run.recipe.write_tokenizer(folder)


def _differing(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """A phrase for each setting whose stored value is not the wanted one."""
    defaults = {
        f"recipe.{NAMES_IN_FILE.get(field.name, field.name)}": field.default
        for field in dataclasses.fields(Recipe)
        if field.default is not dataclasses.MISSING
    }
    there, asked = (traverse_util.flatten_dict(settings, sep=".") for settings in (stored, wanted))
    there = json.loads(json.dumps(defaults)) | there
    return [
        f"{key} {there.get(key)} there, {asked.get(key)} asked for"
        for key in asked | {key: None for key in there if key == "from"}
        if there.get(key) != asked.get(key)
    ]


def save(
    folder: Path,
    manager: ocp.CheckpointManager,
    metrics: dict[str, Any],
    params: Params,
    state: Any,
) -> None:
    """Writes a checkpoint, and the line of metrics of its step.

    Raises:
        CheckpointError: they cannot be written.
    """
    step = metrics["step"]
    try:
        # A line without its checkpoint is removed when the run goes on; not the reverse.
        with open(folder / METRICS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        _save_items(manager, step, params, state)
    except (OSError, ValueError) as error:  # Orbax: ValueError, with what TensorStore says
        raise CheckpointError(
            f"{folder}: the checkpoint of step {step} cannot be written ({first_line(error)}): "
            "make room for it and give the command again, which goes on from the one before"
        ) from error


def _wanted(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Waiting for previous save")


def _save_items(manager: ocp.CheckpointManager, step: int, params: Params, state: Any) -> None:
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(_nested(params)),
        optimizer=ocp.args.StandardSave(_plain(state)),
    )
    # Each save is waited for, which Orbax takes for one that the next had to wait for.
    logging.getLogger("absl").addFilter(_wanted)
    manager.save(step, args=items)
    manager.wait_until_finished()  # the arrays are donated to the next step


def restore(
    manager: ocp.CheckpointManager, step: int, params: Params, state: Any
) -> tuple[Params, Any]:
    """Parameters and optimizer state of a checkpoint, laid out as the given ones."""
    template = ocp.args.Composite(
        params=ocp.args.StandardRestore(_nested(params)),
        optimizer=ocp.args.StandardRestore(_plain(state)),
    )
    items = manager.restore(step, args=template)
    restored: Any = traverse_util.flatten_dict(items["params"], sep=".")
    leaves = [items["optimizer"][str(i)] for i in range(len(jax.tree.leaves(state)))]
    return restored, jax.tree.unflatten(jax.tree.structure(state), leaves)


def _nested(params: Params) -> dict[str, Any]:
    return traverse_util.unflatten_dict(params, sep=".")


def _plain(state: Any) -> dict[str, jax.Array]:
    """The leaves of the optimizer's state by their number, as Orbax stores them."""
    return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}


def lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of metrics up to the step of a checkpoint.

    Lines after it, which an interrupted run left, are removed from the file.

    Raises:
        CheckpointError: the file has no line of that step.
    """
    lines = read_metrics(path) if path.is_file() else []
    kept = [line for line in lines if line["step"] <= step]
    if step and (not kept or kept[-1]["step"] != step):
        raise CheckpointError(
            f"{path} has no line of step {step}, whose checkpoint is there: put the file back, or "
            "name another folder"
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    return kept


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; incomplete ones are left out with a warning."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            logger.warning("%s: a line that is not whole is left out", path)
    return lines

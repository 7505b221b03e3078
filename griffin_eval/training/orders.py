"""What a user asks the trainer for, by the options of ``griffin-eval train``, on the command line
or in the lines of a queue file."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from griffin_eval.errors import ArgumentError
from griffin_eval.messages import brief, did_you_mean, first_line
from griffin_eval.training.optimizer import DECAYED, SCHEDULES
from griffin_eval.training.recipes import MODELS, SHORTEST, Recipe, recipe_named
from griffin_eval.training.run_folder import Run

DTYPES = ("float32", "bfloat16")
# Options that take the place of a recipe's field of the same name, but for these.
RECIPE_FIELDS = {"window": "visible_keys"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """One run to make.

    Attributes:
        run: its settings.
        folder: of the run.
        until: as in `griffin_eval.training.trainer.train_model`.
    """

    run: Run
    folder: Path
    until: float | None


def read_order(options: Mapping[str, Any]) -> Order:
    """The run that options ask for, by their long names with underscores; None is not given.

    Raises:
        ArgumentError: an option that does not exist, is missing, or cannot have its value.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in OPTIONS:
            raise ArgumentError(
                f"unknown field {name!r}: expected one of {', '.join(OPTIONS)}"
                f"{did_you_mean(name, OPTIONS)}"
            )
    for name in ("recipe", "model", "output"):
        if name not in given:
            raise ArgumentError(f"{name} is missing: a run needs a recipe, a model and an output")
    for name, value in given.items():
        fits, expected = OPTIONS[name]
        if not fits(value):
            raise ArgumentError(f"{_shown(name)} must be {expected}, found {brief(value)}")
    recipe = recipe_named(given.pop("recipe"))
    model = given.pop("model")
    if model not in MODELS:
        raise ArgumentError(
            f"unknown model {model!r}: expected {', '.join(MODELS)}{did_you_mean(model, MODELS)}"
        )
    start = given.pop("from", None)
    folder, until = Path(given.pop("output")), given.pop("until", None)
    seed, dtype = given.pop("seed", 0), given.pop("dtype", DTYPES[0])
    run = Run(
        recipe=_changed(recipe, given),
        model=model,
        seed=seed,
        start=None if start is None else Path(start).absolute(),
        dtype=dtype,
    )
    run.recipe.config(model)  # whose sizes must fit each other
    return Order(run=run, folder=folder, until=until)


def read_queue(path: Path) -> list[Order]:
    """The runs of a queue file: on each line a JSON object with the options of a run.

    Raises:
        ArgumentError: the file cannot be read or has no line, or a line asks for no possible run,
            or two lines name one folder.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read: {first_line(error)}") from None
    orders: dict[Path, Order] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            order = read_order(_object(line))
            if order.folder in orders:
                raise ArgumentError(f"a line before it has the output {order.folder} too")
        except ArgumentError as error:
            raise ArgumentError(f"{path}, line {number}: {error}") from None
        orders[order.folder] = order
    if not orders:
        raise ArgumentError(f"{path} has no line: expected a JSON object for each run")
    return list(orders.values())


def command(settings: Mapping[str, Any], steps: int, until: float | None = None) -> str:
    """The command that makes a run again, but for its output.

    Args:
        settings: the contents of its ``run.json``.
        steps: that it took.
        until: the accuracy that ended it, or was to end it.
    """
    stored, seed = settings["recipe"], settings["seed"]
    given: dict[str, Any] = {"model": settings["model"], "seed": seed, "steps": steps}
    if "steps" in stored:  # which its learning rates depend on, however early it ended
        given["steps"] = stored["steps"]
        given |= {} if until is None else {"until": until}
    given |= {name: stored[name] for name in ("length", "learning_rate")}
    default = Run(recipe=recipe_named(stored["name"]), model="griffin", seed=0).settings()["recipe"]
    changed = {name: value for name, value in stored.items() if value != default.get(name, value)}
    if "tokens" in changed:
        given["rows"] = max(1, stored["tokens"] // stored["length"])
    given |= {name: value for name, value in changed.items() if name in OPTIONS}
    given |= {name: settings[name] for name in ("from", "dtype") if name in settings}
    words = ["griffin-eval train", stored["name"]]
    for name, value in given.items():
        if name == "curriculum":
            words.append("--no-curriculum")
        else:
            words.append(_shown(name) if value is True else f"{_shown(name)} {value}")
    return " ".join(words)


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"expected a JSON object, found none ({error.msg})") from None
    if not isinstance(value, dict):
        raise ArgumentError(f"expected a JSON object, found {brief(value)}")
    return value


def _changed(recipe: Recipe, given: dict[str, Any]) -> Recipe:
    """A recipe with other values in the place of its own."""
    changes = {RECIPE_FIELDS.get(name, name): value for name, value in given.items()}
    if not changes.pop("curriculum", True):
        changes["curriculum"] = ()
    rows = changes.pop("rows", None)
    recipe = dataclasses.replace(recipe, **changes)
    return recipe if rows is None else dataclasses.replace(recipe, tokens=rows * recipe.length)


def _shown(name: str) -> str:
    return name if name in ("recipe", "output") else f"--{name.replace('_', '-')}"


def _whole(least: int) -> tuple[Any, str]:
    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return fits, f"at least {least}" if least else "0 or more"


def _number(below: float, phrase: str) -> tuple[Any, str]:
    def fits(value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and 0 < value < below

    return fits, phrase


def _one_of(*names: str) -> tuple[Any, str]:
    return (lambda value: value in names), " or ".join(names)


_TEXT = (lambda value: isinstance(value, str | Path)), "a text"
_FLAG = (lambda value: isinstance(value, bool)), "true or false"
_POSITIVE = _number(math.inf, "a number above 0")
_SHARE = _number(1.0 + 1e-9, "a number above 0, at most 1")

# What each option must be, and in which words an error says so.
OPTIONS = {
    "recipe": _TEXT,
    "model": _TEXT,
    "output": _TEXT,
    "from": _TEXT,
    "seed": _whole(0),
    "steps": _whole(1),
    "until": _SHARE,
    "length": _whole(SHORTEST),
    "rows": _whole(1),
    "curriculum": _FLAG,
    "width": _whole(1),
    "heads": _whole(1),
    "lru_width": _whole(1),
    "window": _whole(1),
    "scale_window": _FLAG,
    "rope_fraction": _SHARE,
    "conv_variance": _POSITIVE,
    "learning_rate": _POSITIVE,
    "recurrent_rate": _POSITIVE,
    "schedule": _one_of(*SCHEDULES),
    "decayed": _one_of(*DECAYED),
    "dtype": _one_of(*DTYPES),
}

"""Options of a training run, for ``griffin-eval train`` and the lines of a queue file."""

import dataclasses
import functools
import hashlib
import json
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from griffin_eval.errors import ArgumentError
from griffin_eval.json_files import parse_json
from griffin_eval.messages import brief, first_line
from griffin_eval.training.recipes import (
    MIN_LENGTH,
    MODELS,
    RECIPES,
    Recipe,
    check_name,
    recipe_named,
)

SCHEDULES = ("cosine", "constant", "falling")
DECAYED = ("matrices", "linear")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The settings that determine a run. A run is resumed only with the same settings."""

    recipe: Recipe
    model: str
    seed: int
    start: Path | None = None  # checkpoint with the initial weights
    dtype: str = "float32"  # computations of a step; stored weights and moments are float32

    def settings(self, save_every: int) -> dict[str, Any]:
        """Return the contents of ``run.json``, with a hash in place of a training text.

        The number of steps is included if earlier steps depend on it, and ``save_every``, the
        number of steps between two tests, if their accuracy ends a stage.
        """
        from griffin_eval.training.batches import DATA

        recipe, text = dataclasses.asdict(self.recipe), DATA[self.recipe.name].text
        if text is not None:
            recipe["text"] = hashlib.sha256(text()).hexdigest()
        if self.recipe.schedule == "constant":
            del recipe["steps"]
        settings = {"recipe": recipe, "model": self.model, "seed": self.seed}
        if self.start is not None:
            settings["from"] = str(self.start)
        if self.dtype != "float32":
            settings["dtype"] = self.dtype
        if self.recipe.advance is not None and self.recipe.curriculum:
            settings["save_every"] = save_every
        return json.loads(json.dumps(settings))


# A condition on the value of an option, and its description for errors.
Rule = tuple[Callable[[Any], bool], str]
_NOT_NEGATIVE: Rule = (lambda value: value >= 0), "0 or more"
_COUNT: Rule = (lambda value: value >= 1), "at least 1"
_LENGTH: Rule = (lambda value: value >= MIN_LENGTH), f"at least {MIN_LENGTH}"
_POSITIVE: Rule = (lambda value: 0 < value < math.inf), "a number above 0"
_SHARE: Rule = (lambda value: 0 < value <= 1), "a number above 0, at most 1"
_SCHEDULE: Rule = SCHEDULES.__contains__, " or ".join(SCHEDULES)
_DECAYED: Rule = DECAYED.__contains__, " or ".join(DECAYED)
_DTYPE: Rule = DTYPES.__contains__, " or ".join(DTYPES)
_KEPT: Rule = (lambda v: v == "all" or (v.isdecimal() and int(v) >= 1)), "all or at least 1"

# JSON types that are accepted for a type of option, and their description for errors.
_TYPES: dict[type, tuple[Any, str]] = {
    str: ((str, int), "a text"),
    Path: ((str, Path), "a path"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    bool: (bool, "true or false"),
}


def _option(help: str, rule: Rule | None = None, default: Any = None, names: tuple = ()) -> Any:
    """Return a dataclass field with an option's data; ``names`` override the command's flags."""
    metadata = {"help": help, "rule": rule, "names": names}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of a run; None stands for the recipe's value.

    A field is an option of ``griffin-eval train`` and a key of a queue file's lines, both without
    a trailing underscore.
    """

    recipe: str = _option(f"Recipe: {', '.join(RECIPES)}.", default=MISSING)
    model: str = _option(f"Model: {', '.join(MODELS)}.", default=MISSING)
    output: Path = _option("Folder of the run.", None, MISSING, ("--output", "-o"))
    from_: Path | None = _option("Checkpoint with the initial weights.", names=("--from",))
    seed: int = _option("Seed of weights and data.", _NOT_NEGATIVE, 0)
    steps: int | None = _option("Number of steps.", _COUNT)
    until: float | None = _option("Accuracy of two tests in a row that ends the run.", _SHARE)
    length: int | None = _option("Length of a training sequence in tokens.", _LENGTH)
    rows: int | None = _option("Sequences of a step at this length.", _COUNT)
    curriculum: bool | None = _option("Begin with shorter sequences.")
    width: int | None = _option("Width of the model.", _COUNT)
    heads: int | None = _option("Number of heads and of gate blocks.", _COUNT)
    lru_width: int | None = _option("Channels of the recurrence.", _COUNT)
    window: int | None = _option("Number of keys that local attention sees.", _COUNT)
    scale_window: bool | None = _option("Use shorter windows for shorter sequences.")
    rope_fraction: float | None = _option("Share of each head that RoPE rotates.", _SHARE)
    conv_variance: float | None = _option("Initial variance of convolution outputs.", _POSITIVE)
    learning_rate: float | None = _option("Peak learning rate.", _POSITIVE)
    recurrent_rate: float | None = _option("Factor of the rate in recurrent blocks.", _POSITIVE)
    schedule: str | None = _option(f"Learning rate by step: {', '.join(SCHEDULES)}.", _SCHEDULE)
    decayed: str | None = _option(f"Parameters with weight decay: {', '.join(DECAYED)}.", _DECAYED)
    dtype: str = _option("Dtype of a step: float32 or bfloat16.", _DTYPE, DTYPES[0])
    save_every: int = _option("Number of steps between two checkpoints with tests.", _COUNT, 100)
    keep: str = _option("Number of the latest checkpoints to keep, or all.", _KEPT, "2")
    mesh: str | None = _option("Devices that split batch and weights, such as data=4,model=2.")
    pieces: int = _option("Number of pieces of a batch whose gradients are summed.", _COUNT, 1)
    recompute: bool = _option(
        "Recompute activations to save memory.", None, False, ("--recompute",)
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, _checked(field, value))
        self.run.recipe.config(self.model)  # raises an error for incompatible sizes
        _check_length(self.run.recipe)

    @functools.cached_property
    def run(self) -> Run:
        """The settings of the run: its recipe with the values of these options."""
        check_name("model", self.model, MODELS)
        recipe = recipe_named(self.recipe)
        names = {field.name for field in dataclasses.fields(Recipe)} - {"name", "curriculum"}
        values = {name: getattr(self, name) for name in names if hasattr(self, name)}
        changes: dict[str, Any] = {n: value for n, value in values.items() if value is not None}
        if self.curriculum is False:
            changes["curriculum"] = ()
        if self.rows is not None:
            changes["tokens"] = self.rows * (self.length or recipe.length)
        return Run(
            recipe=dataclasses.replace(recipe, **changes),
            model=self.model,
            seed=self.seed,
            start=None if self.from_ is None else self.from_.absolute(),
            dtype=self.dtype,
        )

    @property
    def checkpoints_kept(self) -> int | None:
        """The number of checkpoints to keep; None for all."""
        return None if self.keep == "all" else int(self.keep)


def _check_length(recipe: Recipe) -> None:
    """Raise ArgumentError if sequences are longer than the texts that they are parts of."""
    from griffin_eval.training.batches import DATA

    data = DATA[recipe.name]
    sizes = [len(text()) for text in (data.text, data.held_out_text) if text is not None]
    if sizes and recipe.length >= min(sizes):
        raise ArgumentError(
            f"--length must be below the {min(sizes)} bytes of the text of the recipe "
            f"{recipe.name}, found {recipe.length}"
        )


FIELDS = {field.name.rstrip("_"): field for field in dataclasses.fields(TrainOptions)}
_NEEDED = [name for name, field in FIELDS.items() if field.default is MISSING]


def option_type(field: dataclasses.Field) -> type:
    """Return the type of an option's value, without None."""
    kinds: Any = typing.get_args(field.type) or (field.type,)
    return kinds[0]


def _checked(field: dataclasses.Field, value: Any) -> Any:
    """Return the value of an option in its type."""
    kind = option_type(field)
    types, words = _TYPES[kind]
    holds, words = field.metadata["rule"] or (lambda value: True, words)
    if isinstance(value, types) and isinstance(value, bool) == (kind is bool):
        try:
            converted = kind(value)
        except OverflowError:  # an integer beyond the range of floats
            converted = math.inf
        if holds(converted):
            return converted
    raise ArgumentError(f"{_shown(field.name)} must be {words}, found {brief(value)}")


def read_options(values: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a run from their values by name; None stands for the default.

    Raises:
        ArgumentError: An option is unknown or missing, or its value is invalid.
    """
    for name in values:
        check_name("field", name, FIELDS)
    for name in _NEEDED:
        if values.get(name) is None:
            raise ArgumentError(f"{name} is missing: a run needs a recipe, a model and an output")
    return TrainOptions(
        **{FIELDS[name].name: value for name, value in values.items() if value is not None}
    )


def read_queue(path: Path, shared: Mapping[str, Any] = {}) -> list[TrainOptions]:
    """Read a queue file, with the options of a run as a JSON object on each line.

    Args:
        shared: Default options of all runs.

    Raises:
        ArgumentError: The file cannot be read or has no line, a line is invalid, or two lines have
            the same output folder.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read: {first_line(error)}") from None
    runs: dict[Path, TrainOptions] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            options = read_options({**shared, **_object(line)})
            if options.output in runs:
                raise ArgumentError(f"an earlier line has the output {options.output} too")
        except ArgumentError as error:
            raise ArgumentError(f"{path}, line {number}: {error}") from None
        runs[options.output] = options
    if not runs:
        raise ArgumentError(f"{path} has no line: expected a JSON object for each run")
    return list(runs.values())


def _object(line: str) -> dict[str, Any]:
    try:
        return parse_json(line.encode())
    except ValueError as error:
        raise ArgumentError(f"expected a JSON object, found {error}") from None


def command(settings: Mapping[str, Any], steps: int, until: float | None = None) -> str:
    """Return the command that repeats a run, from its ``run.json``, without its output."""
    stored = settings["recipe"]
    default = Run(recipe=recipe_named(stored["name"]), model="", seed=0).settings(1)["recipe"]
    options = {"model": settings["model"], "seed": settings["seed"], "steps": steps}
    if "steps" in stored:  # learning rates depend on the planned number
        options |= {"steps": stored["steps"], "until": until}
    options |= {name: stored[name] for name in ("length", "learning_rate")}
    changed = {name: value for name, value in stored.items() if value != default.get(name, value)}
    if "tokens" in changed:
        options["rows"] = max(1, stored["tokens"] // stored["length"])
    options |= {name: value for name, value in changed.items() if name in FIELDS}
    kept = ("from", "dtype", "save_every")
    options |= {name: settings[name] for name in kept if name in settings}
    words = ["griffin-eval train", stored["name"]]
    for name, value in options.items():
        if name == "curriculum":
            words.append("--no-curriculum")
        elif value is not None:
            words.append(_shown(name) if value is True else f"{_shown(name)} {value}")
    return " ".join(words)


def _shown(name: str) -> str:
    """Return the flag of an option in the command."""
    return name if name == "recipe" else f"--{name.strip('_').replace('_', '-')}"

"""config.json as this package writes it: the fields of `GriffinConfig`."""

import dataclasses
from typing import Any

from griffin_eval.config import ADDED, GriffinConfig
from griffin_eval.converters.configs.huggingface import to_huggingface
from griffin_eval.converters.formats import Format
from griffin_eval.errors import CheckpointError

MODEL_TYPE = "griffin"  # of a config.json that holds the fields of GriffinConfig themselves


def read_own_config(raw: dict[str, Any], source: str) -> GriffinConfig:
    names = [field.name for field in dataclasses.fields(GriffinConfig)]
    given: dict[str, Any] = {key: value for key, value in raw.items() if key in names}
    if missing := [n for n in names if n not in given and n not in ADDED]:
        raise CheckpointError(f"{source} lacks {', '.join(missing)}, which a griffin config has")
    try:
        given["block_pattern"] = tuple(given["block_pattern"])
        return GriffinConfig(**given)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {error}") from None


def config_json(config: GriffinConfig, target: Format, dtype: str) -> dict[str, Any]:
    """The config.json of a model in a format, but for the ids of its tokenizer."""
    if target.name == "hf":
        return to_huggingface(config) | {"dtype": dtype}
    return {"model_type": MODEL_TYPE, **dataclasses.asdict(config)}

"""config.json as this package writes it: the fields of `GriffinConfig`."""

import dataclasses
from typing import Any

from griffin_eval.config import ADDED, GriffinConfig
from griffin_eval.converters.configs.huggingface import to_huggingface
from griffin_eval.converters.formats import Format
from griffin_eval.errors import CheckpointError
from griffin_eval.messages import listed

MODEL_TYPE = "griffin"  # marks a config.json that holds the fields of GriffinConfig themselves
# Other keys that such a config.json may have, on which the model's computation does not depend.
# Any further key may be a field of a later version, without which the model would be another one.
_OTHERS = {
    *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "quantization", "quantization_config"),
}


def read_own_config(raw: dict[str, Any], source: str) -> GriffinConfig:
    """Return the config that a config.json of this package states; CheckpointError for a field
    that is missing, not allowed, or not known to this version. Fields that came later than a
    file have their defaults (`ADDED`)."""
    names = [field.name for field in dataclasses.fields(GriffinConfig)]
    if unknown := sorted(raw.keys() - _OTHERS - set(names)):
        raise CheckpointError(
            f"{source} has {listed(unknown)}, which this version does not know and which may "
            "change what the model computes: update griffin-eval, or remove what is no field"
        )
    given: dict[str, Any] = {key: value for key, value in raw.items() if key in names}
    if missing := [n for n in names if n not in given and n not in ADDED]:
        raise CheckpointError(f"{source} lacks {', '.join(missing)}, which a griffin config has")
    try:
        given["block_pattern"] = tuple(given["block_pattern"])
        return GriffinConfig(**given)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {error}") from None


def config_json(config: GriffinConfig, target: Format, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model in a format, but for the ids of its tokenizer."""
    if target.name == "hf":
        return to_huggingface(config) | {"dtype": dtype}
    return {"model_type": MODEL_TYPE, **dataclasses.asdict(config)}

"""Reads and writes the config.json of transformers' RecurrentGemma, and reads its token ids.

An absent key has the default of transformers' RecurrentGemmaConfig.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from griffin_eval.config import BlockType, GriffinConfig
from griffin_eval.converters.formats import FORMATS, check_expressible
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import read_json
from griffin_eval.messages import brief

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

# Names of fields in config.json, and transformers' defaults.
_INTEGERS = {
    "vocab_size": ("vocab_size", 256_000),
    "width": ("hidden_size", 2560),
    "num_heads": ("num_attention_heads", 10),
    "num_layers": ("num_hidden_layers", 26),
    "visible_keys": ("attention_window_size", 2048),
    "conv_width": ("conv1d_width", 4),
}
_NUMBERS = {"logits_soft_cap": ("logits_soft_cap", 30.0), "norm_eps": ("rms_norm_eps", 1e-6)}
_BOOLEANS = {
    "tie_embeddings": ("tie_word_embeddings", True),
    "attention_bias": ("attention_bias", False),
}
_BLOCKS: dict[str, BlockType] = {"recurrent": "recurrent", "attention": "local_attention"}
_ACTIVATION = {"hidden_activation": ("hidden_activation", "gelu_pytorch_tanh")}
_SAME = _INTEGERS | _NUMBERS | _BOOLEANS | _ACTIVATION
_BLOCK_NAMES = {ours: theirs for theirs, ours in _BLOCKS.items()}
# Keys that these models allow only one value: the value, and why others are refused.
_FIXED = {
    # An older key that transformers ignores: it always scales.
    "embeddings_scale_by_sqrt_dim": (True, "transformers scales embeddings all the same"),
}
# transformers' default token ids, which are Gemma's.
TOKEN_IDS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


def read_config(folder: str | Path) -> tuple[GriffinConfig, dict[str, Any]]:
    """Return the config of a Hugging Face folder, and the content of its config.json;
    CheckpointError if the file is missing, or for the reasons of `to_griffin_config`."""
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        found = "the folder lacks it" if path.parent.is_dir() else f"{path.parent} is no folder"
        raise CheckpointError(f"{path}: expected the config of a Hugging Face model, but {found}")
    raw = read_json(path)
    return to_griffin_config(raw, source=str(path)), raw


def to_griffin_config(raw: dict[str, Any], *, source: str) -> GriffinConfig:
    """Return the GriffinConfig that a config.json describes, as transformers would read it;
    CheckpointError for another model type, or every value that these models cannot have."""
    if raw.get("model_type") != "recurrent_gemma":
        found = brief(raw["model_type"]) if "model_type" in raw else "none"
        raise CheckpointError(f"{source}: expected model_type 'recurrent_gemma', found {found}")
    problems: list[str] = []

    def integer(key: str, default: int) -> int:
        value = raw.get(key, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            problems.append(f"{key} must be a positive 32-bit integer, found {brief(value)}")
            return default
        return value

    def number(key: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 < value < 1e30:
            problems.append(f"{key} must be a positive, finite number, found {brief(value)}")
            return 1.0
        return float(value)

    fields: dict[str, Any] = {f: integer(key, default) for f, (key, default) in _INTEGERS.items()}
    fields |= {f: number(key, raw.get(key, default)) for f, (key, default) in _NUMBERS.items()}
    width, heads = fields["width"], fields["num_heads"]
    # transformers halves intermediate_size: it counts the gate and the other branch together.
    fields["mlp_width"] = integer("intermediate_size", 7680) // 2
    fields["lru_width"] = width if raw.get("lru_width") is None else integer("lru_width", width)
    fields["gate_blocks"] = heads

    fields["num_kv_heads"] = heads
    if raw.get("num_key_value_heads") is not None:
        fields["num_kv_heads"] = integer("num_key_value_heads", 1)
    for key, (value, reason) in _FIXED.items():
        found = raw.get(key, value)
        if type(found) is not type(value) or found != value:
            problems.append(f"{key} must be {value!r}, found {brief(found)} ({reason})")
    for field, (key, default) in _BOOLEANS.items():
        fields[field] = raw.get(key, default)
        if not isinstance(fields[field], bool):
            problems.append(f"{key} must be true or false, found {brief(fields[field])}")
    ((field, (key, default)),) = _ACTIVATION.items()
    fields[field] = raw.get(key, default)  # GriffinConfig checks it
    # Keys that transformers computes, or knows under another name; where present, they win there.
    if raw.get("head_dim", width // heads) != width // heads or width % heads:
        fields["head_dim"] = integer("head_dim", width // heads) if "head_dim" in raw else None
    expected = fields["visible_keys"]
    if raw.get("sliding_window", expected) != expected:
        found = brief(raw["sliding_window"])
        problems.append(f"sliding_window must be attention_window_size ({expected}), found {found}")

    fields["block_pattern"] = pattern = _block_pattern(raw, problems)
    if fields["num_layers"] > 100 * len(pattern):
        problems.append(
            f"num_hidden_layers must be at most 100 times the {len(pattern)} block_types, as in "
            f"transformers, found {fields['num_layers']}"
        )
    fields |= _rope(raw, problems, number)
    if not problems:
        try:
            return GriffinConfig(**fields)
        except ValueError as error:
            problems.append(str(error))
    raise CheckpointError(f"{source}: {'; '.join(problems)}")


def stated_fields(raw: dict[str, Any]) -> set[str]:
    """Return the fields of GriffinConfig that a config.json states; others have transformers'
    defaults."""
    nested = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    keys = {field: (key,) for field, (key, _) in _SAME.items()} | {
        "mlp_width": ("intermediate_size",),
        "lru_width": ("lru_width", "hidden_size"),
        "gate_blocks": ("num_attention_heads",),
        "num_kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim", "num_attention_heads"),
        # Models of this type have only one value for each of these.
        **dict.fromkeys(("complex_gates", "absent_biases", "lru_constant"), ("model_type",)),
        "block_pattern": ("block_types", "_block_types"),
        "rope_base": ("rope_theta",),
        "rope_fraction": ("partial_rotary_factor",),
    }
    return {field for field, names in keys.items() if any(n in raw or n in nested for n in names)}


def to_huggingface(config: GriffinConfig) -> dict[str, Any]:
    """Return the config.json of a config, such that transformers computes the same model;
    CheckpointError with every field that it cannot express.

    Token ids and dtype are left to the caller. Versions 4 of transformers read RoPE from the top
    level, later ones from ``rope_parameters``: both are written.
    """
    check_expressible(config, FORMATS["hf"])
    rope = {"rope_theta": float(config.rope_base), "partial_rotary_factor": config.rope_fraction}
    raw = {
        "architectures": ["RecurrentGemmaForCausalLM"],
        "model_type": "recurrent_gemma",
        **{key: getattr(config, field) for field, (key, _) in _INTEGERS.items()},
        **{key: float(getattr(config, field)) for field, (key, _) in _NUMBERS.items()},
        **{key: getattr(config, f) for f, (key, _) in (_BOOLEANS | _ACTIVATION).items()},
        **{key: value for key, (value, _) in _FIXED.items()},
        "intermediate_size": 2 * config.mlp_width,
        "lru_width": config.lru_width,
        "head_dim": config.head_size,
        "num_key_value_heads": config.num_kv_heads,  # absent, it would mean num_attention_heads
        "block_types": [_BLOCK_NAMES[block] for block in config.block_pattern],
        **rope,
        "rope_parameters": {**rope, "rope_type": "default"},
    }
    to_griffin_config(raw, source="the config.json of hf")  # its limits are narrower
    return raw


def generation_eos_ids(folder: str | Path) -> tuple[int, ...]:
    """Return every token id that ends a text, from generation_config.json or else config.json;
    an empty tuple if neither file has any."""
    return _token_ids(folder, "eos_token_id") or ()


def token_ids(folder: str | Path) -> dict[str, Any]:
    """Return the ids of BOS, EOS and padding in the form of config.json, without ids that neither
    config.json nor generation_config.json states."""
    ids = {key: _token_ids(folder, key) for key in TOKEN_IDS}
    return {
        key: list(found) if len(found) > 1 else (*found, None)[0]
        for key, found in ids.items()
        if found is not None
    }


def _token_ids(folder: str | Path, key: str) -> tuple[int, ...] | None:
    """Return the token ids under a key: empty if the key is null, None if no file has it."""
    value, path = None, Path(folder) / GENERATION_FILE
    if path.is_file():
        value = read_json(path).get(key)
    if value is None:
        path = Path(folder) / CONFIG_FILE  # absent in other formats
        raw = read_json(path) if path.is_file() else {}
        if raw.get("model_type") == "recurrent_gemma":
            raw = TOKEN_IDS | raw
        if key not in raw:
            return None
        value = raw[key]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise CheckpointError(
            f"{path}: {key} must be one or more token ids >= 0, found {brief(value)}"
        )
    return tuple(ids)


def _block_pattern(raw: dict[str, Any], problems: list[str]) -> tuple[BlockType, ...]:
    # Versions 4 wrote _block_types, which version 5 ignores in favour of its default.
    written = {key: raw[key] for key in ("block_types", "_block_types") if key in raw}
    if len(written) == 2 and raw["block_types"] != raw["_block_types"]:
        problems.append(f"block_types and _block_types differ: {brief(written)}")
    types = next(iter(written.values()), ["recurrent", "recurrent", "attention"])
    # transformers reads any other word as attention.
    if not isinstance(types, list) or not types or any(t not in list(_BLOCKS) for t in types):
        problems.append(
            f"block_types must be one or more of {', '.join(_BLOCKS)}, found {brief(types)}"
        )
        return ("recurrent", "recurrent", "local_attention")
    return tuple(_BLOCKS[t] for t in types)


def _rope(
    raw: dict[str, Any], problems: list[str], number: Callable[[str, Any], float]
) -> dict[str, float]:
    # transformers' order: rope_scaling replaces rope_parameters, and both win over the top level.
    nested = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(nested, dict) or any(isinstance(v, dict) for v in nested.values()):
        problems.append(f"rope_parameters must be one flat object, found {brief(nested)}")
        nested = {}
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind != "default":
        problems.append(f"rope_type must be 'default', found {brief(kind)}")
    # A null fraction, which transformers reads in one way and, once saved, in another, is refused.
    values = {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 0.5),
    }
    values |= {key: nested[key] for key in values if key in nested}
    return {
        "rope_base": number("rope_theta", values["rope_theta"]),
        "rope_fraction": number("partial_rotary_factor", values["partial_rotary_factor"]),
    }

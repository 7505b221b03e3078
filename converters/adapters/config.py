"""Reads the adapter_config.json of peft's LoRA, rsLoRA and DoRA, and refuses what it does not know.

What only says how an adapter was trained is ignored. Everything else changes what the adapter
computes: a field that is not read here must be absent, null, false or empty.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from griffin_eval.converters.adapters.files import ADAPTER_CONFIG
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import read_json
from griffin_eval.messages import brief, listed

# How it was trained, what it was trained on, and what is only there to find its targets.
_IGNORED = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("task_type", "lora_dropout", "eva_config", "megatron_core", "qalora_group_size"),
    *("runtime_config", "layers_to_transform", "layers_pattern", "exclude_modules"),
}
# Initial values that leave the base as it is; the others take something out of its weights.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_MAX_RANK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What an adapter_config.json says of the arithmetic.

    Attributes:
        rank, alpha: r and α of every module that no pattern names.
        rank_patterns, alpha_patterns: those of others, by regular expression.
        root_of_rank: whether α is divided by the root of the rank (rsLoRA).
        magnitudes: whether every adapted row has a magnitude of its own (DoRA).
        bias: whether maps that B makes have a bias (``lora_bias``).
        ties: whether the output head was kept equal to the embedding.
        saved_modules: endings of the names of modules that were trained in full.
        tokens: ids of the tokens whose embeddings were trained, by the name of the module.
        target_modules: endings of the names of adapted modules, if they are listed in full.
        target_parameters: endings of the names of adapted parameters that belong to no linear map.
    """

    rank: int
    alpha: float
    rank_patterns: Mapping[str, int]
    alpha_patterns: Mapping[str, float]
    root_of_rank: bool
    magnitudes: bool
    bias: bool
    ties: bool
    saved_modules: tuple[str, ...]
    tokens: Mapping[str, tuple[int, ...]]
    target_modules: tuple[str, ...] | None
    target_parameters: tuple[str, ...]

    def rank_of(self, name: str) -> int:
        """The rank for a module, or for a parameter among ``target_parameters``."""
        return _matching(self.rank_patterns, name, self.rank)

    def scale_of(self, name: str) -> float:
        """The factor of B A for the same."""
        rank = self.rank_of(name)
        divisor = math.sqrt(rank) if self.root_of_rank else rank
        return _matching(self.alpha_patterns, name, self.alpha) / divisor

    def unclear_alphas(self, name: str) -> list[str]:
        """The patterns of α that fit the same with different values. peft takes the first one,
        and sorts them when it saves."""
        fitting = {p: alpha for p, alpha in self.alpha_patterns.items() if _fits(p, name)}
        return list(fitting) if len(set(fitting.values())) > 1 else []

    def saves(self, module: str) -> bool:
        """Whether a module was trained in full, apart from whatever it is tied to."""
        return module.endswith(self.saved_modules)


def base_named_in(folder: Path) -> str | None:
    """The base that an adapter's config names; None if it names none, or there is no adapter."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    name = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def read_adapter_config(path: Path) -> AdapterConfig:
    """Reads an adapter_config.json.

    Raises:
        CheckpointError: it cannot be read; it is of another kind than LoRA; every field that has
            a value which cannot be, or which changes the arithmetic in a way that is not known.
    """
    raw = read_json(path)
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path}: expected peft_type 'LORA' (LoRA, rsLoRA or DoRA), found "
            f"{brief(raw.get('peft_type'))}, which is not supported: merge it with peft"
        )
    fields = _Fields(raw)
    config = AdapterConfig(
        rank=fields.rank("r", raw.get("r", 8)),
        alpha=fields.number("lora_alpha", raw.get("lora_alpha", 8)),
        rank_patterns=fields.patterns("rank_pattern", fields.rank),
        alpha_patterns=fields.patterns("alpha_pattern", fields.number),
        root_of_rank=fields.flag("use_rslora"),
        magnitudes=fields.flag("use_dora"),
        bias=fields.flag("lora_bias"),
        ties=fields.flag("ensure_weight_tying"),
        saved_modules=fields.names("modules_to_save"),
        tokens=fields.tokens(),
        target_modules=fields.target_modules(),
        target_parameters=fields.names("target_parameters"),
    )
    if fields.value("bias", "none") not in ("none", "all", "lora_only"):
        fields.problems.append(f"bias is {brief(raw['bias'])}, expected none, all or lora_only")
    initial = fields.value("init_lora_weights")
    if (initial.lower() if isinstance(initial, str) else initial) not in _INITIAL:
        fields.problems.append(
            f"init_lora_weights is {brief(initial)}, which changes the weights of the base: save "
            "the adapter with path_initial_model_for_weight_conversion= of peft"
        )
    unknown = {key: value for key, value in raw.items() if key not in fields.read and value}
    unknown = {k: v for k, v in unknown.items() if k not in _IGNORED | {"peft_type"}}
    if unknown:
        shown = listed(unknown, lambda key: f"{brief(key)} is {brief(unknown[key])}")
        fields.problems.append(f"not supported: {shown}")
    if fields.problems:
        raise CheckpointError(f"{path}: {'; '.join(fields.problems)}")
    return config


class _Fields:
    """The fields of a config, each checked.

    Attributes:
        problems: clauses about those that are wrong.
        read: names of those that were looked at.
    """

    def __init__(self, raw: dict[str, Any]):
        self._raw = raw
        self.problems: list[str] = []
        self.read = {"r", "lora_alpha"}

    def value(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        value = self._raw.get(name)
        return default if value is None else value

    def rank(self, name: str, value: Any) -> int:
        if type(value) is int and 0 < value <= _MAX_RANK:
            return value
        self.problems.append(f"{name} is {brief(value)}, expected a positive rank")
        return 1

    def number(self, name: str, value: Any) -> float:
        if type(value) in (int, float) and abs(value) < 1e30:  # neither NaN nor infinite
            return float(value)
        self.problems.append(f"{name} is {brief(value)}, expected a finite number")
        return 1.0

    def flag(self, name: str) -> bool:
        value = self.value(name, False)
        if not isinstance(value, bool):
            self.problems.append(f"{name} is {brief(value)}, expected true or false")
        return value is True

    def names(self, name: str) -> tuple[str, ...]:
        value = self.value(name, [])
        if isinstance(value, list) and all(isinstance(v, str) and v for v in value):
            return tuple(value)
        self.problems.append(f"{name} is {brief(value)}, expected a list of names")
        return ()

    def patterns(self, name: str, check: Any) -> dict[str, Any]:
        value = self.value(name, {})
        if not isinstance(value, dict):
            self.problems.append(f"{name} is {brief(value)}, expected an object")
            return {}
        for pattern in value:
            if wrong := _wrong_pattern(pattern):
                self.problems.append(f"{name} has the key {brief(pattern)}, {wrong}")
        return {pattern: check(f"{name}[{brief(pattern)}]", v) for pattern, v in value.items()}

    def tokens(self) -> dict[str, tuple[int, ...]]:
        value = self.value("trainable_token_indices", {})
        if isinstance(value, list):
            value = {"embed_tokens": value}
        if isinstance(value, dict):
            lists = value.values()
            if all(
                isinstance(v, list) and all(type(i) is int and i >= 0 for i in v) for v in lists
            ):
                return {module: tuple(ids) for module, ids in value.items() if ids}
        self.problems.append(
            f"trainable_token_indices is {brief(value)}, expected lists of token ids"
        )
        return {}

    def target_modules(self) -> tuple[str, ...] | None:
        narrowing = ("layers_to_transform", "exclude_modules")  # of which 0 is a layer
        partly = any(self._raw.get(key) not in (None, [], "") for key in narrowing)
        value = self.value("target_modules")
        if isinstance(value, str) or value is None or partly:
            return None
        return self.names("target_modules")


def _wrong_pattern(pattern: str) -> str | None:
    """What is wrong with a regular expression; also one that could take for ever to match."""
    if (
        len(pattern) > 1000
        or len(re.findall(r"[*+?{]", pattern)) > 4
        or re.search(r"\)[*+{]", pattern)
    ):
        return "a regular expression with too many repetitions"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"which is no regular expression ({error})"
    return None


def _fits(pattern: str, name: str) -> bool:
    """Whether a pattern fits the end of a name, as peft looks it up."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def _matching(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that fits a name."""
    return next((value for pattern, value in patterns.items() if _fits(pattern, name)), default)

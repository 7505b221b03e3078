"""An adapter as peft saves it, opened: its config, its tensors, and the hash of both.

LoRA, rsLoRA and DoRA are read. What an adapter_config.json says of the training alone is ignored.
Everything else changes what the adapter computes: a field that is not read here must be absent,
null, false or empty. The methods in `BY_PEFT` are left to peft, which reads their fields itself.
"""

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from griffin_eval.converters.containers.container import Container
from griffin_eval.converters.containers.safetensors.reader import ADAPTER_FILE, open_safetensors
from griffin_eval.converters.containers.torch_pt.reader import open_torch, torch_files
from griffin_eval.converters.files import checked_pieces, reading
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.json_files import list_folder, read_json
from griffin_eval.messages import brief, listed, printable

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_PICKLE = "adapter_model.bin"  # read if the safetensors file is absent, as in peft
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_FILE, ADAPTER_PICKLE)
LORA = "LORA"
BY_PEFT = ("LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA")  # merged by `peft_layers`


# Keys about the training, its base, and the search for targets: they do not change the result.
_IGNORED = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("task_type", "lora_dropout", "eva_config", "megatron_core", "qalora_group_size"),
    *("runtime_config", "layers_to_transform", "layers_pattern", "exclude_modules"),
}
_READ = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *("lora_bias", "bias", "ensure_weight_tying", "modules_to_save", "trainable_token_indices"),
    *("target_modules", "target_parameters", "init_lora_weights"),
}
# Fields of the methods in `BY_PEFT` that are read here.
_READ_OF_OTHERS = ("modules_to_save", "target_modules", "layers_to_transform", "exclude_modules")
# Initial values that leave the base's weights alone; all others subtract something from them.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_MAX_RANK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The fields of an adapter_config.json that change the arithmetic.

    Attributes:
        method: `LORA`, or one of `BY_PEFT`.
        rank, alpha: r and α of every module that no pattern names.
        rank_patterns, alpha_patterns: r and α of other modules, by regular expression.
        root_of_rank: Whether α is divided by the root of the rank (rsLoRA).
        magnitudes: Whether every adapted row has a magnitude of its own (DoRA).
        bias: Whether maps that B makes have a bias (``lora_bias``).
        ties: Whether the output head was kept equal to the embedding.
        saved_modules: Endings of the names of modules that were trained in full.
        tokens: Ids of the tokens whose embeddings were trained, by the name of the module.
        target_modules: Endings of the names of adapted modules, if they are listed in full.
        target_parameters: Endings of the names of adapted parameters that belong to no linear
            map.
    """

    method: str
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
        """Return the rank for a module, or for a parameter among ``target_parameters``."""
        return _matching(self.rank_patterns, name, self.rank)

    def scale_of(self, name: str) -> float:
        """Return the factor of B A for a module or parameter."""
        rank = self.rank_of(name)
        divisor = math.sqrt(rank) if self.root_of_rank else rank
        return _matching(self.alpha_patterns, name, self.alpha) / divisor

    def unclear_alphas(self, name: str) -> list[str]:
        """Return the patterns that fit a name but have different α. peft uses the first one in the
        file, and sorts the patterns when it saves."""
        fitting = {p: alpha for p, alpha in self.alpha_patterns.items() if _fits(p, name)}
        return list(fitting) if len(set(fitting.values())) > 1 else []

    def saves(self, module: str) -> bool:
        """Return whether a module itself, not one that it is tied to, was trained in full."""
        return module.endswith(self.saved_modules)


def base_named_in(folder: Path) -> str | None:
    """Return the base that an adapter's config names; None if it names none, or there is no
    adapter."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    name = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read an adapter_config.json; CheckpointError if it cannot be read, is of a method that is not
    known, or for every field that has an impossible value or changes the arithmetic in a way that
    is not known."""
    raw = read_json(path)
    method = raw.get("peft_type")
    if method not in (LORA, *BY_PEFT):
        raise CheckpointError(
            f"{path}: expected peft_type 'LORA' (LoRA, rsLoRA or DoRA) or {', '.join(BY_PEFT)}, "
            f"found {brief(method)}, which is not supported: merge it with peft"
        )
    if method != LORA:
        raw = {name: raw.get(name) for name in _READ_OF_OTHERS}
    problems: list[str] = []

    def take(name: str, fits: Callable[[Any], bool], expected: str, default: Any) -> Any:
        value = default if raw.get(name) is None else raw[name]
        if not fits(value):
            problems.append(f"{name} is {brief(value)}, expected {expected}")
            return default
        return value

    def flag(name: str) -> bool:
        return take(name, lambda value: type(value) is bool, "true or false", False)

    def names(name: str) -> tuple[str, ...]:
        return tuple(take(name, _are_names, "a list of names", []))

    def patterns(name: str, fits: Callable[[Any], bool], expected: str) -> dict[str, Any]:
        found = take(name, lambda value: isinstance(value, dict), "an object", {})
        for pattern, value in found.items():
            if wrong := _wrong_pattern(pattern):
                problems.append(f"{name} has the key {brief(pattern)}, {wrong}")
            if not fits(value):
                place = f"{name}[{brief(pattern)}]"
                problems.append(f"{place} is {brief(value)}, expected {expected}")
        return found

    tokens = take("trainable_token_indices", _are_tokens, "lists of token ids", {})
    if isinstance(tokens, list):
        tokens = {"embed_tokens": tokens}
    targets, narrowing = raw.get("target_modules"), ("layers_to_transform", "exclude_modules")
    partly = any(raw.get(key) not in (None, [], "") for key in narrowing)  # 0 is a layer
    config = AdapterConfig(
        method=method,
        rank=take("r", _is_rank, "a positive rank", 8),
        alpha=take("lora_alpha", _is_number, "a finite number", 8),
        rank_patterns=patterns("rank_pattern", _is_rank, "a positive rank"),
        alpha_patterns=patterns("alpha_pattern", _is_number, "a finite number"),
        root_of_rank=flag("use_rslora"),
        magnitudes=flag("use_dora"),
        bias=flag("lora_bias"),
        ties=flag("ensure_weight_tying"),
        saved_modules=names("modules_to_save"),
        tokens={module: tuple(ids) for module, ids in tokens.items() if ids},
        target_modules=None
        if targets is None or isinstance(targets, str) or partly
        else names("target_modules"),
        target_parameters=names("target_parameters"),
    )
    biases = ("none", "all", "lora_only")
    take("bias", lambda value: value in biases, "none, all or lora_only", "none")
    initial = raw.get("init_lora_weights")
    if (initial.lower() if isinstance(initial, str) else initial) not in _INITIAL:
        problems.append(
            f"init_lora_weights is {brief(initial)}, which changes the weights of the base: save "
            "the adapter with path_initial_model_for_weight_conversion= of peft"
        )
    unknown = {key: value for key, value in raw.items() if value and key not in _IGNORED | _READ}
    if unknown:
        shown = listed(unknown, lambda key: f"{brief(key)} is {brief(unknown[key])}")
        problems.append(f"not supported: {shown}")
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    return config


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= _MAX_RANK


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # neither NaN nor infinite


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) and v for v in value)


def _are_tokens(value: Any) -> bool:
    lists = value.values() if isinstance(value, dict) else [value]
    return all(
        isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids) for ids in lists
    )


def _wrong_pattern(pattern: str) -> str | None:
    """Return what is wrong with a regular expression, such as a match that could take for ever."""
    if (
        len(pattern) > 1000
        or len(re.findall(r"[*+?{]", pattern)) > 4
        or re.search(r"\)[*+{]", pattern)
    ):
        return "a regular expression with too many repetitions"
    try:
        re.compile(_at_end(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        return f"which is no regular expression ({error})"
    return None


def _fits(pattern: str, name: str) -> bool:
    """Return whether a pattern fits the end of a name, by peft's rule."""
    return re.match(_at_end(pattern), name) is not None


def _at_end(pattern: str) -> str:
    """Return the regular expression with which peft looks for a pattern."""
    return rf"(.*\.)?({pattern})$"


def _matching(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that fits a name, or the default."""
    return next((value for pattern, value in patterns.items() if _fits(pattern, name)), default)


class Adapter:
    """An adapter of peft in a folder with ``adapter_config.json`` and
    ``adapter_model.safetensors`` or ``.bin``. CheckpointError if a file is missing, damaged or not
    supported.

    Attributes:
        file: Path of the file of tensors.
        weight: Factor of the adapter's additions to the base.
        config: Content of adapter_config.json.
        container: Tensors of the adapter.
    """

    def __init__(self, folder: Path, weight: float = 1.0):
        self.folder, self.weight = folder, weight
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: expected the folder of an adapter of peft")
        absent = [name for name in (ADAPTER_CONFIG, ADAPTER_FILE) if not (folder / name).is_file()]
        pickled = absent == [ADAPTER_FILE] and (folder / ADAPTER_PICKLE).is_file()
        if absent and not pickled:
            raise CheckpointError(
                f"{folder} holds no adapter of peft: {' and '.join(absent)} missing"
            )
        self.file = folder / (ADAPTER_PICKLE if pickled else ADAPTER_FILE)
        self.config = read_adapter_config(folder / ADAPTER_CONFIG)
        self.container: Container = (
            open_torch(self.file) if pickled else open_safetensors(folder, [self.file])
        )

    @property
    def files(self) -> list[Path]:
        """Paths of the adapter's files."""
        return [self.folder / ADAPTER_CONFIG, self.file]

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of the tensors' file followed by the config, in hexadecimal digits: the output of
        ``cat adapter_model.safetensors adapter_config.json | sha256sum``."""
        total = hashlib.sha256()
        for file in reversed(self.files):
            with reading(file), open(file, "rb") as handle:
                hashlib.file_digest(handle, lambda: total)
        return total.hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the adapter's entry in manifests and results."""
        return {"path": printable(str(self.folder)), "weight": self.weight, "sha256": self.sha256}

    def check_tensors(self) -> None:
        """Raise CheckpointError if a tensor does not match its CRC-32."""
        for name, tensor in self.container.tensors.items():
            if tensor.crc32 is not None:
                for _ in checked_pieces(tensor, name, self.file):
                    pass

    def array(self, name: str, dtype: str) -> np.ndarray:
        """Return a tensor, copied in a dtype; CheckpointError if it holds NaN or infinity, or
        cannot be read."""
        values = self.container.tensors[name]
        values = values.read(values.whole)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.file}: {name} holds NaN or infinity")
        return np.ascontiguousarray(values, dtype)


def parse_adapters(texts: Sequence[str], option: str) -> list[tuple[str, float]]:
    """Return places and weights of adapters in texts such as ``DIR`` or ``DIR=0.7``;
    ArgumentError for a weight that is no finite number."""
    parsed = []
    for text in texts:
        place, equals, number = text.rpartition("=")
        if not equals or os.path.isdir(os.path.expanduser(text)):  # a folder with "=" in its name
            place, number = text, "1"
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight) or not place:
            raise ArgumentError(
                f"{option} {text!r}: expected a folder or hub id, or one with a weight such as "
                "my-adapter=0.7"
            )
        parsed.append((place, weight))
    return parsed


def refuse_lone_adapter(path: Path) -> None:
    """Raise CheckpointError, with the base's name, for a folder that holds an adapter where a
    model is expected."""
    if not path.is_dir() or not (path / ADAPTER_CONFIG).is_file():
        return
    if any(name != ADAPTER_FILE for name in list_folder(path, "*.safetensors")):
        return  # a whole model with an adapter beside it
    has_tensors = (path / ADAPTER_FILE).is_file() or (path / ADAPTER_PICKLE).is_file()
    if (path / "config.json").is_file() and (not has_tensors or torch_files(list_folder(path))):
        return
    base = base_named_in(path)
    named = f"the base that it was trained on, {base!r}" if base else "the base of it"
    raise CheckpointError(
        f"{path} holds only an adapter: give {named}, and the adapter with --adapter or peft="
    )

"""The arguments of a model: name, default, help text and check of each.

lm_eval's ``--model_args``, the options of the commands and the keywords of
`griffin_eval.Evaluator` are parsed into `ModelArguments`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from griffin_eval.arguments import (
    DTYPES,
    FRAMEWORKS,
    model_dtype,
    one_visible_keys,
    option,
    parse_size,
    positive_integer,
    text_argument,
)
from griffin_eval.converters.naming.trainers import TRAINERS
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean

# Unsupported arguments of lm_eval's hf model, and what to do instead.
INSTEAD = {
    "backend": "framework=torch or framework=jax chooses what runs the model",
    "parallelize": "tensor_parallel_size= splits the model over devices",
    "device_map": "tensor_parallel_size= splits the model over devices",
    "tp_plan": "tensor_parallel_size= splits the model over devices",
    "max_memory_per_gpu": "tensor_parallel_size= splits the model over devices",
    "max_cpu_memory": "weights are mapped from the file; dtype=bfloat16 halves their memory",
    "offload_folder": "weights are mapped from the file",
    "delta": "merge the delta into the checkpoint first",
    "autogptq": "GPTQ is not read: take the checkpoint that it was made from",
    "gptqmodel": "GPTQ is not read: take the checkpoint that it was made from",
    "load_in_8bit": "quantise the checkpoint with bitsandbytes, and load it with load=quantised",
    "load_in_4bit": "quantise the checkpoint with bitsandbytes, and load it with load=quantised",
    "gguf_file": "give the .gguf file itself as pretrained=, and preset= if it has no config",
    "mixed_precision_dtype": "dtype= sets the precision of weights and activations",
    "torch_dtype": "it is called dtype",
    "trust_remote_code": "the model's code is part of griffin-eval, none is downloaded",
    "use_fast_tokenizer": "tokenizer.json is always used where there is one",
    "truncation": "max_length= truncates from the left",
    "logits_cache": "logits are computed only where a token is scored",
    "think_end_token": "cut the reasoning with a task filter",
    "enable_thinking": "put the choice into the chat template",
    "chat_template_args": "put the choices into the chat template",
    "attn_implementation": "attention runs the fastest kernel for the device and dtype",
    "pretrained_model_name_or_path": "it is called pretrained",
    "model": "it is called pretrained",
    "path": "it is called pretrained",
}


def _size(name: str, value: Any) -> int:
    return parse_size(str(value), name)


def _batch_size(name: str, value: Any) -> int | str:
    if re.fullmatch(r"auto(:\d+)?", str(value)):
        return "auto"
    return positive_integer(name, value, " or auto")


def _token(name: str, value: Any) -> int:
    if str(value) == "0":
        return 0
    return positive_integer(name, value, " or 0")


def _boolean(name: str, value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ArgumentError(f"{name} must be True or False, found {value!r}")
    return str(value).lower() == "true"


def _one_of(*choices: str, or_nothing: bool = False) -> Callable[[str, Any], str]:
    """Return the check of an argument with a few possible values."""
    expected = f"{choices[0]}, or nothing" if or_nothing else " or ".join(choices)
    if len(choices) > 2:
        expected = ", ".join(choices)

    def check(name: str, value: Any) -> str:
        if value not in choices:
            near = did_you_mean(str(value), choices)
            raise ArgumentError(f"unknown {name} {value!r}: expected {expected}{near}")
        return value

    return check


def _adapters(name: str, value: Any) -> tuple[tuple[str, float], ...]:
    """Return the folders or hub ids of adapters, with their weights."""
    from griffin_eval.converters.adapters.adapter import parse_adapters

    if isinstance(value, list | tuple):
        return tuple(parse_adapters(value, "--adapter"))
    return ((text_argument(name, value), 1.0),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The arguments of a model. Arguments that lm_eval's hf model also has mean the same."""

    pretrained: str = option(
        "Checkpoint in any format: a folder, a .pt or .gguf file, or a hub id.",
        default=dataclasses.MISSING,
    )
    framework: str | None = option("Framework: torch or jax.", _one_of(*FRAMEWORKS))
    dtype: str = option(
        "Dtype of weights and activations; auto is that of the checkpoint.", model_dtype, "auto"
    )
    device: str | None = option("Device by its name in the framework, such as cpu or cuda:0.")
    tensor_parallel_size: int = option(
        "Number of devices that share the weights.", positive_integer, 1, kind=int, minimum=1
    )
    data_parallel_size: int | None = option(
        "Number of replicas of the model; by default as many as the devices make.",
        positive_integer,
        kind=int,
        minimum=1,
    )
    batch_size: int | str = option(
        "Ignored; accepted for compatibility with lm-eval.", _batch_size, 1
    )
    max_batch_size: int | None = option(
        "Maximum number of documents in a step.",
        positive_integer,
        kind=int,
        minimum=1,
    )
    max_length: int | None = option(
        "Length in tokens that contexts are cut to, from the left; unlimited by default.",
        positive_integer,
        kind=int,
        minimum=1,
    )
    load: str | None = option(
        "quantised keeps the matrices of a quantised checkpoint quantised in memory.",
        _one_of("quantised", or_nothing=True),
    )
    peft: tuple[tuple[str, float], ...] = option(
        "Folder or hub id of a LoRA, rsLoRA or DoRA of peft to merge, optionally with a weight "
        "(DIR=0.7). Several are summed.",
        _adapters,
        (),
        kind=list[str],
        flag="--adapter",
    )
    tokenizer: str | None = option(
        "Folder or hub id of the tokenizer; the checkpoint's own by default."
    )
    revision: str | None = option("Branch, tag or commit of a hub id, also of adapters.")
    subfolder: str | None = option("Subfolder that holds the checkpoint.")
    add_bos_token: bool | None = option(
        "Begin texts with BOS; by default as the model was trained.", _boolean, kind=bool
    )
    prefix_token_id: int | None = option(
        "Token that stands for an empty context; by default BOS, or EOS without a BOS.",
        _token,
        kind=int,
    )
    on_merge: str = option(
        "Treatment of a continuation that the tokenizer merges into its context: separate, or "
        "error to refuse it.",
        _one_of("separate", "error"),
        "separate",
    )
    softmax_dtype: str | None = option(
        "Dtype in which logits are normalised; float32 by default, or float64 for float64 models.",
        _one_of(*DTYPES),
    )
    state_budget: int | None = option(
        "Memory for the states of shared beginnings, such as 2GB.", _size
    )
    visible_keys: int | None = option("Number of keys that local attention sees.", None, kind=int)
    preset: str | None = option("Preset for values that neither config nor shapes determine.")
    item: str | None = option(
        "Name of the Orbax item (or .pt entry) that holds the weights.",
    )
    embedding_scale: bool | None = option(
        "Scale the embeddings, or use them as they are stored.", _boolean, kind=bool
    )
    logits_soft_cap: float | None = option("Soft cap of the logits; 0 for none.", None, kind=float)
    names: str | None = option(
        "TOML file that maps the tensor names of this checkpoint, or the name of a built-in one: "
        f"{', '.join(TRAINERS)}."
    )
    accept_differences: bool = option(
        "Read weights even if their trainer computes something else.",
        _boolean,
        False,
        kind=bool,
        flag="--accept-differences",
    )
    check: bool = option(
        "Skip the checksum verification of the weights.",
        _boolean,
        True,
        kind=bool,
        flag="--no-check",
    )
    parity: str | None = option(
        "check compares both frameworks first, and refuses differences beyond rounding.",
        _one_of("check", or_nothing=True),
    )
    token_scores: str | None = option("Folder for the scores of every token.", kind=Path)
    token_states: bool = option(
        "Write the states and gates of all layers into the folder of the scores, too.",
        _boolean,
        False,
        kind=bool,
    )
    state: str | None = option("File of a saved state that every text continues.", kind=Path)
    state_cache: str | None = option(
        "Folder for states after long beginnings of texts, which later runs reuse.", kind=Path
    )
    state_cache_size: int = option(
        "Maximum size of the folder of states; 10GB by default.", _size, 10 * 10**9
    )
    chunk_tokens: int | None = option(
        "Largest number of tokens of a chunk of a context; the question is read after each, and "
        "answered from the surest one.",
        positive_integer,
        kind=int,
        minimum=1,
    )
    chunk_question_lines: int = option(
        "Number of lines at the end of a prompt that are its question.",
        positive_integer,
        1,
        kind=int,
        minimum=1,
    )
    chunk_prefix_lines: int = option(
        "Number of lines at the beginning of a prompt that every chunk gets.",
        _token,
        0,
        kind=int,
        minimum=0,
    )
    chunk_absent: str | None = option("Answer that says that a chunk does not have it.")
    chunk_rule: str = option(
        "Rule of the surest chunk: entropy of the next token, or loglikelihood of the answers.",
        _one_of("entropy", "loglikelihood"),
        "entropy",
    )

    def __post_init__(self) -> None:
        if self.state is not None:
            fixed = ("max_length", "add_bos_token", "prefix_token_id")
            if fixed_too := [name for name in fixed if getattr(self, name) is not None]:
                raise ArgumentError(
                    f"state= and {fixed_too[0]}=: texts go on from the saved state as they are, "
                    f"without BOS and uncut; leave {fixed_too[0]}= out"
                )
        if self.state is not None and self.state_cache is not None:
            raise ArgumentError(
                "state= and state_cache=: the folder holds states of texts from their beginning; "
                "leave one of them out"
            )
        chunking = [name for name in FIELDS if name.startswith("chunk_") and name != "chunk_tokens"]
        stated = [name for name in chunking if getattr(self, name) != FIELDS[name].default]
        if stated and self.chunk_tokens is None:
            raise ArgumentError(f"{stated[0]}= needs chunk_tokens=, the size of a chunk")
        if self.token_states and self.token_scores is None:
            raise ArgumentError(
                "token_states= needs token_scores=, the folder that states are written to"
            )
        if self.token_states and (self.tensor_parallel_size > 1 or self.state is not None):
            raise ArgumentError(
                "token_states= reads layers on one device, from the beginning of a text: leave out "
                "tensor_parallel_size= and state="
            )

    @property
    def overrides(self) -> Overrides:
        """Overrides of what the checkpoint's files say, without adapters."""
        shared = {field.name for field in dataclasses.fields(Overrides)} & FIELDS.keys()
        return Overrides(**{name: getattr(self, name) for name in shared}, check_parts=self.check)

    def named(self, **changes: Any) -> "ModelArguments":
        """Return the same arguments with other values."""
        return dataclasses.replace(self, **changes)


FIELDS = {field.name: field for field in dataclasses.fields(ModelArguments)}
# Arguments that select a checkpoint or override its files.
CHECKPOINT = (
    *("preset", "item", "visible_keys", "embedding_scale", "logits_soft_cap", "names"),
    *("accept_differences", "revision", "subfolder"),
)


def parse_arguments(arguments: Mapping[str, Any]) -> ModelArguments:
    """Return the arguments with their defaults, checked as far as possible without the checkpoint.

    They come from ``--model_args``, a command or Python; None is the default. An ArgumentError
    names the wrong argument, its value and what was expected.
    """
    _refuse_unknown(arguments, [*FIELDS, "window"])
    values = {k: v for k, v in arguments.items() if k in FIELDS and v is not None}
    for name in values:
        parse = FIELDS[name].metadata["parse"]
        if parse is not None:
            values[name] = parse(name, values[name])
    if not values.get("pretrained"):
        raise ArgumentError(
            "model_args of griffin: pretrained= is missing: expected a folder, a .pt file or a hub "
            "id of a checkpoint"
        )
    if "state_cache_size" in values and "state_cache" not in values:
        raise ArgumentError(
            "state_cache_size= needs state_cache=, the folder that it limits "
            "(--state-cache-size needs --state-cache)"
        )
    values["visible_keys"] = one_visible_keys(values.get("visible_keys"), arguments.get("window"))
    return ModelArguments(**values)


def _refuse_unknown(arguments: Mapping[str, Any], names: list[str]) -> None:
    """Refuse unknown arguments, all in one message. An argument of hf's model with a false value
    (``parallelize=False``) is accepted."""
    problems = []
    for name, value in arguments.items():
        if name in names:
            continue
        if name not in INSTEAD:
            problems.append(f"{name}= does not exist{did_you_mean(name, names)}")
        elif value:
            problems.append(f"{name}= is not supported: {INSTEAD[name]}")
    if problems:
        raise ArgumentError(
            f"model_args of griffin: {'; '.join(problems)}. What exists: {', '.join(names)}"
        )

"""``--model_args`` of ``lm_eval --model griffin``: what each means, and how it is checked."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from griffin_eval.arguments import (
    dtype_name,
    one_visible_keys,
    parse_size,
    positive_integer,
    stays_quantised,
    text_argument,
)
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean
from griffin_eval.runners.load import choose_framework
from griffin_eval.runners.protocol import DTYPES

ON_MERGE = ("separate", "error")

# Arguments of lm_eval's hf model that this one does not have, and what to do instead.
_INSTEAD = {
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """What ``--model_args`` can say. Arguments that lm_eval's hf model has too mean the same here.

    Attributes:
        pretrained: checkpoint in any format: a folder, a ``.pt`` file, or a hub id.
        framework: ``torch`` or ``jax``; by default the first of these that is installed.
        dtype: float32, bfloat16, float16, float64, or auto for the checkpoint's. Λ, the gates, the
            recurrence, norms and softmax are float32 at least in all of them.
        device: such as ``cpu`` or ``cuda:0``. lm_eval passes cuda:0 unless told otherwise: where
            there is none, the device that is used instead is logged; any other has to exist. Where
            no device is named by number, JAX uses all that this process has. Under torchrun and
            ``accelerate launch`` (with PyTorch) each process takes its share of the documents, and
            a CUDA device of its own.
        tensor_parallel_size: number of devices that share the weights, each of which holds a part;
            1 by default. With PyTorch each has a process, which is started here.
        data_parallel_size: number of replicas of the model, each on so many devices; by default as
            many as the devices make. With PyTorch these are the processes of torchrun.
        batch_size: a number or ``auto``, which change nothing: a step reads from as many documents
            as are fastest and as memory holds, since no result depends on what is read beside it.
        max_batch_size: upper bound of the number of documents that a step reads from or continues.
        max_length: length in tokens that contexts are cut to, from the left and with one warning;
            unlimited by default. It does not apply to rolling log-likelihoods, which read whole
            documents.
        load: ``quantised`` keeps the matrices of a checkpoint of bitsandbytes or MLX quantised in
            memory, on one device a replica, and dequantises each while it is used; by default all
            are dequantised as they are loaded.
        peft: adapter that is merged into the weights while they are read: a folder as peft saves
            LoRA, rsLoRA and DoRA, or a hub id (`griffin_eval.converters.adapters`).
        tokenizer: folder or hub id, if not the checkpoint's own.
        revision: branch, tag or commit of the hub id, and of the adapter's, as in lm_eval's hf.
        subfolder: subfolder of the folder or repository that holds the checkpoint.
        add_bos_token: whether texts start with BOS; by default as the model was trained.
        prefix_token_id: token that an empty context is scored from; by default BOS, else EOS.
        on_merge: what happens if the tokenizer merges a continuation into the last token of its
            context, which leaves no token to score: ``separate`` encodes it alone, with one
            warning; ``error`` refuses it, as lm_eval's hf does.
        state_budget: memory for states that are kept between steps, such as ``2GB``, in bytes once
            parsed; by default 25% of the free memory. States that do not fit are computed again.
        softmax_dtype: dtype in which logits are normalised, float32 by default (float64 if the
            model is).
        visible_keys: number of keys local attention sees, the query's own included, if not the
            config's. ``window`` is another name for it.
        preset: name of a preset that supplies what neither a config nor the shapes say.
        item: name of the item of an Orbax checkpoint that holds the parameters.
        embedding_scale: whether embeddings are scaled, if not as the config says.
        logits_soft_cap: soft cap of the logits, 0 for none, if not the config's.
        names: file with a table of the checkpoint's own names of tensors, or the name of one that
            ships (`griffin_eval.converters.naming.user_table`).
        accept_differences: whether weights are read although ``names`` says that their trainer
            computes what this model does not.
        check: whether the weights are compared with the manifest beside them, if there is one. A
            run whose weights differ ends before the first answer.
        parity: ``check`` runs a probe in both frameworks first, records the largest differences,
            and refuses a checkpoint where they are not rounding
            (`griffin_eval.crosscheck.parity.check_parity`).
        token_scores: folder for the scores of every token, a file of JSON lines for each task
            (`griffin_eval.lm.token_scores`); by default none are written.
        token_states: whether the states and gates of all layers go there, too, a file of
            safetensors for each request, for which its text is read once more.
        state: file of a saved state, from which every request goes on (`griffin-eval read`).
        state_cache: folder in which states at the ends of long shared beginnings of texts are kept,
            and found again by later runs; by default none are kept.
        state_cache_size: bytes of all files in that folder, 10 GB by default.
    """

    pretrained: str
    framework: str
    dtype: str = "auto"
    device: str | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int | None = None
    batch_size: int | str = 1
    max_batch_size: int | None = None
    max_length: int | None = None
    load: str | None = None
    peft: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    subfolder: str | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    on_merge: str = "separate"
    softmax_dtype: str | None = None
    state_budget: int | None = None
    visible_keys: int | None = None
    preset: str | None = None
    item: str | None = None
    embedding_scale: bool | None = None
    logits_soft_cap: float | None = None
    names: str | None = None
    accept_differences: bool = False
    check: bool = True
    parity: str | None = None
    token_scores: str | None = None
    token_states: bool = False
    state: str | None = None
    state_cache: str | None = None
    state_cache_size: int = 10 * 10**9

    @property
    def overrides(self) -> Overrides:
        """What they say of the checkpoint that its files do not, but for an adapter, which has to
        be found first."""
        return Overrides(
            preset=self.preset,
            item=self.item,
            visible_keys=self.visible_keys,
            embedding_scale=self.embedding_scale,
            logits_soft_cap=self.logits_soft_cap,
            names=self.names,
            accept_differences=self.accept_differences,
            check_parts=self.check,
        )


def parse_arguments(given: Mapping[str, Any]) -> ModelArguments:
    """The arguments with their defaults, each checked as far as it can be without the checkpoint.

    Args:
        given: names and values as lm_eval parses them from ``--model_args``, or from Python.

    Raises:
        ArgumentError: one sentence that names the argument, the value and what was expected.
        MissingExtraError: the framework is not installed.
    """
    fields = [field.name for field in dataclasses.fields(ModelArguments)]
    _refuse_unknown(given, [*fields, "window"])
    values = {name: value for name, value in given.items() if name in fields and value is not None}
    for name, parse in _PARSED.items():
        if name in values:
            values[name] = parse(name, values[name])
    if not values.get("pretrained"):
        raise ArgumentError(
            "model_args of griffin: pretrained= is missing: expected a folder, a .pt file or a hub "
            "id of a checkpoint"
        )
    parity, softmax_dtype = values.get("parity"), values.get("softmax_dtype")
    stays_quantised(values.get("load"))
    if parity not in (None, "check"):
        raise ArgumentError(f"unknown parity {parity!r}: expected check, or nothing")
    if values.get("on_merge") not in (None, *ON_MERGE):
        raise ArgumentError(
            f"unknown on_merge {values['on_merge']!r}: expected {' or '.join(ON_MERGE)}"
        )
    if softmax_dtype not in (None, *DTYPES):
        raise ArgumentError(
            f"unknown softmax_dtype {softmax_dtype!r}: expected {', '.join(DTYPES)}"
            f"{did_you_mean(str(softmax_dtype), DTYPES)}"
        )
    if values.get("state") is not None:
        fixed = ("max_length", "add_bos_token", "prefix_token_id")
        if given_too := [name for name in fixed if values.get(name) is not None]:
            raise ArgumentError(
                f"state= and {given_too[0]}=: texts go on from the saved state as they are, "
                f"without BOS and uncut; leave {given_too[0]}= out"
            )
    if values.get("state") is not None and values.get("state_cache") is not None:
        raise ArgumentError(
            "state= and state_cache=: the folder holds states of texts from their beginning; leave "
            "one of them out"
        )
    if values.get("token_states") and values.get("token_scores") is None:
        raise ArgumentError("token_states= needs token_scores=, the folder that they go to")
    if values.get("state_cache_size") is not None and values.get("state_cache") is None:
        raise ArgumentError("state_cache_size= needs state_cache=, the folder that it is of")
    values["framework"] = choose_framework(values.get("framework"))
    values["visible_keys"] = one_visible_keys(values.get("visible_keys"), given.get("window"))
    return ModelArguments(**values)


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


_PARSED = {
    # lm_eval makes numbers of digits, as in subfolder=12000.
    **dict.fromkeys(
        ("pretrained", "framework", "device", "peft", "tokenizer", "revision", "subfolder")
        + ("preset", "item", "names", "token_scores", "state", "state_cache"),
        text_argument,
    ),
    "dtype": dtype_name,
    "state_cache_size": lambda name, value: parse_size(str(value), name),
    "prefix_token_id": _token,
    "add_bos_token": _boolean,
    "embedding_scale": _boolean,
    "check": _boolean,
    "token_states": _boolean,
    "accept_differences": _boolean,
    "batch_size": _batch_size,
    "max_batch_size": positive_integer,
    "tensor_parallel_size": positive_integer,
    "data_parallel_size": positive_integer,
    "max_length": positive_integer,
    "state_budget": lambda name, value: parse_size(str(value), name),
}


def _refuse_unknown(given: Mapping[str, Any], known: list[str]) -> None:
    """Refuses arguments that do not exist, all in one sentence.

    One that hf has is accepted where it asks for nothing (``parallelize=False``).
    """
    problems = []
    for name, value in given.items():
        if name in known:
            continue
        if name not in _INSTEAD:
            problems.append(f"{name}= does not exist{did_you_mean(name, known)}")
        elif value:
            problems.append(f"{name}= is not supported: {_INSTEAD[name]}")
    if problems:
        raise ArgumentError(
            f"model_args of griffin: {'; '.join(problems)}. What exists: {', '.join(known)}"
        )

"""Loads a checkpoint, its tokenizer and its model for `griffin_eval.lm.model.GriffinLM`."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.huggingface import generation_eos_ids
from griffin_eval.converters.source.companions import tokenizer_folder
from griffin_eval.converters.source.resolve import resolve, resolve_adapter
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.layout import parameter_count
from griffin_eval.lm.arguments import ModelArguments
from griffin_eval.lm.weights_hash import weights_sha256
from griffin_eval.runners.load import choose_framework, load_runners
from griffin_eval.runners.protocol import Runner
from griffin_eval.sharding.launch import Launch
from griffin_eval.states.saved_state import SavedState, check_origin, read_state
from griffin_eval.states.state_cache import StateCache
from griffin_eval.text.bounded import bounded
from griffin_eval.text.load import load_tokenizer
from griffin_eval.text.tokenizer import (
    JSON_FILE,
    MODEL_FILE,
    Tokenizer,
    default_add_bos,
    digest,
)

logger = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """A checkpoint that is ready to run, and the settings that follow from it.

    Attributes:
        arguments: what was asked for.
        checkpoint: the open checkpoint.
        tokenizer: its tokenizer, or the one that was named.
        runners: the model, once for each device.
        softmax_dtype: dtype in which logits are normalised.
        add_bos: whether texts start with BOS.
        prefix_token_id: token that an empty context is scored from.
        eos_ids: tokens that end a generated text.
        state: the saved state that every request goes on from, if one was named.
        parity: differences between the frameworks, if ``parity=check`` measured them here.
    """

    arguments: ModelArguments
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    runners: list[Runner]
    softmax_dtype: str
    add_bos: bool
    prefix_token_id: int
    eos_ids: frozenset[int]
    state: SavedState | None
    parity: dict[str, Any] | None


def load(arguments: ModelArguments, launch: Launch) -> LoadedModel:
    """Opens the checkpoint and its tokenizer, and puts the model on its devices.

    Args:
        arguments: from `griffin_eval.lm.arguments.parse_arguments`.
        launch: which of several processes this is, from `griffin_eval.runners.load.launched`.

    Raises:
        BadInput: an argument or a checkpoint that cannot be used; one sentence says why.
    """
    framework, checkpoint = choose_framework(arguments.framework), _open(arguments)
    config = checkpoint.config
    tokenizer = load_tokenizer(arguments.tokenizer or tokenizer_folder(checkpoint.folder))
    tokenizer = bounded(tokenizer, config.vocab_size)
    prefix_token_id = _prefix_token(tokenizer, arguments.prefix_token_id, config.vocab_size)
    add_bos = arguments.add_bos_token
    if add_bos is None:
        add_bos = default_add_bos(tokenizer, config)
    parity = None
    if arguments.parity == "check" and launch.rank == 0:
        from griffin_eval.crosscheck.parity import check_parity

        parity = check_parity(checkpoint)
    runners = load_runners(
        checkpoint,
        framework=arguments.framework,
        dtype=arguments.dtype,
        device=arguments.device if framework == "jax" else _torch_device(arguments, launch),
        tensor_parallel=arguments.tensor_parallel_size,
        data_parallel=arguments.data_parallel_size,
        launch=launch,
        packed=arguments.load is not None,
    )
    state = None
    if arguments.state is not None:
        state, prefix_token_id, add_bos = _start_from(arguments.state, runners, tokenizer)
    model = LoadedModel(
        arguments,
        checkpoint,
        tokenizer,
        runners,
        arguments.softmax_dtype or ("float64" if runners[0].dtype == "float64" else "float32"),
        bool(add_bos),
        prefix_token_id,
        _eos_ids(checkpoint, tokenizer),
        state,
        parity,
    )
    _log(model)
    return model


def device_for_lm_eval(framework: str, device: str | None) -> str | None:
    """Return None for the device that lm_eval asks for by default, cuda:0, if there is none."""
    if device != "cuda:0":
        return device
    if framework == "jax":
        from griffin_eval.runners import jax_parallel
        from griffin_eval.runners.jax_runner import choose_device

        jax_parallel.initialize()
    else:
        from griffin_eval.runners.torch_runner import choose_device
    try:
        choose_device(device)
    except ArgumentError:
        logger.info("lm_eval asks for the device cuda:0 by default, and there is none here")
        return None
    return device


def _torch_device(arguments: ModelArguments, launch: Launch) -> str | None:
    import torch

    try:
        return launch.device(arguments.device, torch.cuda.device_count())
    except ArgumentError:
        if launch.rank:  # the first process prints the reason
            raise SystemExit(2) from None
        raise


class StagedModel(NamedTuple):
    """Another checkpoint of a model that runs.

    Attributes:
        model: as it will be.
        weights: what `Runner.stage` gave.
        weights_sha256: their hash.
    """

    model: LoadedModel
    weights: Any
    weights_sha256: str


def stage(model: LoadedModel, pretrained: str, revision: str | None) -> StagedModel:
    """Reads another checkpoint of the same model into memory; then its files are not needed.

    Args:
        pretrained, revision: of the other checkpoint, instead of the model's arguments.

    Raises:
        CheckpointError: it cannot be read, or its config, dtype or tokenizer is another.
    """
    if model.state is not None:
        raise ArgumentError("state= is of one checkpoint: leave it out where there are several")
    if model.arguments.load is not None:
        raise ArgumentError("load= is of one checkpoint: leave it out where there are several")
    if model.arguments.state_cache is not None:
        raise ArgumentError(
            "state_cache= is of one checkpoint: leave it out where there are several"
        )
    arguments = dataclasses.replace(model.arguments, pretrained=pretrained, revision=revision)
    checkpoint = _open(arguments)
    differing = []
    if checkpoint.config != model.checkpoint.config:
        differing.append("config")
    if arguments.dtype == "auto" and checkpoint.dtype != model.checkpoint.dtype:
        differing.append(f"dtype ({checkpoint.dtype}, not {model.checkpoint.dtype})")
    if arguments.tokenizer is None:
        digests = [_tokenizer_digest(one.folder) for one in (checkpoint, model.checkpoint)]
        if digests[0] != digests[1]:
            differing.append("tokenizer")
    if differing:
        raise CheckpointError(
            f"{pretrained} is no checkpoint of the same model as {model.arguments.pretrained}: it "
            f"has another {' and '.join(differing)}"
        )
    weights = model.runners[0].stage(checkpoint)
    hashed = weights_sha256(checkpoint, arguments.check)
    return StagedModel(model._replace(arguments=arguments, checkpoint=checkpoint), weights, hashed)


def open_state_cache(model: LoadedModel, weights_sha256: str) -> StateCache:
    """The folder that ``state_cache=`` names.

    Raises:
        BadInput: it cannot be used.
    """
    arguments, runner = model.arguments, model.runners[0]
    assert arguments.state_cache is not None
    return StateCache(
        arguments.state_cache,
        arguments.state_cache_size,
        runner.config,
        weights_sha256,
        model.tokenizer.name.rpartition("@")[2],
        runner.dtype,
        runner.framework,
    )


def _open(arguments: ModelArguments) -> Checkpoint:
    """The checkpoint that was asked for, with its adapter."""
    path = resolve(arguments.pretrained, revision=arguments.revision, subfolder=arguments.subfolder)
    overrides = arguments.overrides
    if arguments.peft is not None:
        adapter = resolve_adapter(arguments.peft, arguments.revision)
        overrides = dataclasses.replace(overrides, adapters=((adapter, 1.0),))
    return Checkpoint(path, overrides)


def _start_from(
    path: str, runners: list[Runner], tokenizer: Tokenizer
) -> tuple[SavedState, int, bool]:
    """Lets all documents go on from the state in a file.

    Returns:
        The state, its last token, from which texts are scored, and that they have no BOS.
    """
    state = read_state(path)
    digest = tokenizer.name.rpartition("@")[2]
    check_origin(path, state, runners[0].config, digest, runners[0].dtype)
    for runner in runners:
        runner.start_from(state)
    return state, state.origin.last_token, False


def _tokenizer_digest(folder: Path) -> str | None:
    place = tokenizer_folder(folder)
    files = (place / name for name in (JSON_FILE, MODEL_FILE))
    return next((digest(file) for file in files if file.is_file()), None)


def _prefix_token(tokenizer: Tokenizer, given: int | None, vocab_size: int) -> int:
    if given is not None:
        if given >= vocab_size:
            raise ArgumentError(
                f"prefix_token_id={given} is not a token: the model has {vocab_size}"
            )
        return given
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ArgumentError(
        "the tokenizer has neither BOS nor EOS: name the token that empty contexts start from "
        "with prefix_token_id="
    )


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    ids = set(generation_eos_ids(checkpoint.folder))
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def _attention(config: GriffinConfig) -> str:
    """Describe the attention of a model for the log."""
    if "local_attention" in config.block_types:
        return f"attention sees {config.visible_keys} keys"
    return "global attention" if "global_attention" in config.block_types else "no attention"


def _log(model: LoadedModel) -> None:
    runner = model.runners[0]
    logger.info(
        "griffin: %s on %s in %s, %d parameters, %s, %s BOS",
        runner.framework,
        ", ".join(runner.device for runner in model.runners),
        runner.dtype,
        parameter_count(runner.config),
        _attention(runner.config),
        "one" if model.add_bos else "no",
    )

"""An opened model, which every command, server and library call runs.

`open_model` is the only way to a model, so the same checks apply everywhere.
"""

import copy
import dataclasses
import logging
import os
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint, collect_not_finite
from griffin_eval.converters.configs.huggingface import generation_eos_ids
from griffin_eval.converters.output.manifest import checksums
from griffin_eval.converters.source.companions import tokenizer_folder
from griffin_eval.converters.source.resolve import resolve, resolve_adapter
from griffin_eval.engine.limits import Limits, limits_for
from griffin_eval.engine.scoring import cause_of_not_finite
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.generators import unchanged_generators
from griffin_eval.json_files import exists
from griffin_eval.layout import parameter_count
from griffin_eval.model_arguments import ModelArguments
from griffin_eval.runners.load import choose_framework, load_runners
from griffin_eval.runners.protocol import Runner
from griffin_eval.sharding.launch import Launch
from griffin_eval.states.saved_state import SavedState, check_origin, check_weights, read_state
from griffin_eval.states.state_cache import StateCache
from griffin_eval.states.weights_hash import start_hashing, weights_sha256
from griffin_eval.text.bounded import bounded
from griffin_eval.text.load import load_tokenizer
from griffin_eval.text.tokenizer import JSON_FILE, MODEL_FILE, Tokenizer, default_add_bos, digest

logger = logging.getLogger(__name__)


def find_checkpoint(arguments: ModelArguments) -> Path:
    """Return the folder or file of a checkpoint, downloaded if it is on the hub."""
    revision = arguments.revision
    is_here, *adapters_here = (
        exists(os.path.expanduser(place))
        for place in (arguments.pretrained, *(place for place, _ in arguments.peft))
    )
    if is_here and not all(adapters_here):
        revision = None  # it is that of an adapter on the hub
    return resolve(arguments.pretrained, revision=revision, subfolder=arguments.subfolder)


def open_checkpoint(arguments: ModelArguments) -> Checkpoint:
    """Open the checkpoint with its adapters. Weights are read on demand."""
    adapters = tuple(
        (resolve_adapter(place, arguments.revision), weight) for place, weight in arguments.peft
    )
    overrides = dataclasses.replace(arguments.overrides, adapters=adapters)
    return Checkpoint(find_checkpoint(arguments), overrides)


def open_model(
    arguments: ModelArguments,
    *,
    checkpoint: Checkpoint | None = None,
    launch: Launch | None = None,
    reads_texts: bool = True,
) -> "OpenModel":
    """Open a checkpoint for a framework, and start to compare its weights with their checksums.

    ``launch`` is this process's place among those of a launcher. ``reads_texts`` checks tokenizer,
    BOS and EOS at once. An argument or a checkpoint that cannot be used raises BadInput, and a
    framework that is not installed MissingExtraError.
    """
    arguments = arguments.named(framework=choose_framework(arguments.framework))
    if checkpoint is None:
        checkpoint = open_checkpoint(arguments)
    checkpoint.check_parts = arguments.check
    model = OpenModel(arguments, checkpoint, launch, reads_texts)
    if reads_texts:
        _ = model.prefix_token_id, model.add_bos
    if model.has_checksums and (launch is None or launch.part == 0):
        _ = model.weights
    return model


class OpenModel:
    """A checkpoint, with its tokenizer, weights and runners opened on first use.

    Attributes:
        arguments: Arguments it was opened with; their framework is installed.
        has_checksums: Whether the weights are compared with checksums.
        parity: Differences between the frameworks if ``parity=check`` measured them.
    """

    def __init__(
        self,
        arguments: ModelArguments,
        checkpoint: Checkpoint,
        launch: Launch | None,
        reads_texts: bool,
    ):
        self.arguments, self.checkpoint, self._launch = arguments, checkpoint, launch
        self._reads_texts = reads_texts
        self.has_checksums = arguments.check and bool(checksums(checkpoint))
        self.parity: dict[str, Any] | None = None

    # Texts

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the checkpoint, or the one in the arguments."""
        folder = self.arguments.tokenizer or tokenizer_folder(self.checkpoint.folder)
        return bounded(load_tokenizer(folder), self.checkpoint.config.vocab_size)

    @property
    def tokenizer_sha256(self) -> str:
        """Digest of the tokenizer's files."""
        return self.tokenizer.name.rpartition("@")[2]

    @cached_property
    def add_bos(self) -> bool:
        """Whether texts begin with BOS."""
        if self.arguments.state is not None:
            return False
        if self.arguments.add_bos_token is not None:
            return self.arguments.add_bos_token
        return default_add_bos(self.tokenizer, self.checkpoint.config)

    @cached_property
    def prefix_token_id(self) -> int:
        """Token before the continuation of an empty context, if there is any."""
        if self.state is not None:
            return self.state.origin.last_token
        chosen, vocab_size = self.arguments.prefix_token_id, self.checkpoint.config.vocab_size
        if chosen is not None:
            if chosen >= vocab_size:
                raise ArgumentError(
                    f"prefix_token_id={chosen} is not a token: the model has {vocab_size}"
                )
            return chosen
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ArgumentError(
            "the tokenizer has neither BOS nor EOS: name the token that empty contexts start from "
            "with prefix_token_id=, or give token ids instead of text"
        )

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a generated text."""
        ids = frozenset(generation_eos_ids(self.checkpoint.folder))
        try:
            eos = self.tokenizer.eos_token_id
        except CheckpointError:  # no tokenizer: prompts are token ids
            return ids
        return ids if eos is None else ids | {eos}

    # Weights

    @property
    def dtype(self) -> str:
        """Dtype of weights and activations."""
        return self.checkpoint.dtype if self.arguments.dtype == "auto" else self.arguments.dtype

    @cached_property
    def weights(self) -> Future[str]:
        """Hash of all weights, computed and compared with the checksums in a thread."""
        return start_hashing(self.checkpoint, self.arguments.check)

    @property
    def weights_sha256(self) -> str:
        """Hash of all weights; waits for it, and raises CheckpointError for a wrong checksum."""
        return self.weights.result()

    def confirm_weights(self) -> None:
        """Wait until the weights have been compared with their checksums, if there are any. A wrong
        checksum raises CheckpointError."""
        if self.has_checksums:
            self.weights.result()

    def check_finite(self, not_finite: list[str]) -> None:
        """Refuse NaN or infinite weights, unless ``check`` is off. A wrong checksum is reported
        first."""
        if not_finite and self.arguments.check:
            self.confirm_weights()
            more = f" and {len(not_finite) - 1} parameters more" if not_finite[1:] else ""
            cause = cause_of_not_finite(self.dtype)
            raise CheckpointError(
                f"{self.checkpoint.path}: {not_finite[0]}{more}: {cause} (check=False or "
                "--no-check loads them as they are)"
            )

    # The model on its devices

    @cached_property
    def runners(self) -> list[Runner]:
        """The model, once for each replica, continuing the saved state if there is one."""
        arguments, launch = self.arguments, self._launch
        if arguments.parity == "check" and (launch is None or launch.rank == 0):
            from griffin_eval.crosscheck.parity import check_parity

            self.parity = check_parity(self.checkpoint)
        # If processes share a model, only the first returns from loading, and checks then.
        alone = launch is None or launch.sharing == 1
        if self.state is not None and alone:
            self._check_state(str(arguments.state), self.state)
        with unchanged_generators(), collect_not_finite() as not_finite:
            runners = load_runners(
                self.checkpoint,
                framework=arguments.framework,
                dtype=arguments.dtype,
                device=self._device(),
                tensor_parallel=arguments.tensor_parallel_size,
                data_parallel=arguments.data_parallel_size,
                launch=launch,
                packed=arguments.load is not None,
            )
        self.check_finite(not_finite)
        if self.state is not None:
            if not alone:
                self._check_state(str(arguments.state), self.state)
            for runner in runners:
                runner.start_from(self.state)
        self._log(runners)
        return runners

    @property
    def runner(self) -> Runner:
        """First replica."""
        return self.runners[0]

    @property
    def softmax_dtype(self) -> str:
        """Dtype in which logits are normalised."""
        wide = "float64" if self.dtype == "float64" else "float32"
        return self.arguments.softmax_dtype or wide

    @cached_property
    def limits(self) -> Limits:
        """Limits of a step; chosen once, so that equal requests get bit-identical results."""
        return limits_for(self.runner, self.arguments.state_budget, self.arguments.max_batch_size)

    def _device(self) -> str | None:
        if self.arguments.framework == "jax" or self._launch is None:
            return self.arguments.device
        import torch

        try:
            return self._launch.device(self.arguments.device, torch.cuda.device_count())
        except ArgumentError:
            if self._launch.rank:  # the first process prints the reason
                raise SystemExit(2) from None
            raise

    # States

    @cached_property
    def state(self) -> SavedState | None:
        """Saved state that every text continues, if the arguments name one."""
        return None if self.arguments.state is None else read_state(self.arguments.state)

    def read_state(self, path: str | Path) -> SavedState:
        """Return a saved state, checked to belong to this model."""
        state = read_state(path)
        self._check_state(path, state)
        return state

    def _check_state(self, path: str | Path, state: SavedState) -> None:
        tokenizer = None if state.origin.tokenizer is None else self.tokenizer_sha256
        check_origin(path, state, self.checkpoint.config, tokenizer, self.dtype)
        check_weights(path, state, self.weights_sha256)

    def open_state_cache(self) -> StateCache | None:
        """Open the folder of states that the arguments name; return None without one."""
        if self.arguments.state_cache is None:
            return None
        return StateCache(
            self.arguments.state_cache,
            self.arguments.state_cache_size,
            self.checkpoint.config,
            self.weights_sha256,
            self.tokenizer_sha256,
            self.dtype,
            self.runner.framework,
        )

    # Other checkpoints of the same model

    def stage(self, pretrained: str, revision: str | None) -> "StagedModel":
        """Read another checkpoint with the same config, dtype and tokenizer into memory; its files
        may then be deleted. Another thread may call this while the model runs."""
        for name in ("state", "load", "state_cache"):
            if getattr(self.arguments, name) is not None:
                raise ArgumentError(
                    f"{name}= applies to one checkpoint: leave it out where there are several"
                )
        arguments = self.arguments.named(pretrained=pretrained, revision=revision)
        checkpoint = open_checkpoint(arguments)
        differing = []
        if checkpoint.config != self.checkpoint.config:
            differing.append("config")
        if arguments.dtype == "auto" and checkpoint.dtype != self.checkpoint.dtype:
            differing.append(f"dtype ({checkpoint.dtype}, not {self.checkpoint.dtype})")
        if arguments.tokenizer is None:
            digests = [_tokenizer_digest(one.folder) for one in (checkpoint, self.checkpoint)]
            if digests[0] != digests[1]:
                differing.append("tokenizer")
        if differing:
            raise CheckpointError(
                f"{pretrained} is no checkpoint of the same model as {self.arguments.pretrained}: "
                f"it has another {' and '.join(differing)}"
            )
        model = copy.copy(self)
        model.__dict__.pop("eos_ids", None)  # other generation settings may lie beside it
        model.arguments, model.checkpoint, model.weights = arguments, checkpoint, Future[str]()
        model.has_checksums = arguments.check and bool(checksums(checkpoint))
        with collect_not_finite() as not_finite:
            weights = self.runner.stage(checkpoint)
        model.weights.set_result(weights_sha256(checkpoint, arguments.check))
        model.check_finite(not_finite)
        return StagedModel(model, weights)

    def _log(self, runners: list[Runner]) -> None:
        runner, bos = runners[0], ""
        if self._reads_texts:
            bos = ", one BOS" if self.add_bos else ", no BOS"
        logger.info(
            "griffin: %s on %s in %s, %d parameters, %s%s",
            runner.framework,
            ", ".join(runner.device for runner in runners),
            runner.dtype,
            parameter_count(runner.config),
            _attention(runner.config),
            bos,
        )


@dataclasses.dataclass
class StagedModel:
    """Another checkpoint of a running model, whose weights are in memory."""

    model: OpenModel  # copy of the model with the new checkpoint
    weights: Any  # argument of `Runner.adopt`

    def adopt(self) -> OpenModel:
        """Replace the weights of the runners, and return the new model."""
        for runner in self.model.runners:
            runner.adopt(self.weights)
        return self.model


def _tokenizer_digest(folder: Path) -> str | None:
    place = tokenizer_folder(folder)
    files = (place / name for name in (JSON_FILE, MODEL_FILE))
    return next((digest(file) for file in files if file.is_file()), None)


def _attention(config: GriffinConfig) -> str:
    """Describe the attention of a model for the log."""
    if "local_attention" in config.block_types:
        return f"attention sees {config.visible_keys} keys"
    return "global attention" if "global_attention" in config.block_types else "no attention"

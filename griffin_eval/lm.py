"""`GriffinLM`: what ``lm_eval --model griffin`` runs."""

import hashlib
import inspect
import logging
import os
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

import griffin_eval
from griffin_eval.converters.checkpoint import Checkpoint, Overrides
from griffin_eval.converters.huggingface_config import generation_eos_ids
from griffin_eval.converters.resolve import resolve
from griffin_eval.errors import ArgumentError
from griffin_eval.generation import Prompt, Sampling, generate
from griffin_eval.hints import nearest
from griffin_eval.layout import parameter_count
from griffin_eval.lm_args import refuse_unknown
from griffin_eval.runners import DTYPES, load_runner
from griffin_eval.scoring import Scorable, Scored, fastest_batch_size, score
from griffin_eval.tokenizer import (
    check_vocabulary,
    default_add_bos,
    encode_with_bos,
    load_tokenizer,
)

NO_LIMIT = 2**31 - 1  # positions are 32-bit integers
DEFAULT_GENERATED_TOKENS = 256  # hf's default

logger = logging.getLogger(__name__)


class GriffinLM(TemplateLM):
    """A Griffin-family checkpoint as an lm-eval model.

    Arguments that hf's model has too mean the same here.

    Args:
        pretrained: checkpoint in any format: a folder, a ``.pt`` file, or a hub id.
        framework: ``torch`` or ``jax``; by default the first of these that is installed.
        dtype: float32, bfloat16, float16, float64, or auto for the checkpoint's. Λ, the gates, the
            recurrence, norms and softmax are float32 at least in all of them.
        device: such as ``cpu`` or ``cuda:0``. lm_eval passes cuda:0 unless told otherwise: where
            there is none, what there is gets used and logged.
        batch_size: rows of a step, or ``auto``: the size that measures fastest on this device.
            (``auto:N`` is ``auto``: the state has a fixed size, so there is nothing to re-measure.)
        max_batch_size: upper bound of ``auto``.
        max_length: unlimited by default; a number cuts contexts to their last tokens, with one
            warning. It does not apply to rolling log-likelihoods, which read whole documents.
        tokenizer: folder or hub id, if not the checkpoint's own.
        revision: of the hub id.
        subfolder: of the folder or repository.
        add_bos_token: whether texts start with BOS; by default as the model was trained.
        prefix_token_id: what an empty context is scored from; by default BOS, else EOS.
        softmax_dtype: in which logits are normalised, float32 by default (float64 if the model is).
        window: number of keys local attention sees, the query's own included, if not the config's.
        preset: supplies what neither a config nor the shapes of the checkpoint say.
        item: which item of an Orbax checkpoint holds the parameters.
        embedding_scale: whether embeddings are scaled, if not as the config says.
        logits_soft_cap: soft cap of the logits, 0 for none, if not the config's.

    Raises:
        BadInput: an argument or a checkpoint that cannot be used; one sentence says why. (It is a
            ValueError.)
    """

    def __init__(
        self,
        pretrained: str,
        framework: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        max_length: int | None = None,
        tokenizer: str | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        softmax_dtype: str | None = None,
        window: int | None = None,
        preset: str | None = None,
        item: str | None = None,
        embedding_scale: bool | None = None,
        logits_soft_cap: float | None = None,
        **unknown: Any,
    ):
        super().__init__()
        _log_like_lm_eval()
        known = [p for p in inspect.signature(GriffinLM).parameters if p != "unknown"]
        refuse_unknown(unknown, known)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ArgumentError("griffin runs in one process: start lm_eval without a launcher")
        self._max_batch_size = _positive("max_batch_size", max_batch_size)
        self._batch_size = _batch_size(batch_size)
        self._max_length = None if max_length is None else _positive("max_length", max_length)
        if softmax_dtype not in (None, *DTYPES):
            raise ArgumentError(
                f"unknown softmax_dtype {softmax_dtype!r}: expected {', '.join(DTYPES)}"
                f"{nearest(str(softmax_dtype), DTYPES)}"
            )

        path = resolve(str(pretrained), revision=revision, subfolder=subfolder)
        overrides = Overrides(preset, item, window, embedding_scale, logits_soft_cap)
        self._checkpoint = checkpoint = Checkpoint(path, overrides)
        config = checkpoint.config
        self.tokenizer = load_tokenizer(tokenizer or checkpoint.folder)
        check_vocabulary(self.tokenizer, config.vocab_size)
        self.runner = load_runner(checkpoint, framework=framework, dtype=dtype, device=device)
        self._revision = revision
        self._softmax_dtype = softmax_dtype or (
            "float64" if self.runner.dtype == "float64" else "float32"
        )
        self._device = self.runner.device
        dialect = config.embedding_scale and config.logits_soft_cap
        self._add_bos = (
            default_add_bos(self.tokenizer, "recurrent_gemma" if dialect else "griffin")
            if add_bos_token is None
            else bool(add_bos_token)
        )
        eos = set(generation_eos_ids(checkpoint.folder))
        if self.tokenizer.eos_token_id is not None:
            eos.add(self.tokenizer.eos_token_id)
        self._eos_ids = frozenset(eos)
        self._prefix_token_id = self._choose_prefix(prefix_token_id)
        self._warned: set[str] = set()
        logger.info(
            "griffin: %s on %s in %s, %d parameters, attention sees %d keys, %s BOS",
            self.runner.framework,
            self.runner.device,
            self.runner.dtype,
            parameter_count(self.runner.config),
            self.runner.config.visible_keys,
            "one" if self._add_bos else "no",
        )

    def _choose_prefix(self, given: int | None) -> int:
        if given is not None:
            if not 0 <= int(given) < self.runner.config.vocab_size:
                raise ArgumentError(
                    f"prefix_token_id={given} is not a token: the model has "
                    f"{self.runner.config.vocab_size}"
                )
            return int(given)
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ArgumentError(
            "the tokenizer has neither BOS nor EOS: say what empty contexts start from with "
            "prefix_token_id="
        )

    # What lm-eval asks of a model

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else -1

    @property
    def prefix_token_id(self) -> int:
        return self._prefix_token_id

    @property
    def max_length(self) -> int:
        return self._max_length or NO_LIMIT

    @property
    def max_gen_toks(self) -> int:
        return DEFAULT_GENERATED_TOKENS

    @property
    def batch_size(self) -> int | str:
        return self._batch_size

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids. With ``add_special_tokens=None`` exactly one BOS where the model wants one,
        also for a text that already starts with it; with False none is added."""
        add_bos = self._add_bos if add_special_tokens is None else add_special_tokens
        return encode_with_bos(self.tokenizer, string, add_bos)

    def get_model_info(self) -> dict[str, Any]:
        """What results.json records of the model."""
        return {
            "model_num_parameters": parameter_count(self.runner.config),
            "model_dtype": self.runner.dtype,
            "model_revision": self._revision or "",
            "model_framework": self.runner.framework,
            "model_device": self.runner.device,
            "model_visible_keys": self.runner.config.visible_keys,
            "model_softmax_dtype": self._softmax_dtype,
            "model_add_bos_token": self._add_bos,
            "griffin_eval_version": griffin_eval.__version__,
        }

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Gives this model a table of its own in the ``--use_cache`` file.

        lm-eval's cache keys do not say which model answered, so that two models on one file would
        read each other's answers.
        """
        if cache_hook.dbdict is not None:
            from sqlitedict import SqliteDict

            table = f"griffin-{self._fingerprint()}"
            SqliteDict(cache_hook.dbdict.filename, tablename=table).close()  # creates it
            cache_hook.dbdict.tablename = table
        super().set_cache_hook(cache_hook)

    def _fingerprint(self) -> str:
        """A hash of all that an answer depends on: weights, config, tokenizer and settings."""
        digest = hashlib.sha256()
        for name in self._checkpoint.dtypes:
            for piece in self._checkpoint.pieces(name):
                digest.update(piece.view(np.uint8).data)
        settings = self.get_model_info() | {
            "config": self.runner.config,
            "tokenizer": self.tokenizer.name,
            "max_length": self._max_length,
            "prefix_token_id": self._prefix_token_id,
        }
        digest.update(repr(sorted(settings.items())).encode())
        return digest.hexdigest()[:32]

    # Requests

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        scorables = []
        for (_, continuation), context_ids, continuation_ids in requests:
            if len(continuation_ids) > self.max_length:
                raise ArgumentError(
                    f"the continuation {continuation[:60]!r}… has {len(continuation_ids)} tokens, "
                    f"more than max_length={self.max_length}"
                )
            ids = self._fit(context_ids + continuation_ids, self.max_length + 1)
            scorables.append(Scorable(ids, len(ids) - len(continuation_ids)))

        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)

        def done(index: int, result: Scored) -> None:
            answers[index] = (float(result.logprobs.sum()), bool(result.greedy.all()))
            self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
            bar.update()

        with self._bar("Running loglikelihood requests", len(requests), disable_tqdm) as bar:
            self._score(scorables, done)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole documents in nats, each read in one stream after exactly one
        prefix token (BOS), however long it is: no windows, and BOS itself is not scored."""
        if self._max_length is not None:
            self._warn_once(
                "max_length does not apply to rolling log-likelihoods: documents are read whole"
            )
        texts = [request.args[0] for request in requests]
        scorables = []
        for text in texts:
            ids = self.tok_encode(text, add_special_tokens=False)
            if ids[:1] != [self._prefix_token_id]:
                ids = [self._prefix_token_id, *ids]
            scorables.append(Scorable(ids, 1))

        answers = [0.0] * len(requests)

        def done(index: int, result: Scored) -> None:
            answers[index] = float(result.logprobs.sum())
            self.cache_hook.add_partial("loglikelihood_rolling", (texts[index],), answers[index])

        total = sum(len(s.tokens) - 1 for s in scorables)
        with self._bar("Running loglikelihood_rolling tokens", total, disable_tqdm) as bar:
            self._score(scorables, done, bar.update)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, cut before the first stop string; requests with the same generation
        arguments run in one batch."""
        asked: list[Any] = [request.args for request in requests]  # (context, arguments)
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, (_, arguments) in enumerate(asked):
            groups.setdefault(repr(sorted(arguments.items())), []).append(index)
        seed = int(np.random.randint(2**31))  # lm_eval seeds numpy's global generator
        with self._bar("Running generate_until requests", len(requests), disable_tqdm) as bar:
            for members in groups.values():
                self._generate(asked, members, seed, answers, bar)
        return answers

    def _generate(
        self, asked: list[Any], members: list[int], seed: int, answers: list[str], bar: tqdm
    ) -> None:
        sampling, until, max_new_tokens = _generation_arguments(asked[members[0]][1])
        if self._max_length is not None and max_new_tokens >= self._max_length:
            raise ArgumentError(
                f"max_gen_toks={max_new_tokens} leaves no room for a prompt in "
                f"max_length={self._max_length}"
            )
        prompts = []
        for index in members:
            ids = self.tok_encode(asked[index][0])
            ids = self._fit(ids or [self._prefix_token_id], self.max_length - max_new_tokens)
            prompts.append(Prompt(ids, max_new_tokens))

        def stop(_: int, ids: list[int]) -> bool:
            # A stop string may be a special token, such as <end_of_turn>.
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            return any(s in text for s in until)

        def done(position: int, ids: list[int]) -> None:
            index = members[position]
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            text = postprocess_generated_text(text, until, None)
            answers[index] = text
            self.cache_hook.add_partial("generate_until", asked[index], text)
            bar.update()

        generate(
            self.runner,
            prompts,
            batch_size=self._rows([len(p.tokens) for p in prompts]),
            eos_ids=self._eos_ids,
            sampling=sampling,
            seed=seed,
            stop=stop,
            done=done,
        )

    # Helpers

    def _score(self, scorables: list[Scorable], done, progress=lambda tokens: None) -> None:
        score(
            self.runner,
            scorables,
            batch_size=self._rows([len(s.tokens) for s in scorables]),
            softmax_dtype=self._softmax_dtype,
            done=done,
            progress=progress,
        )

    def _rows(self, lengths: list[int]) -> int:
        if self._batch_size == "auto":
            self._batch_size = fastest_batch_size(
                self.runner, max(lengths, default=1), self._max_batch_size
            )
            logger.info("batch_size=auto chose %d", self._batch_size)
        return int(self._batch_size)

    def _fit(self, ids: list[int], most: int) -> list[int]:
        if len(ids) > most:
            self._warn_once(
                f"max_length={self._max_length}: longer contexts are cut to their last tokens"
            )
        return ids[-most:]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    @staticmethod
    def _bar(description: str, total: int, disable: bool) -> tqdm:
        return tqdm(total=total, desc=description, disable=True if disable else None)


def _log_like_lm_eval() -> None:
    """Sends this package's log where lm_eval sends its own, at the level it was asked for."""
    theirs, ours = logging.getLogger("lm_eval"), logging.getLogger("griffin_eval")
    if theirs.handlers and not ours.handlers:
        ours.handlers = theirs.handlers
        ours.propagate = False
        ours.setLevel(theirs.level)


def _generation_arguments(asked: dict[str, Any]) -> tuple[Sampling, list[str], int]:
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(asked, DEFAULT_GENERATED_TOKENS))
    until = [s for s in handle_stop_sequences(kwargs.pop("until", None), eos=None) if s]
    max_new_tokens = kwargs.pop("max_gen_toks")
    temperature = float(kwargs.pop("temperature", 0.0))
    do_sample = kwargs.pop("do_sample", False)
    sampling = Sampling(
        (temperature or 1.0) if do_sample else 0.0,
        int(kwargs.pop("top_k", None) or 0),
        float(kwargs.pop("top_p", None) or 1.0),
    )
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}
    unsupported = [k for k, v in kwargs.items() if v is not None and v != neutral.get(k)]
    if unsupported:
        raise ArgumentError(
            f"generation arguments {', '.join(unsupported)} are not supported: expected until, "
            "max_gen_toks, do_sample, temperature, top_k, top_p"
        )
    return sampling, until, max_new_tokens


def _batch_size(value: int | str) -> int | str:
    if str(value).startswith("auto"):
        return "auto"
    return _positive("batch_size", value, " or auto")


def _positive(name: str, value: Any, also: str = "") -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ArgumentError(f"{name} must be a positive integer{also}, found {value!r}")
    return number

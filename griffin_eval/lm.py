"""`GriffinLM`: what ``lm_eval --model griffin`` runs."""

import contextlib
import copy
import dataclasses
import hashlib
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
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
from griffin_eval.converters.resolve import resolve, tokenizer_folder
from griffin_eval.engine import parallel
from griffin_eval.engine.generation import Prompt, Sampling
from griffin_eval.engine.limits import Limits, fastest_rows
from griffin_eval.engine.scoring import Scored
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Forget, Scorable
from griffin_eval.errors import ArgumentError, one_sentence
from griffin_eval.hints import nearest
from griffin_eval.launcher import Group, Launch
from griffin_eval.layout import parameter_count
from griffin_eval.lm_args import refuse_unknown
from griffin_eval.runners import DTYPES, choose_framework, load_runners
from griffin_eval.shared_prefixes import encode_all
from griffin_eval.sizes import parse_size
from griffin_eval.tokenizer import (
    check_vocabulary,
    default_add_bos,
    encode_with_bos,
    load_tokenizer,
    with_one_bos,
)
from griffin_eval.weights_hash import WeightsHash

NO_LIMIT = 2**31 - 1  # positions are 32-bit integers
DEFAULT_GENERATED_TOKENS = 256  # hf's default
STOP_MARGIN = 16  # tokens before a stop string that its first token may depend on
FORGET = {
    "nothing": Forget.NOTHING,
    "recurrent": Forget.RECURRENT,
    "attention": Forget.ATTENTION,
}

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
            there is none, what there is gets used and logged. Where no device is named by number,
            JAX uses all that this process has. Under torchrun and ``accelerate launch`` (with
            PyTorch) each process takes its share of the documents, and a CUDA device of its own.
        batch_size: how many documents, or parts of them, a step reads at a time, or ``auto``: as
            many as measure fastest on this device, for scoring and for generation. (``auto:N`` is
            ``auto``: a state has a fixed size, so there is nothing to re-measure.)
        max_batch_size: upper bound of ``auto``.
        max_length: unlimited by default; a number cuts contexts to their last tokens, with one
            warning. It does not apply to rolling log-likelihoods, which read whole documents.
        tokenizer: folder or hub id, if not the checkpoint's own.
        revision: of the hub id.
        subfolder: of the folder or repository.
        add_bos_token: whether texts start with BOS; by default as the model was trained.
        prefix_token_id: what an empty context is scored from; by default BOS, else EOS.
        state_budget: bytes that states kept between steps may take, such as ``2GB``; by default a
            quarter of the free memory. States that do not fit are computed again.
        softmax_dtype: in which logits are normalised, float32 by default (float64 if the model is).
        window: number of keys local attention sees, the query's own included, if not the config's.
        preset: supplies what neither a config nor the shapes of the checkpoint say.
        item: which item of an Orbax checkpoint holds the parameters.
        embedding_scale: whether embeddings are scaled, if not as the config says.
        logits_soft_cap: soft cap of the logits, 0 for none, if not the config's.
        names: file with a table of the checkpoint's own names of tensors
            (`griffin_eval.converters.names_file`).
        parity: ``check`` runs a probe in both frameworks first, records the largest differences,
            and refuses a checkpoint where they are not rounding
            (`griffin_eval.parity_check.check_parity`).

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
        state_budget: int | str | None = None,
        window: int | None = None,
        preset: str | None = None,
        item: str | None = None,
        embedding_scale: bool | None = None,
        logits_soft_cap: float | None = None,
        names: str | None = None,
        parity: str | None = None,
        **unknown: Any,
    ):
        super().__init__()
        launch = Launch.of_environment()
        _behave_like_lm_eval(launch.rank)
        known = [p for p in inspect.signature(GriffinLM).parameters if p != "unknown"]
        refuse_unknown(unknown, known)
        if parity not in (None, "check"):
            raise ArgumentError(f"unknown parity {parity!r}: expected check, or nothing")
        framework = choose_framework(framework)
        if launch.world_size > 1 and framework == "jax":
            raise ArgumentError(
                "framework=jax uses all devices in one process: start lm_eval without a launcher, "
                "or with framework=torch"
            )
        self._rank, self._world_size = launch.rank, launch.world_size
        self._max_batch_size = _positive("max_batch_size", max_batch_size)
        self._batch_size = _batch_size(batch_size)
        self.batch_sizes: dict[str, int] = {}  # what auto chose, which lm_eval records
        self._state_budget = (
            None if state_budget is None else parse_size(str(state_budget), "state_budget")
        )
        self.stats = Stats()  # of this process
        self._others: list[Stats] = []  # of the other processes
        self._max_length = None if max_length is None else _positive("max_length", max_length)
        if softmax_dtype not in (None, *DTYPES):
            raise ArgumentError(
                f"unknown softmax_dtype {softmax_dtype!r}: expected {', '.join(DTYPES)}"
                f"{nearest(str(softmax_dtype), DTYPES)}"
            )

        path = resolve(str(pretrained), revision=revision, subfolder=subfolder)
        overrides = Overrides(preset, item, window, embedding_scale, logits_soft_cap, names)
        self._checkpoint = checkpoint = Checkpoint(path, overrides)
        config = checkpoint.config
        self.tokenizer = load_tokenizer(tokenizer or tokenizer_folder(checkpoint.folder))
        check_vocabulary(self.tokenizer, config.vocab_size)
        self._parity = None
        if parity == "check" and launch.rank == 0:
            from griffin_eval.parity_check import check_parity

            self._parity = check_parity(checkpoint)
        self._runners = load_runners(
            checkpoint, framework=framework, dtype=dtype, device=launch.device(device)
        )
        self.runner = self._runners[0]
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
        self._weights = WeightsHash(checkpoint)
        self._group = Group(launch) if launch.world_size > 1 else None
        logger.info(
            "griffin: %s on %s in %s, %d parameters, attention sees %d keys, %s BOS",
            self.runner.framework,
            ", ".join(runner.device for runner in self._runners),
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

    # What lm-eval's evaluator asks of several processes

    def all_gather(self, tensor: Any) -> Any:
        return tensor if self._group is None else self._group.all_gather(tensor)

    def gather_object(self, obj: Any, dst: int = 0) -> Any:
        return [obj] if self._group is None else self._group.gather_object(obj, dst)

    def barrier(self) -> None:
        """Waits for all processes, and hears from the others what they have done."""
        if self._group is not None:
            found = self._group.all_gather_object(self.stats)
            self._others = found[: self._rank] + found[self._rank + 1 :]

    # Results

    def get_model_info(self) -> dict[str, Any]:
        """What results.json records of the model, and of the work that it has done so far, which
        is logged too: lm_eval asks at the end of a run."""
        measured = self._measured()
        logger.info(
            "griffin: %d tokens requested, %d computed (%.3g times fewer), %d states evicted, "
            "%.0f tokens/s, %d compilations, %.3g GB at most; %s",
            measured["tokens_requested"],
            measured["tokens_computed"],
            measured["saved_ratio"],
            measured["states_evicted"],
            measured["tokens_per_second"],
            measured["compilations"],
            measured["peak_memory_bytes"] / 1e9,
            measured["kernel"],
        )
        parity = {} if self._parity is None else {"griffin_parity": self._parity}
        return (
            self._identity()
            | {f"griffin_{name}": value for name, value in measured.items()}
            | {"griffin_weights_sha256": self._weights.result(), "griffin_versions": _versions()}
            | parity
        )

    def _identity(self) -> dict[str, Any]:
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

    def _measured(self) -> dict[str, Any]:
        stats = copy.copy(self.stats)
        for other in self._others:
            stats += other
        stats.seconds = max(one.seconds for one in (self.stats, *self._others))
        return dataclasses.asdict(stats) | {
            "saved_ratio": stats.saved_ratio,
            "tokens_per_second": stats.tokens_computed / max(stats.seconds, 1e-9),
            "compilations": sum(runner.compilations for runner in self._runners),
            "peak_memory_bytes": max(runner.peak_memory() for runner in self._runners),
            "devices": len(self._runners) * self._world_size,
            "kernel": f"kernels.rglru, {self.runner.kernel}",
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
        settings = self._identity() | {
            "weights": self._weights.result(),
            "config": self.runner.config,
            "tokenizer": self.tokenizer.name,
            "max_length": self._max_length,
            "prefix_token_id": self._prefix_token_id,
        }
        return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:32]

    # Requests

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation after its context, and whether it is what
        greedy decoding would say.

        The ids are those of lm-eval's own method, but what texts begin with in common is tokenised
        once, rather than twice for every request."""
        encoded = self._encode_pairs([request.args for request in requests])
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def loglikelihood_forgetting(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """`loglikelihood` of a model that loses a part of its memory at the end of the context.

        The third argument of a request says what is lost before the context's last token is read,
        the first token with something to predict: ``nothing``; ``recurrent``, the states of RG-LRU
        and convolutions, which start again from zero; or ``attention``, so that no query sees a key
        from before. The other memory and the positions go on. Requests on one context share it."""
        asked: list[Any] = [request.args for request in requests]
        kinds = [kind for _, _, kind in asked]
        unknown = sorted({str(kind) for kind in kinds} - set(FORGET))
        if unknown:
            raise ArgumentError(f"cannot forget {', '.join(unknown)}: expected {', '.join(FORGET)}")
        encoded = self._encode_pairs([pair for *pair, _ in asked])
        return self._loglikelihood_tokens(
            encoded, disable_tqdm=disable_tqdm, forget=[FORGET[kind] for kind in kinds]
        )

    def _encode_pairs(self, pairs: Sequence[Any]) -> list[tuple[tuple[str, str], Any, Any]]:
        """Of each context and continuation, both of them and their ids."""
        texts: list[str] = []
        for context, continuation in pairs:
            texts += [context.rstrip(), context + continuation] if context else [continuation]
        encoded, ids = [], iter(encode_all(self.tokenizer, texts))
        for context, continuation in pairs:
            if context:  # white space at its end belongs to the continuation
                start, whole = self._with_bos(next(ids)), self._with_bos(next(ids))
                end = whole[len(start) :]
            else:
                whole = next(ids)
                own = whole[:1].tolist() == [self._prefix_token_id]
                start, end = (whole[:1], whole[1:]) if own else ([self._prefix_token_id], whole)
            encoded.append(((context, continuation), start, end))
        return encoded

    def _with_bos(self, ids: np.ndarray) -> np.ndarray:
        """`tok_encode`'s BOS in front of the ids of a text."""
        if not self._add_bos:
            return ids
        bos = self.tokenizer.bos_token_id
        rest = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        return np.concatenate([with_one_bos(self.tokenizer, []), ids[rest:]], dtype=np.int32)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        forget: Sequence[Forget] | None = None,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        scorables = []
        kinds = forget or [Forget.NOTHING] * len(requests)
        for ((_, continuation), context_ids, continuation_ids), kind in zip(
            requests, kinds, strict=True
        ):
            if len(continuation_ids) > self.max_length:
                raise ArgumentError(
                    f"the continuation {continuation[:60]!r}… has {len(continuation_ids)} tokens, "
                    f"more than max_length={self.max_length}"
                )
            if not len(context_ids):  # of a context of nothing but white space, without BOS
                context_ids = [self._prefix_token_id]
            ids = np.concatenate([context_ids, continuation_ids], dtype=np.int32)
            ids = self._fit(ids, self.max_length + 1)
            scorables.append(Scorable(ids, len(ids) - len(continuation_ids), kind))

        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)

        def done(index: int, result: Scored) -> None:
            answers[index] = (float(result.logprobs.sum()), bool(result.greedy.all()))
            if forget is None:  # lm_eval looks up no other kinds
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
            bar.update()

        with self._bar("Running loglikelihood requests", len(requests), disable_tqdm) as bar:
            self._score(scorables, done, name=lambda i: _quoted(requests[i][0][0]))
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole documents in nats, each read in one stream after exactly one
        prefix token (BOS), however long it is: no windows, and BOS itself is not scored.

        The answers are numbers that also hold the log-likelihood of every token, `TokenScores`."""
        if self._max_length is not None:
            self._warn_once(
                "max_length does not apply to rolling log-likelihoods: documents are read whole"
            )
        texts = [request.args[0] for request in requests]
        scorables = []
        for ids in encode_all(self.tokenizer, texts):
            if ids[:1].tolist() != [self._prefix_token_id]:
                ids = np.concatenate([[self._prefix_token_id], ids], dtype=np.int32)
            scorables.append(Scorable(ids, 1))

        answers: list[float] = [0.0] * len(requests)

        def done(index: int, result: Scored) -> None:
            answers[index] = TokenScores(result.logprobs)
            self.cache_hook.add_partial("loglikelihood_rolling", (texts[index],), answers[index])

        total = sum(len(s.tokens) - 1 for s in scorables)
        with self._bar("Running loglikelihood_rolling tokens", total, disable_tqdm) as bar:
            self._score(scorables, done, bar.update, lambda i: _quoted(texts[i]))
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, cut before the first stop string; every request has its own generation
        arguments."""
        asked: list[Any] = [request.args for request in requests]  # (context, arguments)
        answers = [""] * len(requests)
        prompts, untils = [], []
        encoded = encode_all(self.tokenizer, [context for context, _ in asked])
        for (_, arguments), context_ids in zip(asked, encoded, strict=True):
            sampling, until, max_new_tokens = _generation_arguments(arguments)
            if self._max_length is not None and max_new_tokens >= self._max_length:
                raise ArgumentError(
                    f"max_gen_toks={max_new_tokens} leaves no room for a prompt in "
                    f"max_length={self._max_length}"
                )
            ids = self._with_bos(context_ids)
            ids = self._fit(
                ids if len(ids) else np.array([self._prefix_token_id]),
                self.max_length - max_new_tokens,
            )
            prompts.append(Prompt(ids, max_new_tokens, sampling))
            untils.append(until)

        def stop(index: int, ids: list[int]) -> bool:
            # A stop string may be a special token, such as <end_of_turn>. One that has just
            # appeared is within the last tokens, of which each is a byte at least.
            until = untils[index]
            tail = ids[-max(len(s.encode()) for s in until) - STOP_MARGIN :] if until else []
            text = self.tokenizer.decode(tail, skip_special_tokens=False)
            return any(s in text for s in until)

        def done(index: int, ids: list[int]) -> None:
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            text = postprocess_generated_text(text, untils[index], None)
            answers[index] = text
            self.cache_hook.add_partial("generate_until", asked[index], text)
            bar.update()

        with self._bar("Running generate_until requests", len(requests), disable_tqdm) as bar:
            self.stats += parallel.generate(
                self._runners,
                prompts,
                limits=self._limits(generate=True),
                eos_ids=self._eos_ids,
                seed=int(np.random.randint(2**31)),  # lm_eval seeds numpy's global generator
                stop=stop,
                done=done,
                name=lambda i: _quoted(asked[i][0]),
            )
        return answers

    # Helpers

    def _score(
        self,
        scorables: list[Scorable],
        done: Callable[[int, Scored], None],
        progress: Callable[[int], Any] = lambda tokens: None,
        name: Callable[[int], str] = str,
    ) -> None:
        self.stats += parallel.score(
            self._runners,
            scorables,
            limits=self._limits(generate=False),
            softmax_dtype=self._softmax_dtype,
            done=done,
            progress=progress,
            name=name,
        )

    def _limits(self, *, generate: bool) -> Limits:
        rows = self._batch_size
        if rows == "auto":
            what = "generation" if generate else "scoring"
            if what not in self.batch_sizes:
                self.batch_sizes[what] = fastest_rows(
                    self.runner, self._max_batch_size, generate=generate
                )
                logger.info("batch_size=auto chose %d for %s", self.batch_sizes[what], what)
            rows = self.batch_sizes[what]
        return Limits(self.runner.step_tokens, int(rows), self._state_budget)

    def _fit(self, ids: np.ndarray, most: int) -> np.ndarray:
        if len(ids) > most:
            self._warn_once(
                f"max_length={self._max_length}: longer contexts are cut to their last tokens"
            )
        return ids[-most:]

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    @contextlib.contextmanager
    def _bar(self, description: str, total: int, disable: bool) -> Iterator[tqdm]:
        """A progress bar; however what it shows ends, the ``--use_cache`` file has all answers."""
        hidden = True if disable or self._rank else None
        try:
            with tqdm(total=total, desc=description, disable=hidden) as bar:
                yield bar
        finally:
            if self.cache_hook.dbdict is not None:
                self.cache_hook.dbdict.commit()  # answers are written by a thread


class TokenScores(float):
    """The log-likelihood of a text in nats.

    Attributes:
        tokens: float64, the log-likelihood of each of its tokens.
    """

    tokens: np.ndarray

    def __new__(cls, tokens: np.ndarray) -> "TokenScores":
        score = super().__new__(cls, tokens.sum())
        score.tokens = tokens
        return score

    def __getnewargs__(self) -> tuple[Any]:
        return (self.tokens,)


def _quoted(text: str) -> str:
    """A request by the end of its text, where requests differ."""
    return repr(text if len(text) <= 60 else f"…{text[-60:]}")


def _behave_like_lm_eval(rank: int) -> None:
    """Where lm_eval's command line runs: logs go where it sends its own, at the level it was asked
    for, and what a user can mend ends with one sentence. Of several processes the first one logs.
    """
    theirs, ours = logging.getLogger("lm_eval"), logging.getLogger("griffin_eval")
    if theirs.handlers and not ours.handlers:
        ours.handlers = theirs.handlers
        ours.propagate = False
        ours.setLevel(theirs.level)
        sys.excepthook = one_sentence
    if rank:
        ours.setLevel(logging.ERROR)


def _versions() -> dict[str, str]:
    """Of what computes: those that are installed."""
    found = {}
    for name in ("torch", "jax", "jaxlib", "flax", "transformers", "lm_eval"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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

"""What a task asks of a model, as lm-eval's own hf model understands it.

Tokens and expected answers here come from transformers alone; only the prefix tree that counts the
tokens is this package's.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from benchmarks.evaluation.requests import HEAD, ask
from benchmarks.flops import Work, prompt_work, scoring_work
from benchmarks.model_flops import logit_flops, reading_flops
from griffin_eval._plugin import install
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.engine.tree import Scorable

UNCLEAR = 1e-3  # logits closer than this may change places by rounding

_HFLM: Any = HFLM  # lm_eval's decorator hides its type


def plan(checkpoint: str, doubtful: list[int], **requests: Any) -> dict[str, Any]:
    """Tokens and work of a task, and what to expect of it.

    Args:
        checkpoint: Hugging Face folder.
        doubtful: log-likelihood requests of which to say whether rounding decides the greedy flag.
        requests: arguments of `ask`.

    Returns:
        ``kinds``, the methods of a model that were called; the fields of `Work`; ``decode_flops``,
        which a generated token takes at least; ``rolling``, of each document the log-likelihood of
        its first `HEAD` tokens after one BOS, in one pass; ``unclear``, those of ``doubtful`` that
        rounding decides.
    """
    install()
    lm = _Plan(checkpoint, doubtful)
    ask(lm, **requests)
    work = {name: sum(getattr(w, name) for w in lm.works) for name in Work._fields}
    return work | {
        "kinds": lm.kinds,
        "decode_flops": lm.decode_flops,
        "rolling": lm.rolling,
        "unclear": lm.unclear,
    }


class _Plan(_HFLM):
    """Takes down what it is asked and makes nothing of it."""

    def __init__(self, checkpoint: str, doubtful: list[int]):
        super().__init__(pretrained=checkpoint, dtype="float32", device="cpu", batch_size=1)
        self._architecture = Checkpoint(checkpoint).config
        self._doubtful = doubtful
        self.kinds: list[str] = []
        self.works: list[Work] = []
        self.rolling: list[float] = []
        self.unclear: list[int] = []
        self.decode_flops = 0

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        self.kinds.append("loglikelihood")
        scorables = [Scorable(context + new, len(context)) for _, context, new in requests]
        self.works.append(scoring_work(self._architecture, scorables))
        self.unclear = [
            i
            for i, (_, context, new) in enumerate(requests)
            if i in self._doubtful and self._is_unclear(context + new, len(context))
        ]
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        self.kinds.append("loglikelihood_rolling")
        bos = self.prefix_token_id
        documents = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            documents.append(ids if ids[:1] == [bos] else [bos, *ids])
        scorables = [Scorable(ids, 1) for ids in documents]
        self.works.append(scoring_work(self._architecture, scorables))
        self.rolling = [self._one_pass(ids[: HEAD + 1]) for ids in documents]
        return [0.0] * len(requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self.kinds.append("generate_until")
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        self.works.append(prompt_work(self._architecture, prompts))
        shortest = min(len(ids) for ids in prompts)
        token = reading_flops(self._architecture, np.array([shortest - 1]))
        self.decode_flops = token + logit_flops(self._architecture)
        return [""] * len(requests)

    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].double()

    def _one_pass(self, ids: list[int]) -> float:
        logprobs = self._logits(ids)[:-1].log_softmax(-1)
        return float(logprobs[range(len(ids) - 1), ids[1:]].sum())

    def _is_unclear(self, ids: Sequence[int], start: int) -> bool:
        """Whether rounding may decide if every token from ``start`` on is the likeliest."""
        logits, which = self._logits(ids)[start - 1 : -1], range(len(ids) - start)
        target = logits[which, ids[start:]]
        logits[which, ids[start:]] = -math.inf
        lead = target - logits.max(-1).values
        return bool((lead >= -UNCLEAR).all() and (lead <= UNCLEAR).any())

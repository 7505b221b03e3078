"""The work of a task for a model: its requests, their prefix tree, and FLOPs.

Tokens come from lm_eval's own hf model; only the prefix tree that counts them is this package's.
``python -m benchmarks.evaluation.plan`` answers requests for `plan` (`benchmarks.timing.serve`).
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from benchmarks.model_flops import logit_flops, reading_flops
from benchmarks.timing import serve
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.engine.tree import Edge, Scorable, Tree, build, build_prompts
from griffin_eval.errors import ArgumentError

_HFLM: Any = HFLM  # lm_eval's decorator hides its type


class Work(NamedTuple):
    """The least work that answers some requests.

    Attributes:
        requested: Tokens of the requests, each read by itself.
        unique: Tokens of their prefix tree.
        flops: Operations that read the unique tokens, with logits where something is scored.
    """

    requested: int
    unique: int
    flops: int


def scoring_work(config: GriffinConfig, sequences: Sequence[Scorable]) -> Work:
    """Return the work of scoring sequences; their last tokens are not read."""
    tree = build(sequences)
    scored = sum(
        len(np.unique(np.concatenate([np.arange(t.start, t.end) for t in edge.targets])))
        for edge in _edges(tree)
        if edge.targets
    )
    flops = reading_flops(config, _positions(tree)) + scored * logit_flops(config)
    return Work(sum(len(s.tokens) - 1 for s in sequences), tree.tokens, flops)


def prompt_work(config: GriffinConfig, prompts: Sequence[Sequence[int]]) -> Work:
    """Return the work of reading prompts without their last tokens, which decoding reads."""
    tree = build_prompts([tokens[:-1] for tokens in prompts])
    requested = sum(len(tokens) - 1 for tokens in prompts)
    return Work(requested, tree.tokens, reading_flops(config, _positions(tree)))


def _edges(tree: Tree) -> Iterator[Edge]:
    pending = list(tree.roots)
    while pending:
        edge = pending.pop()
        yield edge
        pending += edge.children


def _positions(tree: Tree) -> np.ndarray:
    parts = [np.arange(edge.start, edge.end) for edge in _edges(tree)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def plan(checkpoint: str, task: str, limit: int, tasks_path: str | None) -> dict[str, Any]:
    """Return the work of a task: the fields of `Work`; ``kinds``, the methods of a model that were
    called; and ``decode_flops``, the least operations of a generated token.

    Raises:
        ArgumentError: There is no such task.
    """
    manager = TaskManager(include_path=tasks_path)
    if not manager.match_tasks([task]):
        where = f" or in {tasks_path}" if tasks_path else ""
        raise ArgumentError(
            f"task {task!r}: lm_eval{where} has no such task; `lm_eval ls tasks` lists them, "
            "--tasks-path adds a folder"
        )
    lm = _Plan(checkpoint)
    simple_evaluate(
        lm, tasks=[task], limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=False
    )
    work = {name: sum(getattr(w, name) for w in lm.works) for name in Work._fields}
    return work | {"kinds": lm.kinds, "decode_flops": lm.decode_flops}


class _Plan(_HFLM):
    """A model that records the work of its requests and computes nothing."""

    def __init__(self, checkpoint: str):
        super().__init__(pretrained=checkpoint, dtype="float32", device="cpu", batch_size=1)
        self._architecture = Checkpoint(checkpoint).config
        self.kinds: list[str] = []
        self.works: list[Work] = []
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
        self.works.append(scoring_work(self._architecture, [Scorable(ids, 1) for ids in documents]))
        return [0.0] * len(requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        self.kinds.append("generate_until")
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        self.works.append(prompt_work(self._architecture, prompts))
        shortest = min(len(ids) for ids in prompts)
        token = reading_flops(self._architecture, np.array([shortest - 1]))
        self.decode_flops = token + logit_flops(self._architecture)
        return [""] * len(requests)


if __name__ == "__main__":
    serve(sys.modules[__name__])

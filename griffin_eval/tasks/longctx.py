"""Loss on long documents: by position, and by how much of the same document comes before.

Figure 5 of the Griffin paper (De et al., 2024) and figure 10 of its appendix G show the loss on
books and on arXiv articles for longer and longer sequences. That has two readings, which are two
tasks here, since a curve of one says nothing about the other:

- ``griffin_longctx_position``: whole documents, each read once from its start; the loss of the
  tokens up to position 128, from there to 256, and so on, doubling. Later bins hold other tokens
  than earlier ones, of fewer and longer documents.
- ``griffin_longctx_context``: the loss of the same tokens of the same documents after the last 128,
  256 … 32768 tokens before them, and after the whole document before them. From point to point
  nothing differs but the context.

All requests are plain log-likelihoods of a text after a text, so that any model can answer. Griffin
reads a document once for all bins, and once for all whole contexts in it.
"""

import logging
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance

from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import CurveTask, Item, as_split
from griffin_eval.tasks.metadata import integers, ordered, tokenizer_of
from griffin_eval.tasks.texts import SLACK, Document, documents

FIRST = 128
CONTEXTS = tuple(128 << n for n in range(9))  # to 32768
TARGETS, SPAN = 2, 64
WHOLE = "whole"

logger = logging.getLogger(__name__)


class LossTask(CurveTask):
    """A task whose documents are parts of a text to score, each after some of what is before it.

    A row has ``text``, and for each request its ``label``, the characters at which its ``context``,
    its continuation (``start``) and their ``end`` are, and the ``tokens`` of the continuation.
    """

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> list[Instance]:
        text = doc["text"]
        return [
            Instance(
                request_type=self.request_type(doc, i),
                doc=doc,
                arguments=(text[context:start], text[start:end], *self.more(doc, i)),
                idx=i,
                metadata=kwargs["metadata"],
            )
            for i, (context, start, end) in enumerate(
                zip(doc["context"], doc["start"], doc["end"], strict=True)
            )
        ]

    def request_type(self, doc: dict[str, Any], index: int) -> Any:
        """What lm_eval calls the request of that number."""
        return "loglikelihood"

    def more(self, doc: dict[str, Any], index: int) -> tuple[str, ...]:
        """Arguments of the request after context and continuation."""
        return ()

    def labels(self) -> list[str]:
        """All labels of requests, numbers first and in order."""
        found = {label for labels in self.dataset["test"]["label"] for label in labels}
        return sorted(found, key=lambda label: (not label.isdigit(), label.zfill(12)))


class LongContext(LossTask):
    """The task of lm_eval: ``nats_per_token@x`` and ``bits_per_byte@x``, x a position or length."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        for quantity in ("nats_per_token", "bits_per_byte"):
            for label in self.labels():
                self.declare(f"{quantity}@{label}", "ratio", higher_is_better=False)

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        if "bypass" in self._metric_fn_list:  # --predict_only
            return super().process_results(doc, results)
        items = {}
        for i, (label, (loglikelihood, _)) in enumerate(zip(doc["label"], results, strict=True)):
            nats = -float(loglikelihood)
            size = len(doc["text"][doc["start"][i] : doc["end"][i]].encode())
            items[f"nats_per_token@{label}"] = Item(nats, doc["tokens"][i], doc["name"])
            items[f"bits_per_byte@{label}"] = Item(nats / math.log(2), size, doc["name"])
        return self.scores(items)


def positions(
    document: Any = None,
    samples: int | None = None,
    max_tokens: int | None = None,
    first: int = FIRST,
    seed: int = 0,
    **model: Any,
) -> dict[str, Any]:
    """The split of ``griffin_longctx_position``. lm_eval passes what ``--metadata`` says, and the
    arguments of the model, which name the tokenizer.

    Args:
        document: see `griffin_eval.tasks.texts.documents`.
        samples: how many documents; None for all.
        max_tokens: where to cut longer documents; None for nowhere.
        first: tokens of the first bin, each of the others being as long as all before it.
        seed: of the order of the documents.
        model: names the tokenizer.
    """
    task = "griffin_longctx_position"
    integers(task, first=first, **_given(samples=samples, max_tokens=max_tokens))
    integers(task, 0, seed=seed)
    rows = []
    for found in documents(tokenizer_of(**model), document, seed, max_tokens):
        edges, edge, labels = [0], first, []
        while edges[-1] < found.tokens:
            edges.append(found.cut(edge) if edge < found.tokens else found.tokens)
            labels.append(str(edge))
            edge *= 2
        spans = [(0, begin, end) for begin, end in zip(edges, edges[1:], strict=False)]
        rows.append(row(found, labels, spans))
        if len(rows) == samples:
            break
    return as_split(rows)


def contexts(
    document: Any = None,
    samples: int | None = None,
    max_tokens: int | None = None,
    contexts: Sequence[int] = CONTEXTS,
    targets: int = TARGETS,
    span: int = SPAN,
    seed: int = 0,
    **model: Any,
) -> dict[str, Any]:
    """The split of ``griffin_longctx_context``, a row for each target.

    Args:
        contexts: tokens before a target; documents in which the most of them do not fit are left
            out, so that all points are about the same tokens.
        targets: parts of each document that are scored.
        span: tokens of each, not more than the shortest context.
        seed: of the order of the documents, and of the targets' places.
        document, samples, max_tokens, model: see `positions`.
    """
    task = "griffin_longctx_context"
    integers(task, contexts=contexts, targets=targets, span=span)
    integers(task, 0, seed=seed)
    lengths = ordered(contexts)
    if span > lengths[0]:
        raise ArgumentError(f"{task}: span={span} is more than the shortest context, {lengths[0]}")
    labels = [*map(str, lengths), WHOLE]

    def rows_of(found: Document, begin: int, end: int) -> dict[str, Any]:
        starts = [*(found.back(begin - length) for length in lengths), 0]
        return row(found, labels, [(start, begin, end) for start in starts])

    return as_split(
        [
            rows_of(*place)
            for place in places(
                task, lengths[-1], targets, span, seed, document, samples, max_tokens, model
            )
        ]
    )


def places(
    task: str,
    before: int,
    targets: int,
    span: int,
    seed: int,
    document: Any,
    samples: int | None,
    max_tokens: int | None,
    model: dict[str, Any],
) -> Iterator[tuple[Document, int, int]]:
    """Documents and the tokens from and to which a target reaches, first one of each document.

    Of equal parts of what is at least ``before`` tokens from the document's start, each has one
    target, at a place that the seed draws.

    Raises:
        ArgumentError: no document is long enough.
    """
    integers(task, **_given(samples=samples, max_tokens=max_tokens))
    room = span + 2 * SLACK
    needed = before + targets * room
    fit, longest, left_out = [], 0, 0
    for found in documents(tokenizer_of(**model), document, seed, max_tokens):
        longest = max(longest, found.tokens)
        if found.tokens >= needed:
            fit.append(found)
        else:
            left_out += 1
        if len(fit) == samples:
            break
    if not fit:
        raise ArgumentError(
            f"{task}: no document has the {needed} tokens that {targets} targets of {span} after "
            f"contexts of {before} need, the longest has {longest}; name longer documents "
            "(document=) or ask for shorter contexts"
        )
    if left_out:
        logger.warning("%s: %d documents of fewer than %d tokens left out", task, left_out, needed)
    for index in range(targets):
        for found in fit:
            rng = random.Random(f"griffin_longctx {seed} {found.name} {index}")
            part = (found.tokens - before) / targets
            begin = found.cut(before + int(index * part + rng.random() * (part - room)))
            yield found, begin, found.cut(begin + span)


def row(
    found: Document, labels: Sequence[str], spans: Sequence[tuple[int, int, int]]
) -> dict[str, Any]:
    """A row of the dataset.

    Args:
        found: the document.
        labels: of the requests.
        spans: the tokens at which each one's context, continuation and end are.
    """
    context, start, end = (
        found.places[list(tokens)].tolist() for tokens in zip(*spans, strict=True)
    )
    return {
        "name": found.name,
        "label": list(labels),
        "context": context,
        "start": start,
        "end": end,
        "tokens": [stop - begin for _, begin, stop in spans],
        "text": found.text[: max(end)],
    }


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}

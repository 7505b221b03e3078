"""Loss on long documents: by position, and by the amount of preceding context.

Figure 5 of the Griffin paper (De et al., 2024) and figure 10 of its appendix G show the loss on
books and on arXiv articles for longer and longer sequences. This can be read in two ways, so there
are two tasks:

- ``griffin_longctx_position``: every document is read once from its start. The points are the
  losses of the tokens up to position 128, from there to 256, and so on, doubling. Later bins hold
  other tokens than earlier ones, from fewer and longer documents.
- ``griffin_longctx_context``: the loss of the same tokens of the same documents after the last 128,
  256 … 32768 tokens before them, and after the whole document before them. From point to point
  only the context differs.

All requests are plain log-likelihoods, which any model can answer. Griffin reads a document once
for all bins, and once for all whole contexts in it.
"""

import logging
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance

from griffin_eval.arguments import check_integers, ordered
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import CurveTask, Observation, as_split
from griffin_eval.tasks.long_text.documents import SLACK, Document, documents
from griffin_eval.tasks.metadata import tokenizer_of

FIRST = 128  # tokens of the first bin
CONTEXTS = tuple(128 << n for n in range(9))  # 128 to 32768 tokens
TARGETS, SPAN = 2, 64  # parts of each document that are scored, and tokens of each
WHOLE = "whole"  # label of the request whose context is the whole document before the target

logger = logging.getLogger(__name__)


class LossTask(CurveTask):
    """A task that scores parts of a text after preceding text. Its documents are made by `row`."""

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> list[Instance]:
        text = doc["text"]
        return [
            Instance(
                request_type=self.request_type(doc, i),
                doc=doc,
                arguments=(text[context:start], text[start:end], *self.more_arguments(doc, i)),
                idx=i,
                metadata=kwargs["metadata"],
            )
            for i, (context, start, end) in enumerate(
                zip(doc["context"], doc["start"], doc["end"], strict=True)
            )
        ]

    def request_type(self, doc: dict[str, Any], index: int) -> Any:
        """Return lm_eval's name for the type of this request."""
        return "loglikelihood"

    def more_arguments(self, doc: dict[str, Any], index: int) -> tuple[str, ...]:
        """Return the arguments of this request after its context and continuation."""
        return ()

    def labels(self) -> list[str]:
        """Return the labels of all requests, numbers first and in order."""
        labels = {label for labels in self.dataset["test"]["label"] for label in labels}
        return sorted(labels, key=lambda label: (not label.isdigit(), label.zfill(12)))


class LongContext(LossTask):
    """Both tasks: ``nats_per_token@x`` and ``bits_per_byte@x``, where x is a label of `row`."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        for quantity in ("nats_per_token", "bits_per_byte"):
            for label in self.labels():
                self.declare(f"{quantity}@{label}", "ratio", higher_is_better=False)

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        if "bypass" in self._metric_fn_list:  # --predict_only
            return super().process_results(doc, results)
        observations = {}
        for i, (label, (loglikelihood, _)) in enumerate(zip(doc["label"], results, strict=True)):
            nats = -float(loglikelihood)
            size = len(doc["text"][doc["start"][i] : doc["end"][i]].encode())
            per_token = Observation(nats, doc["tokens"][i], cluster=doc["name"])
            per_byte = Observation(nats / math.log(2), size, cluster=doc["name"])
            observations[f"nats_per_token@{label}"] = per_token
            observations[f"bits_per_byte@{label}"] = per_byte
        return self.scores(observations)


def positions(
    document: Any = None,
    samples: int | None = None,
    max_tokens: int | None = None,
    first: int = FIRST,
    seed: int = 0,
    **model: Any,
) -> dict[str, Any]:
    """Return the split of ``griffin_longctx_position``, with a row for each document.

    Args:
        document: See `griffin_eval.tasks.long_text.documents.texts_of`.
        samples: Number of documents; None for all.
        max_tokens: Number of tokens at which longer documents are cut.
        first: Number of tokens of the first bin. Each further bin is as long as all before it.
        seed: Seed of the order of the documents.
        model: Arguments of the model, which name the tokenizer.
    """
    task = "griffin_longctx_position"
    check_integers(task, first=first, seed=seed, **_options(samples=samples, max_tokens=max_tokens))
    rows = []
    for text in documents(tokenizer_of(**model), document, seed, max_tokens):
        edges, edge, labels = [0], first, []
        while edges[-1] < text.tokens:
            edges.append(text.word_end(edge) if edge < text.tokens else text.tokens)
            labels.append(str(edge))
            edge *= 2
        spans = [(0, begin, end) for begin, end in zip(edges, edges[1:], strict=False)]
        rows.append(row(text, labels, spans))
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
    """Return the split of ``griffin_longctx_context``, with a row for each target.

    Args:
        contexts: Numbers of tokens before a target. Documents shorter than the longest context are
            left out, so that all points are about the same tokens.
        targets: Number of scored parts of each document.
        span: Number of tokens of each part, at most the shortest context.
        seed: Seed of the order of the documents and of the positions of the targets.
        document, samples, max_tokens, model: See `positions`.
    """
    task = "griffin_longctx_context"
    check_integers(task, contexts=contexts, targets=targets, span=span, seed=seed)
    lengths = ordered(contexts)
    if span > lengths[0]:
        raise ArgumentError(f"{task}: span={span} is more than the shortest context, {lengths[0]}")
    labels = [*map(str, lengths), WHOLE]

    rows = []
    for text, begin, end in draw_targets(
        task, lengths[-1], targets, span, seed, document, samples, max_tokens, model
    ):
        starts = [*(text.clean_start(begin - length) for length in lengths), 0]
        rows.append(row(text, labels, [(start, begin, end) for start in starts]))
    return as_split(rows)


def draw_targets(
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
    """Yield a document, the first token of a target in it, and the token after the target's last.

    The first targets of all documents come first. The tokens after the first ``before`` tokens of a
    document are divided into equal parts, with one target at a random position in each.

    Args:
        before: Number of tokens that every target has before it at least.
        targets, span, seed, document, samples, max_tokens, model: See `contexts`.
    """
    check_integers(task, **_options(samples=samples, max_tokens=max_tokens))
    longest_target = span + 2 * SLACK
    needed = before + targets * longest_target
    texts, longest, left_out = [], 0, 0
    for text in documents(tokenizer_of(**model), document, seed, max_tokens):
        longest = max(longest, text.tokens)
        if text.tokens >= needed:
            texts.append(text)
        else:
            left_out += 1
        if len(texts) == samples:
            break
    if not texts:
        raise ArgumentError(
            f"{task}: no document has the {needed} tokens that {targets} targets of {span} after "
            f"contexts of {before} need, the longest has {longest}; name longer documents "
            "(document=) or ask for shorter contexts"
        )
    if left_out:
        logger.warning("%s: %d documents of fewer than %d tokens left out", task, left_out, needed)
    for index in range(targets):
        for text in texts:
            rng = random.Random(f"griffin_longctx {seed} {text.name} {index}")
            part = (text.tokens - before) / targets
            drawn = int(index * part + rng.random() * (part - longest_target))
            begin = text.word_end(before + drawn)
            yield text, begin, text.word_end(begin + span)


def row(
    source: Document, labels: Sequence[str], spans: Sequence[tuple[int, int, int]]
) -> dict[str, Any]:
    """Return a row of the dataset; all columns but the first and last have an entry per request.

    Args:
        labels: Names of the requests in metrics, such as the length of the context.
        spans: Triple for each request: first token of the context, first token of the
            continuation, and the token after its last.

    Returns:
        ``name`` of the document; ``label``; the characters at which each ``context`` and each
        continuation (``start``) begins, and its ``end``; ``tokens`` of the continuation; and the
        ``text`` up to the last end.
    """
    context, start, end = (
        source.token_starts[list(tokens)].tolist() for tokens in zip(*spans, strict=True)
    )
    return {
        "name": source.name,
        "label": list(labels),
        "context": context,
        "start": start,
        "end": end,
        "tokens": [stop - begin for _, begin, stop in spans],
        "text": source.text[: max(end)],
    }


def _options(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}

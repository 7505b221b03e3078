"""Memory in bytes a token of reading long documents, beside a model that is given nothing to do."""

import tracemalloc
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from griffin_eval import tasks
from griffin_eval.lm.model import GriffinLM
from griffin_eval.text import shared_prefixes

PAGE = "".join(topics[name] for name in sorted(topics))
SHORT, LONG = 10_000, 40_000  # tokens


@pytest.fixture(scope="module")
def lm(checkpoint):
    """Return a model whose steps take no time and whose tokens are all as likely."""
    lm = GriffinLM(str(checkpoint), framework="torch", batch_size=4)
    patch = pytest.MonkeyPatch()
    patch.setattr(lm.runner, "read", lambda pool, *_: (None, pool))
    patch.setattr(
        lm.runner, "score", lambda h, p, ids, *_: (np.zeros(len(ids)), np.ones(len(ids), bool))
    )
    patch.setattr(shared_prefixes, "_BATCH", 1 << 12)  # so that a batch is not the most
    yield lm
    patch.undo()


def slope(lm, read):
    """Bytes that ``read`` takes at most for each token by which a text is longer, beside the text
    itself."""
    peaks, counts = [], []
    for tokens in (1000, SHORT, LONG):  # the first imports
        text = PAGE[: round(tokens * len(PAGE) / len(lm.tok_encode(PAGE)))]
        counts.append(len(lm.tok_encode(text)))
        tracemalloc.start()
        read(text)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return (peaks[2] - peaks[1]) / (counts[2] - counts[1])


def test_a_rolling_document_takes_few_bytes_a_token(lm):
    def read(text):
        request = Instance("loglikelihood_rolling", {}, (text,), 0)
        (answer,) = lm.loglikelihood_rolling([request], disable_tqdm=True)
        assert len(answer.tokens) > len(text) / 5

    assert slope(lm, read) < 25  # ids twice, a float and a flag of each


def test_questions_on_a_document_share_its_ids(lm):
    def read(text):
        at = text.rindex(" ", 0, -200)
        book = text[:at]
        asked = [(book, " yes"), (book, " no"), (book, text[at:])]
        requests = [Instance("loglikelihood", {}, pair, 0) for pair in asked]
        lm.loglikelihood(requests, disable_tqdm=True)

    assert slope(lm, read) < 75  # texts of four requests, and ids of three


@pytest.mark.ci
def test_the_task_takes_few_bytes_a_token(lm, tmp_path, checkpoint):
    folder = Path(tasks.__file__).parent / "long_text"

    def read(text):
        (tmp_path / "book.txt").write_text(text, encoding="utf-8")
        metadata = {"document": str(tmp_path), "pretrained": str(checkpoint), "contexts": [128]}
        manager = TaskManager(
            include_path=str(folder), include_defaults=False, metadata=metadata | {"targets": 1}
        )
        simple_evaluate(
            lm,
            tasks=["griffin_longctx"],
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )

    assert slope(lm, read) < 100

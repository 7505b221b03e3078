"""Time and memory of scoring one long document, in a process that uses only public names.

``python -m benchmarks.evaluation.document`` answers requests for `read_document`.
"""

import sys
import time
from pydoc_data.topics import topics

from benchmarks.timing import serve, tune_process, watch_memory


def read_document(checkpoint: str, framework: str, tokens: int) -> dict[str, float]:
    """Score one document of text that ships with Python.

    Return ``tokens``, ``seconds``, and bytes of anonymous resident memory (RssAnon) of a model that
    has read a page: ``before`` the text exists, and the ``peak`` while it is read.
    """
    import griffin_eval

    tune_process()
    model = griffin_eval.Evaluator(checkpoint, framework=framework, device="cpu")
    page = "".join(text for _, text in sorted(topics.items()))
    (start,) = model.score([page[:10_000]])
    length = round(10_000 * tokens / len(start.tokens))
    with watch_memory() as readings:
        text = (page * (length // len(page) + 1))[:length]
        begin = time.perf_counter()
        (score,) = model.score([text])
        seconds = time.perf_counter() - begin
    figures: dict[str, float] = {"tokens": len(score.tokens), "seconds": seconds}
    return figures | {"before": readings[0], "peak": max(readings)}


if __name__ == "__main__":
    serve(sys.modules[__name__])

"""The engine without a server, in a process that uses only public names.

``python -m benchmarks.serving.engine CHECKPOINT FRAMEWORK DTYPE`` answers requests for the methods
of `Engine`, first `Engine.load` (`benchmarks.timing.serve`).
"""

import sys
import time
from typing import Any

from benchmarks.timing import serve, tune_process


class Engine:
    """A checkpoint that answers the requests of a `Job`."""

    def load(self) -> None:
        """Load the model; BadInput if the checkpoint cannot be used."""
        import griffin_eval

        tune_process()
        checkpoint, framework, dtype = sys.argv[1:]
        self._model: Any = griffin_eval.Evaluator(checkpoint, framework=framework, dtype=dtype)

    def continue_texts(self, texts: list[str], new_tokens: int) -> float:
        """Return the seconds to continue texts."""
        begin = time.perf_counter()
        self._model.generate(texts, max_new_tokens=new_tokens)
        return time.perf_counter() - begin

    def score(self, texts: list[str]) -> float:
        """Return the seconds to score texts."""
        begin = time.perf_counter()
        self._model.score(texts)
        return time.perf_counter() - begin


if __name__ == "__main__":
    serve(Engine())

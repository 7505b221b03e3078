"""The stock ``lm_eval`` command, with its model's request methods timed.

``PYTHON -P benchmarks/start.py benchmarks.evaluation.timed_lm_eval FILE ARGUMENTS…`` runs
``lm_eval ARGUMENTS…`` and writes to FILE the seconds in the model and the answers.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lm_eval import evaluator
from lm_eval.__main__ import cli_evaluate

# Rolling log-likelihoods are timed but not compared, since hf cuts documents into windows.
COMPARED = ("loglikelihood", "generate_until")


def watch(lm: Any, record: dict[str, Any]) -> None:
    """Record the seconds and the answers of all requests to an lm_eval model."""

    def timed(kind: str, method: Callable) -> Callable:
        def answer(requests: list, **arguments: Any) -> list:
            begin = time.perf_counter()
            answers = method(requests, **arguments)
            record["seconds"] += time.perf_counter() - begin
            if kind in COMPARED:
                record["answers"][kind] = [plain(one) for one in answers]
            return answers

        return answer

    for kind in (*COMPARED, "loglikelihood_rolling"):
        setattr(lm, kind, timed(kind, getattr(lm, kind)))


def plain(answer: Any) -> str | float:
    """Return a text, or the log-likelihood from a pair with a greedy flag."""
    return answer if isinstance(answer, str) else float(answer[0])


def main() -> None:
    file, *arguments = sys.argv[1:]
    record: dict[str, Any] = {"seconds": 0.0, "answers": {}}
    evaluate = evaluator.evaluate

    def watched(lm: Any, *rest: Any, **named: Any) -> Any:
        watch(lm, record)
        return evaluate(lm, *rest, **named)

    evaluator.evaluate = watched
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
    Path(file).write_text(json.dumps(record))


if __name__ == "__main__":
    main()

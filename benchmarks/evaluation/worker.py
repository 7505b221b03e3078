"""One measurement of `benchmarks.evaluation.run`, in a process of its own.

``python -m benchmarks.evaluation.worker`` answers requests for its functions
(`benchmarks.timing.serve`).
"""

import time
from collections.abc import Callable
from typing import Any

from benchmarks.evaluation.requests import ask, comparable_metrics, plain_answer
from benchmarks.products import products_jax, products_torch
from benchmarks.timing import serve, watch_memory
from griffin_eval.process import tune_process


def plan(**arguments: Any) -> dict[str, Any]:
    """See `benchmarks.evaluation.plan.plan`."""
    from benchmarks.evaluation.plan import plan

    return plan(**arguments)


def evaluate(
    model: str, model_args: dict[str, Any], batch_size: int, **requests: Any
) -> dict[str, Any]:
    """Runs lm-eval's `simple_evaluate`, with a clock in the methods that answer requests.

    The stock command takes the time of everything: importing, loading, making requests. This is
    what lm-eval waits for the model, tokenizing included.

    Args:
        model: as lm_eval's ``--model``.
        model_args: as ``--model_args``.
        batch_size: as ``--batch_size``.
        requests: arguments of `ask`.

    Returns:
        ``seconds`` in the methods, ``answers`` of each of them, ``metrics``, and ``stats`` of
        griffin's engine.
    """
    from lm_eval.api.registry import get_model

    from griffin_eval._plugin import install

    install()
    settings = {"batch_size": batch_size, "device": "cpu"}
    lm: Any = get_model(model).create_from_arg_obj(model_args, settings)
    found: dict[str, Any] = {"seconds": 0.0, "answers": {}}

    def timed(kind: str, method: Callable) -> Callable:
        def answer(requests, **arguments):
            begin = time.perf_counter()
            answers = method(requests, **arguments)
            found["seconds"] += time.perf_counter() - begin
            found["answers"][kind] = [plain_answer(each) for each in answers]
            return answers

        return answer

    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(lm, kind, timed(kind, getattr(lm, kind)))
    found["metrics"] = comparable_metrics(ask(lm, **requests))
    found["stats"] = vars(lm.stats) if model == "griffin" else None
    return found


def read_document(checkpoint: str, framework: str, tokens: int) -> dict[str, float]:
    """Rolling log-likelihood of one document of about so many tokens, text that Python ships.

    Returns:
        ``tokens``, ``seconds``, and the anonymous resident memory (RssAnon) in bytes of a model
        that has read a page before: ``before`` there is the text, and its peaks while
        ``tokenizing`` and ``reading``.
    """
    from pydoc_data.topics import topics

    from lm_eval.api.instance import Instance

    tune_process()
    from griffin_eval.lm.model import GriffinLM

    lm = GriffinLM(checkpoint, framework=framework, device="cpu")

    def read(text: str) -> Any:
        request = Instance("loglikelihood_rolling", {}, (text,), 0)
        (answer,) = lm.loglikelihood_rolling([request], disable_tqdm=True)
        return answer

    page = "".join(text for _, text in sorted(topics.items()))
    length = round(len(page) * tokens / len(lm.tok_encode(page, add_special_tokens=False)))
    read(page[:10_000])
    first_step, step = [], lm.runner.read

    def noted(*arguments: Any) -> Any:
        first_step.append(len(seen))
        return step(*arguments)

    lm.runner.read = noted  # type: ignore[method-assign]
    with watch_memory() as seen:
        text = (page * (length // len(page) + 1))[:length]
        begin = time.perf_counter()
        answer = read(text)
        seconds = time.perf_counter() - begin
    return {
        "tokens": len(answer.tokens),
        "seconds": seconds,
        "before": seen[0],
        "tokenizing": max(seen[: first_step[0]]),
        "reading": max(seen[first_step[0] - 1 :]),
    }


if __name__ == "__main__":
    serve({f.__name__: f for f in (plan, evaluate, products_torch, products_jax, read_document)})

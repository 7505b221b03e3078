"""What lm-eval asks a model in a benchmark, and what is compared of its answers."""

import copy
from typing import Any

from griffin_eval.errors import ArgumentError

HEAD = 4095  # tokens of a document that one pass of transformers can score: it is quadratic


def ask(
    lm: Any, task: str, limit: int, tasks_path: str | None, characters: int | None
) -> dict[str, Any]:
    """Evaluates a model on a task or tag.

    Args:
        lm: a model of lm-eval.
        task: its name.
        limit: documents of each task.
        tasks_path: folder with more tasks.
        characters: rolling documents are cut to so many; None for whole ones.

    Raises:
        ArgumentError: there is no such task.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=tasks_path)
    if not manager.match_tasks([task]):
        where = f" or in {tasks_path}" if tasks_path else ""
        raise ArgumentError(
            f"task {task!r}: there is no such task in lm_eval{where}; `lm_eval ls tasks` lists "
            "them, --tasks-path adds a folder"
        )
    rolling = lm.loglikelihood_rolling

    def cut(requests, **arguments):
        shorter = [copy.copy(request) for request in requests]
        for request in shorter:
            request.arguments = (request.args[0][:characters],)
        return rolling(shorter, **arguments)

    lm.loglikelihood_rolling = cut
    results = simple_evaluate(
        lm, tasks=[task], limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=False
    )
    assert results is not None  # of the only rank
    return dict(results)


def comparable_metrics(results: dict[str, Any]) -> dict[str, float]:
    """Metrics that hf's model should give too: rolling log-likelihoods, which it cuts into windows,
    are left out."""
    return {
        f"{task} {metric.removesuffix(',none')}": float(value)
        for task, metrics in results["results"].items()
        if results["configs"].get(task, {}).get("output_type") != "loglikelihood_rolling"
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def plain_answer(answer: Any) -> Any:
    """An answer as JSON has it; of a rolling log-likelihood what its first `HEAD` tokens have."""
    if isinstance(answer, tuple):
        return [float(answer[0]), bool(answer[1])]
    if hasattr(answer, "tokens"):
        return float(answer.tokens[:HEAD].sum())
    return answer

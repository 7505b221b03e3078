"""Models of the sixteen symbols: a rule that solves a task, a guesser, and a random checkpoint."""

import random
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from benchmarks.random_checkpoint import write_weights
from griffin_eval._plugin import TASKS
from griffin_eval.config import GriffinConfig
from griffin_eval.tasks.symbols.sequences import VOCABULARY, write_symbol_tokenizer


class Rule(LM):
    """A model that answers each context with ``rule(context)``."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def loglikelihood(self, requests):
        asked = [request.args for request in requests]
        return [(0.0, True) if self.rule(c) == answer else (-9.0, False) for c, answer in asked]

    generate_until = loglikelihood_rolling = None


def guessing(choices: str, seed: int = 0):
    rng = random.Random(seed)
    return Rule(lambda context: rng.choice(choices))


def evaluate(model, task: str, metadata: dict, **arguments):
    """Return lm_eval's results for a model, given as an object or by name and arguments."""
    given = arguments.get("model_args", {})
    tasks = TaskManager(include_path=TASKS, include_defaults=False, metadata=given | metadata)
    results = simple_evaluate(
        model, tasks=[task], task_manager=tasks, bootstrap_iters=0, **arguments
    )
    assert results is not None
    return results


def points(results, task: str) -> dict:
    found = results["results"][task]
    return {
        key.removesuffix(",none"): value
        for key, value in found.items()
        if key.endswith(",none") and "_stderr" not in key
    }


def write_symbol_checkpoint(folder: Path, window: int = 16) -> None:
    """Write a random model with 16 tokens in transformers' format, and its tokenizer."""
    config = GriffinConfig(
        vocab_size=VOCABULARY,
        width=32,
        mlp_width=3 * 32,
        num_heads=2,
        num_layers=3,
        lru_width=32,
        gate_blocks=2,
        visible_keys=window,
    )
    folder.mkdir(exist_ok=True)
    write_weights(config, folder)
    write_symbol_tokenizer(folder)

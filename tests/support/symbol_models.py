"""Models of the sixteen symbols: one that solves a task by rule, one that guesses, and a small
checkpoint with random weights."""

import random
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from griffin_eval._plugin import TASKS
from griffin_eval.tasks.symbols.sequences import VOCABULARY, write_symbol_tokenizer


class Rule(LM):
    """Says after each context what ``rule(context)`` says."""

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
    """What lm_eval makes of a model, given as such or by name and arguments."""
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
    """A RecurrentGemma of transformers with a vocabulary of 16 and the tokenizer for it."""
    import torch
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=6 * 32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=3,
        attention_window_size=window,
    )
    model = RecurrentGemmaForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("recurrent_param"):
                p.normal_(-4.0, 0.5)
            else:
                p.normal_(0.0, 0.1 if "norm" in name or p.ndim == 1 else p.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    write_symbol_tokenizer(folder)

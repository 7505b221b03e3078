"""Convert and evaluate Griffin, Hawk and RecurrentGemma checkpoints in JAX and PyTorch.

>>> import griffin_eval
>>> model = griffin_eval.Evaluator("checkpoint", framework="torch")  # a folder, .pt file or hub id
>>> [score] = model.score(["What is memory?"])
>>> score.logprobs  # float64, in nats: of every token given those before it
>>> [continuation] = model.generate(["What is memory?"], max_new_tokens=32)
>>> continuation.text

The names in ``__all__`` are the whole interface; everything below them may change. They are
imported on first use, and a framework only when a model is loaded.
"""

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "Checkpoint",
    "Comparison",
    "Continuation",
    "Evaluator",
    "GriffinConfig",
    "Score",
    "convert",
    "load",
    "memory",
    "open_checkpoint",
    "tune_process",
    "verify",
]

TYPE_CHECKING = False  # without importing typing, since every Python process imports this file
if TYPE_CHECKING:
    from griffin_eval.api import (
        Checkpoint,
        Comparison,
        convert,
        load,
        memory,
        open_checkpoint,
        verify,
    )
    from griffin_eval.config import PRESETS, GriffinConfig
    from griffin_eval.evaluator import Continuation, Evaluator, Score
    from griffin_eval.process import tune_process

_MODULES = {"PRESETS": "config", "GriffinConfig": "config", "tune_process": "process"}
_MODULES |= dict.fromkeys(("Continuation", "Evaluator", "Score"), "evaluator")  # others: api


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'api')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

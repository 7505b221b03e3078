"""One interface to a loaded model, whichever framework runs it.

Everything above this file (scoring, generation, the lm-eval model) speaks numpy and holds states
and hidden vectors as opaque values. The adapters import their framework when they are loaded.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError, MissingExtraError
from griffin_eval.hints import nearest

FRAMEWORKS = ("torch", "jax")
DTYPES = ("float32", "bfloat16", "float16", "float64")
LOGITS_AT_A_TIME = 1 << 25  # numbers of a block of logits, 128 MiB in float32


class Runner(Protocol):
    """A model on a device.

    Attributes:
        config: the architecture.
        framework: ``torch`` or ``jax``.
        device: where it runs, as the framework names it.
        dtype: of weights and activations; Λ, gates, recurrence, norms and softmax are float32 at
            least.
    """

    config: GriffinConfig
    framework: str
    device: str
    dtype: str

    def bucket(self, count: int, smallest: int = 16) -> int:
        """What to pad a number of tokens or rows to, so that few shapes are ever compiled."""
        ...

    def init_state(self, batch: int, capacity: int) -> Any:
        """State of ``batch`` rows before their first token; see the twins' ``init_state``."""
        ...

    def step(self, tokens: np.ndarray, lengths: np.ndarray, state: Any) -> tuple[Any, Any]:
        """Reads ``lengths[B]`` of each row of ``tokens[B, T]``; gives (hidden[B, T, W], state)."""
        ...

    def score(
        self, hidden: Any, at: np.ndarray, targets: np.ndarray, softmax_dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability of each target, and whether it is the most likely token.

        Args:
            hidden: [B, T, W] of a step.
            at: int [N, 2], row and column of each scored position.
            targets: int [N], the token that follows there.
            softmax_dtype: in which logits are normalised.

        Returns:
            float64 [N] log-probabilities in nats, bool [N].
        """
        ...

    def logits(self, hidden: Any, at: np.ndarray) -> np.ndarray:
        """float32 (or wider) logits [N, V] at the given rows and columns."""
        ...

    def greedy(self, hidden: Any, at: np.ndarray) -> np.ndarray:
        """int [N], the most likely next token at the given rows and columns."""
        ...


def load_runner(
    checkpoint: str | Path | Checkpoint,
    *,
    framework: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> Runner:
    """Loads a checkpoint of any format into a runner.

    Args:
        checkpoint: folder or file, or one that is open already.
        framework: ``torch`` or ``jax``; None takes the first of these that is installed.
        dtype: one of ``DTYPES``, or ``auto`` for the dtype of the checkpoint.
        device: as the framework names it; None, or an accelerator that is not there, takes what
            there is and says so in the log.

    Raises:
        CheckpointError: it cannot be read as a model; says which file or tensor.
        ArgumentError: unknown framework, dtype or device.
        MissingExtraError: the framework is not installed.
    """
    framework = choose_framework(framework)
    if dtype not in ("auto", *DTYPES):
        raise ArgumentError(
            f"unknown dtype {dtype!r}: expected auto, {', '.join(DTYPES)}{nearest(dtype, DTYPES)}"
        )
    if framework == "torch":
        from griffin_eval.runner_torch import TorchRunner as Adapter
    else:
        from griffin_eval.runner_jax import JaxRunner as Adapter
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    return Adapter.load(checkpoint, dtype, device)


def choose_framework(framework: str | None) -> str:
    """The framework asked for, checked to be installed; without one, the first that is."""
    from importlib.util import find_spec

    if framework is None:
        installed = [name for name in FRAMEWORKS if find_spec(name)]
        if not installed:
            raise MissingExtraError("neither PyTorch nor JAX", "torch")
        return installed[0]
    if framework not in FRAMEWORKS:
        raise ArgumentError(
            f"unknown framework {framework!r}: expected {' or '.join(FRAMEWORKS)}"
            f"{nearest(framework, FRAMEWORKS)}"
        )
    needs = ("torch",) if framework == "torch" else ("jax", "flax")
    for library in needs:
        if find_spec(library) is None:
            raise MissingExtraError(library, framework)
    return framework


def in_blocks(at: np.ndarray, vocab_size: int) -> list[slice]:
    """Splits scored positions so that the logits of one block stay small."""
    rows = max(1, LOGITS_AT_A_TIME // vocab_size)
    return [slice(i, i + rows) for i in range(0, len(at), rows)]

"""One interface to a loaded model, whichever framework runs it.

Everything above this file (scoring, generation, the lm-eval model) speaks numpy and holds states
and hidden vectors as opaque values. The adapters import their framework when they are loaded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError, MissingExtraError
from griffin_eval.hints import nearest

FRAMEWORKS = ("torch", "jax")
DTYPES = ("float32", "bfloat16", "float16", "float64")
ROOM = 64  # steps that decoding goes on before what it remembers is moved back
LOGITS_AT_A_TIME = 1 << 25  # numbers of a block of logits, 128 MiB in float32


class Runner(Protocol):
    """A model on a device.

    Attributes:
        config: the architecture.
        framework: ``torch`` or ``jax``.
        device: where it runs, as the framework names it.
        dtype: of weights and activations; Λ, gates, recurrence, norms and softmax are float32 at
            least.
        step_tokens: how many tokens a step should read to keep the device busy.
        kernel: which implementation of `griffin_eval.kernels.rglru.api` runs.
    """

    config: GriffinConfig
    framework: str
    device: str
    dtype: str
    step_tokens: int
    kernel: str

    def bucket(self, count: int, smallest: int = 16) -> int:
        """What to pad a number of tokens to, so that few shapes are ever compiled."""
        ...

    def row_bucket(self, count: int) -> int:
        """What to pad a number of rows to that are continued together, which is not many steps."""
        ...

    def state_bytes(self, capacity: int) -> int:
        """Bytes of the state of one document.

        Args:
            capacity: tokens the document may have; see the twins' ``init_state``.
        """
        ...

    def free_memory(self) -> int:
        """Bytes that are free on the device."""
        ...

    def open_pool(self, rows: int, capacity: int) -> Any:
        """Room for the states of ``rows`` documents of up to ``capacity`` tokens. What is there
        before a state is written means nothing."""
        ...

    def grow_pool(self, pool: Any, rows: int, capacity: int) -> Any:
        """Room for more states, beside those of a pool, which is not to be used again."""
        ...

    def read(
        self,
        pool: Any,
        tokens: np.ndarray,
        lengths: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
        forget: np.ndarray | None = None,
    ) -> tuple[Any, Any]:
        """Reads chunks of several documents, each going on from a state of the pool.

        Args:
            pool: from `open_pool` or an earlier call, not to be used again.
            tokens: int [N], the chunks behind each other.
            lengths: int [S], tokens of each chunk.
            sources: int [S], which rows of the pool the documents go on from; -1 at their start.
            targets: int [S], which rows take the states after; -1 for those nobody wants. All
                sources are taken before a target is written.
            forget: int [S], what each document forgets before it goes on, as numbers of
                `griffin_eval.engine.tree.Forget`: 1 for states of recurrent blocks, 2 for the keys
                of attention, 3 for both. None if none forgets anything.

        Returns:
            Hidden vectors for `score`, `logits` and `greedy`, and the pool.
        """
        ...

    def decode(self, tokens: np.ndarray, active: np.ndarray, state: Any) -> tuple[Any, Any]:
        """Reads one token of each active row of ``tokens[B]``; gives (hidden, state). The state is
        not to be used again, nor are rows that were not active before another state enters."""
        ...

    def init_state(self, batch: int, capacity: int) -> Any:
        """State of ``batch`` rows before their first token, for `decode`."""
        ...

    def enter(self, state: Any, rows: np.ndarray, pool: Any, sources: np.ndarray) -> Any:
        """Writes states of a pool, -1 for a document's start, over rows of a state, which is not to
        be used again."""
        ...

    def score(
        self,
        hidden: Any,
        at: np.ndarray,
        targets: np.ndarray,
        which: np.ndarray,
        softmax_dtype: str,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability of each target, and whether it is the most likely token.

        Args:
            hidden: of `read` or `decode`.
            at: int [M], the tokens after which something is scored, in order.
            targets: int [N], what may follow.
            which: int [N], which entry of ``at`` a target follows.
            softmax_dtype: in which logits are normalised.

        Returns:
            float64 [N] log-probabilities in nats, bool [N].
        """
        ...

    def logits(self, hidden: Any, at: np.ndarray) -> np.ndarray:
        """float32 (or wider) logits [M, V] after the given tokens of `read` or `decode`."""
        ...

    def greedy(self, hidden: Any, at: np.ndarray) -> np.ndarray:
        """int [M], the most likely next token after the given ones; -1 where logits are NaN."""
        ...

    def peak_memory(self) -> int:
        """The most bytes in use so far: of the device, or of the process where that is the CPU."""
        ...

    @property
    def compilations(self) -> int:
        """How many shapes were compiled since loading."""
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


def load_runners(
    checkpoint: Checkpoint,
    *,
    framework: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> list[Runner]:
    """A runner on each device of this process that ``device`` leaves open.

    That is one, except with JAX where ``device`` is None, a platform without a number, or not
    there: then it is every local device of the platform, each with all of the weights.

    Args and errors: see `load_runner`.
    """
    first = load_runner(checkpoint, framework=framework, dtype=dtype, device=device)
    if first.framework == "torch":
        return [first]
    from griffin_eval.runner_jax import other_devices

    return [first] + [
        load_runner(checkpoint, framework="jax", dtype=dtype, device=other)
        for other in other_devices(first.device, device)
    ]


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


def in_blocks(
    at: np.ndarray, which: np.ndarray, vocab_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Splits scored positions so that the logits of one block stay small.

    Gives the positions of each block, and which targets (indices of ``which``) belong to it.
    """
    rows = max(1, LOGITS_AT_A_TIME // vocab_size)
    order = np.argsort(which, kind="stable")
    for first in range(0, len(at), rows):
        low, high = np.searchsorted(which[order], [first, first + rows])
        yield at[first : first + rows], order[low:high]


def attention_tile(tokens: int, rows: int) -> int:
    """Tokens that attention works on together in a step: about half of an average row's, since
    what a tile does not fill is lost."""
    return int(np.clip(1 << max(tokens // (2 * rows), 1).bit_length() - 1, 8, 128))


def step_tokens(device: str) -> int:
    """How many tokens a step should read: 512 fill a processor, an accelerator takes more."""
    return 512 if device.startswith("cpu") else 4096


def peak_host_memory() -> int:
    """The most bytes that this process has had in memory."""
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def host_memory() -> int:
    """Bytes of memory that are free on this machine."""
    import psutil

    return psutil.virtual_memory().available

"""The interface of a loaded model in either framework.

Its callers (scoring, generation, the lm-eval model) use numpy, and hold states and hidden vectors
as opaque values. Implementations import their framework.
"""

from typing import Any, Protocol

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.states.saved_state import SavedState


class Runner(Protocol):
    """A model on a device, or split over several.

    Attributes:
        framework: ``torch`` or ``jax``.
        device: The framework's name of the device.
        devices: Number of devices that share the weights.
        dtype: Dtype of weights and activations; Λ, gates, recurrence, norms and softmax are at
            least float32.
        step_tokens: Number of tokens that a step should read to keep the device busy.
        step_rows: Number of documents that a step should read from.
        decode_rows: Number of documents that should be decoded together.
        kernel: Implementation of `griffin_eval.kernels.rglru.api` in use.
        attention_kernel: Implementation of `griffin_eval.kernels.attention.api` in use, or none.
    """

    config: GriffinConfig
    framework: str
    device: str
    devices: int
    dtype: str
    step_tokens: int
    step_rows: int
    decode_rows: int
    kernel: str
    attention_kernel: str

    def padded_tokens(self, count: int, smallest: int = 16) -> int:
        """Return the length to pad ``count`` >= 1 tokens to, so that few lengths are compiled.
        More than one token is padded to at least ``smallest``."""
        ...

    def padded_batch(self, count: int) -> int:
        """Return the size to pad a decoding batch to, so that few sizes are compiled."""
        ...

    def state_bytes(self, capacity: int) -> int:
        """Return the bytes of the state of a document of up to ``capacity`` tokens (see the twins'
        ``init_state``), in a pool or while it is decoded."""
        ...

    def step_bytes(self, capacity: int) -> int:
        """Return the bytes that `read` copies for the state of each document; see `state_bytes`."""
        ...

    def free_memory(self) -> int:
        """Return the free bytes on the device."""
        ...

    def open_pool(self, rows: int, capacity: int) -> Any:
        """Return a pool for the states of ``rows`` documents of up to ``capacity`` tokens. A row is
        undefined until `read` writes it."""
        ...

    def grow_pool(self, pool: Any, rows: int, capacity: int) -> Any:
        """Return a larger pool that begins with the rows of ``pool``, which is consumed."""
        ...

    def start_from(self, saved: SavedState) -> None:
        """Let every document start from a saved state. Positions and capacities still count a
        document's own tokens only."""
        ...

    def state_tensors(self, pool: Any, row: int, read: int) -> dict[str, np.ndarray]:
        """Return the state in a row after ``read`` tokens, as tensors of `SavedState`."""
        ...

    def write_state(
        self, pool: Any, row: int, tensors: dict[str, np.ndarray], read: int, capacity: int
    ) -> Any:
        """Write tensors from `state_tensors` of any runner of this model, after ``read`` tokens,
        into a row of a pool of this capacity. Consumes the pool and returns it."""
        ...

    def read(
        self,
        pool: Any,
        tokens: np.ndarray,
        lengths: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
        ablations: np.ndarray | None = None,
    ) -> tuple[Any, Any]:
        """Read chunks of several documents, each continuing from a state of the pool.

        Args:
            pool: Pool from `open_pool` or an earlier call; consumed.
            tokens: int [N], the concatenated chunks.
            lengths: int [S], number of tokens of each chunk.
            sources: int [S], pool row from which each document continues; -1 at its start.
            targets: int [S], pool row for each state after the chunk; -1 discards it. A document
                must not continue from a row that an earlier one writes.
            ablations: int [S], memory that each document loses before its chunk, as values of
                `griffin_eval.engine.tree.Ablation`: 1 for states of recurrent blocks, 2 for the
                keys of attention, 3 for both. None if no document loses any.

        Returns:
            Hidden vectors for `score`, `logits` and `greedy`, and the pool.
        """
        ...

    def start_decoding(self, batch: int, capacity: int) -> Any:
        """Return the twins' ``DecodingState`` for ``batch`` documents of up to ``capacity`` tokens,
        before their first token."""
        ...

    def insert_rows(self, state: Any, rows: np.ndarray, pool: Any, sources: np.ndarray) -> Any:
        """Copy states of a pool into rows of a decoding state.

        Args:
            state: State from `start_decoding` or an earlier call; consumed.
            rows: int [N], rows of ``state`` to write.
            pool: Pool of the same capacity; not changed.
            sources: int [N], pool row for each of ``rows``; -1 for a document's start.
        """
        ...

    def decode_step(self, state: Any, tokens: np.ndarray, active: np.ndarray) -> tuple[Any, Any]:
        """Read one token of every active row.

        Args:
            state: State from `start_decoding` or an earlier call; consumed.
            tokens: int [B] ids.
            active: int [B], 1 for rows that read their token, 0 for rows that stay unchanged.

        Returns:
            Hidden vectors for `score`, `logits` and `greedy`, and the state.
        """
        ...

    def score(
        self,
        hidden: Any,
        positions: np.ndarray,
        targets: np.ndarray,
        position_of: np.ndarray,
        softmax_dtype: str,
        *,
        details: bool = False,
        top: int = 0,
    ) -> tuple[np.ndarray, ...]:
        """Return the log-probability of each target, with more about its prediction on request.

        Args:
            hidden: Hidden vectors from `read` or `decode_step`.
            positions: int [M], increasing indices of the hidden vectors that predict a target.
            targets: int [N], ids of the tokens to score.
            position_of: int [N], index in ``positions`` of each target's prediction.
            softmax_dtype: Dtype in which logits are normalised.
            details: Whether to compute ranks and entropies, which reads logits twice more.
            top: Number of most likely tokens to return, 0 to 20 and at most the vocabulary size;
                not together with ``details``.

        Returns:
            float64 [N] log-probabilities in nats; bool [N], whether the target is the most likely
            token. With ``details`` also int64 [N] ranks, which are 1 plus the number of more likely
            tokens, and float64 [N] entropies in nats. With ``top`` instead the log-probabilities,
            int64 [N, top] tokens, the most likely first, and float64 [N, top] their
            log-probabilities.
        """
        ...

    def logits(self, hidden: Any, positions: np.ndarray) -> np.ndarray:
        """Return the logits [M, V] at int [M] positions, in float32 or wider."""
        ...

    def greedy(self, hidden: Any, positions: np.ndarray) -> np.ndarray:
        """Return int [M], the most likely token at each position; -1 where logits are NaN."""
        ...

    def stage(self, checkpoint: Checkpoint) -> Any:
        """Read the weights of an open checkpoint of the same config into host memory, for `adopt`.

        Another thread may call this while the runner runs. The checkpoint can be closed afterwards.
        """
        ...

    def adopt(self, staged: Any) -> None:
        """Replace the model's weights by staged ones, one by one. Compiled programs stay; earlier
        states become invalid."""
        ...

    def peak_memory(self) -> int:
        """Return the maximum bytes used so far on the device, or by the process on a CPU."""
        ...

    @property
    def compilations(self) -> int:
        """Number of shapes compiled since loading."""
        ...

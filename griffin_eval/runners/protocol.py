"""One interface to a loaded model, whichever framework runs it.

Everything above this folder (scoring, generation, the lm-eval model) speaks numpy and holds states
and hidden vectors as opaque values. The adapters import their framework when they are loaded.
"""

from typing import Any, Protocol

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.states.saved_state import SavedState


class Runner(Protocol):
    """A model on a device, or split over several.

    Attributes:
        config: the architecture.
        framework: ``torch`` or ``jax``.
        device: where it runs, as the framework names it.
        devices: number of devices that share the weights.
        dtype: of weights and activations; Λ, gates, recurrence, norms and softmax are float32 at
            least.
        step_tokens: number of tokens a step should read to keep the device busy.
        step_rows: number of documents that it should read from.
        decode_rows: number of documents that should be continued at a time.
        kernel: implementation of `griffin_eval.kernels.rglru.api` that runs.
        attention_kernel: implementation of `griffin_eval.kernels.attention.api` that runs, or none.
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
        """Length to pad ``count`` tokens to, so that few lengths are compiled.

        Args:
            count: number of tokens, at least 1.
            smallest: least length of more than one token.
        """
        ...

    def padded_batch(self, count: int) -> int:
        """Batch size to pad a decoding batch of ``count`` rows to, so that few are compiled."""
        ...

    def state_bytes(self, capacity: int) -> int:
        """Bytes of the state of one document, in a pool and while it is continued.

        Args:
            capacity: most tokens of the document; see the twins' ``init_state``.
        """
        ...

    def step_bytes(self, capacity: int) -> int:
        """Bytes that `read` copies of the state of each document; see `state_bytes`."""
        ...

    def free_memory(self) -> int:
        """Free bytes on the device."""
        ...

    def open_pool(self, rows: int, capacity: int) -> Any:
        """A pool for the states of ``rows`` documents of up to ``capacity`` tokens. A row holds
        undefined values until `read` writes it."""
        ...

    def grow_pool(self, pool: Any, rows: int, capacity: int) -> Any:
        """A pool of more rows, which begins with those of ``pool``. ``pool`` is consumed."""
        ...

    def start_from(self, saved: SavedState) -> None:
        """Lets every document start from a saved state instead of from nothing. Documents are
        numbered as before: a capacity counts their own tokens."""
        ...

    def state_tensors(self, pool: Any, row: int, read: int) -> dict[str, np.ndarray]:
        """The state in a row of a pool, after so many tokens, as `SavedState` holds it."""
        ...

    def write_state(
        self, pool: Any, row: int, tensors: dict[str, np.ndarray], read: int, capacity: int
    ) -> Any:
        """Writes a state into a row of a pool.

        Args:
            pool: from `open_pool` or an earlier call; it is consumed.
            tensors: what `state_tensors` gave, of a runner of this model in any framework.
            read: number of tokens after which.
            capacity: with which the pool was opened.
        """
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
        """Reads chunks of several documents, each continuing from a state of the pool.

        Args:
            pool: from `open_pool` or an earlier call; it is consumed.
            tokens: int [N], the chunks behind each other.
            lengths: int [S], tokens of each chunk.
            sources: int [S], the row of the pool from which each document continues; -1 at its
                start.
            targets: int [S], the row that takes each state after the chunk; -1 discards it. No
                document continues from a row that takes the state of one before it.
            ablations: int [S], the memory that each document loses before its chunk, as numbers of
                `griffin_eval.engine.tree.Ablation`: 1 for states of recurrent blocks, 2 for the
                keys of attention, 3 for both. None if none loses any.

        Returns:
            Hidden vectors for `score`, `logits` and `greedy`, and the pool.
        """
        ...

    def start_decoding(self, batch: int, capacity: int) -> Any:
        """The twins' ``DecodingState`` of ``batch`` documents of up to ``capacity`` tokens, before
        their first token."""
        ...

    def insert_rows(self, state: Any, rows: np.ndarray, pool: Any, sources: np.ndarray) -> Any:
        """Writes states of a pool over rows of a decoding state.

        Args:
            state: from `start_decoding` or an earlier call; it is consumed.
            rows: int [N], which rows of it to write.
            pool: of the same capacity; it is not changed.
            sources: int [N], the row of the pool that each of them gets; -1 for a document's start.
        """
        ...

    def decode_step(self, state: Any, tokens: np.ndarray, active: np.ndarray) -> tuple[Any, Any]:
        """Reads one token of every active row.

        Args:
            state: from `start_decoding` or an earlier call; it is consumed.
            tokens: int [B], ids.
            active: int [B], 1 for rows that read their token, 0 for those that stay as they are.

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
        """Return the log-probability of each target, and what else is asked of its prediction.

        Args:
            hidden: Hidden vectors from `read` or `decode_step`.
            positions: int [M], increasing indices of the hidden vectors that predict a target.
            targets: int [N], ids of the tokens to score.
            position_of: int [N], the index in ``positions`` that predicts each target.
            softmax_dtype: Dtype in which logits are normalised.
            details: Whether ranks and entropies are computed, which reads logits twice more.
            top: Number of likeliest tokens, 1 to 20 and at most those of the vocabulary; 0 for
                none. Not together with ``details``.

        Returns:
            float64 [N] log-probabilities in nats; bool [N], whether the target is the likeliest
            token. With ``details`` also int64 [N] ranks, which are 1 plus the number of likelier
            tokens, and float64 [N] entropies in nats. With ``top`` instead the log-probabilities,
            int64 [N, top] tokens, the likeliest first, and float64 [N, top] their
            log-probabilities.
        """
        ...

    def logits(self, hidden: Any, positions: np.ndarray) -> np.ndarray:
        """float32 (or wider) logits [M, V] of the hidden vectors at int [M] positions."""
        ...

    def greedy(self, hidden: Any, positions: np.ndarray) -> np.ndarray:
        """int [M], the most likely next token at each position; -1 where logits are NaN."""
        ...

    def stage(self, checkpoint: Checkpoint) -> Any:
        """Reads the weights of another checkpoint of the same config into the host's memory, for
        `adopt`. Another thread may call it while this runner runs.

        Args:
            checkpoint: that is open; it is not needed any more afterwards.
        """
        ...

    def adopt(self, staged: Any) -> None:
        """Puts staged weights in the place of the model's, one by one. What was compiled stays;
        states from before are of the other weights."""
        ...

    def peak_memory(self) -> int:
        """Most bytes in use so far: of the device, or of the process if that is the CPU."""
        ...

    @property
    def compilations(self) -> int:
        """Number of shapes compiled since loading."""
        ...

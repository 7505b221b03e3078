"""The JAX runner."""

import contextlib
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError
from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.model_jax.loading import load
from griffin_eval.model_jax.state import State
from griffin_eval.runners import in_blocks

logger = logging.getLogger(__name__)


class JaxRunner:
    """`Runner` over `griffin_eval.model_jax`: the model is split once and its methods compiled."""

    framework = "jax"

    def __init__(self, model: Griffin):
        weight = model.model.embed_tokens.weight[...]
        self.config = model.config
        self.dtype = weight.dtype.name
        (self._device,) = weight.devices()
        self.device = f"{self._device.platform}:{self._device.id}"
        graph, self._params = nnx.split(model)

        def step(params: Any, tokens: Array, lengths: Array, state: State):
            return nnx.merge(graph, params).step(tokens, lengths, state)

        def logits(params: Any, hidden: Array, at: Array) -> Array:
            return nnx.merge(graph, params).logits(hidden[at[:, 0], at[:, 1]])

        def greedy(params: Any, hidden: Array, at: Array) -> Array:
            return jnp.argmax(logits(params, hidden, at), axis=1)

        self._step, self._logits, self._greedy = jax.jit(step), jax.jit(logits), jax.jit(greedy)
        self._init_state = jax.jit(model.init_state, static_argnums=(0, 1))

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str, device: str | None):
        """See `griffin_eval.runners.load_runner`."""
        if dtype == "float64" and not jax.config.read("jax_enable_x64"):
            raise ArgumentError(
                "dtype=float64 in JAX needs the environment variable JAX_ENABLE_X64=1"
            )
        chosen = None if dtype == "auto" else jnp.dtype(dtype)
        return cls(load(checkpoint, chosen, choose_device(device)))

    def bucket(self, count: int, smallest: int = 16) -> int:
        return 1 if count == 1 else max(smallest, 1 << (count - 1).bit_length())

    def init_state(self, batch: int, capacity: int) -> State:
        with jax.default_device(self._device):
            return self._init_state(batch, capacity)

    def step(self, tokens: np.ndarray, lengths: np.ndarray, state: State) -> tuple[Array, State]:
        with self._exact():
            return self._step(self._params, self._put(tokens), self._put(lengths), state)

    def score(
        self, hidden: Array, at: np.ndarray, targets: np.ndarray, softmax_dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        logprobs = np.empty(len(at), np.float64)
        greedy = np.empty(len(at), bool)
        wide = jax.enable_x64(True) if softmax_dtype == "float64" else contextlib.nullcontext()
        for block in in_blocks(at, self.config.vocab_size):
            count = len(at[block])
            logits = self._logits_at(hidden, at[block])
            target = self._padded(targets[block], len(logits))
            with wide:
                chosen, best = _normalise(logits, self._put(target), softmax_dtype)
            logprobs[block] = np.asarray(chosen, np.float64)[:count]
            greedy[block] = (np.asarray(best) == target)[:count]
        return logprobs, greedy

    def logits(self, hidden: Array, at: np.ndarray) -> np.ndarray:
        return np.asarray(self._logits_at(hidden, at))[: len(at)]

    def greedy(self, hidden: Array, at: np.ndarray) -> np.ndarray:
        positions = self._put(self._padded(at, self.bucket(len(at))))
        with self._exact():
            return np.asarray(self._greedy(self._params, hidden, positions))[: len(at)]

    def _logits_at(self, hidden: Array, at: np.ndarray) -> Array:
        positions = self._put(self._padded(at, self.bucket(len(at))))
        with self._exact():
            return self._logits(self._params, hidden, positions)

    @staticmethod
    def _padded(array: np.ndarray, length: int) -> np.ndarray:
        padding = [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1)
        return np.pad(array, padding)

    def _put(self, array: np.ndarray) -> Array:
        return jax.device_put(array.astype(np.int32), self._device)

    def _exact(self):
        # Accelerators multiply float32 in bfloat16 passes unless told otherwise.
        return jax.default_matmul_precision(
            "default" if self.dtype in ("bfloat16", "float16") else "highest"
        )


@jax.jit(static_argnums=2)
def _normalise(logits: Array, target: Array, dtype: str) -> tuple[Array, Array]:
    logits = logits.astype(dtype)
    chosen = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1), jnp.argmax(logits, axis=1)


def choose_device(device: str | None) -> Any:
    """The jax.Device asked for; lm_eval asks for cuda:0 unless told otherwise, so where none is
    there (or None is given) it is JAX's default device, and the log says so.

    Raises:
        ArgumentError: not the name of a device.
    """
    best = jax.devices()[0]
    if device is None:
        logger.info("running on %s", best)
        return best
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "gpu", "cuda", "rocm", "tpu") or not (index or "0").isdigit():
        raise ArgumentError(f"unknown device {device!r}: expected cpu, gpu, cuda:N or tpu:N")
    try:
        return jax.devices(kind)[int(index or 0)]
    except (RuntimeError, IndexError):
        logger.info("there is no device %s here: running on %s", device, best)
        return best

"""A process that trains and reads with one model in JAX, for `experiments.paper_speed.training`."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.products import products_jax
from benchmarks.timing import serve
from experiments.paper_speed.decoding_worker import open_jax_device
from griffin_eval.config import GriffinConfig
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs
from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.runners.batching import step_tokens
from griffin_eval.training.allocator import use_one_heap
from griffin_eval.training.optimizer import make_optimizer
from griffin_eval.training.recipes import Batch
from griffin_eval.training.step import compile_update

LEARNING_RATE = 1e-4


class Worker:
    """A model, of a `GriffinConfig` as JSON, that answers the requests of a `Job`."""

    def __init__(self, config: str, device: str):
        self._config, self._device = GriffinConfig(**json.loads(config)), device
        self._warm: set[tuple[str, int]] = set()

    def load(self) -> None:
        """Make the model and its optimizer."""
        self._chunk = step_tokens(open_jax_device(self._device).platform)
        specs = param_specs(self._config).items()
        self._params = {name: jnp.asarray(initial_value(spec, 0)) for name, spec in specs}
        optimizer = make_optimizer(optax.constant_schedule(LEARNING_RATE))
        self._state = optimizer.init(self._params)
        self._update, _ = compile_update(self._config, optimizer)
        self._read = jax.jit(self._read_chunk, donate_argnums=2)

    def train(self, rows: int, length: int) -> float:
        """Return the seconds of one update on rows of random tokens."""
        drawn = self._tokens(rows, length + 1)
        weights = np.ones((rows, length), np.float32)
        batch = Batch(drawn[:, :-1], drawn[:, 1:], weights, weights > 0)

        def update() -> None:
            result = self._update(self._params, self._state, batch)
            self._params, self._state, *_ = jax.block_until_ready(result)

        return self._seconds("train", length, update)

    def prefill(self, length: int) -> float:
        """Return the seconds to read one document into a state, including its last logits."""
        tokens = self._tokens(1, length)

        def read() -> None:
            logits, state = None, self._model(self._params).init_state(1, length)
            for start in range(0, length, self._chunk):
                chunk = tokens[:, start : start + self._chunk]
                logits, state = self._read(self._params, chunk, state)
            jax.block_until_ready((logits, state))

        return self._seconds("prefill", length, read)

    def products(self, tokens: int) -> Mapping[str, float]:
        """Return the FLOP/s of each method to multiply matrices of the shapes of the MLP."""
        return products_jax(tokens, self._config.width, self._config.mlp_width)

    def _model(self, params: dict[str, jax.Array]) -> Griffin:
        return Griffin(self._config, lambda spec: nnx.Param(params[spec.name]))

    def _read_chunk(self, params: dict[str, jax.Array], tokens: jax.Array, state: Any):
        model = self._model(params)
        lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
        hidden, state = model.step(tokens, lengths, state)
        return model.logits(hidden[:, -1]), state

    def _tokens(self, rows: int, length: int) -> np.ndarray:
        rng = np.random.default_rng([rows, length])
        return rng.integers(self._config.vocab_size, size=(rows, length), dtype=np.int32)

    def _seconds(self, kind: str, length: int, work: Callable[[], None]) -> float:
        """Time the work, after a first run for each kind and length, which compiles."""
        if (kind, length) not in self._warm:
            work()
            self._warm.add((kind, length))
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


if __name__ == "__main__":
    use_one_heap()  # `griffin-eval train` does the same
    serve(Worker(*sys.argv[1:]))

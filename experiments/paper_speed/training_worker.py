"""One model in JAX, in a process that `experiments.paper_speed.training` asks to train and read.

``python -m experiments.paper_speed.training_worker CONFIG DEVICE`` answers requests for the
methods of `Worker` (`benchmarks.timing.serve`).
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.products import products_jax
from benchmarks.timing import serve
from experiments.paper_speed.samplers import open_jax_device
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
    """What can be asked of a model.

    Args:
        config: the fields of its `GriffinConfig` as JSON.
        device: as JAX names it.

    Raises:
        ArgumentError: JAX finds no such device.
    """

    def __init__(self, config: str, device: str):
        self._chunk = step_tokens(open_jax_device(device).platform)
        self._config = GriffinConfig(**json.loads(config))
        specs = param_specs(self._config).items()
        self._params = {name: jnp.asarray(initial_value(spec, 0)) for name, spec in specs}
        optimizer = make_optimizer(optax.constant_schedule(LEARNING_RATE))
        self._state = optimizer.init(self._params)
        self._update, _ = compile_update(self._config, optimizer)
        self._read = jax.jit(self._read_chunk, donate_argnums=2)
        self._warm: set[tuple[str, int]] = set()

    def train(self, rows: int, length: int) -> float:
        """Seconds of one update on rows of random tokens."""
        drawn = self._tokens(rows, length + 1)
        weights = np.ones((rows, length), np.float32)
        batch = Batch(drawn[:, :-1], drawn[:, 1:], weights, weights > 0)

        def update() -> None:
            result = self._update(self._params, self._state, batch)
            self._params, self._state, *_ = jax.block_until_ready(result)

        return self._seconds("train", length, update)

    def prefill(self, length: int) -> float:
        """Seconds to read one document into a state to decode from, with its last logits."""
        tokens = self._tokens(1, length)

        def read() -> None:
            logits, state = None, self._model(self._params).init_state(1, length)
            for start in range(0, length, self._chunk):
                chunk = tokens[:, start : start + self._chunk]
                logits, state = self._read(self._params, chunk, state)
            jax.block_until_ready((logits, state))

        return self._seconds("prefill", length, read)

    def products(self, tokens: int) -> dict[str, float]:
        """FLOP/s by each way of multiplying matrices, on the shapes of the MLP."""
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
        """Seconds of the work, done once before if it is the first of its kind and compiles."""
        if (kind, length) not in self._warm:
            work()
            self._warm.add((kind, length))
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


def main() -> None:
    use_one_heap()  # as `griffin-eval train` does
    worker: list[Worker] = []

    def load() -> None:
        worker.append(Worker(*sys.argv[1:]))

    asked = ("train", "prefill", "products")
    serve({"load": load} | {name: lambda n=name, **a: getattr(worker[0], n)(**a) for name in asked})


if __name__ == "__main__":
    main()

"""A process that samples with one model in one framework, for `experiments.paper_speed.decoding`.

A state is filled with a constant, as if its rows had read that many tokens: the time of a step
depends on the number of keys and not on their values.

Each model has ``begin(batch, context)``, which returns tokens of the rows and a state as after
``context`` tokens of each, with room for `MAX_STEPS` more, and ``sample(tokens, state)``, which
reads a token of every row and returns the likeliest next ones and the new state. Both return after
the results are computed.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model.implementations import make_transformers
from benchmarks.products import products_jax, products_torch, reading_jax, reading_torch
from benchmarks.random_checkpoint import write_weights
from benchmarks.timing import serve
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint

FILLED = 0.1  # every number of a state
MAX_STEPS = 64  # steps after the context, for which a state has room
WARM_UP = 2  # steps before those that are timed; the first may compile
STEPS, LONG_ENOUGH = 16, 2.0  # timed steps, and seconds after which no more are timed
POSITIONS = 8  # bytes of the two int32 that a state has for every row


class Torch:
    """`griffin_eval.model_torch` with random weights in float32."""

    def __init__(self, config: GriffinConfig, device: str):
        from griffin_eval.model_torch.griffin import initialize
        from griffin_eval.process import tune_process
        from griffin_eval.runners.torch_runner import choose_device

        self._device = choose_device(device)
        if self._device.type == "cpu":
            tune_process()
        self._model = initialize(config).to(self._device).requires_grad_(False).eval()

    def begin(self, batch: int, context: int) -> tuple[Any, Any]:
        import torch

        from griffin_eval.model_torch.decoding import DecodingState
        from griffin_eval.model_torch.state import map_leaves

        def fill(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.fill_(FILLED) if leaf.is_floating_point() else leaf

        state = DecodingState.start(self._model, batch, context + MAX_STEPS + 1)
        rows = map_leaves(fill, state.rows)
        rows = rows._replace(pos=torch.full_like(rows.pos, context))
        tokens = torch.zeros(batch, dtype=torch.int64, device=self._device)
        return tokens, state._replace(rows=rows)

    def sample(self, tokens: Any, state: Any) -> tuple[Any, Any]:
        import torch

        hidden, state = state.step(self._model, tokens, torch.ones_like(tokens))
        likeliest = self._model.logits(hidden).argmax(-1)
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return likeliest, state

    def state_bytes(self, context: int) -> int:
        from griffin_eval.model_torch.state import nbytes

        return nbytes(self._model.init_state(1, context + 1)) - POSITIONS


class Jax:
    """`griffin_eval.model_jax` with random weights in float32, compiled, the state donated."""

    def __init__(self, config: GriffinConfig, device: str):
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from griffin_eval.model_jax.decoding import DecodingState
        from griffin_eval.model_jax.griffin import initialize

        open_jax_device(device)
        model = self._model = initialize(config)
        graph, self._params = nnx.split(model)

        def step(state, params, tokens):
            model = nnx.merge(graph, params)
            hidden, state = state.step(model, tokens, jnp.ones_like(tokens))
            return jnp.argmax(model.logits(hidden), -1).astype(jnp.int32), state

        def begin(batch, context):
            def fill(leaf):
                return jnp.full_like(leaf, FILLED if leaf.ndim > 1 else context)

            state = DecodingState.start(model, batch, context + MAX_STEPS + 1)
            rows = jax.tree.map(fill, state.rows)
            rows = rows._replace(attention_start=jnp.zeros_like(rows.pos))
            return jnp.zeros(batch, jnp.int32), state._replace(rows=rows)

        self._begin = jax.jit(begin, static_argnums=(0, 1))
        self._step = jax.jit(step, donate_argnums=0)
        self._ready = jax.block_until_ready

    def begin(self, batch: int, context: int) -> tuple[Any, Any]:
        return self._ready(self._begin(batch, context))

    def sample(self, tokens: Any, state: Any) -> tuple[Any, Any]:
        return self._ready(self._step(state, self._params, tokens))

    def state_bytes(self, context: int) -> int:
        from griffin_eval.model_jax.state import nbytes

        return nbytes(self._model.init_state(1, context + 1)) - POSITIONS


class Transformers:
    """RecurrentGemma of transformers on the CPU; one row reads, and the others are copies."""

    def __init__(self, config: GriffinConfig, device: str):
        with tempfile.TemporaryDirectory() as folder:
            write_weights(config, Path(folder))
            self._model = make_transformers(Checkpoint(folder), "float32")

    def begin(self, batch: int, context: int) -> tuple[Any, Any]:
        cache, memory = self._model.begin(np.zeros((1, max(context, 1)), np.int32))
        for layer in cache.layers:
            if hasattr(layer, "keys"):  # recurrent blocks keep their state themselves
                layer.batch_repeat_interleave(batch)
        copies = [tuple(x.repeat_interleave(batch, 0) for x in pair) for pair in memory]
        return np.zeros(batch, np.int32), (cache, copies)

    def sample(self, tokens: Any, state: Any) -> tuple[Any, Any]:
        logits, state = self._model.decode(state, tokens)
        return logits.argmax(-1).int().numpy(), state


def open_jax_device(device: str) -> Any:
    """Make a JAX device the default, and return it."""
    import jax

    from griffin_eval.runners.jax_runner import choose_device

    chosen = choose_device(device)
    jax.config.update("jax_default_device", chosen)
    return chosen


class Worker:
    """A model, of a `GriffinConfig` as JSON, that answers the requests of a `Job`."""

    _model: Any

    def __init__(self, config: str, device: str, framework: str):
        self._config = GriffinConfig(**json.loads(config))
        self._device, self._framework = device, framework

    def load(self) -> None:
        """Make the model."""
        make = {"torch": Torch, "jax": Jax, "transformers": Transformers}[self._framework]
        self._model = make(self._config, self._device)

    def steps(self, batch: int, context: int) -> float:
        """Return the mean seconds of a decoding step."""
        tokens, state = self._model.begin(batch, context)
        for _ in range(WARM_UP):
            tokens, state = self._model.sample(tokens, state)
        done, begin = 0, time.perf_counter()
        while done < STEPS and time.perf_counter() - begin < LONG_ENOUGH:
            tokens, state = self._model.sample(tokens, state)
            done += 1
        return (time.perf_counter() - begin) / done

    def state_bytes(self, context: int) -> int:
        """Return the bytes of the state of one document of ``context`` tokens."""
        return self._model.state_bytes(context)

    def products(self, tokens: int) -> Mapping[str, float]:
        """Return the FLOP/s of each method to multiply matrices of the shapes of the MLP."""
        shape = tokens, self._config.width, self._config.mlp_width
        jax = self._framework == "jax"
        return products_jax(*shape) if jax else products_torch(*shape, self._device)

    def reading(self, nbytes: int) -> Mapping[str, float]:
        """Return the bytes per second of each way to read an array."""
        jax = self._framework == "jax"
        return reading_jax(nbytes) if jax else reading_torch(nbytes, self._device)


def main() -> None:
    worker, inference = Worker(*sys.argv[1:]), nullcontext()
    if sys.argv[3] != "jax":
        import torch

        inference = torch.inference_mode()
    with inference:
        serve(worker)


if __name__ == "__main__":
    main()

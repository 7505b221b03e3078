"""A process that samples with one model in one framework, for `experiments.paper_speed.decoding`.

A state is filled with a constant, as if its rows had read that many tokens: the time of a step
depends on the number of keys and not on their values.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
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
MOST_STEPS = 64  # steps after the context for which a state has room
WARM_UP = 2  # untimed first steps, which may compile
STEPS, LONG_ENOUGH = 16, 2.0  # timed steps, and seconds after which timing stops
POSITIONS = 8  # bytes of the two int32 of each row of a state


class Sampler:
    """A model that samples greedily; methods return after the results are computed."""

    def begin(self, batch: int, context: int) -> tuple[Any, Any]:
        """Return tokens of B rows and a state as after ``context`` tokens of each, with room for
        `MOST_STEPS` more."""
        raise NotImplementedError

    def sample(self, tokens: Any, state: Any) -> tuple[Any, Any]:
        """Read one token of every row; return the likeliest next tokens and the new state."""
        raise NotImplementedError

    def state_bytes(self, context: int) -> int:
        """Return the bytes of the state of one document with ``context`` tokens."""
        raise NotImplementedError


def make_torch(config: GriffinConfig, device: str) -> Sampler:
    """Make `griffin_eval.model_torch` with random weights in float32."""
    import torch

    from griffin_eval.model_torch.decoding import DecodingState
    from griffin_eval.model_torch.griffin import initialize
    from griffin_eval.model_torch.state import map_leaves, nbytes
    from griffin_eval.process import tune_process
    from griffin_eval.runners.torch_runner import choose_device

    chosen = choose_device(device)
    if chosen.type == "cpu":
        tune_process()
    model = initialize(config).to(chosen).requires_grad_(False).eval()

    def wait(value):
        if chosen.type != "cpu":
            torch.accelerator.synchronize(chosen)
        return value

    def fill(leaf):
        return leaf.fill_(FILLED) if leaf.is_floating_point() else leaf

    class Torch(Sampler):
        def begin(self, batch, context):
            state = DecodingState.start(model, batch, context + MOST_STEPS + 1)
            rows = map_leaves(fill, state.rows)
            rows = rows._replace(pos=torch.full_like(rows.pos, context))
            tokens = torch.zeros(batch, dtype=torch.int64, device=chosen)
            return tokens, state._replace(rows=rows)

        def sample(self, tokens, state):
            hidden, state = state.step(model, tokens, torch.ones_like(tokens))
            return wait(model.logits(hidden).argmax(-1)), state

        def state_bytes(self, context):
            return nbytes(model.init_state(1, context + 1)) - POSITIONS

    return Torch()


def make_jax(config: GriffinConfig, device: str) -> Sampler:
    """Make `griffin_eval.model_jax` with random weights in float32, compiled, the state donated."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from griffin_eval.model_jax.decoding import DecodingState
    from griffin_eval.model_jax.griffin import initialize
    from griffin_eval.model_jax.state import nbytes

    open_jax_device(device)
    model = initialize(config)
    graph, params = nnx.split(model)

    def step(state, params, tokens):
        model = nnx.merge(graph, params)
        hidden, state = state.step(model, tokens, jnp.ones_like(tokens))
        return jnp.argmax(model.logits(hidden), -1).astype(jnp.int32), state

    def begin(batch, context):
        def fill(leaf):
            return jnp.full_like(leaf, FILLED if leaf.ndim > 1 else context)

        state = DecodingState.start(model, batch, context + MOST_STEPS + 1)
        rows = jax.tree.map(fill, state.rows)
        rows = rows._replace(attention_start=jnp.zeros_like(rows.pos))
        return jnp.zeros(batch, jnp.int32), state._replace(rows=rows)

    begin = jax.jit(begin, static_argnums=(0, 1))
    step = jax.jit(step, donate_argnums=0)

    class Jax(Sampler):
        def begin(self, batch, context):
            return jax.block_until_ready(begin(batch, context))

        def sample(self, tokens, state):
            return jax.block_until_ready(step(state, params, tokens))

        def state_bytes(self, context):
            return nbytes(model.init_state(1, context + 1)) - POSITIONS

    return Jax()


def make_theirs(config: GriffinConfig, device: str) -> Sampler:
    """Make transformers' RecurrentGemma on the CPU; one row reads, and the others are copies."""
    with tempfile.TemporaryDirectory() as folder:
        write_weights(config, Path(folder))
        model = make_transformers(Checkpoint(folder), "float32")

    class Transformers(Sampler):
        def begin(self, batch, context):
            cache, memory = model.begin(np.zeros((1, max(context, 1)), np.int32))
            for layer in cache.layers:
                if hasattr(layer, "keys"):  # recurrent blocks hold their own state
                    layer.batch_repeat_interleave(batch)
            copies = [tuple(x.repeat_interleave(batch, 0) for x in pair) for pair in memory]
            return np.zeros(batch, np.int32), (cache, copies)

        def sample(self, tokens, state):
            logits, state = model.decode(state, tokens)
            return logits.argmax(-1).int().numpy(), state

    return Transformers()


MAKERS = {"torch": make_torch, "jax": make_jax, "transformers": make_theirs}


def open_jax_device(device: str) -> Any:
    """Make a JAX device the default, and return it."""
    import jax

    from griffin_eval.runners.jax_runner import choose_device

    chosen = choose_device(device)
    jax.config.update("jax_default_device", chosen)
    return chosen


class Worker:
    """A model that answers the requests of a `Job`; ``config`` is a `GriffinConfig` as JSON."""

    _sampler: Sampler

    def __init__(self, config: str, device: str, framework: str):
        self._config = GriffinConfig(**json.loads(config))
        self._device, self._framework = device, framework

    def load(self) -> None:
        """Make the model."""
        self._sampler = MAKERS[self._framework](self._config, self._device)

    def steps(self, batch: int, context: int) -> float:
        """Return the mean seconds of a decoding step."""
        tokens, state = self._sampler.begin(batch, context)
        for _ in range(WARM_UP):
            tokens, state = self._sampler.sample(tokens, state)
        done, begin = 0, time.perf_counter()
        while done < STEPS and time.perf_counter() - begin < LONG_ENOUGH:
            tokens, state = self._sampler.sample(tokens, state)
            done += 1
        return (time.perf_counter() - begin) / done

    def state_bytes(self, context: int) -> int:
        """Return the bytes of the state of one document with ``context`` tokens."""
        return self._sampler.state_bytes(context)

    def products(self, tokens: int) -> Mapping[str, float]:
        """Return the FLOP/s of each method to multiply matrices of the shapes of the MLP."""
        shape = tokens, self._config.width, self._config.mlp_width
        return products_jax(*shape) if self._jax else products_torch(*shape, self._device)

    def reading(self, nbytes: int) -> Mapping[str, float]:
        """Return the bytes per second of each method to read an array."""
        return reading_jax(nbytes) if self._jax else reading_torch(nbytes, self._device)

    @property
    def _jax(self) -> bool:
        return self._framework == "jax"


def main() -> None:
    worker = Worker(*sys.argv[1:])
    names = ("load", "steps", "state_bytes", "products", "reading")
    functions = {name: getattr(worker, name) for name in names}
    if sys.argv[3] == "jax":
        serve(functions)
        return
    import torch

    with torch.inference_mode():
        serve(functions)


if __name__ == "__main__":
    main()

"""The implementations that sample: this package's twins, and transformers' RecurrentGemma.

A state is filled with a constant, as if its rows had read so many tokens: what a step takes depends
on how many keys there are and not on what is in them.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.model.implementations import make_transformers
from benchmarks.random_checkpoint import write_weights
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError

FILLED = 0.1  # every number of a state
MOST_STEPS = 64  # after which a state is compacted, and which its capacity allows for


class Sampler(Protocol):
    """A model that samples greedily; what it returns has been computed, not only asked for."""

    def begin(self, batch: int, context: int) -> tuple[Any, Any]:
        """Tokens of B rows to go on with, and a decoding state as after ``context`` tokens of each,
        in which at most `MOST_STEPS` more are read."""
        ...

    def sample(self, tokens: Any, state: Any) -> tuple[Any, Any]:
        """Reads one token of every row: the likeliest next ones, and the state, which replaces the
        one before."""
        ...

    def compact(self, state: Any) -> Any:
        """The state after the work that is due every `MOST_STEPS` steps."""
        ...

    def state_bytes(self, context: int) -> int | None:
        """Bytes that the state of one document has, for so many tokens; None if nobody knows."""
        ...


def make_torch(config: GriffinConfig, device: str) -> Sampler:
    """`griffin_eval.model_torch` with random weights in float32."""
    import torch

    from griffin_eval.model_torch.decoding import DecodingState
    from griffin_eval.model_torch.griffin import initialize
    from griffin_eval.model_torch.state import map_leaves, nbytes
    from griffin_eval.process import tune_process
    from griffin_eval.runners.torch_runner import choose_device

    chosen = choose_device(device)
    _check_device("torch", device, chosen.type)
    if chosen.type == "cpu":
        tune_process()
    model = initialize(config).to(chosen).requires_grad_(False).eval()

    def wait(value):
        if chosen.type != "cpu":
            torch.accelerator.synchronize(chosen)
        return value

    class Torch:
        def begin(self, batch, context):
            state = DecodingState.start(model, batch, context + MOST_STEPS + 1)
            rows = map_leaves(
                lambda leaf: leaf.fill_(FILLED) if leaf.is_floating_point() else leaf, state.rows
            )
            rows = rows._replace(pos=torch.full_like(rows.pos, context))
            tokens = torch.zeros(batch, dtype=torch.int64, device=chosen)
            return tokens, state._replace(rows=rows)

        def sample(self, tokens, state):
            hidden, state = state.step(model, tokens, torch.ones_like(tokens))
            return wait(model.logits(hidden).argmax(-1)), state

        def compact(self, state):
            return wait(state.compact())

        def state_bytes(self, context):
            return _without_positions(nbytes(model.init_state(1, context + 1)))

    return Torch()


def make_jax(config: GriffinConfig, device: str) -> Sampler:
    """`griffin_eval.model_jax` with random weights in float32: compiled, the state donated."""
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
    step, compact = (jax.jit(f, donate_argnums=0) for f in (step, DecodingState.compact))

    class Jax:
        def begin(self, batch, context):
            return jax.block_until_ready(begin(batch, context))

        def sample(self, tokens, state):
            return jax.block_until_ready(step(state, params, tokens))

        def compact(self, state):
            return jax.block_until_ready(compact(state))

        def state_bytes(self, context):
            return _without_positions(nbytes(model.init_state(1, context + 1)))

    return Jax()


def make_theirs(config: GriffinConfig, device: str) -> Sampler:
    """transformers' RecurrentGemma on the CPU. One row reads a text, and the others are copies."""
    if device != "cpu":
        raise ArgumentError("transformers is measured on the CPU only")
    with tempfile.TemporaryDirectory() as folder:
        write_weights(config, Path(folder))
        model = make_transformers(Checkpoint(folder), "float32")

    class Transformers:
        def begin(self, batch, context):
            text = np.zeros((1, max(context, 1)), np.int32)
            cache, memory = model.begin(text)
            for layer in cache.layers:
                if hasattr(layer, "keys"):  # recurrent blocks keep what they remember themselves
                    layer.batch_repeat_interleave(batch)
            copies = [tuple(x.repeat_interleave(batch, 0) for x in pair) for pair in memory]
            return np.zeros(batch, np.int32), (cache, copies)

        def sample(self, tokens, state):
            logits, state = model.decode(state, tokens)
            return logits.argmax(-1).int().numpy(), state

        def compact(self, state):
            return state

        def state_bytes(self, context):
            return None

    return Transformers()


MAKERS: dict[str, Callable[[GriffinConfig, str], Sampler]] = {
    "torch": make_torch,
    "jax": make_jax,
    "transformers": make_theirs,
}


def open_jax_device(device: str) -> Any:
    """The jax.Device of this name, from now on the default.

    Raises:
        ArgumentError: JAX finds no such device.
    """
    import jax

    from griffin_eval.runners.jax_runner import choose_device

    chosen = choose_device(device)
    _check_device("jax", device, chosen.platform)
    jax.config.update("jax_default_device", chosen)
    return chosen


def _check_device(framework: str, asked: str, found: str) -> None:
    """Raises ArgumentError where the framework would run on another kind of device."""
    kinds = {"cuda": "gpu", "rocm": "gpu"}
    kind = asked.partition(":")[0]
    if kinds.get(kind, kind) != kinds.get(found, found):
        raise ArgumentError(
            f"--device {asked}: {framework} finds no such device here, only {found}"
        )


def _without_positions(nbytes: int) -> int:
    return nbytes - 8  # two int32 that a state has of every row

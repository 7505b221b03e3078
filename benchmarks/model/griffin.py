"""This package's models, through the names that `griffin_eval.load` promises.

Steps of decoding go through `DecodingState`, as in the package's runners.
"""

from typing import Any

import numpy as np

import griffin_eval
from benchmarks.timing import tune_process

STEP = 512  # tokens that the runners read at a time on a CPU


class Torch:
    """The model in PyTorch, as an `Implementation`."""

    def __init__(self, checkpoint: str, dtype: str):
        tune_process()
        import torch

        self._torch = torch
        self._model: Any = griffin_eval.load(
            checkpoint, framework="torch", dtype=dtype, device="cpu"
        ).eval()

    def read(self, tokens: np.ndarray, every: bool) -> Any:
        hidden, _ = self._read(tokens)
        wanted = self._torch.cat(hidden, 1)[0] if every else hidden[-1][0, -1:]
        return self._model.logits(wanted)

    def begin(self, tokens: np.ndarray) -> Any:
        _, state = self._read(tokens)
        from griffin_eval.model_torch.decoding import DecodingState

        rows = self._torch.arange(len(tokens))
        return DecodingState.start(self._model, len(rows)).insert(rows, state, rows)

    def decode(self, state: Any, tokens: np.ndarray) -> tuple[Any, Any]:
        ids, ones = self._torch.from_numpy(tokens), self._torch.ones(len(tokens)).long()
        hidden, state = state.step(self._model, ids, ones)
        return self._model.logits(hidden), state

    def _read(self, tokens: np.ndarray) -> tuple[list, Any]:
        state, hidden = self._model.init_state(len(tokens)), []
        for chunk in self._torch.from_numpy(tokens).split(STEP, 1):
            lengths = self._torch.full((len(tokens),), chunk.shape[1])
            h, state = self._model.step(chunk, lengths, state)
            hidden.append(h)
        return hidden, state


class Jax:
    """The model in JAX, as an `Implementation`: compiled, with the state donated."""

    def __init__(self, checkpoint: str, dtype: str):
        import jax
        import jax.numpy as jnp
        from flax import nnx

        self._jax, self._jnp = jax, jnp
        self._model: Any = griffin_eval.load(checkpoint, framework="jax", dtype=dtype)
        graph, self._params = nnx.split(self._model)

        def step(state: Any, params: Any, tokens: Any) -> Any:
            lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
            return nnx.merge(graph, params).step(tokens, lengths, state)

        def logits(params: Any, hidden: Any) -> Any:
            return nnx.merge(graph, params).logits(hidden)

        def decode(state: Any, params: Any, tokens: Any) -> Any:
            active = jnp.ones(len(tokens), jnp.int32)
            hidden, state = state.step(nnx.merge(graph, params), tokens, active)
            return logits(params, hidden), state

        self._step, self._decode = (jax.jit(f, donate_argnums=0) for f in (step, decode))
        self._logits = jax.jit(logits)

    def read(self, tokens: np.ndarray, every: bool) -> Any:
        hidden, state = self._read(tokens)
        wanted = self._jnp.concatenate(hidden, 1)[0] if every else hidden[-1][0, -1:]
        return self._jax.block_until_ready((self._logits(self._params, wanted), state))[0]

    def begin(self, tokens: np.ndarray) -> Any:
        _, state = self._read(tokens)
        from griffin_eval.model_jax.decoding import DecodingState

        rows = self._jnp.arange(len(tokens))
        start = DecodingState.start(self._model, len(rows))
        if self._reads_in_place():
            from griffin_eval.runners.jax_functions import as_bits

            start, state = DecodingState(as_bits(start.rows)), as_bits(state)
        insert = self._jax.jit(DecodingState.insert, donate_argnums=0)
        return insert(start, rows, state, rows)

    def decode(self, state: Any, tokens: np.ndarray) -> tuple[Any, Any]:
        return self._jax.block_until_ready(self._decode(state, self._params, tokens))

    def _reads_in_place(self) -> bool:
        """Return whether the package's runner keeps keys and values as bits; 53c0389's does not."""
        from griffin_eval.runners import jax_functions
        from griffin_eval.runners.jax_runner import JaxRunner

        has_bits = hasattr(jax_functions, "as_bits")
        return has_bits and JaxRunner(self._model).attention_kernel.startswith("cpu")

    def _read(self, tokens: np.ndarray) -> tuple[list, Any]:
        state, hidden = self._model.init_state(len(tokens)), []
        for start in range(0, tokens.shape[1], STEP):
            h, state = self._step(state, self._params, tokens[:, start : start + STEP])
            hidden.append(h)
        return hidden, state


MAKERS = {"torch": Torch, "jax": Jax}

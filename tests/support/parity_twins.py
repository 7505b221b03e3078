"""Both twins behind one interface of numpy arrays, so that one test covers both."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from parity import weights
from xla_options import QUICK_COMPILE

from griffin_eval.config import GriffinConfig
from griffin_eval.model_jax import decoding as jax_decoding
from griffin_eval.model_jax import griffin as jax_griffin
from griffin_eval.model_jax import state as jax_state
from griffin_eval.model_torch import decoding as torch_decoding
from griffin_eval.model_torch import griffin as torch_griffin
from griffin_eval.model_torch import state as torch_state


class TorchTwin:
    name = "torch"

    def __init__(
        self, config: GriffinConfig, weights: dict[str, np.ndarray], dtype: str = "float32"
    ):
        def make(spec):
            value = torch.tensor(weights[spec.name])
            return torch.nn.Parameter(
                value.to(torch_griffin.param_dtype(spec, getattr(torch, dtype)))
            )

        self.config = config
        self.model = torch_griffin.Griffin(config, make)

    def init_state(self, batch, capacity=None):
        return self.model.init_state(batch, capacity)

    @torch.no_grad()
    def step(self, tokens, lengths, state, resets=None):
        hidden, state = self.model.step(*self._inputs(tokens, lengths), state, self._array(resets))
        return to_numpy(hidden), state

    @torch.no_grad()
    def step_packed(self, tokens, lengths, state, tile):
        every = torch.arange(len(lengths))
        pool = torch_state.gather(state, every)  # a copy, which is consumed
        rows = torch_state.PoolRows(every, every, every)
        inputs = self._inputs(tokens, lengths)
        hidden, state = self.model.step_packed(*inputs, pool, rows, tile)
        return to_numpy(hidden), state

    def start_decoding(self, batch, capacity=None):
        return torch_decoding.DecodingState.start(self.model, batch, capacity)

    def insert(self, state, rows, pool, sources):
        return state.insert(self._array(rows), pool, self._array(sources))

    def extract(self, state, rows):
        return state.extract(self._array(np.asarray(rows)))

    @torch.no_grad()
    def decode_step(self, state, tokens, active):
        hidden, state = state.step(self.model, *self._inputs(tokens, active))
        return to_numpy(hidden), state

    @torch.no_grad()
    def logits(self, tokens, lengths=None, resets=None, capacity=None):
        return to_numpy(self._logits(tokens, lengths, resets, capacity))

    def gradients(self, tokens, targets, resets=None):
        """Return d(mean cross-entropy) / d(parameter) by name."""
        logits = self._logits(tokens, None, resets, tokens.shape[1])
        targets = self._array(targets)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        return {
            name: to_numpy(gradient)
            for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True)
        }

    def gather(self, state, rows):
        return torch_state.gather(state, self._array(np.asarray(rows)))

    def with_position(self, state, position):
        return state._replace(pos=torch.full_like(state.pos, position))

    def with_values(self, state, value):
        layers = (type(s)(*(torch.full_like(x, value) for x in s)) for s in state.layers)
        return state._replace(layers=tuple(layers))

    def _logits(self, tokens, lengths, resets, capacity):
        state = self.model.init_state(len(tokens), capacity)
        hidden, _ = self.model.step(*self._inputs(tokens, lengths), state, self._array(resets))
        return self.model.logits(hidden)

    def _inputs(self, tokens, lengths):
        lengths = full_lengths(tokens) if lengths is None else lengths
        return self._array(tokens), self._array(np.asarray(lengths))

    @staticmethod
    def _array(value):
        if value is None:
            return None
        value = torch.from_numpy(np.ascontiguousarray(value))
        return value if value.dtype == torch.bool else value.long()


def _compiled(function, **options):
    return jax.jit(function, compiler_options=QUICK_COMPILE, **options)


# Without jit, JAX compiles a program for each leaf and operation.
_gather = _compiled(jax_state.gather)
_insert = _compiled(jax_decoding.DecodingState.insert)
_extract = _compiled(jax_decoding.DecodingState.extract)


class JaxTwin:
    name = "jax"

    def __init__(
        self,
        config: GriffinConfig,
        weights: dict[str, np.ndarray],
        dtype: str = "float32",
        compiler_options: dict | None = QUICK_COMPILE,
    ):
        self.config, self.x64 = config, dtype == "float64"

        def make(spec):
            kind = jax_griffin.param_dtype(spec, jnp.dtype(dtype))
            return nnx.Param(jnp.asarray(weights[spec.name], kind))

        with self.precision():
            model = jax_griffin.Griffin(config, make)
            self.graph, self.params = nnx.split(model)

        def step(params, *args):
            return nnx.merge(self.graph, params).step(*args)

        def decode(params, hidden):
            return nnx.merge(self.graph, params).logits(hidden)

        def step_packed(params, tokens, lengths, state, tile):
            every = jnp.arange(len(lengths), dtype=jnp.int32)
            rows = jax_state.PoolRows(every, every, every)
            return nnx.merge(self.graph, params).step_packed(tokens, lengths, state, rows, tile)

        def decode_step(params, state, tokens, active):
            return state.step(nnx.merge(self.graph, params), tokens, active)

        self._step, self._decode, self._decode_step, self._gradients = (
            jax.jit(function, compiler_options=compiler_options)
            for function in (step, decode, decode_step, jax.grad(self._loss))
        )
        self._step_packed = jax.jit(
            step_packed, static_argnames="tile", compiler_options=compiler_options
        )

    def precision(self):
        return jax.enable_x64(True) if self.x64 else contextlib.nullcontext()

    @property
    def model(self):
        return nnx.merge(self.graph, self.params)

    def init_state(self, batch, capacity=None):
        with self.precision():
            return self.model.init_state(batch, capacity)

    def step(self, tokens, lengths, state, resets=None):
        with self.precision():
            args = (*self._inputs(tokens, lengths), state, self._array(resets))
            hidden, state = self._step(self.params, *args)
        return to_numpy(hidden), state

    def step_packed(self, tokens, lengths, state, tile):
        with self.precision():
            inputs = self._inputs(tokens, lengths)
            hidden, state = self._step_packed(self.params, *inputs, state, tile=tile)
        return to_numpy(hidden), state

    def start_decoding(self, batch, capacity=None):
        with self.precision():
            return jax_decoding.DecodingState.start(self.model, batch, capacity)

    def insert(self, state, rows, pool, sources):
        return _insert(state, self._array(rows), pool, self._array(sources))

    def extract(self, state, rows):
        return _extract(state, self._array(np.asarray(rows)))

    def decode_step(self, state, tokens, active):
        with self.precision():
            hidden, state = self._decode_step(self.params, state, *self._inputs(tokens, active))
        return to_numpy(hidden), state

    def logits(self, tokens, lengths=None, resets=None, capacity=None):
        with self.precision():
            state = self.model.init_state(len(tokens), capacity)
            args = (*self._inputs(tokens, lengths), state, self._array(resets))
            hidden, _ = self._step(self.params, *args)
            return to_numpy(self._decode(self.params, hidden))

    def gradients(self, tokens, targets, resets=None):
        """Return d(mean cross-entropy) / d(parameter) by name."""
        with self.precision():
            args = (self._array(tokens), self._array(targets), self._array(resets))
            gradients = self._gradients(self.params, *args)
        return {
            ".".join(map(str, path)): to_numpy(g[...]) for path, g in nnx.to_flat_state(gradients)
        }

    def _loss(self, params, tokens, targets, resets):
        model = nnx.merge(self.graph, params)
        batch, length = tokens.shape
        state = model.init_state(batch, length)
        lengths = jnp.full((batch,), length, jnp.int32)
        hidden, _ = model.step(tokens, lengths, state, resets)
        log_p = jax.nn.log_softmax(model.logits(hidden))
        return -jnp.take_along_axis(log_p, targets[:, :, None], -1).mean()

    def gather(self, state, rows):
        with self.precision():
            return _gather(state, self._array(np.asarray(rows)))

    def with_position(self, state, position):
        return state._replace(pos=jnp.full_like(state.pos, position))

    def with_values(self, state, value):
        layers = jax.tree.map(lambda x: jnp.full_like(x, value), state.layers)
        return state._replace(layers=layers)

    def _inputs(self, tokens, lengths):
        lengths = full_lengths(tokens) if lengths is None else lengths
        return self._array(tokens), self._array(np.asarray(lengths))

    @staticmethod
    def _array(value):
        if value is None:
            return None
        return jnp.asarray(value, None if value.dtype == bool else jnp.int32)


TWINS = {"torch": TorchTwin, "jax": JaxTwin}


@functools.cache
def twin(name: str, config: GriffinConfig, dtype: str = "float32"):
    """Return the twin with `parity.weights`; it is cached, so JAX compiles each shape once."""
    return TWINS[name](config, weights(config), dtype)


def full_lengths(tokens):
    return np.full(len(tokens), tokens.shape[1])


def to_numpy(x) -> np.ndarray:
    """Convert to numpy, bfloat16 to float32."""
    if isinstance(x, torch.Tensor):
        x = x.detach()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == jnp.bfloat16 else x


def leaves(state) -> list[np.ndarray]:
    """Return every array of a state: positions first, then layer by layer."""
    if isinstance(state, tuple):
        return [leaf for part in state for leaf in leaves(part)]
    return [to_numpy(state)]

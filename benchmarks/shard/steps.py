"""Compilation of the steps of a model that is split over devices, from shapes alone."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.ahead_of_time import no_compilation_cache
from benchmarks.scan.tpu_compiler import xla_cycles
from benchmarks.shard.collectives import collectives
from benchmarks.shard.measured import Measured, Sizes
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import ParamSpec, param_specs
from griffin_eval.model_jax.decoding import DecodingState
from griffin_eval.model_jax.griffin import Griffin, param_dtype
from griffin_eval.model_jax.state import PoolRows
from griffin_eval.runners import jax_functions
from griffin_eval.runners.jax_time import read_over_time
from griffin_eval.sharding.mesh_jax import param_sharding
from griffin_eval.sharding.split import DATA, MODEL, TIME, Split, split_over
from griffin_eval.training.recipes import Batch

TPUS = {"TPU v5 lite": "v5e", "TPU v6 lite": "v6e"}  # JAX's and the compiler's names


def compile_training(config: GriffinConfig, mesh: Mesh, dtype: str, sizes: Sizes) -> Measured:
    """Compile the trainer's step with recomputation, with batch and weights split over a mesh."""
    from griffin_eval.training import optimizer as optimizers
    from griffin_eval.training import step

    optimizer = optimizers.make_optimizer(lambda step: 1e-3)
    method = step.Method(mesh=mesh, recompute=True)
    update, _ = step.compile_update(config, optimizer, method, dtype)

    def placed(shape: tuple[int, ...], dtype: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    places = step.param_places(config, mesh)
    params = {n: placed(s.shape, jnp.float32, places[n]) for n, s in param_specs(config).items()}
    state = jax.tree.map(
        lambda x, place: placed(x.shape, x.dtype, place),
        jax.eval_shape(optimizer.init, params),
        step.state_places(optimizer, config, mesh),
    )
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    kinds = jnp.int32, jnp.int32, jnp.float32, jnp.bool_
    batch = Batch(*(placed((sizes.batch, sizes.length), kind, rows) for kind in kinds))
    compiled = compile_on(mesh, update, params, state, batch)
    return _summary("training", compiled, params, state)


def compile_reading(config: GriffinConfig, mesh: Mesh, dtype: str, sizes: Sizes) -> Measured:
    """Compile the reading of one document, of which every device reads a part of the tokens.

    The whole model is on every device. The mesh has the axis ``time``; with one device it reads
    all.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    model = abstract_model(config, mesh, split_over(config, 1), jnp.dtype(dtype))
    split, params = jax_functions.split(model)
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
        jax.eval_shape(lambda: model.init_state(1)),
    )
    parts = NamedSharding(mesh, PartitionSpec(None, TIME))
    tokens = jax.ShapeDtypeStruct((1, sizes.tokens), jnp.int32, sharding=parts)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=whole)

    def read(state, params, tokens, lengths):
        twin = split.merge(params)
        if mesh.size == 1:
            return twin.step(tokens, lengths, state)
        return read_over_time(twin, tokens, lengths, state, mesh)

    jitted = jax.jit(read, donate_argnums=0)
    compiled = compile_on(mesh, jitted, state, params, tokens, lengths)
    target = TPUS.get(mesh.devices.flat[0].device_kind)
    cycles = xla_cycles(compiled.as_text() or "", target) if target else None
    return _summary("reading", compiled, params, state)._replace(cycles=cycles)


def compile_steps(config: GriffinConfig, mesh: Mesh, dtype: str, sizes: Sizes) -> list[Measured]:
    """Compile the JAX runner's scoring and decoding steps, with weights split along ``model``."""
    return list(_Steps(config, mesh, jnp.dtype(dtype), sizes).compiled())


class _Steps:
    def __init__(self, config: GriffinConfig, mesh: Mesh, dtype: Any, sizes: Sizes):
        self._mesh, self._shards, self._sizes = mesh, split_over(config, mesh.shape[MODEL]), sizes
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._model = abstract_model(config, mesh, self._shards, dtype)
        self._split, self._params = jax_functions.split(self._model)

    def compiled(self) -> Any:
        size = self._sizes
        pool = self._state(lambda: self._model.init_state(size.pool + 1, size.capacity))
        each: Any = self._ints(size.documents)
        rows = PoolRows(each, each, each)
        tokens, lengths = self._ints(size.tokens), self._ints(size.documents)
        positions = self._ints(size.tokens)

        def score(pool, params, tokens, lengths, rows, positions, targets):
            hidden, pool = jax_functions.read(
                self._split, pool, params, tokens, lengths, rows, None
            )
            logits = jax_functions.logits(self._split, params, hidden, positions)
            row = jnp.arange(len(positions), dtype=jnp.int32)
            return jax_functions.normalise("float32", logits, row, targets), pool

        arguments = (pool, self._params, tokens, lengths, rows, positions, positions)
        yield self._compile("scoring", score, (self._whole, self._places(pool)), *arguments)

        start = functools.partial(DecodingState.start, self._model, size.rows, size.capacity)
        decoding = self._state(start)

        def decode(state, params, tokens, active):
            hidden, state = jax_functions.decode_step(self._split, state, params, tokens, active)
            every = jnp.arange(size.rows, dtype=jnp.int32)
            return jax_functions.greedy(self._split, params, hidden, every), state

        arguments = decoding, self._params, self._ints(size.rows), self._ints(size.rows)
        yield self._compile("decoding", decode, (self._whole, self._places(decoding)), *arguments)

    def _ints(self, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count,), jnp.int32, sharding=self._whole)

    def _state(self, start: Callable[[], Any]) -> Any:
        shapes = jax.eval_shape(start)
        places = jax_functions.state_shardings(self._mesh, self._shards, shapes)
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places
        )

    def _places(self, state: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding, state)

    def _compile(self, name: str, step: Callable, results: Any, state: Any, *rest: Any) -> Measured:
        jitted = jax.jit(step, donate_argnums=0, out_shardings=results)
        compiled = compile_on(self._mesh, jitted, state, *rest)
        return _summary(name, compiled, self._params, state)


def _summary(name: str, compiled: jax.stages.Compiled, weights: Any, states: Any) -> Measured:
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    return Measured(
        name,
        collectives(text),
        text.count("tpu_custom_call") or text.count('custom_call_target="griffin_'),
        bytes_a_device(weights),
        bytes_a_device(states),
        memory.temp_size_in_bytes,
        (compiled.cost_analysis() or {}).get("flops", 0.0),
        None,
    )


def compile_on(mesh: Mesh, function: Any, *arguments: Any) -> jax.stages.Compiled:
    """Compile a jitted function for the devices of a mesh, which need not be present."""
    platform = mesh.devices.flat[0].platform
    with jax.set_mesh(mesh), no_compilation_cache():
        lowered = function.trace(*arguments).lower(lowering_platforms=(platform,))
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            message = str(error).partition("RESOURCE_EXHAUSTED: ")[2]
            if not message:
                raise
            what = message.splitlines()[0].rstrip(".")
            raise ArgumentError(
                f"the step does not fit the memory of a device ({what}): take more devices, or "
                "fewer tokens or rows"
            ) from error


def abstract_model(config: GriffinConfig, mesh: Mesh, split: Split, dtype: Any) -> Griffin:
    """Return the model with shapes in place of its parameters."""

    def make(spec: ParamSpec) -> nnx.Param:
        where = param_sharding(mesh, split, spec)
        value: Any = jax.ShapeDtypeStruct(spec.shape, param_dtype(spec, dtype), sharding=where)
        return nnx.Param(value)

    return Griffin(config, make)


def bytes_a_device(tree: Any) -> int:
    """Return the bytes on each device of a tree of arrays or of their shapes."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )

"""Compile the steps of a model that is split over devices, from shapes alone."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import ShapeDtypeStruct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.scan.tpu_compiler import TARGETS, Module, no_compilation_cache
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

TPUS = {"TPU v5 lite": "v5e", "TPU v6 lite": "v6e"}  # JAX's names, and keys of TARGETS


def compile_training(config: GriffinConfig, mesh: Mesh, dtype: str, sizes: Sizes) -> Measured:
    """Compile the trainer's step with activations computed again, over a mesh.

    ``dtype`` is that of the computation; parameters and optimizer are in float32.
    """
    from griffin_eval.training import optimizer as optimizers
    from griffin_eval.training import step

    optimizer = optimizers.make_optimizer(lambda step: 1e-3)
    method = step.Method(mesh=mesh, recompute=True)
    update, _ = step.compile_update(config, optimizer, method, dtype)
    shapes = {n: ShapeDtypeStruct(s.shape, jnp.float32) for n, s in param_specs(config).items()}
    params = _placed(shapes, step.param_places(config, mesh))
    places = step.state_places(optimizer, config, mesh)
    state = _placed(jax.eval_shape(optimizer.init, params), places)
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    kinds = jnp.int32, jnp.int32, jnp.float32, jnp.bool_
    shape = sizes.batch, sizes.length
    arrays: list[Any] = [ShapeDtypeStruct(shape, kind, sharding=rows) for kind in kinds]
    batch = Batch(*arrays)
    compiled = compile_on(mesh, update, params, state, batch)
    return _summary("training", compiled, params, state)


def compile_reading(config: GriffinConfig, mesh: Mesh, dtype: str, sizes: Sizes) -> Measured:
    """Compile the reading of one document, of which every device reads a part of the tokens.

    The model lies whole on every device of the mesh, whose axis is ``time``; a single device reads
    everything.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    model = abstract_model(config, mesh, split_over(config, 1), jnp.dtype(dtype))
    split, params = jax_functions.split(model)
    shapes = jax.eval_shape(lambda: model.init_state(1))
    state = _placed(shapes, jax.tree.map(lambda _: whole, shapes))
    parts = NamedSharding(mesh, PartitionSpec(None, TIME))
    tokens = ShapeDtypeStruct((1, sizes.tokens), jnp.int32, sharding=parts)
    lengths = ShapeDtypeStruct((1,), jnp.int32, sharding=whole)

    def read(state, params, tokens, lengths):
        twin = split.merge(params)
        if mesh.size == 1:
            return twin.step(tokens, lengths, state)
        return read_over_time(twin, tokens, lengths, state, mesh)

    jitted = jax.jit(read, donate_argnums=0)
    compiled = compile_on(mesh, jitted, state, params, tokens, lengths)
    tpu = TPUS.get(mesh.devices.flat[0].device_kind)
    cycles = Module(compiled.as_text() or "", TARGETS[tpu]).cycles() if tpu else None
    return _summary("reading", compiled, params, state)._replace(cycles=cycles)


def compile_steps(config: GriffinConfig, mesh: Mesh, dtype: str, sizes: Sizes) -> list[Measured]:
    """Compile the JAX runner's scoring and decoding steps, with weights split along ``model``."""
    shards, whole = split_over(config, mesh.shape[MODEL]), NamedSharding(mesh, PartitionSpec())
    model = abstract_model(config, mesh, shards, jnp.dtype(dtype))
    split, params = jax_functions.split(model)

    def ints(count: int) -> ShapeDtypeStruct:
        return ShapeDtypeStruct((count,), jnp.int32, sharding=whole)

    def compiled(name: str, step: Callable, start: Callable[[], Any], *rest: Any) -> Measured:
        shapes = jax.eval_shape(start)
        places = jax_functions.state_shardings(mesh, shards, shapes)
        state = _placed(shapes, places)
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(whole, places))
        return _summary(name, compile_on(mesh, jitted, state, params, *rest), params, state)

    def score(pool, params, tokens, lengths, rows, positions, targets):
        hidden, pool = jax_functions.read(split, pool, params, tokens, lengths, rows, None)
        logits = jax_functions.logits(split, params, hidden, positions)
        row = jnp.arange(len(positions), dtype=jnp.int32)
        return jax_functions.normalise("float32", logits, row, targets), pool

    def decode(state, params, tokens, active):
        hidden, state = jax_functions.decode_step(split, state, params, tokens, active)
        every = jnp.arange(sizes.rows, dtype=jnp.int32)
        return jax_functions.greedy(split, params, hidden, every), state

    pool = functools.partial(model.init_state, sizes.pool + 1, sizes.capacity)
    start = functools.partial(DecodingState.start, model, sizes.rows, sizes.capacity)
    tokens, lengths, rows = map(ints, (sizes.tokens, sizes.documents, sizes.rows))
    places: Any = PoolRows(*[lengths] * 3)  # type: ignore[arg-type]
    return [
        compiled("scoring", score, pool, tokens, lengths, places, tokens, tokens),
        compiled("decoding", decode, start, rows, rows),
    ]


def _placed(shapes: Any, places: Any) -> Any:
    """Return a tree of shapes with their shardings."""
    return jax.tree.map(
        lambda leaf, place: ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )


def _summary(name: str, compiled: jax.stages.Compiled, weights: Any, states: Any) -> Measured:
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    return Measured(
        name,
        collectives(text),
        bytes_a_device(weights),
        bytes_a_device(states),
        memory.temp_size_in_bytes,
        text.count("tpu_custom_call") or text.count('custom_call_target="griffin_'),
        (compiled.cost_analysis() or {}).get("flops", 0.0),
    )


def compile_on(mesh: Mesh, function: Any, *arguments: Any) -> jax.stages.Compiled:
    """Compile a jitted function for the devices of a mesh, which need not be there.

    Raises:
        ArgumentError: It takes more memory than a device has.
    """
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
    """Return the model with shapes in the place of its parameters."""

    def make(spec: ParamSpec) -> nnx.Param:
        where = param_sharding(mesh, split, spec)
        value: Any = ShapeDtypeStruct(spec.shape, param_dtype(spec, dtype), sharding=where)
        return nnx.Param(value)

    return Griffin(config, make)


def bytes_a_device(tree: Any) -> int:
    """Return the bytes of a tree of arrays or shapes that each device holds."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )

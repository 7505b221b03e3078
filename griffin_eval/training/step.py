"""One compiled training step: the loss of a batch, its gradients and the optimizer's update."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import ParamSpec, param_specs
from griffin_eval.model_jax.griffin import Griffin, param_dtype
from griffin_eval.sharding.mesh_jax import (
    SUMS,
    axis_size,
    gathered,
    make_mesh,
    training_sharding,
)
from griffin_eval.sharding.split import DATA, MODEL, parse_mesh, split_over
from griffin_eval.training.recipes import Batch

if TYPE_CHECKING:
    from griffin_eval.training.options import TrainOptions

Params = dict[str, jax.Array]  # parameters by canonical name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """The computation of a step, which affects results only by rounding.

    Attributes:
        mesh: Mesh that splits batch and weights, from `make_mesh`; None for one device.
        pieces: Number of pieces of a batch whose gradients are summed; it divides the rows.
        recompute: Whether the backward pass recomputes activations, keeping only two vectors of the
            model's width for each token and residual block.
    """

    mesh: Mesh | None = None
    pieces: int = 1
    recompute: bool = False


ONE_DEVICE = Method()


def make_method(options: "TrainOptions") -> Method:
    """Return the computation of a run's steps.

    Raises:
        ArgumentError: The mesh, its devices, the pieces and the rows are incompatible.
    """
    recipe, pieces = options.run.recipe, options.pieces
    rows = max(1, recipe.tokens // recipe.length)
    if rows % pieces:
        raise ArgumentError(f"--pieces {pieces} does not divide a step's {rows} rows")
    mesh = None if options.mesh is None else _training_mesh(options.mesh, rows // pieces)
    return Method(mesh=mesh, pieces=pieces, recompute=options.recompute)


def _training_mesh(text: str, rows: int) -> Mesh:
    """Return a mesh of this process's first devices, for ``rows`` read at a time."""
    sizes, devices = parse_mesh(text, "--mesh"), jax.local_devices()
    needed = sizes[DATA] * sizes[MODEL]
    if needed > len(devices):
        raise ArgumentError(
            f"--mesh {text}: it takes {needed} devices, and this process has {len(devices)}"
        )
    if rows % sizes[DATA]:
        raise ArgumentError(
            f"--mesh {text}: {sizes[DATA]} does not divide the {rows} rows that are read at a time"
        )
    return make_mesh(devices[:needed], sizes[DATA])


def losses_of(
    config: GriffinConfig,
    params: Mapping[str, jax.Array],
    batch: Batch,
    dtype: str = "float32",
) -> tuple[jax.Array, jax.Array]:
    """Return each row's weighted sum of cross-entropies in nats, float32 [B], and whether each
    target is the likeliest token, bool [B, T]. Each row starts from an empty state."""
    split = split_over(config, axis_size(MODEL))

    def make(spec: ParamSpec) -> nnx.Param:
        value = params[spec.name].astype(param_dtype(spec, jnp.dtype(dtype)))
        return nnx.Param(gathered(split, spec, value))

    model = Griffin(config, make)
    tokens, targets, weights = map(jnp.asarray, batch[:3])
    rows, length = tokens.shape
    lengths = jnp.full(rows, length, jnp.int32)
    hidden, _ = model.step(tokens, lengths, model.init_state(rows, length))
    logits = model.logits(hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * weights, -1), jnp.argmax(logits, -1) == targets


def param_places(config: GriffinConfig, mesh: Mesh) -> dict[str, NamedSharding]:
    """Return the sharding of each parameter between steps, by canonical name."""
    split = split_over(config, mesh.shape[MODEL])
    return {n: training_sharding(mesh, split, s) for n, s in param_specs(config).items()}


def state_places(
    optimizer: optax.GradientTransformation, config: GriffinConfig, mesh: Mesh | None
) -> Any:
    """Return the sharding of the optimizer's state; moments are sharded like parameters."""
    if mesh is None:
        return None
    places = param_places(config, mesh)
    shapes = {n: jax.ShapeDtypeStruct(s.shape, jnp.float32) for n, s in param_specs(config).items()}
    return optax.tree.map_params(
        optimizer,
        lambda _, place: place,
        jax.eval_shape(optimizer.init, shapes),
        places,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )


def compile_update(
    config: GriffinConfig,
    optimizer: optax.GradientTransformation,
    method: Method = ONE_DEVICE,
    dtype: str = "float32",
):
    """Return two compiled functions, to be called with the method's mesh set.

    ``update(params, state, batch)`` consumes parameters and optimizer state and returns new ones,
    the loss and the norm of the gradients; ``evaluate(params, batch)`` is `losses_of`.
    """

    def total(params: Params, batch: Batch) -> jax.Array:
        return jnp.sum(losses_of(config, params, batch, dtype)[0])

    if method.recompute:
        total = jax.checkpoint(total, policy=jax.checkpoint_policies.save_only_these_names(SUMS))
    gradient = jax.value_and_grad(total)

    def summed(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        """Return the sum of losses and its gradients."""
        pieces = math.gcd(method.pieces, len(batch.tokens))
        if pieces == 1:
            return gradient(params, batch)

        def add(sums: tuple[jax.Array, Params], piece: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, gradient(params, piece)), None

        cut = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]), batch)
        zero = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zero, cut)[0]

    def update(params: Params, state: Any, batch: Batch):
        loss, gradients = summed(params, jax.tree.map(jnp.asarray, batch))
        weight = jnp.sum(jnp.asarray(batch.weights))
        loss, gradients = jax.tree.map(lambda x: x / weight, (loss, gradients))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            changes, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, changes), state, loss, optax.tree.norm(gradients)

    results, mesh = None, method.mesh
    if mesh is not None:
        one = NamedSharding(mesh, PartitionSpec())
        results = param_places(config, mesh), state_places(optimizer, config, mesh), one, one
    evaluate = jax.jit(functools.partial(losses_of, config, dtype=dtype))
    return jax.jit(update, donate_argnums=(0, 1), out_shardings=results), evaluate

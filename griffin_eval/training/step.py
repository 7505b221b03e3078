"""One training step, compiled: the loss of a batch, its gradients and the optimizer's change."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from griffin_eval.config import GriffinConfig
from griffin_eval.layout import ParamSpec, param_specs
from griffin_eval.model_jax.griffin import Griffin, param_dtype
from griffin_eval.sharding.mesh_jax import SUMS, axis_size, gathered, training_sharding
from griffin_eval.sharding.split import MODEL, split_over
from griffin_eval.training.recipes import Batch

Params = dict[str, jax.Array]  # by canonical name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How a step is computed, of which its results do not depend but for rounding.

    Attributes:
        mesh: over which batch and weights are split, from `make_mesh`; None for one device.
        pieces: into which a batch is cut, whose gradients are added up; it divides the rows.
        recompute: whether the backward pass computes activations again, instead of keeping more
            than two vectors of the model's width of each token and residual block.
    """

    mesh: Mesh | None = None
    pieces: int = 1
    recompute: bool = False


ONE_DEVICE = Method()


def losses_of(
    config: GriffinConfig,
    params: Mapping[str, jax.Array],
    batch: Batch,
    dtype: str = "float32",
) -> tuple[jax.Array, jax.Array]:
    """The losses of the rows of a batch, and which targets are the likeliest token.

    Args:
        config: architecture of the model.
        params: parameters by canonical name.
        batch: B rows of equal length T, each of which the model reads from an empty state.
        dtype: to compute in.

    Returns:
        The weighted sum of each row's cross-entropies in nats, float32 [B]; and whether each target
        is the likeliest token, bool [B, T].
    """
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
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(each * weights, -1), jnp.argmax(logits, -1) == targets


def param_places(config: GriffinConfig, mesh: Mesh) -> dict[str, NamedSharding]:
    """Where each parameter lies on a mesh between steps, by canonical name."""
    split = split_over(config, mesh.shape[MODEL])
    return {n: training_sharding(mesh, split, s) for n, s in param_specs(config).items()}


def state_places(
    optimizer: optax.GradientTransformation, config: GriffinConfig, mesh: Mesh | None
) -> Any:
    """Where the optimizer's state lies: moments as their parameters do. None without a mesh."""
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
    """The compiled functions that make one training step, and that compute `losses_of`. With a mesh
    they are called where it is set.

    Args:
        config: architecture of the model.
        optimizer: from `make_optimizer`.
        method: how a step is computed.
        dtype: as of `Run`.

    Returns:
        ``update(params, state, batch)``, which consumes parameters and the optimizer's state and
        gives both anew, the loss and the norm of the gradients; and ``evaluate(params, batch)``.
    """

    def total(params: Params, batch: Batch) -> jax.Array:
        return jnp.sum(losses_of(config, params, batch, dtype)[0])

    if method.recompute:
        total = jax.checkpoint(total, policy=jax.checkpoint_policies.save_only_these_names(SUMS))
    gradient = jax.value_and_grad(total)

    def added(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        """The sum of losses, and its gradients."""
        pieces = math.gcd(method.pieces, len(batch.tokens))
        if pieces == 1:
            return gradient(params, batch)

        def add(sums: tuple[jax.Array, Params], piece: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, gradient(params, piece)), None

        cut = jax.tree.map(lambda x: x.reshape(pieces, -1, *x.shape[1:]), batch)
        zero = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zero, cut)[0]

    def update(params: Params, state: Any, batch: Batch):
        loss, gradients = added(params, jax.tree.map(jnp.asarray, batch))
        weight = jnp.sum(jnp.asarray(batch.weights))
        loss, gradients = jax.tree.map(lambda x: x / weight, (loss, gradients))
        with jax.numpy_dtype_promotion("standard"):  # which optax counts on
            changes, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, changes), state, loss, optax.tree.norm(gradients)

    results, mesh = None, method.mesh
    if mesh is not None:
        one = NamedSharding(mesh, PartitionSpec())
        results = param_places(config, mesh), state_places(optimizer, config, mesh), one, one
    evaluate = jax.jit(functools.partial(losses_of, config, dtype=dtype))
    return jax.jit(update, donate_argnums=(0, 1), out_shardings=results), evaluate

"""Trains the model of a recipe in JAX: AdamW, warm-up and cosine schedule, Orbax checkpoints.

The folder of a run holds ``run.json`` (its settings), ``config.json`` and the tokenizer, so that
``griffin-eval convert`` and ``lm_eval --model griffin`` read its latest checkpoint as it is;
``metrics.jsonl``; the curves; and a folder for each of the last two checkpoints, with the items
``params`` (canonical names) and ``optimizer``.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.configs.huggingface import CONFIG_FILE
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.formats import FORMATS
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.initializers import initial_value
from griffin_eval.json_files import read_json
from griffin_eval.layout import ParamSpec, param_specs
from griffin_eval.model_jax.griffin import Griffin, param_dtype
from griffin_eval.runners.jax_runner import keep_compilations
from griffin_eval.sharding.mesh_jax import SUMS, axis_size, gathered, training_sharding
from griffin_eval.sharding.split import MODEL, split_over
from griffin_eval.training.recipes import Batch, Recipe

logger = logging.getLogger(__name__)

RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
NAMES_IN_FILE = {"visible_keys": "window"}  # fields of a recipe that run.json calls otherwise
Params = dict[str, jax.Array]  # by canonical name

WARM_UP_SHARE = 0.05  # of the steps, in which the learning rate rises to its peak
FINAL_RATE_SHARE = 0.1  # of the peak learning rate, at the last step
WEIGHT_DECAY = 0.1  # of the matrices of the linear and embedding layers
LARGEST_GRADIENT_NORM = 1.0  # to which larger gradients are scaled down
BETAS = (0.9, 0.98)  # AdamW's decay rates of the two moments
CHECKPOINTS_KEPT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The settings that determine a run. A run is resumed only with the same settings.

    Attributes:
        recipe: the recipe with its final steps, learning rate and length.
        model: one of `griffin_eval.training.recipes.MODELS`.
        seed: seed of the weights and of the data.
        dtype: of weights and activations as a step computes with them. The weights that are kept,
            gradients and the optimizer are float32.
    """

    recipe: Recipe
    model: str
    seed: int
    dtype: str = "float32"

    def settings(self) -> dict[str, Any]:
        """The contents of ``run.json``, in which the hash stands for a text."""
        fields = dataclasses.asdict(self.recipe)
        recipe = {
            NAMES_IN_FILE.get(name, name): value
            for name, value in fields.items()
            if not callable(value)
        }
        if self.recipe.text is not None:
            recipe["text"] = hashlib.sha256(self.recipe.text()).hexdigest()
        settings = {"recipe": recipe, "model": self.model, "seed": self.seed}
        if self.dtype != "float32":
            settings["dtype"] = self.dtype
        return json.loads(json.dumps(settings))


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


def train_model(
    run: Run,
    folder: Path,
    *,
    checkpoint_every: int = 100,
    method: Method = ONE_DEVICE,
    progress: Callable[[dict[str, Any]], Any] = lambda metrics: None,
) -> dict[str, Any]:
    """Trains to the last step, from the latest checkpoint of the folder if it has one.

    Args:
        run: settings of the run.
        folder: folder of the run, created if it does not exist.
        method: how steps are computed. A run may go on with another one.
        checkpoint_every: steps between two checkpoints, each with a test on the held-out batches
            and a line of metrics.
        progress: called after every step with ``step`` and ``tokens``, and at checkpoints with the
            whole line of metrics.

    Returns:
        The last line of metrics.

    Raises:
        CheckpointError: the folder is of another run.
        ArgumentError: the loss is not finite.
    """
    recipe, config, mesh = run.recipe, run.recipe.config(run.model), method.mesh
    _prepare_folder(run, config, folder)
    keep_compilations()
    rate = _schedule(recipe)
    optimizer = make_optimizer(rate)
    specs = param_specs(config)
    places = None if mesh is None else param_places(config, mesh)
    params = {
        name: jax.device_put(initial_value(spec, run.seed), places and places[name])
        for name, spec in specs.items()
    }
    state = jax.jit(optimizer.init, out_shardings=state_places(optimizer, config, mesh))(params)
    update, evaluate = compile_update(config, optimizer, method, run.dtype)
    held_out = recipe.held_out()
    with (
        contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh),
        ocp.CheckpointManager(
            folder.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=CHECKPOINTS_KEPT)
        ) as manager,
    ):
        first = manager.latest_step() or 0
        if first:
            params, state = _restore(manager, first, params, state)
        lines = _lines_until(folder / METRICS_FILE, first)
        metrics = lines[-1] if lines else {}
        losses, started = [], time.monotonic() - metrics.get("seconds", 0.0)
        tokens = metrics.get("tokens", 0)
        for step in range(first, recipe.steps):
            batch = recipe.batch(run.seed, step)
            params, state, loss, norm = update(params, state, batch)
            losses.append(loss)
            tokens += batch.tokens.size
            now = {"step": step + 1, "tokens": tokens}
            if (step + 1) % checkpoint_every and step + 1 < recipe.steps:
                progress(now)
                continue
            now |= {
                "length": recipe.length_at(step),
                "loss": float(np.mean(jax.device_get(losses))),
                "learning_rate": float(np.asarray(rate(step))),
                "gradient_norm": float(norm),
                **_test_metrics(evaluate, params, held_out),
                "seconds": round(time.monotonic() - started, 1),
            }
            losses.clear()
            if not np.isfinite(now["loss"]):
                raise ArgumentError(
                    f"the loss is {now['loss']} at step {step + 1}; the checkpoint before it is "
                    f"kept: a learning rate below {recipe.learning_rate} may do"
                )
            # A line without its checkpoint is removed when the run goes on; not the reverse.
            with open(folder / METRICS_FILE, "a", encoding="utf-8") as file:
                file.write(json.dumps(now) + "\n")
            _save(manager, step + 1, params, state)
            metrics = now
            progress(now)
    return metrics


def loss_of(
    config: GriffinConfig,
    params: Mapping[str, jax.Array],
    batch: Batch,
    dtype: str = "float32",
) -> tuple[jax.Array, jax.Array]:
    """The loss of a batch, and the number of right answers.

    Args:
        config: architecture of the model.
        params: parameters by canonical name.
        batch: rows of equal length, each of which the model reads from an empty state.
        dtype: to compute in.

    Returns:
        The weighted mean cross-entropy in nats, float32 []; and the number of asked targets that
        are the likeliest token, int32 [].
    """
    loss, right = _loss_and_right(config, dtype, params, batch)
    return loss / jnp.sum(jnp.asarray(batch.weights)), right


def _loss_and_right(
    config: GriffinConfig, dtype: str, params: Mapping[str, jax.Array], batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of cross-entropies, and the number of right answers."""
    split = split_over(config, axis_size(MODEL))

    def make(spec: ParamSpec) -> nnx.Param:
        value = params[spec.name].astype(param_dtype(spec, jnp.dtype(dtype)))
        return nnx.Param(gathered(split, spec, value))

    model = Griffin(config, make)
    tokens, targets, weights, asked = map(jnp.asarray, batch)
    rows, length = tokens.shape
    lengths = jnp.full(rows, length, jnp.int32)
    hidden, _ = model.step(tokens, lengths, model.init_state(rows, length))
    logits = model.logits(hidden)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = (jnp.argmax(logits, -1) == targets) & asked
    return jnp.sum(each * weights), right.sum()


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
    """The compiled functions that make one training step, and that compute `loss_of`. With a mesh
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
    total = functools.partial(_loss_and_right, config, dtype)
    if method.recompute:
        total = jax.checkpoint(total, policy=jax.checkpoint_policies.save_only_these_names(SUMS))
    gradient = jax.value_and_grad(total, has_aux=True)

    def added(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        """The sum of losses, and its gradients."""
        pieces = math.gcd(method.pieces, len(batch.tokens))
        if pieces == 1:
            (loss, _), gradients = gradient(params, batch)
            return loss, gradients

        def add(sums: tuple[jax.Array, Params], piece: Batch) -> tuple[Any, None]:
            (loss, _), gradients = gradient(params, piece)
            return jax.tree.map(jnp.add, sums, (loss, gradients)), None

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
    evaluate = jax.jit(functools.partial(loss_of, config, dtype=dtype))
    return jax.jit(update, donate_argnums=(0, 1), out_shardings=results), evaluate


def _test_metrics(evaluate: Callable, params: Params, batches: list[Batch]) -> dict[str, float]:
    """Loss and accuracy on the held-out batches."""
    losses, right = zip(*(evaluate(params, batch) for batch in batches), strict=True)
    asked = sum(int(batch.asked.sum()) for batch in batches)
    loss = float(np.mean([float(loss) for loss in losses]))
    return {"test_loss": loss, "accuracy": sum(map(int, right)) / max(asked, 1)}


def _schedule(recipe: Recipe) -> optax.Schedule:
    """The learning rate by step: a linear warm-up, then a cosine."""
    warm_up = max(1, round(WARM_UP_SHARE * recipe.steps))
    return optax.warmup_cosine_decay_schedule(
        0.0,
        recipe.learning_rate,
        warm_up,
        max(recipe.steps, warm_up + 1),
        FINAL_RATE_SHARE * recipe.learning_rate,
    )


def make_optimizer(rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW after clipping, with weight decay for matrices but not for convolutions."""

    def decayed(params: Params) -> dict[str, bool]:
        return {name: value.ndim > 1 and "conv_1d" not in name for name, value in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(LARGEST_GRADIENT_NORM),
        optax.adamw(rate, *BETAS, weight_decay=WEIGHT_DECAY, mask=decayed),
    )


def _prepare_folder(run: Run, config: GriffinConfig, folder: Path) -> None:
    """Creates the folder of a run, or checks that it is of this run.

    Raises:
        CheckpointError: the folder is of another run, or of none.
    """
    file, wanted = folder / RUN_FILE, run.settings()
    if file.is_file():
        differing = _differing(read_json(file), wanted)
        if differing:
            raise CheckpointError(
                f"{folder} is of another run ({'; '.join(differing)}): name another folder"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there and no run: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(wanted, indent=2) + "\n")
    raw = config_json(config, FORMATS["griffin-orbax"], "float32")
    (folder / CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n")
    run.recipe.write_tokenizer(folder)


def _differing(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """A phrase for each setting whose stored value is not the wanted one."""
    there, asked = (traverse_util.flatten_dict(settings, sep=".") for settings in (stored, wanted))
    return [
        f"{key} {there.get(key)} there, {value} asked for"
        for key, value in asked.items()
        if there.get(key) != value
    ]


def _save(manager: ocp.CheckpointManager, step: int, params: Params, state: Any) -> None:
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(_nested(params)),
        optimizer=ocp.args.StandardSave(_plain(state)),
    )
    manager.save(step, args=items)
    manager.wait_until_finished()  # the arrays are donated to the next step


def _restore(manager: ocp.CheckpointManager, step: int, params: Params, state: Any):
    template = ocp.args.Composite(
        params=ocp.args.StandardRestore(_nested(params)),
        optimizer=ocp.args.StandardRestore(_plain(state)),
    )
    items = manager.restore(step, args=template)
    restored: Any = traverse_util.flatten_dict(items["params"], sep=".")
    leaves = [items["optimizer"][str(i)] for i in range(len(jax.tree.leaves(state)))]
    return restored, jax.tree.unflatten(jax.tree.structure(state), leaves)


def _nested(params: Params) -> dict[str, Any]:
    return traverse_util.unflatten_dict(params, sep=".")


def _plain(state: Any) -> dict[str, jax.Array]:
    """The leaves of the optimizer's state by their number, as Orbax stores them."""
    return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}


def _lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of metrics up to the step of a checkpoint.

    Lines after it, which an interrupted run left, are removed from the file.

    Raises:
        CheckpointError: the file has no line of that step.
    """
    lines = read_metrics(path) if path.is_file() else []
    kept = [line for line in lines if line["step"] <= step]
    if step and (not kept or kept[-1]["step"] != step):
        raise CheckpointError(
            f"{path} has no line of step {step}, whose checkpoint is there: put the file back, or "
            "name another folder"
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    return kept


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; incomplete ones are left out with a warning."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            logger.warning("%s: a line that is not whole is left out", path)
    return lines

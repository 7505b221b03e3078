"""Training of a recipe's model in JAX, with Orbax checkpoints that continue a run exactly.

The folder of a run holds ``run.json`` (its settings), ``config.json`` and the tokenizer, so that
``griffin-eval convert`` and ``lm_eval --model griffin`` read its latest checkpoint as it is;
``metrics.jsonl``; the curves; and a folder for each kept checkpoint, with the items ``params``
(canonical names) and ``optimizer``.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.source.steps import FINISHED_FILE
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs
from griffin_eval.messages import listed
from griffin_eval.runners.jax_runner import keep_compilations
from griffin_eval.states.weights_hash import weights_sha256
from griffin_eval.training.batches import batches, held_out_batches, processes_for
from griffin_eval.training.held_out import compile_gates, held_out_metrics
from griffin_eval.training.optimizer import make_optimizer, make_schedule
from griffin_eval.training.options import Run
from griffin_eval.training.recipes import Batch, Recipe
from griffin_eval.training.run_folder import (
    METRICS_FILE,
    lines_until,
    only_run,
    prepare_folder,
    restore,
    save,
)
from griffin_eval.training.step import (
    ONE_DEVICE,
    Method,
    compile_update,
    param_places,
    state_places,
)

TESTS_IN_A_ROW = 2  # consecutive tests that must reach ``until`` to end a run
DEFAULT_CONV_VARIANCE = 0.01  # variance of the layout's initialisation


def train_model(
    run: Run,
    folder: Path,
    *,
    until: float | None = None,
    save_every: int = 100,
    keep: int | None = 2,
    method: Method = ONE_DEVICE,
    progress: Callable[[dict[str, Any]], Any] = lambda metrics: None,
) -> dict[str, Any]:
    """Train to the last step, from the latest checkpoint of the folder if it has one.

    Args:
        folder: Folder of the run, created if it does not exist.
        until: Held-out accuracy that ends the run if two consecutive tests reach it.
        save_every: Number of steps between two checkpoints, each with a test and a line of metrics.
        keep: Number of the latest checkpoints to keep; None for all.
        method: Computation of a step, which may change when a run continues.
        progress: Function called after every step with ``step`` and ``tokens``, and at checkpoints
            with the whole line of metrics.

    Returns:
        The last line of metrics.

    Raises:
        CheckpointError: The folder belongs to another run or is in use, the initial checkpoint
            has another shape, or a checkpoint cannot be written.
        ArgumentError: The loss or the gradient is not finite.
    """
    recipe, config = run.recipe, run.recipe.config(run.model)
    weights = _first_weights(run, config)
    prepare_folder(run, config, folder, save_every)
    keep_compilations()
    model = _Model(run, weights, method)
    kept = ocp.CheckpointManagerOptions(max_to_keep=keep)
    with (
        only_run(folder),
        contextlib.nullcontext() if method.mesh is None else jax.set_mesh(method.mesh),
        ocp.CheckpointManager(folder.resolve(), options=kept) as manager,
        batches(recipe, run.seed, processes_for(jax.default_backend())) as take,
    ):
        first = manager.latest_step() or 0
        if first:
            model.params, model.state = restore(manager, first, model.params, model.state)
        lines = lines_until(folder / METRICS_FILE, first)
        last = lines[-1] if lines else {"tokens": 0, "seconds": 0.0}
        tokens, started = last["tokens"], time.monotonic() - last["seconds"]
        for step in range(first + 1, recipe.steps + 1):
            if is_finished(lines, recipe.steps, until):
                break
            stage = _stage(recipe, step - 1, lines)
            batch = take(step - 1, stage)
            model.train(batch, stage)
            tokens += batch.tokens.size
            now = {"step": step, "tokens": tokens}
            if step % save_every == 0 or step == recipe.steps:
                now |= model.test(step, stage)
                now["seconds"] = round(time.monotonic() - started, 1)
                save(folder, manager, now, model.params, model.state)
                lines.append(now)
            progress(now)
    (folder / FINISHED_FILE).touch()
    return lines[-1]


class _Model:
    """The parameters and optimizer state of a run, and the compiled functions of its steps."""

    def __init__(self, run: Run, weights: dict[str, np.ndarray], method: Method) -> None:
        self._recipe, self._name = run.recipe, run.model
        recipe = run.recipe
        config, mesh = recipe.config(run.model), method.mesh
        self._rate = rate = make_schedule(recipe)
        optimizer = make_optimizer(rate, recipe.recurrent_rate, recipe.decayed)
        places = {} if mesh is None else param_places(config, mesh)
        self.params = {n: jax.device_put(value, places.get(n)) for n, value in weights.items()}
        shardings = state_places(optimizer, config, mesh)
        self.state = jax.jit(optimizer.init, out_shardings=shardings)(self.params)

        @functools.cache
        def compiled(config: GriffinConfig) -> tuple[Callable, Callable]:
            return compile_update(config, optimizer, method, run.dtype)

        self._compiled, self._evaluate = compiled, compiled(config)[1]
        measured = mesh is None and "recurrent" in config.block_types
        self._gates = compile_gates(config) if measured else None
        self._held_out = functools.cache(functools.partial(held_out_batches, recipe))
        self._losses: list[jax.Array] = []

    def train(self, batch: Batch, stage: int) -> None:
        """Run one step."""
        update, _ = self._compiled(self._recipe.config(self._name, stage))
        self.params, self.state, loss, self._norm = update(self.params, self.state, batch)
        self._losses.append(loss)

    def test(self, step: int, stage: int) -> dict[str, Any]:
        """Return the metrics after a step, with the loss of the steps since the last test."""
        loss = float(np.mean(jax.device_get(self._losses)))
        self._losses.clear()
        self._refuse_not_finite("loss", loss, step)
        metrics = {
            "stage": stage,
            "length": self._recipe.length_of(stage),
            "loss": loss,
            "learning_rate": float(np.asarray(self._rate(step - 1))),
            "gradient_norm": float(self._norm),
            **self._tested(None),
        }
        # The last update may have spoilt the weights.
        for name in ("gradient_norm", "test_loss"):
            self._refuse_not_finite(name.replace("_", " "), metrics[name], step)
        if self._recipe.advance is not None:
            metrics["stage_accuracy"] = self._tested(stage)["accuracy"]
        if self._gates is not None:
            metrics |= self._gates(self.params, self._held_out(None)[0])
        return metrics

    def _refuse_not_finite(self, name: str, value: float, step: int) -> None:
        if not np.isfinite(value):
            raise ArgumentError(
                f"the {name} is {value} at step {step}; the checkpoint before it is kept: a "
                f"learning rate below {self._recipe.learning_rate} may do"
            )

    def _tested(self, stage: int | None) -> dict[str, Any]:
        rows = self._held_out(stage)
        return held_out_metrics(self._evaluate, self.params, rows, self._recipe.window)


def is_finished(lines: list[dict[str, Any]], steps: int, until: float | None) -> bool:
    """Return whether a run with these lines of metrics has all its steps or reached ``until``."""
    if lines and lines[-1]["step"] >= steps:
        return True
    tests = [line["accuracy"] for line in lines[-TESTS_IN_A_ROW:]]
    return until is not None and len(tests) == TESTS_IN_A_ROW and min(tests) >= until


def _stage(recipe: Recipe, step: int, lines: list[dict[str, Any]]) -> int:
    """Return the stage of a step after these lines of metrics."""
    if recipe.advance is None:
        return recipe.stage_at(step)
    if not lines:
        return 0
    passed = lines[-1]["stage_accuracy"] >= recipe.advance
    return min(lines[-1]["stage"] + passed, len(recipe.curriculum))


def _first_weights(run: Run, config: GriffinConfig) -> dict[str, np.ndarray]:
    """Return the initial weights of a run, float32, by canonical name."""
    specs = param_specs(config)
    if run.start is None:
        values = {name: initial_value(spec, run.seed) for name, spec in specs.items()}
        scale = np.float32((run.recipe.conv_variance / DEFAULT_CONV_VARIANCE) ** 0.5)
        for name in values:
            if name.endswith("conv_1d.weight"):
                values[name] *= scale
        return values
    with contextlib.closing(Checkpoint(run.start)) as checkpoint:
        theirs, ours = _described(checkpoint.config), _described(config)
        differing = [
            f"{name} {theirs.get(name, 'missing')} there, {ours.get(name, 'none')} in this run"
            for name in theirs | ours
            if theirs.get(name) != ours.get(name)
        ]
        if differing:
            raise CheckpointError(
                f"{run.start} differs from the model of this run ({listed(differing)}): give the "
                "run its sizes, or name another checkpoint"
            )
        weights_sha256(checkpoint)  # refuses weights that differ from a checksum
        values = {name: checkpoint.numpy(name).astype(np.float32) for name in specs}
    not_finite = [name for name, value in values.items() if not np.isfinite(value).all()]
    if not_finite:
        raise CheckpointError(
            f"{run.start}: expected finite weights, found NaN or infinity in {listed(not_finite)}: "
            "name another checkpoint"
        )
    return values


def _described(config: GriffinConfig) -> dict[str, Any]:
    """Return the properties that a run and its first checkpoint must share: the fields that the
    computation uses, except the window, and the shapes by canonical name."""
    fields = ["embedding_scale", "logits_soft_cap", "hidden_activation", "norm_eps"]
    if config.attends:
        fields += ["num_heads", "rope_base", "rope_fraction"]
    if "recurrent" in config.block_types:
        fields.append("lru_constant")
    described = {name: getattr(config, name) for name in fields}
    return described | {name: list(spec.shape) for name, spec in param_specs(config).items()}

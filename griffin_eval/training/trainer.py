"""Trains the model of a recipe in JAX, with Orbax checkpoints from which a run goes on exactly.

The folder of a run holds ``run.json`` (its settings), ``config.json`` and the tokenizer, so that
``griffin-eval convert`` and ``lm_eval --model griffin`` read its latest checkpoint as it is;
``metrics.jsonl``; the curves; and a folder for each of the last two checkpoints, with the items
``params`` (canonical names) and ``optimizer``.
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
from griffin_eval.training.batches import batches, processes_for
from griffin_eval.training.held_out import compile_gates, held_out_metrics
from griffin_eval.training.optimizer import make_optimizer, make_schedule
from griffin_eval.training.recipes import Recipe
from griffin_eval.training.run_folder import (
    CHECKPOINTS_KEPT,
    METRICS_FILE,
    Run,
    lines_until,
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

TESTS_IN_A_ROW = 2  # that must reach the accuracy until which a run goes on
DEFAULT_CONV_VARIANCE = 0.01  # of the layout's initialisation


def train_model(
    run: Run,
    folder: Path,
    *,
    until: float | None = None,
    checkpoint_every: int = 100,
    method: Method = ONE_DEVICE,
    progress: Callable[[dict[str, Any]], Any] = lambda metrics: None,
) -> dict[str, Any]:
    """Trains to the last step, from the latest checkpoint of the folder if it has one.

    Args:
        run: settings of the run.
        folder: folder of the run, created if it does not exist.
        until: accuracy on the held-out batches which two tests in a row must reach for the run to
            end before its last step; None for all steps.
        method: how steps are computed. A run may go on with another one.
        checkpoint_every: steps between two checkpoints, each with a test on the held-out batches
            and a line of metrics.
        progress: called after every step with ``step`` and ``tokens``, and at checkpoints with the
            whole line of metrics.

    Returns:
        The last line of metrics.

    Raises:
        CheckpointError: the folder is of another run, the checkpoint to start from is of another
            shape, or a checkpoint cannot be written.
        ArgumentError: the loss is not finite.
    """
    recipe, config, mesh = run.recipe, run.recipe.config(run.model), method.mesh
    first_weights = _first_weights(run, config)
    prepare_folder(run, config, folder)
    keep_compilations()
    rate = make_schedule(recipe)
    optimizer = make_optimizer(rate, recurrent_rate=recipe.recurrent_rate, decayed=recipe.decayed)
    places = None if mesh is None else param_places(config, mesh)
    params = {
        name: jax.device_put(value, places and places[name])
        for name, value in first_weights.items()
    }
    state = jax.jit(optimizer.init, out_shardings=state_places(optimizer, config, mesh))(params)

    @functools.cache
    def update_of(stage: GriffinConfig) -> Callable:
        return compile_update(stage, optimizer, method, run.dtype)[0]

    _, evaluate = compile_update(config, optimizer, method, run.dtype)
    gates = compile_gates(config) if mesh is None and "recurrent" in config.block_types else None
    held_out = recipe.held_out()
    with (
        contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh),
        ocp.CheckpointManager(
            folder.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=CHECKPOINTS_KEPT)
        ) as manager,
        batches(recipe, run.seed, processes_for(jax.default_backend())) as take,
    ):
        first = manager.latest_step() or 0
        if first:
            params, state = restore(manager, first, params, state)
        lines = lines_until(folder / METRICS_FILE, first)
        last = lines[-1] if lines else {}
        losses, started = [], time.monotonic() - last.get("seconds", 0.0)
        tokens = last.get("tokens", 0)
        for step in range(first, recipe.steps):
            if is_finished(lines, recipe.steps, until):
                break
            stage = _stage(recipe, step, lines)
            batch = take(step, stage)
            update = update_of(recipe.config(run.model, stage))
            params, state, loss, norm = update(params, state, batch)
            losses.append(loss)
            tokens += batch.tokens.size
            now = {"step": step + 1, "tokens": tokens}
            if (step + 1) % checkpoint_every and step + 1 < recipe.steps:
                progress(now)
                continue
            now |= {
                "stage": stage,
                "length": recipe.length_of(stage),
                "loss": float(np.mean(jax.device_get(losses))),
                "learning_rate": float(np.asarray(rate(step))),
                "gradient_norm": float(norm),
                **held_out_metrics(evaluate, params, held_out, recipe.visible_keys),
            }
            if recipe.advance is not None:
                there = recipe.held_out(stage)
                tested = held_out_metrics(evaluate, params, there, recipe.visible_keys)
                now["stage_accuracy"] = tested["accuracy"]
            if gates is not None:
                now |= gates(params, held_out[0])
            now["seconds"] = round(time.monotonic() - started, 1)
            losses.clear()
            if not np.isfinite(now["loss"]):
                raise ArgumentError(
                    f"the loss is {now['loss']} at step {step + 1}; the checkpoint before it is "
                    f"kept: a learning rate below {recipe.learning_rate} may do"
                )
            save(folder, manager, now, params, state)
            lines.append(now)
            progress(now)
    (folder / FINISHED_FILE).touch()
    return lines[-1]


def is_finished(lines: list[dict[str, Any]], steps: int, until: float | None) -> bool:
    """Whether a run with these lines of metrics has all its steps, or is good enough."""
    if lines and lines[-1]["step"] >= steps:
        return True
    tests = [line["accuracy"] for line in lines[-TESTS_IN_A_ROW:]]
    return until is not None and len(tests) == TESTS_IN_A_ROW and min(tests) >= until


def _stage(recipe: Recipe, step: int, lines: list[dict[str, Any]]) -> int:
    """The stage of a step after these lines of metrics."""
    if recipe.advance is None:
        return recipe.stage_at(step)
    if not lines:
        return 0
    passed = lines[-1]["stage_accuracy"] >= recipe.advance
    return min(lines[-1]["stage"] + passed, len(recipe.curriculum))


def _first_weights(run: Run, config: GriffinConfig) -> dict[str, np.ndarray]:
    """The weights that a run begins with, float32, by canonical name.

    Raises:
        CheckpointError: the checkpoint to start from is of another shape.
    """
    specs = param_specs(config)
    if run.start is None:
        values = {name: initial_value(spec, run.seed) for name, spec in specs.items()}
        scale = np.float32((run.recipe.conv_variance / DEFAULT_CONV_VARIANCE) ** 0.5)
        for name in values:
            if name.endswith("conv_1d.weight"):
                values[name] *= scale
        return values
    with contextlib.closing(Checkpoint(run.start)) as checkpoint:
        there = param_specs(checkpoint.config)
        differing = [
            f"{name} {list(there[name].shape) if name in there else 'missing'} there, "
            f"{list(specs[name].shape) if name in specs else 'none'} in this run"
            for name in there | specs
            if name not in there or name not in specs or there[name].shape != specs[name].shape
        ]
        if differing:
            raise CheckpointError(
                f"{run.start} is of another shape ({listed(differing)}): give the run its sizes"
            )
        return {name: checkpoint.numpy(name).astype(np.float32) for name in specs}

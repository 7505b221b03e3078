"""Print results of a model split over simulated CPU devices as JSON for tests/model/test_mesh.py.

The module runs in a separate process."""

import contextlib
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from fixtures_engine import continuations, random_ids, scores
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from parity import BASE, relative_error, weights
from tiny_checkpoints import write_source
from xla_options import QUICK_COMPILE

from benchmarks.shard.collectives import collectives
from benchmarks.shard.measured import Sizes
from benchmarks.shard.plan import expected_sums
from benchmarks.shard.run import unexpected
from benchmarks.shard.steps import compile_steps
from griffin_eval.config import HAWK, MQA, GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.tree import Ablation, Scorable
from griffin_eval.layout import param_specs
from griffin_eval.model_jax.griffin import Griffin, param_dtype
from griffin_eval.model_jax.loading import load
from griffin_eval.runners.jax_runner import JaxRunner
from griffin_eval.runners.jax_time import read_over_time
from griffin_eval.sharding.mesh_jax import make_mesh, make_time_mesh, param_sharding
from griffin_eval.sharding.split import MODEL, split_over

FOUR = dataclasses.replace(BASE, vocab_size=64, num_heads=4, gate_blocks=4)
CONFIGS = {
    "griffin": FOUR,
    "hawk": dataclasses.replace(FOUR, block_pattern=HAWK, num_layers=2),
    "mqa": dataclasses.replace(FOUR, block_pattern=MQA, num_layers=2),
    "local attention": dataclasses.replace(FOUR, block_pattern=("local_attention",), num_layers=2),
    "two heads on four devices": dataclasses.replace(FOUR, num_heads=2, gate_blocks=2),
    "odd vocabulary": dataclasses.replace(FOUR, vocab_size=61),
    "a head of its own": dataclasses.replace(FOUR, tie_embeddings=False),
    "two heads of keys": dataclasses.replace(
        FOUR,
        num_kv_heads=2,
        head_dim=12,
        attention_bias=True,
        hidden_activation="silu",
        absent_biases=("linear_x", "input_gate", "o_proj", "down_proj"),
        lru_constant=5.0,
    ),
    "complex gates": dataclasses.replace(FOUR, complex_gates=True),
}
SIZES = Sizes(tokens=24, documents=5, pool=3, rows=4, batch=4, length=8, capacity=32)


def runner_on(config: GriffinConfig, devices: int) -> JaxRunner:
    values, mesh = weights(config), make_mesh(jax.devices()[:devices])
    split = split_over(config, devices)

    def make(spec):
        value = np.asarray(values[spec.name]).astype(param_dtype(spec, np.float32))
        where = param_sharding(mesh, split, spec) if devices > 1 else jax.devices()[0]
        return nnx.Param(jax.device_put(value, where))

    return JaxRunner(Griffin(config, make), QUICK_COMPILE)


def answers(runner: JaxRunner) -> dict:
    sequences = [Scorable(random_ids(20, i % 2) + random_ids(7, i), 9) for i in range(6)]
    sequences += [
        Scorable(random_ids(12, 5), 6, kind) for kind in (Ablation.RECURRENT, Ablation.ATTENTION)
    ]
    prompts = [Prompt(random_ids(5 + i, i), 6) for i in range(3)]
    found = scores(runner, sequences)
    return {
        "logprobs": [each.logprobs.tolist() for each in found],
        "greedy": [each.greedy.tolist() for each in found],
        "continuations": [list(map(int, ids)) for ids in continuations(runner, prompts)],
    }


def evaluated(name: str, devices: int) -> dict:
    runner = runner_on(CONFIGS[name], devices)
    return answers(runner) | {
        "kernels": [runner.kernel, runner.attention_kernel],
        "state_bytes": runner.state_bytes(32),
    }


def counted(name: str, devices: int) -> dict:
    config, split = CONFIGS[name], split_over(CONFIGS[name], devices)
    steps = compile_steps(config, make_mesh(jax.devices()[:devices]), "float32", SIZES)
    return {
        "expected": expected_sums(split),
        "steps": {
            step.name: {
                "kinds": [each.kind for each in step.collectives],
                "unexpected": unexpected(step, split, vectors),
            }
            for step, vectors in zip(steps, (SIZES.tokens, SIZES.rows), strict=True)
        },
    }


def trained(model: str, data: int, devices: int, method: dict, steps: int = 20) -> dict:
    from griffin_eval.training.recipes import RECIPES
    from griffin_eval.training.run_folder import Run, read_metrics
    from griffin_eval.training.step import ONE_DEVICE, Method
    from griffin_eval.training.trainer import train_model

    changes = {"layers": 3, "length": 16, "tokens": 128, "steps": steps, "curriculum": ()}
    changes |= {"width": 32, "heads": 2}
    run = Run(
        recipe=dataclasses.replace(RECIPES["induction_heads"], **changes), model=model, seed=1
    )
    mesh, other = (make_mesh(jax.devices()[:devices], n) for n in (data, 2 if data == 1 else 1))
    half, one = steps // 2, ONE_DEVICE
    meshed, elsewhere = (Method(mesh=each, **method) for each in (mesh, other))
    ways = [
        [(steps, one)],
        [(half, meshed), (steps, elsewhere)],
        [(half, one), (half + 5, meshed), (steps, one)],
    ]
    losses = []
    for way in ways:  # each stage continues the checkpoint of the previous stage
        with tempfile.TemporaryDirectory() as folder:
            for last, used in way:
                with contextlib.suppress(_StopAt.Reached):
                    stop = _StopAt(last)
                    train_model(run, Path(folder), save_every=5, method=used, progress=stop)
            losses.append([line["loss"] for line in read_metrics(Path(folder, "metrics.jsonl"))])
    return {"losses": losses, "data": data, "model": mesh.shape[MODEL]}


def driven(name: str, data: int, devices: int, steps: int = 10) -> dict:
    """Train with plain Flax and Optax on one device and a mesh; return losses and differences."""
    config, mesh = CONFIGS[name], make_mesh(jax.devices()[:devices], data)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (steps, 4, 12))
    with tempfile.TemporaryDirectory() as folder:
        write_source(Path(folder, "it"), config)
        models = [load(Checkpoint(Path(folder, "it")), device=each) for each in (None, mesh)]
    places = nnx.get_named_sharding(nnx.state(models[1]), mesh)
    losses = []
    for model in models:
        at = model is models[1]
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
        with jax.set_mesh(mesh) if at else contextlib.nullcontext():
            losses.append([float(_driven_step(model, optimizer, batch)) for batch in tokens])
    one, other = (nnx.to_flat_state(nnx.state(model)) for model in models)
    lie = nnx.to_flat_state(places)
    split = split_over(config, devices // data)
    specs = param_specs(config)
    return {
        "losses": losses,
        "off": max(
            float(abs(np.asarray(a[...]) - np.asarray(b[...])).max())
            for (_, a), (_, b) in zip(one, other, strict=True)
        ),
        "misplaced": [
            path
            for (path, place), (_, value) in zip(lie, other, strict=True)
            for spec in [specs[".".join(map(str, path))]]
            if tuple(place.get_value().spec) != split.axes(spec)
            or not value[...].sharding.is_equivalent_to(place.get_value(), value[...].ndim)
        ],
    }


@nnx.jit
def _driven_step(model, optimizer, tokens):
    def loss_of(model):
        rows, length = tokens.shape
        hidden, _ = model.step(tokens, np.full(rows, length), model.init_state(rows, length))
        logits = model.logits(hidden[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, gradients)
    return loss


def read_together(name: str, devices: int) -> dict:
    """Compare reading rows split over devices in time with one device, from two states."""
    config, mesh, total = CONFIGS[name], make_time_mesh(jax.devices()[:devices]), 12 * devices
    values, whole = weights(config), NamedSharding(mesh, PartitionSpec())
    model = Griffin(config, lambda spec: nnx.Param(jax.numpy.asarray(values[spec.name])))
    graph, params = nnx.split(model)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, total + 8)).astype(np.int32)
    tokens, more = ids[:, :total], ids[:, total:]
    empty = model.init_state(2)
    _, later = model.step(more[:, :5], np.array([5, 3]), empty)
    step = jax.jit(lambda *rest: model.step(*rest))
    together = jax.jit(lambda p, *rest: read_over_time(nnx.merge(graph, p), *rest, mesh))
    found = []
    for lengths in ([total, total - 7], [total // 2 + 3, 0], [12, 13], [1, 2]):
        for state in (empty, later):
            arguments = tokens, np.array(lengths, np.int32), state
            one = step(*arguments)
            with jax.set_mesh(mesh):
                other = together(*jax.device_put((params, *arguments), whole))
            hidden = [
                np.concatenate([row[:n] for row, n in zip(np.asarray(h), lengths, strict=True)])
                for h, _ in (one, other)
            ]
            last = [
                step(more, np.full(2, 8, np.int32), jax.device_get(s))[0] for _, s in (one, other)
            ]
            off = [relative_error(b, a) for a, b in (hidden, map(np.asarray, last))]
            off += map(_off, *map(jax.tree.leaves, jax.device_get((one[1], other[1]))))
            found.append({"lengths": lengths, "off": float(max(off))})
    with jax.set_mesh(mesh):
        text = together.lower(*jax.device_put((params, *arguments), whole)).compile().as_text()
    operations = collectives(text or "")
    return {
        "results": found,
        "said": sorted([each.kind, list(each.shapes)] for each in operations),
        "in_loop": any(each.in_loop for each in operations),
    }


def _off(one: np.ndarray, other: np.ndarray) -> float:
    return float(abs(np.float64(one) - np.float64(other)).max())


class _StopAt:
    """A progress listener that interrupts a run at a step."""

    class Reached(Exception):
        pass

    def __init__(self, step: int):
        self._step = step

    def __call__(self, metrics: dict) -> None:
        if metrics["step"] == self._step and "loss" in metrics:
            raise self.Reached


if __name__ == "__main__":
    functions = evaluated, counted, trained, driven, read_together
    calls = {function.__name__: function for function in functions}
    found = [calls[name](*arguments) for name, *arguments in json.loads(sys.argv[1])]
    print(json.dumps(found))

"""Contract of model_torch and model_jax: files, public names, signatures, parameters, states."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from parity import BASE, MODELS
from parity_twins import to_numpy, twin

import griffin_eval
from griffin_eval import model_jax, model_torch
from griffin_eval.checkpoints import folder as shipped
from griffin_eval.layout import param_specs
from griffin_eval.model_jax import griffin as jax_griffin
from griffin_eval.model_jax import hooks as jax_hooks
from griffin_eval.model_torch import griffin as torch_griffin
from griffin_eval.model_torch import hooks as torch_hooks

TORCH, JAX = (Path(package.__path__[0]) for package in (model_torch, model_jax))
FILES = sorted(path.name for path in TORCH.glob("*.py"))

# Words for the same thing in the two frameworks.
SAME_WORD = {
    "torch.dtype": "Any",
    "jnp.dtype": "Any",
    "torch.device": "Any",
    "jax.Device": "Any",
    "Any | None": "Any",
    "torch.float32": "jnp.float32",
    "Tensor": "Array",
    "nn.Module": "nnx.Module",
    "nn.Parameter": "nnx.Param",
    "forward": "__call__",
    "int | Int[Array, '']": "int",  # JAX compiles one step for all of them
    "Int[Array, '']": "int",
}
# Public names that one of them alone has, and why.
ALONE = {
    "PaddedLayout.full": "torch can look, JAX compiles one step for all lengths",
    "map_leaves": "JAX maps trees itself",
    "write_rows": "a scatter of XLA is slow, and copies what it writes to",
}


def outline(path: Path) -> dict[str, str]:
    """Return the public names of a file: constants, functions with their signatures, classes with
    their bases and fields."""
    out = {}

    def visit(body, prefix=""):
        for node in body:
            if isinstance(node, ast.FunctionDef):
                arguments = ast.unparse(node.args)
                returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                name, what = common(node.name), common(f"({arguments}){returns}")
            elif isinstance(node, ast.ClassDef):
                bases = ", ".join(map(ast.unparse, node.bases))
                name, what = node.name, common(f"class({bases})")
            elif isinstance(node, ast.AnnAssign):
                name, what = ast.unparse(node.target), common(ast.unparse(node.annotation))
            elif isinstance(node, ast.Assign):
                name, what = ast.unparse(node.targets[0]), common(ast.unparse(node.value))
            else:
                continue
            if name.startswith("_") and not name.endswith("__"):
                continue
            out[prefix + name] = what
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{name}.")

    visit(ast.parse(path.read_text()).body)
    return out


def common(text: str) -> str:
    for word, same in SAME_WORD.items():
        text = text.replace(word, same)
    return text


def test_the_files_are_the_same():
    assert sorted(path.name for path in JAX.glob("*.py")) == FILES


def test_public_names_and_signatures_are_the_same():
    for file in FILES:
        torch_has, jax_has = (
            {name: what for name, what in outline(folder / file).items() if name not in ALONE}
            for folder in (TORCH, JAX)
        )
        assert torch_has == jax_has, file


def test_blocks_are_one_text_but_for_types():
    lines = []
    for folder, own in ((TORCH, "torch"), (JAX, "jax")):
        text = common((folder / "blocks.py").read_text()).replace(f"model_{own}", "model")
        tree = ast.parse(text.replace("super().__init__()", "pass"))
        code = [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
        dumped = ast.unparse(ast.Module(code, []))
        lines.append([line for line in dumped.splitlines() if line.strip() != "pass"])
    assert lines[0] == lines[1]


def parameters(name, model):
    """Name to array, in the order in which the model lists its parameters."""
    if name == "torch":
        return {key: to_numpy(value) for key, value in model.state_dict().items()}
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): to_numpy(value[...]) for path, value in flat}


INITIALIZE = {"torch": torch_griffin.initialize, "jax": jax_griffin.initialize}


@pytest.mark.parametrize("model", ["recurrent last", "paper griffin", "mqa"])
def test_parameters_are_those_of_the_layout_and_drawn_alike(model):
    config = MODELS[model]
    shapes = {name: spec.shape for name, spec in param_specs(config).items()}
    drawn = {name: parameters(name, make(config, 7)) for name, make in INITIALIZE.items()}
    for values in drawn.values():
        assert {name: value.shape for name, value in values.items()} == shapes
    for name in shapes:
        np.testing.assert_array_equal(drawn["torch"][name], drawn["jax"][name])
        spec = param_specs(config)[name]
        assert spec.init == "zeros" or np.unique(drawn["torch"][name]).size > 1


@pytest.mark.parametrize("record", ["record_blocks", "record_temporal"])
def test_every_run_is_recorded_alike(record):
    """Also a second run of the same model, which begins with its own input."""
    seen = {}
    for name, hooks in (("torch", torch_hooks), ("jax", jax_hooks)):
        model = griffin_eval.load(shipped("bytes_griffin"), framework=name, dtype="float32")
        array = {"torch": torch.tensor, "jax": jnp.asarray}[name]
        recorded = getattr(hooks, record)(model.model.layers)
        for ids in ([[5, 6, 7]], [[8, 9, 10]]):
            model.step(array(ids), array([3]), model.init_state(1))
        each = [leaf if isinstance(leaf, dict) else {"x": leaf} for leaf in recorded]
        seen[name] = [{key: to_numpy(value) for key, value in leaf.items()} for leaf in each]
    blocks = len(model.model.layers)
    assert len(seen["torch"]) == len(seen["jax"]) == 2 * (blocks + (record == "record_blocks"))
    for one, other in zip(seen["torch"], seen["jax"], strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ids", [[[5, 11]], [[-1, 5]]])
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_ids_beyond_the_vocabulary_are_refused(name, ids):
    model = twin(name, dataclasses.replace(BASE, vocab_size=11))
    assert np.isfinite(model.step(np.array([[10, 0]]), np.array([2]), model.init_state(1))[0]).all()
    with pytest.raises(IndexError):
        model.model.model.embed_tokens(model._array(np.array(ids)))


def test_a_compiled_function_may_hold_its_tokens():
    model = twin("jax", dataclasses.replace(BASE, vocab_size=11)).model.model
    inside, beyond = jnp.array([[10, 0]]), jnp.array([[10, 11]])
    expected = model.embed_tokens(inside)
    found = jax.jit(lambda: model.embed_tokens(inside))()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(IndexError):
        jax.jit(lambda: model.embed_tokens(beyond))()

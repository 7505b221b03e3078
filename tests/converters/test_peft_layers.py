"""Adapters of peft's methods other than LoRA, compared with peft's own merged models."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from adapters import LINEAR, load_adapted, write_adapter, write_base
from safetensors.torch import load_file, save_file
from slow import fast

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import CheckpointError

# Arguments of peft's configs by method. linear_x and o_proj have biases.
METHODS = {
    "LoHa": {"target_modules": LINEAR, "r": 3, "alpha": 5},
    "LoKr": {"target_modules": LINEAR, "r": 3, "alpha": 5, "rank_pattern": {"q_proj": 2}},
    "IA3": {"target_modules": LINEAR, "feedforward_modules": ["down_proj"]},
    "OFT": {"target_modules": LINEAR, "oft_block_size": 4},
    "BOFT": {"target_modules": LINEAR, "boft_block_size": 4},
    "HRA": {"target_modules": LINEAR, "r": 4},
    "LoHa and modules": {"target_modules": ["up_proj"], "modules_to_save": ["final_norm"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_base(folder)
    return folder


def write(folder, base, method):
    write_adapter(folder, base, method=method.partition(" ")[0], **METHODS[method])
    return folder


def open_with(base, *pairs):
    return Checkpoint(base, Overrides(adapters=pairs))


@pytest.mark.parametrize("method", fast(["LoKr", "IA3"], METHODS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_that_peft_merges(method, dtype, tmp_path):
    write_base(tmp_path / "base", dtype=dtype)
    adapter = write(tmp_path / "adapter", tmp_path / "base", method)
    checkpoint = open_with(tmp_path / "base", (adapter, 1.0))
    wide = load_adapted(tmp_path / "base", adapter, torch.float32).merge_and_unload()
    changed, drawn = 0, torch.get_rng_state()
    for name, value in wide.named_parameters():
        found = checkpoint.torch(name)
        assert found.dtype == dtype
        difference = (found.float() - value.detach().to(dtype).float()).abs().max()
        assert difference <= value.abs().max() * (1e-6 if dtype == torch.float32 else 2**-8)
        changed += not torch.equal(found, Checkpoint(tmp_path / "base").torch(name))
    assert changed >= 3 and torch.equal(drawn, torch.get_rng_state())


def test_an_adapter_of_another_method_stands_alone(base, tmp_path):
    adapter = write(tmp_path / "adapter", base, "LoHa")
    for pairs in [((adapter, 0.5),), ((adapter, 1.0), (adapter, 1.0))]:
        with pytest.raises(CheckpointError, match="is a LOHA, of which there are no weighted sums"):
            open_with(base, *pairs).numpy("model.final_norm.weight")


def damage(change):
    def changed(folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return changed


def add(name):
    return damage(lambda tensors: tensors.update({f"base_model.model.{name}": torch.ones(2)}))


def without_a_factor(tensors):
    del tensors[next(name for name in tensors if name.endswith("hada_w2_a"))]


def not_finite(tensors):
    next(iter(tensors.values()))[0, 0] = np.nan


def wrong_rank(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 7}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add("lm_head.hada_w1_a"), "no part of a LOHA of this model"),
        (add("model.layers.0.temporal_block.conv_1d.hada_w1_a"), "no part of a LOHA"),
        (add("model.layers.0.mlp_block.up_proj.hada_w9"), "not known to peft"),
        (damage(without_a_factor), "are missing"),
        (damage(not_finite), "holds NaN or infinity"),
        (wrong_rank, "peft cannot merge"),
    ],
)
def test_what_peft_cannot_merge_is_refused(base, change, said, tmp_path):
    adapter = write(tmp_path / "adapter", base, "LoHa")
    change(adapter)
    with pytest.raises(CheckpointError, match=said) as caught:
        checkpoint = open_with(base, (adapter, 1.0))
        for name in checkpoint.dtypes:
            checkpoint.numpy(name)
    assert str(adapter) in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_without_peft_names_it(base, tmp_path):
    adapter, output = write(tmp_path / "adapter", base, "LoHa"), tmp_path / "merged"
    code = "import sys; sys.modules['peft'] = None; from griffin_eval.cli.main import main; main()"
    arguments = ["convert", str(base), str(output), "--to", "hf", "--adapter", str(adapter)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install peft" in done.stderr
    assert "Traceback" not in done.stderr and not output.exists()

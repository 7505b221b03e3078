"""Loading: any dtype and sharding binds to both twins, and no model is in memory twice."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from programs import griffin_eval
from slow import ci, slow

from benchmarks.random_checkpoint import SMALL, write_weights
from griffin_eval.api import convert, load
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.layout import parameter_count

# Loads a folder in a process of its own, or in one of two that share the model, and prints the
# largest RssAnon seen, less what was there before, and what it then holds, in bytes. Mapped pages
# of a file are not anonymous memory.
MEASURE = """
import re, sys, threading, time
from griffin_eval.converters.checkpoint import Checkpoint

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

folder, framework, dtype, rank, port = sys.argv[1:]
mesh = None
if framework == "torch":
    import torch
    import torch.distributed as dist
    from griffin_eval.model_torch.loading import load
    from griffin_eval.sharding import processes_torch
    dtype = getattr(torch, dtype, None)
    if port:
        address = "tcp://127.0.0.1:" + port
        dist.init_process_group("gloo", init_method=address, rank=int(rank), world_size=2)
        processes_torch.share(dist.group.WORLD)
else:
    import jax
    from flax import nnx
    from griffin_eval.model_jax.loading import load
    from griffin_eval.sharding.mesh_jax import make_mesh
    dtype = getattr(jax.numpy, dtype, None)
    if port:
        jax.distributed.initialize("127.0.0.1:" + port, 2, int(rank))
        mesh = make_mesh(jax.devices())
        whole = jax.NamedSharding(mesh, jax.P())
        one = jax.make_array_from_callback((4,), whole, lambda part: jax.numpy.zeros(4)[part])
    else:
        one = jax.numpy.zeros(4)
    jax.numpy.isfinite(one.sum()).item()
before, seen, busy = anonymous(), [], True

def watch():
    while busy:
        seen.append(anonymous())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
model = load(Checkpoint(folder), dtype, device=mesh)
busy = False
thread.join()
if framework == "torch":
    held = sum(p.nbytes for p in model.parameters())
    if port:
        dist.destroy_process_group()
else:
    leaves = jax.tree.leaves(nnx.state(model))
    held = sum(part.data.nbytes for leaf in leaves for part in leaf.addressable_shards)
print()
print(max(seen) - before, held)
"""


DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a model in every dtype, whole and in shards."""
    folder = tmp_path_factory.mktemp("saved")
    write_weights(replace(SMALL, vocab_size=200, num_layers=4), folder)
    for dtype in DTYPES:
        for shard in ("5GB", "200KB"):
            out, dtypes = folder / f"{dtype}-{shard}", f"{dtype},recurrent_param={dtype}"
            convert(folder, out, to="hf", dtype=dtypes, max_shard_size=shard)
        assert list((folder / f"{dtype}-200KB").glob("*.index.json"))
    return folder


@pytest.mark.parametrize(
    ("asked", "stored", "shard"),
    [
        (None, "float32", "5GB"),
        (None, "bfloat16", "200KB"),
        ("float32", "float16", "5GB"),
        ("bfloat16", "float32", "5GB"),
    ],
)
def test_both_twins_hold_what_the_file_holds(saved, shard, stored, asked):
    import jax.numpy as jnp
    from flax import nnx
    from safetensors.torch import load_file

    from griffin_eval.model_jax import loading as jax_loading
    from griffin_eval.model_torch import loading as torch_loading

    folder = saved / f"{stored}-{shard}"
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    truth = {name: tensor for file in files for name, tensor in file.items()}
    torch_model = torch_loading.load(
        Checkpoint(folder), asked and getattr(torch, asked)
    ).state_dict()
    jax_model = nnx.to_flat_state(
        nnx.state(jax_loading.load(Checkpoint(folder), asked and jnp.dtype(asked)))
    )
    jax_model = {".".join(map(str, path)): leaf[...] for path, leaf in jax_model}
    assert truth.keys() == torch_model.keys() == jax_model.keys()
    for name, weight in truth.items():
        dtype = "float32" if name.endswith("recurrent_param") else asked or stored
        expected = weight.to(getattr(torch, dtype))
        assert torch_model[name].dtype == expected.dtype and jax_model[name].dtype == dtype
        assert torch.equal(torch_model[name], expected), name
        np.testing.assert_array_equal(
            np.asarray(jax_model[name], np.float32), expected.float().numpy(), name
        )


def test_surroundings_of_torch_change_no_result(formats):
    """Neither another default device nor autocast, in which logits are still float32."""
    model = load(formats("griffin"), framework="torch", dtype="float32")
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]])
    lengths = torch.tensor([4, 3])

    def logits():
        with torch.no_grad():
            return model.logits(model.step(tokens, lengths, state)[0])

    state = model.init_state(2)
    usual = logits()
    with torch.device("meta"):
        assert torch.equal(logits(), usual)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.step(tokens, lengths, state)[0]
        assert model.logits(hidden).dtype == torch.float32
    assert torch.allclose(model.logits(hidden), logits(), atol=0.2)


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_what_overflows_in_the_dtype_of_the_model_is_said(framework, tmp_path, caplog):
    from parity import MODELS, weights
    from safetensors.numpy import save_file

    from griffin_eval.converters.configs.huggingface import to_huggingface
    from griffin_eval.runners.load import load_runner

    config = MODELS["attention first"]
    values = {name: value.astype(np.float32) for name, value in weights(config).items()}
    values["model.layers.1.mlp_block.up_proj.weight"][0, :3] = 1e5  # float16 ends at 65504
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(to_huggingface(config)))
    load_runner(tmp_path, framework=framework, dtype="float32", device="cpu")
    assert "NaN or infinite" not in caplog.text
    load_runner(tmp_path, framework=framework, dtype="float16", device="cpu")
    said = "model.layers.1.mlp_block.up_proj.weight: 3 of 2560 weights are NaN or infinite"
    assert said in caplog.text


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 240 MB in float32, its embedding 80 MB."""
    from safetensors.torch import save_file

    from griffin_eval.converters.configs.huggingface import to_huggingface
    from griffin_eval.layout import param_specs

    config = GriffinConfig(
        vocab_size=40_000,
        width=512,
        mlp_width=3 * 512,
        num_heads=4,
        num_layers=12,
        lru_width=512,
        gate_blocks=4,
        visible_keys=2048,
    )
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(to_huggingface(config)))
    weights = {name: torch.rand(spec.shape) for name, spec in param_specs(config).items()}
    save_file(weights, folder / "model.safetensors")
    return folder, 4 * parameter_count(config), 4 * 40_000 * 512


@pytest.mark.parametrize(
    ("framework", "dtype", "copies"),
    [
        ci("torch", "auto", 0),
        slow("torch", "bfloat16", 0.5),
        slow("jax", "auto", 1),
        ci("jax", "bfloat16", 0.5),
    ],
)
def test_the_model_is_never_in_memory_twice(large, framework, dtype, copies):
    """Torch maps the file; a copy costs itself and the one tensor that is on its way."""
    folder, model, tensor = large
    command = [sys.executable, "-c", MEASURE, folder, framework, dtype, "", ""]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-2]) < copies * model + tensor * bool(copies) + 30e6


@pytest.fixture(scope="module")
def formats(large, tmp_path_factory):
    """Return a function that gives the folder of the large model in a format."""
    folders = {"hf": large[0]}

    def folder(name):
        if name not in folders:
            target, _, chunks = name.partition(" ")
            folders[name] = tmp_path_factory.mktemp("format") / target
            options = ("--chunks", chunks) if chunks else ()
            done = griffin_eval("convert", large[0], folders[name], "--to", target, *options)
            assert done.returncode == 0, done.stderr
        return folders[name]

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", ["hf", "griffin-orbax model=2", "deepmind-torch"])
def test_no_process_holds_the_model_that_they_share(large, formats, name, framework):
    """Each of two needs its own part and that of the one tensor that is on its way."""
    folder, (_, model, tensor) = formats(name), large
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    one_device = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEASURE, folder, framework, "auto", rank, port],
            stdout=subprocess.PIPE,
            env=os.environ | {"XLA_FLAGS": one_device},
        )
        for rank in ("0", "1")
    ]
    try:
        printed = [process.communicate(timeout=240)[0].split()[-2:] for process in processes]
    finally:
        for process in processes:
            process.kill()
    print(f"{name} {framework}: {printed}")
    for peak, held in (map(int, words) for words in printed):
        assert model / 2 <= held < 0.55 * model
        assert peak < held + tensor / 2 + 30e6 < model
        if (name, framework) == ("hf", "torch"):  # tensors that are split by rows stay mapped
            assert peak < held / 2

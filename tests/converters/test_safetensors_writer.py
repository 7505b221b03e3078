"""Folders that transformers, safetensors and our own reader read, named and split as theirs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from slow import examples

from griffin_eval.converters.containers.safetensors.reader import open_safetensors
from griffin_eval.converters.containers.safetensors.writer import SafetensorsWriter
from griffin_eval.converters.tensors import FLOATS
from griffin_eval.errors import BadInput

INDEX = "model.safetensors.index.json"
SPECS = {
    "model.b": ((7,), "float32"),
    "model.a": ((16, 8), "bfloat16"),
    "scalar": ((), "float64"),
    "half": ((3, 5), "float16"),
    "empty": ((0, 3), "float32"),
    "ünïcode": ((32,), "float64"),
}


def values(specs=SPECS, seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {}
    for name, (shape, dtype) in specs.items():
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        size = int(np.prod(shape, dtype=int)) * kind.itemsize
        made[name] = np.frombuffer(rng.bytes(size), kind).reshape(shape)
    return made


def write(folder: Path, arrays, specs=SPECS, **options) -> SafetensorsWriter:
    folder.mkdir(exist_ok=True)
    with SafetensorsWriter(folder, specs, **options) as writer:
        for name, array in arrays.items():
            writer.write(name, [array])
    return writer


def check_reads(folder: Path, arrays) -> None:
    with open_safetensors(folder) as reader:
        assert set(reader.tensors) == set(arrays)
        for name, array in arrays.items():
            assert reader.tensors[name].numpy().tobytes() == array.tobytes()
            assert reader.tensors[name].numpy().shape == array.shape
            assert reader.tensors[name].numpy().dtype == array.dtype
    found = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as theirs:
            assert theirs.metadata() == {"format": "pt"}
            for name in theirs.keys():
                found.add(name)
                flat = theirs.get_tensor(name).reshape(-1)
                assert flat.view(torch.uint8).numpy().tobytes() == arrays[name].tobytes()
    assert found == set(arrays)


@pytest.mark.parametrize("max_shard_size", [5 * 10**9, 300, 1])
def test_everyone_reads_it(tmp_path, max_shard_size):
    arrays = values()
    writer = write(tmp_path, dict(reversed(arrays.items())), max_shard_size=max_shard_size)
    check_reads(tmp_path, arrays)
    files = {file.name: file.stat().st_size for file in tmp_path.glob("*.safetensors")}
    assert files == writer.nbytes
    assert set(os.listdir(tmp_path)) - set(files) == ({INDEX} if len(files) > 1 else set())


@pytest.mark.parametrize("max_shard_size", [5 * 10**9, 20_000, 8_000, 100])
def test_names_split_and_index_are_those_of_transformers(tmp_path, max_shard_size):
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    config = RecurrentGemmaConfig(
        num_hidden_layers=3, vocab_size=32, hidden_size=16, intermediate_size=96, lru_width=16
    )
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 8
    model = RecurrentGemmaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    state = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    arrays = {n: t.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) for n, t in state.items()}
    specs = {name: (array.shape, "bfloat16") for name, array in arrays.items()}
    write(tmp_path / "ours", arrays, specs, max_shard_size=max_shard_size)

    def files(folder):
        return {
            file.name: set(safe_open(file, "np").keys()) for file in folder.glob("*.safetensors")
        }

    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    index = tmp_path / "ours" / INDEX
    assert index.exists() == (tmp_path / "theirs" / INDEX).exists()
    if index.exists():
        assert index.read_text() == (tmp_path / "theirs" / INDEX).read_text()
    model.config.save_pretrained(tmp_path / "ours")
    loaded = RecurrentGemmaForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_tensors_begin_at_64_bytes(tmp_path):
    specs = {"odd": ((3,), "bfloat16"), "one": ((1,), "float64")}
    specs |= {f"t{i}": ((32 * i,), "bfloat16") for i in range(1, 9)}
    writer = write(tmp_path, values(specs), specs)
    assert list(writer.shards.values()) == [[*(f"t{i}" for i in range(1, 9)), "one", "odd"]]
    with open_safetensors(tmp_path) as reader:
        for name, info in reader.tensors.items():
            assert info.numpy().ctypes.data % (64 if name.startswith("t") else 8) == 0


def test_the_bytes_are_deterministic(tmp_path):
    arrays = values()
    write(tmp_path / "one", arrays, max_shard_size=300)
    write(tmp_path / "two", dict(reversed(arrays.items())), max_shard_size=300)
    names = os.listdir(tmp_path / "one")
    assert sorted(names) == sorted(os.listdir(tmp_path / "two"))
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_chunks_and_strides(tmp_path):
    array = np.arange(35, dtype=np.float32).reshape(5, 7)
    specs = {name: ((7, 5), "float32") for name in ("rows", "flat", "whole")}
    with SafetensorsWriter(tmp_path, specs) as writer:
        writer.write("rows", (array.T[i : i + 2] for i in range(0, 7, 2)))
        writer.write("flat", np.array_split(array.T.reshape(-1), 4))
        writer.write("whole", [array.T])
    check_reads(tmp_path, dict.fromkeys(specs, array.T))


def test_what_cannot_be_written(tmp_path):
    ones = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="2 tensors were never written: 'b'; 'c'"):
        with SafetensorsWriter(tmp_path, {n: ((2,), "float32") for n in "abc"}) as writer:
            writer.write("a", [ones])
    with SafetensorsWriter(tmp_path, {"a": ((2,), "float32")}) as writer:
        with pytest.raises(ValueError, match="'b' is not among"):
            writer.write("b", [])
        for chunks in ([ones[:1]], [ones, ones], [np.ones(2)], [ones.astype(">f4")]):
            with pytest.raises(ValueError, match="'a' was given"):
                writer.write("a", chunks)
        writer.write("a", [ones])
        with pytest.raises(ValueError, match="written before"):
            writer.write("a", [ones])
    with pytest.raises(ValueError, match="'a' is int4"):
        SafetensorsWriter(tmp_path, {"a": ((2,), "int4")})
    with pytest.raises(ValueError, match="no tensors"):
        SafetensorsWriter(tmp_path, {})
    with pytest.raises(ValueError, match="__metadata__"):
        SafetensorsWriter(tmp_path, {"__metadata__": ((2,), "float32")})
    with pytest.raises(BadInput, match="cannot be written"):
        with SafetensorsWriter(tmp_path / "no", {"a": ((2,), "float32")}) as writer:
            writer.write("a", [ones])


def test_no_framework_is_needed(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['jax'] = None\n"
        "import numpy as np\n"
        "from griffin_eval.converters.containers.safetensors.writer import SafetensorsWriter\n"
        f"with SafetensorsWriter({str(tmp_path)!r}, {{'a': ((2,), 'float32')}}) as writer:\n"
        "    writer.write('a', [np.ones(2, np.float32)])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    check_reads(tmp_path, {"a": np.ones(2, np.float32)})


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    specs=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5).filter("__metadata__".__ne__),
        st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(FLOATS)),
        min_size=1,
        max_size=6,
    ),
    max_shard_size=st.sampled_from([1, 50, 10**9]),
)
def test_any_tensors(tmp_path, specs, max_shard_size):
    for file in tmp_path.iterdir():
        file.unlink()
    arrays = values(specs)
    write(tmp_path, arrays, specs, max_shard_size=max_shard_size)
    check_reads(tmp_path, arrays)


@pytest.mark.slow
def test_a_large_tensor_takes_no_memory(tmp_path):
    code = """
import re, sys
from pathlib import Path
import numpy as np
from griffin_eval.converters.containers.safetensors.writer import SafetensorsWriter
def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
source = np.lib.format.open_memmap(sys.argv[2], "w+", np.float32, (10_000, 32_000))
source[:, 0] = np.arange(10_000)
before = peak = resident()
def chunks(array):
    global peak
    for i in range(0, len(array), 500):
        yield array[i : i + 500]
        peak = max(peak, resident())
specs = {"a": ((10_000, 32_000), "float32"), "b": ((32_000, 10_000), "float32")}
with SafetensorsWriter(sys.argv[1], specs, max_shard_size=2 * 10**9) as writer:
    writer.write("a", chunks(source))
    writer.write("b", [source.T])
    peak = max(peak, resident())
print(peak - before)
"""
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "out"), str(tmp_path / "source.npy")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert int(done.stdout) < 64  # MB, of 1280
    with open_safetensors(tmp_path / "out") as reader:
        assert reader.tensors["a"].numpy()[:, 0].tolist() == list(range(10_000))
        assert reader.tensors["b"].numpy()[0].tolist() == list(range(10_000))
    assert re.fullmatch(r"\d+\n", done.stdout)

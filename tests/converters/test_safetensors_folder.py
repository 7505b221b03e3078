"""Folders written by transformers and damaged ones: read in full, in place, or refused."""

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from slow import examples

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.containers.container import natural_key
from griffin_eval.converters.containers.safetensors.reader import open_safetensors
from griffin_eval.converters.tensors import FLOATS, LazyTensor
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import param_specs

CONFIG = GriffinConfig(
    vocab_size=32,
    width=16,
    mlp_width=48,
    num_heads=2,
    num_layers=11,  # layers.2 and layers.10
    lru_width=24,
    gate_blocks=2,
    visible_keys=8,
)
SPECS = param_specs(CONFIG)
EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def model():
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(0)
    return RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            num_hidden_layers=CONFIG.num_layers,
            vocab_size=CONFIG.vocab_size,
            hidden_size=CONFIG.width,
            intermediate_size=2 * CONFIG.mlp_width,
            num_attention_heads=CONFIG.num_heads,
            num_key_value_heads=1,
            lru_width=CONFIG.lru_width,
            attention_window_size=CONFIG.visible_keys,
        )
    )


def weights(dtype=torch.float32, **changes):
    """The tensors of SPECS, small integers; a change of None drops one."""
    tensors = {n: torch.full(s.shape, i % 7, dtype=dtype) for i, (n, s) in enumerate(SPECS.items())}
    return {n: t for n, t in (tensors | changes).items() if t is not None}


def write(folder: Path, tensors, name="model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def write_raw(folder: Path, header, data=b"", name="model.safetensors") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def write_shards(folder: Path, shards: dict[str, dict], weight_map=None) -> Path:
    for name, tensors in shards.items():
        write(folder, tensors, name)
    default = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"weight_map": default if weight_map is None else weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def entry(dtype="U8", shape=(1,), offsets=(0, 1), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def refusal(folder, *fragments: str) -> str:
    """The one sentence with which opening the folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(folder)
    return check_message(caught, folder, *fragments)


def check_message(caught, folder, *fragments: str) -> str:
    message = str(caught.value)
    for fragment in (str(folder), *fragments):
        assert fragment in message
    assert "\n" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def check(folder: Path) -> None:
    """Opens a folder as a model of this config."""
    config = {"model_type": "griffin", **dataclasses.asdict(CONFIG)}
    (folder / "config.json").write_text(json.dumps(config))
    Checkpoint(folder).close()


# What transformers writes.


@pytest.mark.parametrize("shard_size", ["5GB", "8KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reads_what_transformers_saves(model, tmp_path, dtype, shard_size):
    model = type(model)(model.config).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).is_file() == (shard_size == "8KB")
    Checkpoint(tmp_path).close()
    with open_safetensors(tmp_path) as folder:
        assert set(folder.tensors) == set(SPECS)
        for name, expected in model.state_dict().items():
            if name == "lm_head.weight":
                continue
            info = folder.tensors[name]
            array, tensor = info.numpy(), info.torch()
            assert info.shape == array.shape == tuple(tensor.shape) == tuple(expected.shape)
            assert info.nbytes == array.nbytes
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected)
            bits = expected.contiguous().view(torch.uint8).numpy()
            assert array.tobytes() == bits.tobytes()
            if dtype == torch.bfloat16:
                assert array.dtype == ml_dtypes.bfloat16


def test_tensors_are_in_natural_order(tmp_path):
    with open_safetensors(write(tmp_path, weights())) as folder:
        names = list(folder.tensors)
    layers = [int(n.split(".")[2]) for n in names if n.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert max(layers) == 10
    assert natural_key("9" * 5000) > natural_key("8" * 5000)


def test_a_lone_safetensors_file_is_the_model(tmp_path):
    check(write(tmp_path, weights(), "hawk.safetensors"))


# Views.


def test_numpy_views_are_read_only_and_outlive_the_folder(tmp_path):
    with open_safetensors(write(tmp_path, {"a": torch.arange(4.0)})) as folder:
        array, tensor = folder.tensors["a"].numpy(), folder.tensors["a"].torch()
    assert not array.flags.writeable
    assert not array.flags.owndata
    folder.close()  # twice is no error
    assert array.tolist() == tensor.tolist() == [0, 1, 2, 3]


def test_writing_to_a_torch_tensor_never_reaches_the_file(tmp_path):
    write(tmp_path, {"a": torch.arange(4.0)})
    before = (tmp_path / "model.safetensors").read_bytes()
    with open_safetensors(tmp_path) as folder:
        folder.tensors["a"].torch().add_(1)
        assert folder.tensors["a"].numpy().tolist() == [0, 1, 2, 3]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_scalars_empty_and_unaligned_tensors(tmp_path):
    header = {
        "empty": entry("F32", (0, 4), (0, 0)),
        "byte": entry("U8", (1,), (0, 1)),
        "scalar": entry("F32", (), (1, 5)),
        "pair": entry("BF16", (2,), (5, 9)),
        "__metadata__": {"format": "pt"},
    }
    data = b"\7" + np.float32(1.5).tobytes() + np.array([1, 2], ml_dtypes.bfloat16).tobytes()
    with open_safetensors(write_raw(tmp_path, header, data)) as folder:
        assert set(folder.tensors) == {"empty", "byte", "scalar", "pair"}
        for read in (LazyTensor.numpy, LazyTensor.torch):
            found = {name: read(tensor) for name, tensor in folder.tensors.items()}
            assert tuple(found["empty"].shape) == (0, 4)
            assert found["byte"].tolist() == [7]
            assert found["scalar"].tolist() == 1.5
            assert found["pair"].tolist() == [1, 2]


def test_dtypes_without_a_numpy_type(tmp_path):
    with open_safetensors(write_raw(tmp_path, {"model.a": entry("F8_E8M0")}, b"1")) as folder:
        with pytest.raises(CheckpointError, match="'model.a' is F8_E8M0, which numpy cannot hold"):
            folder.tensors["model.a"].numpy()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_reading_does_not_copy(tmp_path):
    # In a process of its own: here, the allocator may reuse memory that other tests have freed.
    write(tmp_path, {"a": torch.ones(50_000_000), "b": torch.ones(10_000_000).bfloat16()})
    program = """
        import re, sys
        import ml_dtypes, numpy, torch
        from griffin_eval.converters.containers.safetensors.reader import open_safetensors

        def anonymous():
            with open("/proc/self/status") as status:
                return int(re.search(r"RssAnon:\\s+(\\d+)", status.read())[1]) // 1024

        torch.ones(2).sum(), numpy.ones(2).sum()
        folder, before = open_safetensors(sys.argv[1]), anonymous()
        array, tensor = folder.tensors["a"].numpy(), folder.tensors["a"].torch()
        assert float(array.sum()) == float(tensor.sum()) == 50_000_000
        low = folder.tensors["b"].torch()
        assert low.view(torch.int16).max() == low.view(torch.int16).min()
        assert folder.tensors["b"].numpy().view("u2").max() == 0x3F80
        print(anonymous() - before)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(result.stdout) < 8  # of 220 MB


def test_opening_imports_no_framework(tmp_path):
    write(tmp_path, {"a": torch.ones(2)})
    program = (
        "import sys\n"
        "from griffin_eval.converters.containers.safetensors.reader import open_safetensors\n"
        "open_safetensors(sys.argv[1]); "
        "print([m for m in ('torch', 'jax', 'numpy', 'safetensors', 'huggingface_hub') "
        "if m in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.check_output(command, text=True).strip() == "[]"


# Folders that hold no model, or two.


def test_no_such_folder(tmp_path):
    refusal(tmp_path / "absent", "expected a folder with model.safetensors, found nothing")
    (tmp_path / "file").write_text("")
    refusal(tmp_path / "file", "found a file")


def test_folders_without_safetensors(tmp_path):
    refusal(tmp_path, "found nothing")
    (tmp_path / "pytorch_model.bin").write_text("")
    refusal(tmp_path, "found pytorch_model.bin", "converted")


def test_several_files_need_an_index(tmp_path):
    write(tmp_path, weights(), "a.safetensors")
    write(tmp_path, weights(), "b.safetensors")
    refusal(tmp_path, "found only a.safetensors; b.safetensors", INDEX)


def test_a_lone_shard_is_not_a_model(tmp_path):
    write(tmp_path, weights(), "model-00001-of-00002.safetensors")
    refusal(tmp_path, "found only model-00001-of-00002.safetensors", INDEX)
    (tmp_path / "one").mkdir()
    open_safetensors(write(tmp_path / "one", weights(), "model-00001-of-00001.safetensors"))


def test_a_single_file_beside_an_index_is_ambiguous(tmp_path):
    write_shards(tmp_path, {"a.safetensors": {"x": torch.ones(1)}})
    write(tmp_path, {"x": torch.zeros(1)})
    refusal(tmp_path, "holds two models", INDEX)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    with open_safetensors(tmp_path) as folder:
        assert folder.tensors["x"].numpy() == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    write(tmp_path, weights())
    (tmp_path / "model.safetensors").chmod(0)
    refusal(tmp_path, "Permission denied")


# Indexes.


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (b"", "no JSON, at character 0"),
        (b"[]", "a JSON list"),
        (b"\xff", "not UTF-8, at 0"),
        (b'{"a": 1, "a": 2}', "the key 'a' twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "expected a JSON object"),
        (b"{}", "'weight_map' from tensor names to file names, found a NoneType"),
        (b'{"weight_map": []}', "found a list"),
        (b'{"weight_map": {}}', "found an empty one"),
        (b'{"weight_map": {"x": 3}}', "'x' is in 3"),
        (b'{"weight_map": {"x": ""}}', "'x' is in ''"),
        (b'{"weight_map": {"x": "../a"}}', "'x' is in '../a'; expected names of files within"),
        (b'{"weight_map": {"x": "b/../../a"}}', "'x' is in 'b/../../a'"),
        (b'{"weight_map": {"x": "/etc/passwd"}}', "'x' is in '/etc/passwd'"),
        (b'{"weight_map": {"x": "..\\\\a"}}', "'x' is in '..\\\\a'"),
        (b'{"weight_map": {"x": "a.safetensors"}}', "1 of 1 shards that are not there"),
        (b'{"weight_map": {"x": "a\\u0000b"}}', "'a\\x00b'"),
        (b'{"weight_map": {"x": "\\ud800"}}', "half of a surrogate pair"),
        (b'{"weight_map": {"x": "."}}', "not there"),
        (b'{"weight_map": {"x": "' + b"y" * 5000 + b'"}}', "not there"),
    ],
)
def test_malformed_indexes(tmp_path, text, fragment):
    (tmp_path / INDEX).write_bytes(text)
    refusal(tmp_path, INDEX, fragment).encode()


def test_an_index_that_would_fill_the_memory(tmp_path):
    with open(tmp_path / INDEX, "wb") as file:
        file.truncate(1 << 40)
    refusal(tmp_path, "found 1099511627776 bytes, more than the 100000000 that are allowed")


def test_missing_shards_are_listed_together(tmp_path):
    write_shards(tmp_path, {f"{i}.safetensors": {f"x{i}": torch.ones(1)} for i in range(15)})
    for i in range(1, 15):
        (tmp_path / f"{i}.safetensors").unlink()
    refusal(tmp_path, "14 of 15 shards", "'1.safetensors'; ", "; and 4 more; download")


def test_index_and_shards_that_disagree_are_listed_together(tmp_path):
    names = {
        "a.safetensors": ("right", "twice", "unnamed", "elsewhere"),
        "b.safetensors": ["twice"],
    }
    shards = {file: {name: torch.ones(1) for name in held} for file, held in names.items()}
    weight_map = {
        "right": "a.safetensors",
        "twice": "a.safetensors",
        "lacking": "b.safetensors",
        "elsewhere": "b.safetensors",
    }
    message = refusal(
        write_shards(tmp_path, shards, weight_map),
        INDEX,
        "'twice' is in 2 shards, a.safetensors, b.safetensors",
        "a.safetensors holds 'unnamed', which the index does not name",
        "places 'lacking' in b.safetensors, which lacks it",
        "places 'elsewhere' in b.safetensors, but it is in a.safetensors",
    )
    assert "'right'" not in message


def test_an_index_may_spell_a_path_in_several_ways(tmp_path):
    write(tmp_path, {"x": torch.ones(1), "y": torch.ones(1)}, "a.safetensors")
    weight_map = {"x": "a.safetensors", "y": "./a.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert set(open_safetensors(tmp_path).tensors) == {"x", "y"}


def test_files_may_be_links_as_in_the_hub_cache(tmp_path):
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs", weights(), "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    check(tmp_path / "snapshot")


# Headers.


@pytest.mark.parametrize(
    ("header", "data", "fragment"),
    [
        (b"", b"", "no JSON, at character 0"),
        (b"[1]", b"", "found a JSON list"),
        (b"\xff", b"", "not UTF-8"),
        (b'{"a": {}, "a": {}}', b"", "the key 'a' twice"),
        ({"a": 1}, b"", "'a' is 1, expected an object"),
        ({"a": {}}, b"", "'a' has dtype None, which safetensors does not have"),
        ({"a": entry("C128")}, b"1", "'a' has dtype 'C128'"),
        ({"a": entry(dtype=[])}, b"1", "'a' has dtype []"),
        ({"a": entry(shape=(-1,))}, b"1", "'a' has shape [-1]"),
        ({"a": entry(shape=(1.0,))}, b"1", "'a' has shape [1.0]"),
        ({"a": entry(shape=(True,))}, b"1", "'a' has shape [True]"),
        ({"a": entry(shape=[1] * 33)}, b"1", "expected at most 32 integers"),
        ({"a": entry(shape=(0, 1 << 62, 1 << 62), offsets=(0, 0))}, b"", "larger than any memory"),
        ({"a": {"dtype": "U8", "shape": "1", "data_offsets": [0, 1]}}, b"1", "has shape '1'"),
        ({"a": entry(offsets=(1, 0))}, b"1", "'a' has data_offsets [1, 0], expected [begin, end]"),
        ({"a": entry(offsets=(0,))}, b"1", "'a' has data_offsets [0]"),
        ({"a": entry(offsets=(-1, 0))}, b"1", "'a' has data_offsets [-1, 0]"),
        ({"a": entry("F32", (2,), (0, 4))}, b"1234", "has 32 bits, but dtype F32 and shape (2,)"),
        ({"a": entry("F4", (3,), (0, 1))}, b"1", "has 8 bits, but dtype F4 and shape (3,) need 12"),
        ({"a": entry(), "b": entry()}, b"1", "'b' overlaps 'a' by 1 bytes"),
        ({"a": entry(), "b": entry(offsets=(2, 3))}, b"123", "1 bytes between 'a' and 'b'"),
        ({"a": entry(offsets=(2, 3))}, b"123", "2 bytes between the header and 'a' are unused"),
        ({"a": entry()}, b"123", "2 bytes after 'a' are unused"),
        ({"a": entry(), "b": entry(offsets=(1, 2))}, b"1", "1 tensors end past it ('b')"),
        ({"a": entry(), "\ud800": entry(offsets=(1, 2))}, b"12", "half of a surrogate pair"),
        ({"a" * 1001: entry()}, b"1", "has 1001 characters, more than any name"),
        ({"__metadata__": {"a": 1}}, b"", "'__metadata__' must map strings to strings"),
        ({"__metadata__": {"a": "\ud800"}}, b"", "half of a surrogate pair"),
        ({"__metadata__": 0}, b"", "'__metadata__' must map strings to strings"),
        ({}, b"1", "1 bytes after the header are unused"),
    ],
)
def test_malformed_headers(tmp_path, header, data, fragment):
    refusal(write_raw(tmp_path, header, data), "model.safetensors", fragment, "download").encode()


@pytest.mark.parametrize("shape", ["[-0]", "[2, -0]", "[0, -0]"])
@pytest.mark.parametrize("offsets", ["[0, 0]", "[-0, 0]", "[0, -0]"])
def test_a_zero_with_a_sign_is_refused_as_by_the_library(tmp_path, shape, offsets):
    header = f'{{"a": {{"dtype": "U8", "shape": {shape}, "data_offsets": {offsets}}}}}'
    folder = write_raw(tmp_path, header.encode(), b"")
    with pytest.raises(SafetensorError), safe_open(folder / "model.safetensors", "np"):
        pass
    refusal(folder, "found the number -0, where only integers >= 0 may be")
    header = f'{{"a": {{"dtype": "U8", "shape": [0], "data_offsets": {offsets}}}}}'
    if "-" in offsets:
        refusal(write_raw(tmp_path, header.encode(), b""), "found the number -0")


def test_lengths_that_lie(tmp_path):
    file = tmp_path / "model.safetensors"
    for content, fragment in (
        (b"", "is empty"),
        (b"\0" * 7, "at least 8 bytes, found a file of 7"),
        (struct.pack("<Q", 3) + b"{}", "claims 3 bytes, but the file has 2"),
        (struct.pack("<Q", (1 << 64) - 1) + b"{}", "but the file has 2"),
    ):
        file.write_bytes(content)
        refusal(tmp_path, "model.safetensors", fragment)
    with open(file, "wb") as handle:  # sparse
        handle.write(struct.pack("<Q", 100_000_001) + b"{}")
        handle.truncate(200_000_000)
    refusal(tmp_path, "claims 100000001 bytes, more than the 100000000 that are allowed")


def test_truncated_files_say_what_is_lost(tmp_path):
    write(tmp_path, weights())
    file = tmp_path / "model.safetensors"
    full = file.stat().st_size
    os.truncate(file, full - 10)
    refusal(tmp_path, f"the file is truncated: expected {full} bytes, found {full - 10}")


def test_problems_of_all_shards_are_listed_together(tmp_path):
    write_shards(tmp_path, {f"{i}.safetensors": {f"x{i}": torch.ones(4)} for i in range(3)})
    for i in range(2):
        file = tmp_path / f"{i}.safetensors"
        os.truncate(file, file.stat().st_size - 1)
    refusal(tmp_path, "0.safetensors: the file is truncated", "1.safetensors: the file is")


# What the config expects.


def disagreement(folder: Path, *fragments: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(folder)
    return check_message(caught, folder, *fragments)


def test_missing_unexpected_and_reshaped_are_listed_together(tmp_path):
    layer = "model.layers.10.temporal_block"
    changes = {
        f"{layer}.linear_x.weight": None,
        f"{layer}.linear_in.weight": torch.ones(24, 16),
        "model.layers.2.mlp_block.up_proj.bias": None,
        "quux": torch.ones(1),
        "model.final_norm.weight": torch.ones(2, 8),
        EMBEDDING: torch.ones(32, 16, dtype=torch.int8),
    }
    message = disagreement(
        write(tmp_path, weights(**changes)),
        f"2 missing ('model.layers.2.mlp_block.up_proj.bias'; '{layer}.linear_x.weight')",
        f"2 unexpected ('{layer}.linear_in.weight', nearest '{layer}.linear_x.weight'; 'quux')",
        "1 of another shape ('model.final_norm.weight' is (2, 8), expected (16,))",
        f"1 of a dtype other than bfloat16, float16, float32, float64 ('{EMBEDDING}' is I8)",
    )
    assert "linear_y" not in message


def test_long_lists_are_cut(tmp_path):
    extra = {f"model.layers.{i}.extra": torch.ones(1) for i in range(30)}
    message = disagreement(write(tmp_path, weights(**extra)), "30 unexpected", "; and 20 more")
    assert message.index("layers.2.extra") < message.index("layers.9.extra")
    assert "layers.10.extra" not in message


def test_a_bare_model_is_read_if_its_head_is_tied(model, tmp_path):
    model.model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(checkpoint.torch(name), value)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="RecurrentGemmaForCausalLM") as caught:
        Checkpoint(tmp_path)
    message = str(caught.value)
    assert f"{len(SPECS)} names lack the prefix 'model.'" in message
    assert "1 missing ('lm_head.weight')" in message
    assert "unexpected" not in message


def test_output_heads(tmp_path):
    tensors = weights()
    head = tensors[EMBEDDING].clone()
    check(write(tmp_path, tensors | {"lm_head.weight": head}))
    other = head.clone()
    other[-1, -1] = -0.0 if other[-1, -1] == 0 else 100
    for own in (other, head.bfloat16()):
        checkpoint = Checkpoint(write(tmp_path, tensors | {"lm_head.weight": own}))
        assert not checkpoint.config.tie_embeddings
        assert torch.equal(checkpoint.torch("lm_head.weight"), own)
    folder = write(tmp_path, tensors | {"lm_head.weight": head[:16].clone()})
    assert "unexpected" not in disagreement(folder, "'lm_head.weight' is (16, ")
    del tensors[EMBEDDING]
    folder = write(tmp_path, tensors | {"lm_head.weight": head})
    checkpoint = Checkpoint(folder)  # one of two tied names is enough
    assert checkpoint.config.tie_embeddings
    assert torch.equal(checkpoint.torch(EMBEDDING), head)
    config = json.loads((folder / "config.json").read_text()) | {"tie_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(f"1 missing ('{EMBEDDING}')")):
        Checkpoint(folder)


# Damage at random: refused, or opened with every tensor where the file has bytes.


def check_survives(folder: Path) -> None:
    try:
        opened = open_safetensors(folder)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    with opened:
        for name, info in opened.tensors.items():
            if info.dtype in (*FLOATS, "U8"):
                assert info.numpy().nbytes == info.nbytes
            try:
                files = [safe_open(file, "pt") for file in opened.files()]
                assert any(name in file.keys() for file in files)
            except SafetensorError as error:  # it must agree, but for what JSON may say elsewhere
                assert "JSON" in str(error) or "UTF-8" in str(error)
            try:
                check(folder)
            except CheckpointError:
                pass


damage = st.lists(
    st.tuples(st.floats(0, 1), st.one_of(st.binary(max_size=3), st.sampled_from(b'0129{}[]",: '))),
    max_size=4,
)


def damaged(content: bytes, changes, end: int) -> bytes:
    for place, byte in changes:
        at = int(place * end)
        if isinstance(byte, int):  # overwritten, else something is inserted
            content = content[:at] + bytes([byte]) + content[at + 1 :]
        else:
            content = content[:at] + byte + content[at:]
    return content


fuzzed = settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fuzzed
@given(changes=damage, cut=st.integers(0, 30))
@example(changes=[], cut=1)
def test_random_damage_to_a_header(tmp_path, changes, cut):
    tensors = {EMBEDDING: torch.ones(4, 2), "b": torch.ones(3).bfloat16(), "c": torch.ones(())}
    file = write(tmp_path, tensors) / "model.safetensors"
    content = file.read_bytes()
    content = damaged(content, changes, len(content))
    file.write_bytes(content[: len(content) - cut])
    check_survives(tmp_path)


@fuzzed
@given(changes=damage, cut=st.integers(0, 3))
def test_random_damage_to_an_index(tmp_path, changes, cut):
    shards = {"a.safetensors": {"x": torch.ones(1)}, "b.safetensors": {"y": torch.ones(1)}}
    index = write_shards(tmp_path, shards) / INDEX
    content = index.read_bytes()
    content = damaged(content, changes, len(content))
    index.write_bytes(content[: len(content) - cut])
    check_survives(tmp_path)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.integers(), st.floats(), st.text(max_size=3)
)
anything = st.recursive(
    scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=2), x, max_size=3)
)
dtypes = st.sampled_from(["U8", "F4", "F6_E2M3", "BF16", "F32", "F8_E4M3", "C64", "X"])
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(dtypes, anything),
        "shape": st.one_of(st.lists(st.integers(0, 4), max_size=3), anything),
        "data_offsets": st.one_of(st.lists(st.integers(0, 16), min_size=2, max_size=2), anything),
    }
)


@fuzzed
@given(
    header=st.dictionaries(st.text(max_size=3), entries | anything, max_size=3),
    size=st.integers(0, 20),
)
def test_random_headers(tmp_path, header, size):
    check_survives(write_raw(tmp_path, header, bytes(size)))


@fuzzed
@given(
    parts=st.lists(st.tuples(dtypes, st.lists(st.integers(0, 3), max_size=3)), max_size=4),
    padding=st.integers(0, 9),
)
def test_well_formed_headers_open_as_safetensors_opens_them(tmp_path, parts, padding):
    bits = {"U8": 8, "F4": 4, "F6_E2M3": 6, "BF16": 16, "F32": 32, "F8_E4M3": 8, "C64": 64, "X": 8}
    header, end = {}, 0
    for i, (dtype, shape) in enumerate(parts):
        begin, end = end, end + int(np.prod(shape, dtype=int)) * bits[dtype] // 8
        header[str(i)] = entry(dtype, shape, (begin, end))
    text = json.dumps(header).encode() + b" " * padding
    write_raw(tmp_path, text, bytes(end))
    try:
        with safe_open(tmp_path / "model.safetensors", "pt") as reference:
            names = set(reference.keys())
    except SafetensorError as error:
        assume("unknown variant `C64`" not in str(error))  # an older release's word
        names = None
    try:
        found = set(open_safetensors(tmp_path).tensors)
    except CheckpointError as error:
        assert re.search("dtype", str(error))
        found = None
    assert found == names

"""GGUF files, compared with the gguf library's reader and dequantisation."""

import dataclasses
import json
import shutil
import struct
import sys

import numpy as np
import pytest
import torch
from adapters import load_base
from gguf_files import (
    TYPES,
    Stored,
    candle,
    dequantisable,
    entry,
    gguf,
    header,
    padded,
    random_blocks,
    stored,
    string,
    write_candle,
    write_gguf,
)
from parity import BASE, weights
from slow import fast
from typer.testing import CliRunner

from griffin_eval.cli.main import app
from griffin_eval.config import PRESETS
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.codecs.decode import decoded
from griffin_eval.converters.containers.gguf import open_gguf
from griffin_eval.converters.output.manifest import check
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import CheckpointError, MissingExtraError

# Widths that are multiples of the block sizes 32 and 256.
NARROW = dataclasses.replace(BASE, width=64, lru_width=64, mlp_width=128)
WIDE = dataclasses.replace(BASE, width=256, lru_width=256, mlp_width=256, num_heads=1)
WIDE = dataclasses.replace(WIDE, gate_blocks=1, visible_keys=16)
WRITERS = {"candle": write_candle, "gguf": write_gguf}
KNOWN = ("--visible-keys", "8", "--embedding-scale", "--logits-soft-cap", "30")


def run(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "250"})
    assert done.exit_code == code, done.output
    return done.output


def same_bits(found, expected):
    """Compare dtype, shape and bits; all NaNs count as equal."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    different = found.view(np.uint32) != expected.view(np.uint32)
    return np.isnan(found[different]).all() and np.isnan(expected[different]).all()


RANDOM = [k for k in ("Q4_0", "Q4_K", "IQ2_XS") if k in dequantisable()]


@pytest.mark.parametrize("kind", fast(RANDOM, dequantisable()))
def test_random_blocks_in_any_pieces(tmp_path, kind):
    block, _ = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    tensors = {
        "matrix": random_blocks((5, 3 * block), kind, 1),
        "vector": random_blocks((7 * block,), kind, 2),
        "wide": random_blocks((2, 3, 400 * block), kind, 3),
    }
    write_candle(tmp_path / "m.gguf", tensors)
    read = decoded(open_gguf(tmp_path / "m.gguf"), tmp_path)
    for name, tensor in tensors.items():
        expected = tensor.values
        assert same_bits(read.tensors[name].numpy(), expected)
        assert same_bits(read.tensors[name].torch().numpy(), expected)
        for nbytes in (1, 12 * block + 5, 1 << 20):
            assert same_bits(np.concatenate(list(read.tensors[name].pieces(nbytes))), expected)
    cut = (slice(1, 2), slice(1, 3), slice(block - 1, 2 * block + 1))
    assert same_bits(read.tensors["wide"].read(cut), tensors["wide"].values[cut])


def theirs(file):
    """Read every tensor with the library; return its stored type and its values by name."""
    with np.errstate(all="ignore"):
        return {
            tensor.name: (
                tensor.tensor_type.name,
                gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(
                    tuple(map(int, reversed(tensor.shape)))
                ),
            )
            for tensor in gguf.GGUFReader(file).tensors
        }


@pytest.mark.parametrize("writer", fast(["candle"], WRITERS))
@pytest.mark.parametrize("kind", fast(["Q4_K"], ["F16", *dequantisable(), "BF16"]))
def test_whole_files(tmp_path, writer, kind):
    block, _ = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    config = WIDE if block > 32 else NARROW
    WRITERS[writer](tmp_path / "m.gguf", candle(weights(config), kind))
    known = Overrides(
        visible_keys=config.visible_keys,
        embedding_scale=True,
        logits_soft_cap=config.logits_soft_cap,
    )
    checkpoint = Checkpoint(tmp_path / "m.gguf", known)
    assert checkpoint.config == config
    expected = theirs(tmp_path / "m.gguf")
    assert checkpoint.dtypes.keys() == expected.keys()
    types = {stored_as for stored_as, _ in expected.values()}
    assert types == {kind, "F32"}  # matrices, and all other tensors
    for name, (stored_as, values) in expected.items():
        dtype = {"F16": "float16", "BF16": "bfloat16"}.get(stored_as, "float32")
        assert checkpoint.dtypes[name] == dtype
        found = checkpoint.numpy(name)
        assert same_bits(found.astype(np.float32), values), name
        assert np.array_equal(np.concatenate(list(checkpoint.pieces(name, 3000))), found)
        assert np.array_equal(checkpoint.torch(name).float().numpy(), found.astype(np.float32))
    metadata = {"general.architecture", "general.alignment", "tokenizer.ggml.model"}
    metadata |= {"tokenizer.ggml.tokens", "griffin.numbers"}
    assert checkpoint.container.left_out.keys() == (metadata if writer == "gguf" else set())


def test_a_plain_file_is_mapped_and_never_written_to(tmp_path):
    tensors = candle(weights(NARROW), "F16")
    write_candle(tmp_path / "m.gguf", tensors | {"empty": Stored((0, 3), "F32", b"")})
    before = (tmp_path / "m.gguf").read_bytes()
    with open_gguf(tmp_path / "m.gguf") as file:
        empty = file.tensors["empty"]
        assert empty.numpy().shape == (0, 3) == empty.torch().shape
        weight = file.tensors["model.embed_tokens.weight"].torch()
        assert weight.dtype == torch.float16
        weight.zero_()
        assert not file.tensors["model.embed_tokens.weight"].numpy().flags.writeable
    assert weight.sum() == 0 and (tmp_path / "m.gguf").read_bytes() == before


@pytest.fixture
def file(tmp_path):
    write_candle(tmp_path / "model.gguf", candle(weights(NARROW), "Q4_0"))
    return tmp_path / "model.gguf"


def test_commands(file, tmp_path, monkeypatch):
    facts = json.loads(run("inspect", file, "--json"))
    (scheme,) = facts["quantised"]["schemes"].values()
    assert facts["format"] == "gguf" and scheme["bits"] == 4.5
    assert "give a preset or these values" in facts["warnings"][0]
    alone = facts["quantised"]["left_alone"]
    for kept in ("conv_1d.weight", "rg_lru.recurrent_param", "rg_lru.input_gate_weight"):
        assert f"model.layers.*.temporal_block.{kept}" in alone
    said = run("inspect", file, *KNOWN)
    assert "Q4_0 in blocks of 32: 4.50 bits an element" in said and "not quantised:" in said
    monkeypatch.setitem(PRESETS, "tiny", NARROW)
    out = tmp_path / "out"
    run("convert", file, out, "--to", "hf", "--preset", "tiny")
    assert "are the same bit for bit" in run("verify", file, out, "--preset", "tiny")
    expected = theirs(file)
    for name, value in load_base(out).named_parameters():
        assert np.array_equal(value.detach().numpy(), expected[name][1]), name
    cast = ("--dtype", "bfloat16", "--preset", "tiny")
    run("convert", tmp_path, tmp_path / "cast", "--to", "deepmind-flax", *cast)  # the file's folder
    manifest = json.loads((tmp_path / "cast" / "griffin_manifest.json").read_text())
    entry = manifest["tensors"]["model.embed_tokens.weight"]
    assert (entry["dtype"], entry["cast_from"]) == ("bfloat16", "float32")
    assert manifest["source"]["format"] == "gguf"


def test_a_manifest_is_of_what_lies_beside_it(file, tmp_path):
    """A manifest covers the GGUF file beside it if the folder holds no other weights."""
    other, alone = tmp_path / "other", tmp_path / "alone"
    run("convert", file, other, "--to", "hf", *KNOWN)
    alone.mkdir()
    for name in ("config.json", "griffin_manifest.json"):
        shutil.copy(other / name, alone)
    for folder in (other, alone):
        write_candle(folder / "q8.gguf", candle(weights(NARROW), "Q8_0"))
    run("convert", other / "q8.gguf", tmp_path / "out", "--to", "hf")
    with pytest.raises(CheckpointError, match="is of other weights there: name another"):
        check(Checkpoint(other / "q8.gguf"))
    run("verify", alone / "q8.gguf", code=1)
    shutil.copy(file, alone / "q8.gguf")
    for path in (alone / "q8.gguf", other):
        assert "are as its manifest says" in run("verify", path)


# Two tensors: (2, 32) in Q4_0 has 36 bytes, padded to 64; (8,) in F32 has 32 bytes.
Q4_0, F32 = 2, 0
DATA = bytes(96)
GOOD = [entry("a", (2, 32), Q4_0, 0), entry("b", (8,), F32, 64)]


def key(name, kind, value):
    return string(name) + struct.pack("<I", kind) + value


def file_of(entries, data=DATA, metadata=(), **options):
    return padded(header(list(entries), list(metadata), **options)) + data


def test_what_the_refused_files_are_made_of_is_read(tmp_path):
    metadata = [
        key("general.alignment", 4, struct.pack("<I", 32)),
        key("flag", 7, b"\1"),
        key("text", 8, string("x" * 2000)),
        key("numbers", 9, struct.pack("<IQ3H", 2, 3, 1, 2, 3)),
        key("words", 9, struct.pack("<IQ", 8, 2) + string("a") + string(b"\xff")),
    ]
    for version in (2, 3):
        (tmp_path / "m.gguf").write_bytes(file_of(GOOD, metadata=metadata, version=version))
        with open_gguf(tmp_path / "m.gguf") as file:
            found = {n: (t.shape, t.quantised) for n, t in file.tensors.items()}
            assert found["b"] == ((8,), None)
            shape, stored = found["a"]
            assert (shape, stored.scheme, stored.bits) == ((2, 32), "Q4_0 in blocks of 32", 4.5)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty"),
        (b"GGUF\3\0", "goes on for 8 bytes at byte 0, but only 6 are there"),
        (b"GGML" + bytes(40), "is no GGUF file: it begins with b'GGML'"),
        (file_of(GOOD, version=1), "version 1, expected one of"),
        (file_of(GOOD, version=3 << 24), "is big-endian"),
        (file_of(GOOD, counts=(1 << 60, 0)), "has an empty name"),
        (file_of(GOOD, counts=(2, 1 << 60)), "has a name of 562949953421312 bytes"),
        (file_of([string(b"a" * 1001) + GOOD[0][9:]]), "has a name of 1001 bytes"),
        (file_of([struct.pack("<Q", 1 << 60)]), "has a name of 1152921504606846976 bytes"),
        (file_of([entry(b"\xff", (8,), F32, 0)]), "a name that is not UTF-8"),
        (file_of([entry("a", (1,) * 5, F32, 0)]), "of 5 dimensions, expected at most 4"),
        (file_of([entry("a", (1 << 40, 1 << 40), F32, 0)]), "larger than any memory"),
        (file_of([entry("a", (0, 1 << 63), F32, 0)]), "larger than any memory"),
        (file_of([entry("a", (8,), 99, 0)]), "has the type 99, which the gguf library does not"),
        (file_of([entry("a", (256,), 15, 0)], bytes(320)), "is Q8_K, which the gguf library does"),
        (file_of([entry("a", (2, 33), Q4_0, 0)]), r"is \(2, 33\), no rows of whole blocks of 32"),
        (file_of([entry("a", (), Q4_0, 0)]), r"is \(\), no rows of whole blocks"),
        (file_of([GOOD[0], GOOD[0]]), "'a' is there twice"),
        (file_of([GOOD[0], entry("b", (8,), F32, 32)]), "'b' overlaps 'a'"),
        (file_of([GOOD[0], entry("b", (8,), F32, 60)]), "the offset 60, no multiple of 32"),
        (file_of([GOOD[0], entry("b", (8,), F32, (1 << 64) - 32)]), "has the offset"),
        (file_of(GOOD, DATA[:-1]), "'b' ends at byte 224 of a file of 223"),
        (file_of(GOOD, DATA + bytes(64)), "64 bytes after 'b' are unused"),
        (
            file_of([entry("a", (2, 32), Q4_0, 32)]),
            "32 bytes between the header and 'a' are unused",
        ),
        (file_of([], b""), "holds no tensor"),
        (file_of(GOOD, metadata=[key("a", 13, b"")]), "'a' of the unknown type 13"),
        (file_of(GOOD, metadata=[key("a", 7, b"\1")] * 2), "has the metadata 'a' twice"),
        (file_of(GOOD, metadata=[key("a", 8, struct.pack("<Q", 1 << 60))]), "goes on for 115292"),
        (file_of(GOOD, metadata=[key("a", 9, struct.pack("<IQ", 0, 1 << 60))]), "goes on for 1152"),
        (file_of(GOOD, metadata=[key("a", 9, struct.pack("<IQ", 9, 1))]), "an array of the type 9"),
        (
            file_of(GOOD, metadata=[key("general.alignment", 4, struct.pack("<I", 48))]),
            "general.alignment 48, expected a power of two",
        ),
        (
            file_of(GOOD, metadata=[key("general.alignment", 6, struct.pack("<f", 32))]),
            "general.alignment 32.0, expected",
        ),
        (
            file_of(GOOD, metadata=[key("split.count", 2, struct.pack("<H", 3))]),
            "is one of 3 parts of a model: join them with llama-gguf-split --merge",
        ),
    ],
)
def test_files_that_lie_are_refused(tmp_path, content, message):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as refused:
        Checkpoint(tmp_path / "m.gguf")
    said = str(refused.value)
    assert "\n" not in said and said.count(str(tmp_path / "m.gguf")) == 1
    assert "m.gguf" in run("inspect", tmp_path / "m.gguf", code=1)


def test_parts_that_were_merged_are_read(tmp_path):
    """llama-gguf-split --merge writes that there are 0 parts."""
    merged = file_of(GOOD, metadata=[key("split.count", 2, struct.pack("<H", 0))])
    (tmp_path / "m.gguf").write_bytes(merged)
    assert open_gguf(tmp_path / "m.gguf").tensors


def test_files_that_cannot_be_chosen_from(file, tmp_path):
    shutil.copy(file, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"one \.gguf file in the folder, found model.gguf"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="holds no tensor named model.embed_tokens.weight"):
        write_candle(file, {"blk.0.attn_q.weight": stored(np.ones((1, 32), np.float32), "Q4_0")})
        Checkpoint(file)


def test_a_file_that_becomes_shorter_while_it_is_read(file):
    known = Overrides(visible_keys=8, embedding_scale=True, logits_soft_cap=30.0)
    checkpoint = Checkpoint(file, known)
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="was longer when it was opened"):
        for name in checkpoint.dtypes:
            list(checkpoint.pieces(name))


def test_without_the_library(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'griffin-eval\[gguf\]'"):
        Checkpoint(file)

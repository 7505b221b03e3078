"""Checks of weights against their manifest, and against the checksums of other formats."""

import hashlib
import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import griffin_eval
from parity import weights
from safetensors.numpy import load_file, save_file
from slow import fast, slow
from tiny_checkpoints import CONFIG, write_all

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.containers.torch_pt.reader import open_torch
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.manifest import MANIFEST_FILE, check, recorded
from griffin_eval.converters.plan import make_plan, parse_dtypes
from griffin_eval.converters.source.hub import hub_sha256
from griffin_eval.errors import BadInput, CheckpointError
from griffin_eval.states.weights_hash import weights_sha256

CONTAINERS = ["griffin", "griffin-orbax", "deepmind-torch"]  # one format for each container
WEIGHTS = weights(CONFIG)


def convert(source, destination, target, **options):
    plan = make_plan(Checkpoint(source), FORMATS[target], **options)
    try:
        convert_checkpoint(plan, destination)
    finally:
        plan.source.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Write the same weights in every format, each with its manifest."""
    folder = tmp_path_factory.mktemp("converted")
    write_all(folder)
    return folder


@pytest.mark.parametrize("name", fast(CONTAINERS, FORMATS))
def test_whole_ones_are_as_their_manifest_says(converted, tmp_path, name):
    assert check(Checkpoint(converted / name)) == (len(WEIGHTS), [])
    convert(converted / name, tmp_path / "again", "griffin")
    manifest = json.loads((tmp_path / "again" / MANIFEST_FILE).read_text())
    assert manifest["source"]["checked"] == f"{len(WEIGHTS)} parameters"
    done = griffin_eval("verify", converted / name)
    assert done.returncode == 0
    assert f"{len(WEIGHTS)} of {len(WEIGHTS)} parameters are as its manifest says" in done.stdout


@pytest.mark.parametrize("count", [10, slow(1000)])
@pytest.mark.parametrize("name", fast(CONTAINERS, FORMATS))
def test_no_flipped_bit_goes_through(converted, tmp_path, name, count):
    """A flipped bit in any file of weights is refused or has no effect."""
    draw, noticed = np.random.default_rng(count), 0
    apart = {MANIFEST_FILE, "config.json"}
    for trial in range(count):
        copy, out = tmp_path / f"copy{trial}", tmp_path / f"out{trial}"
        shutil.copytree(converted / name, copy)
        files = [p for p in sorted(copy.rglob("*")) if p.is_file() and p.name not in apart]
        sizes = np.array([p.stat().st_size for p in files])
        path = files[draw.choice(len(files), p=sizes / sizes.sum())]
        content = bytearray(path.read_bytes())
        content[draw.integers(len(content))] ^= 1 << draw.integers(8)
        path.write_bytes(content)
        try:
            convert(copy, out, "griffin")
        except BadInput:
            noticed += 1
            assert not out.exists()
        else:
            for key, value in load_file(out / "model.safetensors").items():
                np.testing.assert_array_equal(value, WEIGHTS[key])
        shutil.rmtree(copy)
        shutil.rmtree(out, ignore_errors=True)
    assert noticed  # no exact count: Orbax's files and their order are random


@pytest.mark.parametrize(
    "options",
    [{}, {"dtypes": parse_dtypes("bfloat16")}, {"vocab_size": 5}],
    ids=["as it is", "another dtype", "fewer tokens"],
)
def test_the_tensor_is_named_and_no_check_takes_it(converted, tmp_path, options):
    copy = tmp_path / "copy"
    shutil.copytree(converted / "griffin", copy)
    weights = load_file(copy / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name][-1, -1] += 1  # row of the last token, which --vocab-size may remove
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has the SHA-256 .*\(--no-check"):
        convert(copy, tmp_path / "out", "griffin", **options)
    assert not (tmp_path / "out").exists()
    convert(copy, tmp_path / "out", "griffin", check=False, **options)
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert manifest["source_not_checked"] and manifest["source"]["checked"] == "nothing"
    done = griffin_eval("verify", copy)
    assert done.returncode == 1 and f"{name} has the SHA-256" in done.stdout
    assert f"{len(WEIGHTS) - 1} of {len(WEIGHTS)} parameters" in done.stdout


def test_a_parameter_that_the_manifest_lacks_is_noticed(converted, tmp_path):
    """An untied output head is added to an output whose head was the embedding."""
    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(converted / "griffin", copy)
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, copy / "model.safetensors")
    done = griffin_eval("verify", copy)
    assert done.returncode == 1 and f"{copy}: lm_head.weight is not in" in done.stdout
    assert f"{len(WEIGHTS)} of {len(WEIGHTS) + 1} parameters are as its man" in done.stdout
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not in .* \(--no-check"):
        convert(copy, out, "griffin")
    convert(copy, out, "griffin", check=False)
    assert check(Checkpoint(out)) == (len(WEIGHTS) + 1, [])
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not in .* \(check=False"):
        weights_sha256(Checkpoint(copy))
    assert weights_sha256(Checkpoint(copy), check=False) == weights_sha256(Checkpoint(out))


def test_another_dtype_than_the_manifest_says_is_noticed(converted, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(converted / "griffin", copy)
    weights = load_file(copy / "model.safetensors")
    save_file({n: w.astype(np.float16) for n, w in weights.items()}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="is float16, and griffin_manifest.json says float32"):
        convert(copy, tmp_path / "out", "griffin")
    done = griffin_eval("inspect", copy)
    assert done.returncode == 1 and "is float16, and griffin_manifest.json says" in done.stdout


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "{",
            "[]",
            "{}",
            '{"tensors": 3}',
            '{"tensors": {}}',
            '{"tensors": {"a": {}}}',
            "[" * 100_000,
        ),
        json.dumps({"tensors": {"a": {"sha256": "\ud800", "dtype": "float32"}}}),
        json.dumps({"tensors": {"a": {"sha256": "0" * 64, "dtype": "two\nlines"}}}),
    ],
)
def test_a_damaged_manifest_is_one_sentence(converted, tmp_path, content):
    copy = tmp_path / "copy"
    shutil.copytree(converted / "griffin", copy)
    (copy / MANIFEST_FILE).write_text(content)
    with pytest.raises(CheckpointError, match="is damaged .*so that the weights cannot be checked"):
        recorded(Checkpoint(copy))
    with pytest.raises(CheckpointError, match="is damaged"):
        convert(copy, tmp_path / "out", "griffin")
    done = griffin_eval("inspect", copy)
    assert done.returncode == 1 and f"problem: {copy / MANIFEST_FILE} is damaged" in done.stdout
    convert(copy, tmp_path / "out", "griffin", check=False)


def test_a_source_whose_name_is_not_utf8(converted, tmp_path):
    source = tmp_path / os.fsdecode(b"s\xffrc")
    shutil.copytree(converted / "source", source)
    convert(source, tmp_path / "out", "griffin")
    assert check(Checkpoint(tmp_path / "out")) == (len(WEIGHTS), [])


def test_without_a_manifest_nothing_is_checked(converted):
    plain = converted / "source"
    assert recorded(Checkpoint(plain)) == {}
    done = griffin_eval("verify", plain)
    assert done.returncode == 2
    assert "has no griffin_manifest.json to be checked against" in done.stderr


@pytest.mark.parametrize("name", fast(["griffin"], FORMATS))
def test_the_manifest_of_other_weights_in_the_folder_is_left_alone(converted, tmp_path, name):
    """A .pt file was copied into the folder of an output to use its config."""
    scaled, plain = tmp_path / "scaled", tmp_path / "plain"
    shutil.copytree(converted / "source", plain)
    save_file({n: w * 2 for n, w in WEIGHTS.items()}, plain / "model.safetensors")
    convert(plain, scaled, "deepmind-torch")
    folder = shutil.copytree(converted / name, tmp_path / "folder")
    shutil.copy(scaled / "model.pt", folder / "step.pt")
    step = Checkpoint(folder / "step.pt")
    assert recorded(step) == {}
    assert check(step) == (len(WEIGHTS), [])  # checked by the CRC-32s in the file
    step.parts("model.final_norm.weight").numpy([slice(None)])
    convert(folder / "step.pt", tmp_path / "out", "griffin")
    for key, value in load_file(tmp_path / "out" / "model.safetensors").items():
        np.testing.assert_array_equal(value, 2 * WEIGHTS[key])
    (folder / "step.pt").rename(tmp_path / "step.pt")
    assert len(recorded(Checkpoint(folder))) == len(WEIGHTS)


@pytest.mark.parametrize("kind", fast(["loglikelihood"], ["loglikelihood", "generate_until"]))
def test_damage_is_told_before_the_nan_that_comes_of_it(checkpoint, tmp_path, kind):
    from lm_eval.api.instance import Instance

    from griffin_eval.lm.model import GriffinLM

    source = tmp_path / "source"
    convert_checkpoint(make_plan(Checkpoint(checkpoint), FORMATS["griffin"]), source)
    weights = load_file(source / "model.safetensors")
    weights["model.final_norm.weight"][:] = float("nan")
    save_file(weights, source / "model.safetensors")
    last = " is" if kind == "loglikelihood" else {"until": ["."], "max_gen_toks": 2}
    request = Instance(kind, {}, ("The unary minus", last), 0)
    for checked, said in ((True, "model.final_norm.weight has the SHA-256"), (False, "may be")):
        with pytest.raises(BadInput, match=said):
            lm = GriffinLM(pretrained=str(source), tokenizer=str(checkpoint), check=checked)
            getattr(lm, kind)([request], disable_tqdm=True)


def flip(path, at=None):
    """Flip a bit in the middle of a file, or in the byte at ``at``."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


@pytest.fixture
def only_crcs(converted, tmp_path):
    """Write a .pt file with a changed weight and without a manifest."""
    copy = tmp_path / "copy"
    shutil.copytree(converted / "deepmind-torch", copy)
    (copy / MANIFEST_FILE).unlink()
    whole = Checkpoint(copy)
    assert check(whole) == (len(WEIGHTS), [])
    name = "embedder.input_embedding"
    stored = whole.container.tensors[name].numpy().tobytes()
    at = (copy / "model.pt").read_bytes().index(stored)
    whole.close()
    flip(copy / "model.pt", at + 3)
    return copy, name


def test_checksums_of_a_pt_file_are_checked_as_it_is_read(only_crcs, tmp_path):
    copy, name = only_crcs
    with pytest.raises(CheckpointError, match=f"{name} has the CRC-32 .*the file says"):
        convert(copy, tmp_path / "out", "griffin")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=f"{name} has the CRC-32"):
        weights_sha256(Checkpoint(copy))
    done = griffin_eval("verify", copy)
    assert done.returncode == 1 and f"{name} has the CRC-32" in done.stdout
    convert(copy, tmp_path / "out", "griffin", check=False)
    assert weights_sha256(Checkpoint(copy), check=False)


def test_every_tensor_of_a_pt_file_has_a_checksum(converted):
    container = Checkpoint(converted / "deepmind-torch").container
    for name, tensor in container.tensors.items():
        assert tensor.crc32 == zlib.crc32(tensor.numpy().tobytes()), name


def test_views_have_no_checksum_of_their_own(tmp_path):
    """Only tensors that cover a whole storage in order have a CRC-32."""
    whole = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": whole.T, "b": whole[:1], "c": whole.clone(), "d": whole}, tmp_path / "a.pt")
    with open_torch(tmp_path / "a.pt") as file:
        known = [name for name in file.tensors if file.tensors[name].crc32 is not None]
    assert known == ["c", "d"]


def test_files_of_the_hub_are_compared_with_its_hash(converted, tmp_path):
    """The hub's cache names large files by their SHA-256; snapshots hold links to them."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    shutil.copytree(converted / "source", snapshot)
    file = snapshot / "model.safetensors"
    blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
    file.rename(blob)
    file.symlink_to(Path("../../blobs") / blob.name)
    assert hub_sha256(file) == blob.name
    convert(snapshot, tmp_path / "whole", "griffin")
    assert "SHA-256 of 1 files from the hub" in griffin_eval("inspect", snapshot).stdout
    flip(blob, -1)
    with pytest.raises(CheckpointError, match="and the hub says .*download it again"):
        convert(snapshot, tmp_path / "out", "griffin")
    with pytest.raises(CheckpointError, match="and the hub says"):
        weights_sha256(Checkpoint(snapshot))
    assert griffin_eval("verify", snapshot).returncode == 2
    convert(snapshot, tmp_path / "out", "griffin", check=False)


def test_inspect_says_what_is_checked(converted):
    for name, said in [
        ("source", "checksums: none"),
        ("griffin", f"checksums: SHA-256 of {len(WEIGHTS)} parameters in {MANIFEST_FILE}"),
        ("deepmind-torch", "CRC-32 of"),
    ]:
        assert said in griffin_eval("inspect", converted / name).stdout

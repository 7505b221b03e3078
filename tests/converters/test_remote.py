"""Orbax checkpoints in object stores, with emulators of S3 and Google Cloud Storage."""

import json
import posixpath
from itertools import count
from pathlib import Path

import object_stores
import pytest
from commands import griffin_eval

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.containers.orbax.find import TREE_METADATA
from griffin_eval.converters.containers.orbax.reader import open_orbax
from griffin_eval.converters.containers.orbax.remote import (
    fetch,
    inside,
    listed_in,
    stand_in,
    store_of,
    url_of,
)
from griffin_eval.converters.output.remote import RemoteOutput
from griffin_eval.errors import BadInput

SHIPPED = Path(__file__).parents[2] / "griffin_eval" / "checkpoints" / "induction_heads_griffin"
NUMBERS = count()  # numbers in the names of buckets


@pytest.fixture(scope="module", params=["s3", "gs"])
def store(request):
    """Start a server of S3 or Google Cloud Storage; yield its scheme and address."""
    host, port, stop = object_stores.start(request.param)
    yield request.param, f"http://{host}:{port}"
    stop()


@pytest.fixture
def bucket(store, monkeypatch):
    """Return the URL of an empty bucket that griffin-eval reaches."""
    name = f"bucket{next(NUMBERS)}"
    for variable, value in object_stores.environment(*store).items():
        monkeypatch.setenv(variable, value)
    object_stores.make_bucket(*store, name)
    return f"{store[0]}://{name}"


def refused(*arguments) -> str:
    """Return the sentence of a refusal; tensorstore may print lines about gs:// beside it."""
    done = griffin_eval(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    own = [line for line in done.stderr.splitlines() if line.startswith("griffin-eval: ")]
    assert len(own) == 1
    return own[0]


def test_there_and_back(bucket, tmp_path):
    url, back = f"{bucket}/there/and/back", tmp_path / "back"
    done = griffin_eval("convert", SHIPPED, url, "--to", "griffin-orbax")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or not url.startswith("s3")
    done = griffin_eval("verify", SHIPPED, url)
    assert done.returncode == 0, done.stdout + done.stderr
    done = griffin_eval("convert", url, back, "--to", "griffin")
    assert done.returncode == 0, done.stderr
    here, there = Checkpoint(SHIPPED), Checkpoint(back)
    for name in here.dtypes:
        assert here.numpy(name).tobytes() == there.numpy(name).tobytes()
    manifest = json.loads((back / "griffin_manifest.json").read_text())
    assert manifest["source"]["path"].rstrip("/") == url


def test_stock_orbax_restores_what_was_written(bucket, tmp_path, monkeypatch):
    """Orbax requires commit_success.txt in gs://; the test makes it treat a copy's path as one."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.path import gcs_utils

    url, copy = f"{bucket}/stock", tmp_path / "copy"
    done = griffin_eval("convert", SHIPPED, url, "--to", "griffin-orbax")
    assert done.returncode == 0, done.stderr
    store, names = listed_in(url)
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(store.read(name).result().value)
    monkeypatch.setattr(gcs_utils, "_GCS_PATH_PREFIX", ("gs://", str(tmp_path)))
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(copy)
        here = Checkpoint(SHIPPED).numpy("model.final_norm.weight")
        assert tree["model"]["final_norm"]["weight"].tobytes() == here.tobytes()
        (copy / "commit_success.txt").unlink()
        with pytest.raises(ValueError, match="incomplete"):
            checkpointer.restore(copy)


def test_a_folder_of_zarr_arrays_and_steps(bucket, tmp_path):
    """Orbax's CheckpointManager writes such folders without OCDBT."""
    import numpy as np
    import orbax.checkpoint as ocp

    folder = tmp_path / "run" / "300" / "default"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    tree = {"a": {"b": np.arange(6.0, dtype=np.float32).reshape(2, 3)}, "c": np.float32([1])}
    ocp.Checkpointer(handler).save(folder.absolute(), tree)
    url = f"{bucket}/arrays"
    copy_up(url, tmp_path / "run")
    with open_orbax(fetch(url)) as found:
        assert "step 300" in found.layout
        assert sorted(found.tensors) == ["a/b", "c"]
        np.testing.assert_array_equal(found.tensors["a/b"].numpy(), tree["a"]["b"])


def test_what_a_store_cannot_hold_is_one_sentence(bucket, tmp_path):
    url = f"{bucket}/refused"

    assert "holds nothing" in refused("inspect", url)
    assert "://bucket/path" in refused("inspect", bucket)
    assert "only Orbax can" in refused("convert", SHIPPED, url, "--to", "griffin")
    sentence = refused("convert", SHIPPED, url, "--to", "griffin-orbax", "--overwrite")
    assert "--overwrite is not possible in an object store" in sentence
    nowhere = f"{bucket}nowhere/at/all"
    assert "cannot be read" in refused("inspect", nowhere)
    assert "nowhere" in refused("convert", SHIPPED, nowhere, "--to", "griffin-orbax")
    put(f"{url}/model.safetensors", b"1")
    assert "copy the folder first" in refused("inspect", url)
    put(f"{url}/.griffin_partial", b"1")
    assert "was cut off" in refused("convert", SHIPPED, url, "--to", "griffin-orbax")


@pytest.mark.parametrize("below", ["", ".hidden", "..a", "a/.b", "./a", "a/../.c"])
def test_the_address_of_a_file_below_a_stand_in(below):
    folder = stand_in("gs://bucket/run")
    expected = posixpath.normpath(below) if below else ""
    assert url_of(folder / below) == f"gs://bucket/run/{expected}"
    assert store_of(folder / below) == {
        "driver": "gcs",
        "bucket": "bucket",
        "path": posixpath.join("run", expected).rstrip("/") + "/",
    }


def test_no_name_leads_out():
    assert inside(["d/1", "a..b", "../a", "a/../../b", "/etc/a", "..", ""]) == ["d/1", "a..b"]


def test_a_conversion_that_fails_leaves_nothing(bucket, tmp_path):
    damaged, url = tmp_path / "damaged", f"{bucket}/failed"
    assert griffin_eval("convert", SHIPPED, damaged, "--to", "griffin").returncode == 0
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    done = griffin_eval("convert", damaged, url, "--to", "griffin-orbax")
    assert done.returncode == 2 and "griffin_manifest.json says" in done.stderr
    assert listed_in(url)[1] == []


def test_metadata_come_last_and_a_killed_conversion_is_no_checkpoint(bucket):
    """The process ends after the first two small files, before the metadata."""
    url = f"{bucket}/killed"
    output = RemoteOutput(url)
    folder = output.__enter__()
    for name in (TREE_METADATA, "config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    written = []

    class Store:
        """A store that interrupts the process at the third file."""

        def __init__(self, store):
            self._store = store

        def write(self, name, content):
            if len(written) == 2:
                raise KeyboardInterrupt
            written.append(name)
            return self._store.write(name, content)

    output._store = Store(output._store)
    with pytest.raises(KeyboardInterrupt):
        output.__exit__(None)
    assert written == ["config.json", "tokenizer.json"]
    with pytest.raises(BadInput, match="holds no Orbax checkpoint"):
        fetch(url)
    with pytest.raises(BadInput, match="was cut off"):
        RemoteOutput(url).__enter__()


def copy_up(url, folder):
    store, _ = listed_in(url)
    for path in folder.rglob("*"):
        if path.is_file():
            store.write(path.relative_to(folder).as_posix(), path.read_bytes()).result()


def put(url, content):
    scheme, bucket, path, *names = url.replace("://", "/").split("/")
    store, _ = listed_in(f"{scheme}://{bucket}/{path}")
    store.write("/".join(names), content).result()

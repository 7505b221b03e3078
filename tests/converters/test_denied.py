"""A file or folder without access permission is not reported as missing."""

import os
from pathlib import Path

import pytest
from tiny_checkpoints import write_all
from typer.testing import CliRunner

from griffin_eval.cli.main import app
from griffin_eval.converters.output.atomic import SafeOutput
from griffin_eval.errors import BadInput


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    write_all(root)
    return root


def deny(monkeypatch, name, path):
    """Make a function of `os` deny access to every path whose last part is ``path``."""
    call = getattr(os, name)

    def refusing(found=".", *arguments, **options):
        if not isinstance(found, int) and Path(os.fspath(found)).name == path:
            raise PermissionError(13, "Permission denied", os.fspath(found))
        return call(found, *arguments, **options)

    monkeypatch.setattr(os, name, refusing)


@pytest.mark.parametrize(
    ("source", "name", "path"),
    [
        ("sharded", "stat", "model-00002-of-00003.safetensors"),
        ("griffin-orbax", "scandir", "d"),
        ("deepmind-flax", "stat", "_METADATA"),
    ],
)
def test_what_is_denied_is_said(source, name, path, checkpoints, tmp_path, monkeypatch):
    arguments = ["convert", str(checkpoints / source), str(tmp_path / "out"), "--to", "griffin"]
    with monkeypatch.context() as patch:
        deny(patch, name, path)
        done = CliRunner().invoke(app, arguments)
    said = str(done.exception)
    assert isinstance(done.exception, BadInput), done.output
    assert path in said and "cannot be read: Permission denied" in said
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_may_not_be_looked_at_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("mine")
    with monkeypatch.context() as patch:
        deny(patch, "stat", "model")
        with pytest.raises(BadInput, match="model cannot be written: Permission denied"):
            with SafeOutput(tmp_path / "model", overwrite=True):
                raise AssertionError
    assert os.listdir(tmp_path) == ["model"] and os.listdir(tmp_path / "model") == ["mine"]

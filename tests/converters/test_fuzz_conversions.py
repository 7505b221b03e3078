"""Damaged checkpoints of every format: refused in a sentence, or read as what they now say.

What an output holds is judged by safetensors' own reader, never by the code that wrote it.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from slow import examples, fast
from tiny_checkpoints import holds_the_original, write_all
from typer.testing import CliRunner

from griffin_eval.cli.main import app
from griffin_eval.converters.containers.torch_pt.reader import open_torch
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.manifest import MANIFEST_FILE
from griffin_eval.errors import BadInput


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The same tiny model in every format."""
    root = tmp_path_factory.mktemp("originals")
    write_all(root)
    return root


FAST = ["sharded", "griffin-orbax", "deepmind-torch"]  # one of each container
PLACES = st.floats(0, 1, exclude_max=True)  # of the length of a file
DAMAGES = st.one_of(
    st.tuples(st.just("flip"), PLACES, st.integers(0, 7)),
    st.tuples(st.just("truncate"), PLACES, st.none()),
    st.tuples(st.just("insert"), PLACES, st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("zero"), PLACES, st.integers(1, 64)),
    st.tuples(st.just("drop"), st.none(), st.none()),
)
# Headers and indices are at the ends of files and in the small ones: half of all damage goes there.
NEAR_AN_END = st.one_of(st.integers(0, 200), st.integers(-200, -1))


def damage(file: Path, what: tuple, at: int | None) -> None:
    kind, place, detail = what
    if kind == "drop":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    i = int(place * len(data)) if at is None or not data else at % len(data)
    if kind == "flip" and data:
        data[i] ^= 1 << detail
    elif kind == "truncate":
        del data[i:]
    elif kind == "insert":
        data[i:i] = detail
    elif kind == "zero":
        data[i : i + detail] = bytes(len(data[i : i + detail]))
    file.write_bytes(bytes(data))


def command(*arguments) -> int:
    """Exit code; whatever is not bad input is raised."""
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(done.exception, BadInput):
        message = str(done.exception)
        assert message and "\n" not in message, message
        return 2
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code


def assert_torch_reads_the_same(folder: Path):
    """What was accepted has the values that torch.load gives it, unless that refuses the file."""
    (path,) = folder.glob("*.pt")
    try:
        loaded = torch.load(path, weights_only=True)
    except Exception:  # for a field of the zip that says nothing of tensors
        return
    with open_torch(path) as file:
        assert file.tensors.keys() == loaded.keys()
        for name, tensor in loaded.items():
            assert file.numpy(name).tobytes() == tensor.contiguous().numpy().tobytes()


def check(originals, name, data):
    original = originals / name
    files = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    with tempfile.TemporaryDirectory() as folder:
        damaged, out = Path(folder) / "damaged", Path(folder) / "out"
        shutil.copytree(original, damaged)
        file = data.draw(st.sampled_from(files), label="file")
        damage(
            damaged / file,
            data.draw(DAMAGES, label="damage"),
            data.draw(st.none() | NEAR_AN_END, label="at"),
        )
        assert command("inspect", damaged) in (0, 1, 2)  # 1: it says what is wrong
        converted = command("convert", damaged, out, "--to", "griffin")
        verified = command("verify", original, damaged)
        if converted == 2:
            # A damaged manifest is refused, though the weights beside it are whole.
            assert not out.exists() and (verified != 0 or file.name == MANIFEST_FILE)
            assert sorted(p.name for p in Path(folder).iterdir()) == ["damaged"]
            return
        assert converted == 0
        if name == "deepmind-torch":
            assert_torch_reads_the_same(damaged)
        same = holds_the_original(out)
        assert same or file.name == "config.json"  # else the manifest would have noticed
        assert command("verify", original, out) == (0 if same else 1)
        assert verified == (0 if same else 1)


def every(examples):
    """A test of every format with the same damages each time."""

    def decorate(test):
        test = given(st.data())(test)
        test = seed(0)(test)
        test = settings(
            max_examples=examples,
            database=None,
            phases=[Phase.generate],  # what is drawn is small already
            suppress_health_check=list(HealthCheck),
        )(test)
        return pytest.mark.parametrize("name", fast(FAST, ["sharded", *FORMATS]))(test)

    return decorate


@every(examples(2))
def test_a_little_damage(originals, name, data):
    check(originals, name, data)

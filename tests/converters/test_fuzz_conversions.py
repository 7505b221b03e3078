"""Damaged checkpoints of every format: refused in a sentence, or read as what they now say.

What an output holds is judged by safetensors' own reader, never by the code that wrote it.
"""

import random
import shutil
from pathlib import Path

import pytest
from commands import griffin_eval
from slow import examples, fast
from tiny_checkpoints import holds_the_original, write_all

from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.manifest import MANIFEST_FILE

FAST = ["sharded", "griffin-orbax", "deepmind-torch"]  # one of each container


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The same tiny model in every format."""
    root = tmp_path_factory.mktemp("originals")
    write_all(root)
    return root


def damage(file: Path, draw: random.Random) -> None:
    """Headers and indices are at the ends of files and in the small ones: half of it goes there."""
    data, kind = (
        bytearray(file.read_bytes()),
        draw.choice(("flip", "cut", "insert", "zero", "drop")),
    )
    at = draw.randrange(-200, 200) if draw.random() < 0.5 else draw.randrange(1 << 30)
    i = at % len(data) if data else 0
    if kind == "drop":
        file.unlink()
        return
    if kind == "flip" and data:
        data[i] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[i:]
    elif kind == "insert":
        data[i:i] = draw.randbytes(draw.randint(1, 9))
    elif kind == "zero":
        data[i : i + 64] = bytes(len(data[i : i + 64]))
    file.write_bytes(data)


def command(*arguments) -> int:
    """The exit code; whatever is not bad input is raised."""
    done = griffin_eval(*arguments)
    assert done.returncode != 2 or len(done.stderr.splitlines()) == 1, done.stderr
    return done.returncode


@pytest.mark.parametrize("name", fast(FAST, ["sharded", *FORMATS]))
def test_a_little_damage(originals, tmp_path, name):
    original, draw = originals / name, random.Random(name)
    for trial in range(examples(2)):
        folder = tmp_path / str(trial)
        damaged = shutil.copytree(original, folder / "damaged")
        file = draw.choice(sorted(path for path in damaged.rglob("*") if path.is_file()))
        damage(file, draw)
        assert command("inspect", damaged) in (0, 1, 2)  # 1: it says what is wrong
        converted = command("convert", damaged, folder / "out", "--to", "griffin")
        verified = command("verify", original, damaged)
        if converted == 2:
            # A damaged manifest is refused, though the weights beside it are whole.
            assert verified != 0 or file.name == MANIFEST_FILE
            assert [path.name for path in folder.iterdir()] == ["damaged"]
            continue
        same = holds_the_original(folder / "out")
        assert same or file.name == "config.json"  # else the manifest would have noticed
        assert command("verify", original, folder / "out") == (0 if same else 1) == verified

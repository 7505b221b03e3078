"""Damaged checkpoints of every format: refused in one sentence, or read as they now are.

The safetensors library reads the outputs, never the code that wrote them.
"""

import random
import shutil
from pathlib import Path

import pytest
from commands import griffin_eval
from slow import examples, fast
from tiny_checkpoints import holds_the_original, write_all

from griffin_eval.converters.configs.huggingface import GENERATION_FILE
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.manifest import MANIFEST_FILE

FAST = ["sharded", "griffin-orbax", "deepmind-torch"]  # one format for each container


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Write the same tiny model in every format."""
    root = tmp_path_factory.mktemp("originals")
    write_all(root)
    return root


def damage(file: Path, draw: random.Random) -> None:
    """Damage a file, half of the time near its ends, where headers and indices are."""
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
    """Run a command in this process and return its exit code."""
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
        assert command("inspect", damaged) in (0, 1, 2)  # 1: inspect reports a fault
        converted = command("convert", damaged, folder / "out", "--to", "griffin")
        verified = command("verify", original, damaged)
        if converted == 2:
            # A damaged one of these is refused even if the weights beside it are intact.
            assert verified != 0 or file.name in (MANIFEST_FILE, GENERATION_FILE)
            assert [path.name for path in folder.iterdir()] == ["damaged"]
            continue
        same = holds_the_original(folder / "out")
        assert same or file.name == "config.json"  # the manifest covers every other file
        assert command("verify", original, folder / "out") == (0 if same else 1) == verified

"""Conversions killed at any moment go on after their finished files, and end in the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slow import slow

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.containers.safetensors.writer import SafetensorsWriter
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.journal import JOURNAL_FILE, job_of
from griffin_eval.converters.plan import make_plan
from griffin_eval.errors import ArgumentError, CheckpointError

SHARD = 200_000  # bytes; the fixture's model makes a dozen such files

# Runs the command line, and kills itself when a function is called for the n-th time.
_KILLED = """
import os, signal, sys
module, name, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.argv = ["griffin-eval", *sys.argv[4:]]
import importlib
owner = importlib.import_module(module)
original = getattr(owner, name)
def counted(*arguments, **options):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)
setattr(owner, name, counted)
from griffin_eval.cli.main import main
main()
"""


def run(source, destination, *options, kill=None) -> subprocess.CompletedProcess[str]:
    shards = ("--max-shard-size", SHARD)
    arguments = ["convert", source, destination, "--to", "griffin", *shards, *options]
    program = ["-c", _KILLED, *kill] if kill else ["-m", "griffin_eval.cli.main"]
    if not kill:
        program = ["-c", "from griffin_eval.cli.main import main; main()"]
    command = [sys.executable, *program, *arguments]
    return subprocess.run([str(a) for a in command], capture_output=True, text=True)


def content(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def to(source, destination, target="griffin", **options) -> Path:
    plan = make_plan(Checkpoint(source), FORMATS[target])
    convert_checkpoint(plan, destination, max_shard_size=SHARD, **options)
    return destination


def finished_files(partial: Path) -> dict[str, dict[str, Any]]:
    """What the journal holds of the files that have their names."""
    journal = partial / JOURNAL_FILE
    entries = json.loads(journal.read_text()) if journal.exists() else {}
    return {file: entry for file, entry in entries.items() if (partial / file).exists()}


@pytest.fixture(scope="module")
def uninterrupted(checkpoint, tmp_path_factory):
    return to(checkpoint, tmp_path_factory.mktemp("whole") / "out")


@pytest.fixture(scope="module")
def killed_once(checkpoint, tmp_path_factory):
    """A folder with what a run left that was cut off before it named its third file."""
    folder = tmp_path_factory.mktemp("killed")
    killed = run(checkpoint, folder / "out", kill=("os", "replace", 6))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return folder


@pytest.fixture
def interrupted(killed_once, tmp_path):
    """A destination whose conversion was cut off after its second file."""
    shutil.copytree(killed_once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill",
    [
        ("os", "pwrite", 2),  # in the first file
        ("os", "pwrite", 60),
        ("os", "replace", 5),  # the third file is on the disk, and not in the journal
        ("os", "replace", 6),  # it is in the journal, and has no name yet
        ("griffin_eval.converters.convert", "write_manifest", 1),
        ("griffin_eval.converters.output.atomic", "_rename_to_new", 1),
    ],
    ids=lambda kill: f"{kill[1]}-{kill[2]}",
)
def test_a_killed_run_goes_on(checkpoint, uninterrupted, tmp_path, kill, caplog):
    out = tmp_path / "out"
    killed = run(checkpoint, out, kill=kill)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists()
    partial = tmp_path / ".out.partial" / "new"
    finished = {file: os.stat(partial / file).st_ino for file in finished_files(partial)}
    to(checkpoint, out, resume=True)
    assert content(out) == content(uninterrupted)
    kept = {p.name: p.stat().st_ino for p in out.glob("*.safetensors")}
    assert {file: kept[file] for file in finished} == finished
    if finished:
        assert f"{len(finished)} of {len(kept)} files were finished" in caplog.text
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.slow
def test_finished_files_are_neither_read_nor_written(checkpoint, interrupted, monkeypatch):
    read, written = [], []
    pieces, write = Checkpoint.pieces, SafetensorsWriter.write
    monkeypatch.setattr(Checkpoint, "pieces", lambda *a: (read.append(a[1]), pieces(*a))[1])
    monkeypatch.setattr(SafetensorsWriter, "write", lambda *a: (written.append(a[1]), write(*a))[1])
    partial = interrupted.parent / ".out.partial" / "new"
    finished = [set(entry["tensors"]) for entry in finished_files(partial).values()]
    seen = []
    to(checkpoint, interrupted, resume=True, progress=seen.append)
    everything = set(Checkpoint(checkpoint).dtypes)
    assert finished and set(read) == set(written) == everything.difference(*finished)
    assert sum(seen) == sum(t.nbytes for t in Checkpoint(checkpoint).container.tensors.values())


@pytest.mark.slow
def test_a_file_that_was_touched_is_written_again(checkpoint, uninterrupted, interrupted):
    partial = interrupted.parent / ".out.partial" / "new"
    file = partial / min(finished_files(partial))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    to(checkpoint, interrupted, resume=True)
    assert content(interrupted) == content(uninterrupted)


@pytest.mark.slow
def test_another_job_is_refused(checkpoint, interrupted):
    before = content(interrupted.parent)
    done = run(checkpoint, interrupted, "--resume", "--dtype", "bfloat16")
    assert done.returncode == 2 and "another source or other options" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    source = shutil.copytree(checkpoint, interrupted.parent / "copy")
    with pytest.raises(ArgumentError, match="another source"):
        to(source, interrupted, resume=True)
    shutil.rmtree(source)
    assert content(interrupted.parent) == before
    to(checkpoint, interrupted, resume=True)


@pytest.mark.slow
def test_without_resume_nothing_of_it_is_used(checkpoint, uninterrupted, interrupted, caplog):
    to(checkpoint, interrupted)
    assert content(interrupted) == content(uninterrupted)
    assert "resumed" not in caplog.text


@pytest.mark.parametrize("target", ["deepmind-torch", slow("griffin-orbax")])
def test_formats_without_parts_start_again_and_say_so(
    checkpoint, tmp_path, target, caplog, monkeypatch
):
    def fail(*_):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("griffin_eval.converters.convert.write_manifest", fail)
        to(checkpoint, out, target, resume=True)
    assert os.listdir(tmp_path) == [".out.partial"]
    to(checkpoint, out, target, resume=True)
    assert f"{target} has no parts to go on after: starting from the beginning" in caplog.text
    assert Checkpoint(out).format.name == target


def test_what_a_failure_leaves(checkpoint, tmp_path, monkeypatch):
    """Of several threads, the first failure is told; with resume, the finished files stay."""
    write = SafetensorsWriter.write
    count = iter(range(1000))

    def fail(*arguments):
        if next(count) == 40:
            raise CheckpointError("the 40th")
        write(*arguments)

    monkeypatch.setattr(SafetensorsWriter, "write", fail)
    with pytest.raises(CheckpointError, match="the 40th"):
        to(checkpoint, tmp_path / "out", resume=True)
    assert (tmp_path / ".out.partial" / "new" / JOURNAL_FILE).exists()
    assert next(count) < 45
    with pytest.raises(CheckpointError, match="the 40th"):
        count = iter(range(1000))
        to(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_what_makes_two_jobs_the_same(checkpoint, tmp_path, monkeypatch):
    def job(path, target="hf", shard=1, **options):
        return job_of(make_plan(Checkpoint(path), FORMATS[target], **options), shard)

    folder = shutil.copytree(checkpoint, tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    first = job(folder)
    (folder / "README.md").write_text("not read by a conversion")
    assert job("source") == job("source/../source") == first
    others = {job(folder, "griffin"), job(folder, shard=2)}
    others.add(job(folder, dtypes={"": "float16"}))
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        os.utime(folder / name, ns=(0, 0))
        others.add(job(folder))
    (folder / "tokenizer.json").unlink()  # which has ids of more rows
    others |= {job(folder), job(folder, vocab_size=9)}
    assert len(others | {first}) == 9

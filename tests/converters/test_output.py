"""Outputs appear whole or not at all, even after a kill; arrays are written in pieces."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from griffin_eval.converters import files
from griffin_eval.converters.output import atomic
from griffin_eval.converters.output.atomic import SafeOutput
from griffin_eval.errors import ArgumentError, BadInput

SUB = "additional_chat_templates"
FILES = ["config.json", "a.safetensors", f"{SUB}/b.jinja", f"{SUB}/c.jinja"]


def fill(folder: Path, text: str) -> None:
    (folder / SUB).mkdir(exist_ok=True)
    for name in FILES:
        (folder / name).write_text(text)


def content(path: Path) -> str | None:
    """Return the text that every file of the folder holds, or None without the folder."""
    if not os.path.lexists(path):
        return None
    texts = {(path / name).read_text() for name in FILES}
    assert len(texts) == 1
    assert sum(p.is_file() for p in path.rglob("*")) == len(FILES)
    return texts.pop()


def make(path: Path, text: str, **options) -> None:
    with SafeOutput(path, **options) as new:
        fill(new, text)


def refusal(error: type[Exception], *fragments: str, **options) -> str:
    with pytest.raises(error) as caught:
        make(text="new", **options)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message
    assert "\n" not in message
    return message


# Outputs in place.


def test_a_folder_appears_whole(tmp_path):
    to = tmp_path / "parents" / "are made" / "model"
    with SafeOutput(to) as new:
        assert new.parent.parent == to.parent
        fill(new, "new")
        assert not to.exists()
    assert content(to) == "new"
    assert os.listdir(to.parent) == ["model"]


@pytest.mark.parametrize("swap", [True, False], ids=["swap", "two renames"])
def test_overwriting(tmp_path, monkeypatch, swap):
    if not swap:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    to = tmp_path / "model"
    make(to, "old")
    refusal(ArgumentError, str(to), "already exists", path=to)
    assert content(to) == "old"
    make(to, "new", overwrite=True)
    assert content(to) == "new"
    assert os.listdir(tmp_path) == ["model"]


def test_an_exception_leaves_nothing(tmp_path):
    with pytest.raises(KeyError):
        with SafeOutput(tmp_path / "model") as new:
            (new / "shard").write_text("x")
            raise KeyError
    assert os.listdir(tmp_path) == []


def test_what_an_earlier_version_left_is_removed(tmp_path):
    partial = tmp_path / ".model.partial"
    (partial / "new").mkdir(parents=True)
    (partial / "new" / ".griffin_journal.json").write_text("{}")
    (partial / "job").write_text("{}")
    make(tmp_path / "model", "new")
    assert content(tmp_path / "model") == "new"
    assert os.listdir(tmp_path) == ["model"]


def test_what_is_not_overwritten(tmp_path, monkeypatch):
    to = tmp_path / "model"
    make(to, "old")
    options = {"path": to, "overwrite": True}
    refusal(ArgumentError, "would remove", protect=[to / SUB], **options)
    refusal(ArgumentError, "would remove", protect=[to], **options)
    with monkeypatch.context() as patch:
        patch.chdir(to / SUB)
        refusal(ArgumentError, "would remove", **options)
    (tmp_path / "link").symlink_to(to)
    refusal(ArgumentError, "is a link", path=tmp_path / "link", overwrite=True)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years")
    refusal(ArgumentError, "no checkpoint's folder", path=tmp_path / "thesis", overwrite=True)
    refusal(ArgumentError, "cannot be an output", path=Path("/"))
    refusal(BadInput, "cannot be written", path=to / "config.json" / "x")
    assert content(to) == "old"
    assert (tmp_path / "thesis" / "chapter").exists()


def test_what_is_in_the_way_is_not_removed(tmp_path):
    partial = tmp_path / ".model.partial"
    partial.write_text("mine")
    refusal(ArgumentError, "in the way", path=tmp_path / "model")
    partial.unlink()
    partial.mkdir()
    (partial / "mine").write_text("mine")
    refusal(ArgumentError, "'mine', which no conversion wrote", path=tmp_path / "model")
    assert (partial / "mine").exists()


def test_two_at_a_time(tmp_path):
    to = tmp_path / "model"
    with SafeOutput(to) as new:
        fill(new, "first")
        refusal(BadInput, "another process is writing", path=to)
        refusal(BadInput, "another process is writing", path=to, overwrite=True)
    assert content(to) == "first"


@pytest.mark.parametrize("swap", [True, False], ids=["renameat2", "rename"])
def test_what_comes_into_being_meanwhile_is_not_replaced(tmp_path, monkeypatch, swap):
    if not swap:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    to = tmp_path / "model"
    with pytest.raises(ArgumentError, match="already exists"):
        with SafeOutput(to) as new:
            fill(new, "new")
            to.mkdir()
            fill(to, "mine")
    # The folder may also appear between the last check and the renaming.
    (tmp_path / "full").mkdir()
    monkeypatch.setattr(atomic, "exists", lambda path, **_: False)
    with pytest.raises(BadInput, match="was created" if swap else "not empty"):
        with files.writing(to):
            atomic._rename_to_new(tmp_path / "full", to)
    monkeypatch.undo()
    assert content(to) == "mine"


def test_a_failed_replacement_puts_the_old_one_back(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    to = tmp_path / "model"
    make(to, "old")
    real = os.rename

    def fails(source, target):
        if Path(source).name == "new":
            raise OSError(errno.EACCES, "Permission denied")
        real(source, target)

    monkeypatch.setattr(os, "rename", fails)
    refusal(BadInput, "Permission denied", path=to, overwrite=True)
    assert content(to) == "old"
    assert os.listdir(tmp_path) == ["model"]


def test_everything_is_on_the_disk_before_it_is_renamed(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))
    )
    make(tmp_path / "model", "new")
    new = str(tmp_path / ".model.partial" / "new")
    expected = {new, f"{new}/{SUB}", *(f"{new}/{name}" for name in FILES)}
    assert expected <= set(synced[:-1])
    assert synced[-1] == str(tmp_path)


# Killed processes.

_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir"}
_EVENTS |= {"shutil.rmtree", "ctypes.dlsym", "os.truncate", "fcntl.flock"}


def killed_at(count: int, action) -> bool:
    """Fork a process that runs the action and is killed before its count-th step."""
    child = os.fork()
    if child == 0:
        left = count

        def step(event, _):
            nonlocal left
            if event in _EVENTS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(step)
        try:
            action()
        except BaseException:
            os._exit(3)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


# Child processes import this file, so it uses no marks from tests/support.
@pytest.mark.parametrize(
    "swap, before",
    [
        pytest.param(False, "old", marks=pytest.mark.ci),
        pytest.param(True, "old", marks=pytest.mark.slow),
        pytest.param(True, None, marks=pytest.mark.slow),
        pytest.param(False, None, marks=pytest.mark.slow),
    ],
)
def test_killed_at_every_step(tmp_path, swap, before):
    # A new process is needed, since a process that has loaded JAX must not fork.
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_output\n"
        f"test_output.kill_at_every_step({str(tmp_path)!r}, {swap}, {before!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def kill_at_every_step(root: str, swap: bool, before: str | None) -> None:
    if not swap:
        atomic._renameat2 = lambda *_: False
    tmp_path, seen = Path(root), set()
    for count in range(1000):
        folder = tmp_path / str(count)
        folder.mkdir()
        to = folder / "model"
        if before:
            make(to, before)
        options = {"overwrite": bool(before)}
        killed = killed_at(count, lambda to=to, options=options: make(to, "new", **options))
        seen.add(content(to))
        if before and swap:
            assert content(to) is not None
        if count % 3 == 0:  # killed again, at another step
            options["overwrite"] = True
            killed_at(count // 2, lambda to=to, options=options: make(to, "new", **options))
        # Every rerun succeeds and removes leftovers.
        was = content(to)
        if before and was is None:  # between two renames: the next run restores the old output
            refusal(ArgumentError, "already exists", path=to)
            assert content(to) == before
        if was and count % 2:
            with pytest.raises(ArgumentError, match="already exists"):
                make(to, "newer")
            assert content(to) == was
        make(to, "newer", overwrite=True)
        assert content(to) == "newer"
        assert os.listdir(folder) == ["model"]
        shutil.rmtree(folder)
        if not killed:
            break
    assert count > 20  # lower bound of the number of steps
    assert seen == {before, "new"} | (set() if swap else {None})


# Arrays.


def test_a_full_disk_is_said():
    with open("/dev/full", "wb") as file, pytest.raises(BadInput, match="No space left on device"):
        with files.writing("x"):
            os.write(file.fileno(), b"x")

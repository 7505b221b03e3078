"""The folder of compiled programs has a limit, which evaluation and training share."""

import functools
import logging
import os
import time

import pytest

from griffin_eval.json_files import ABANDONED
from griffin_eval.runners import kept_programs


def make(folder, name, nbytes, age):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x" * nbytes)
    os.utime(folder / name, (time.time() - age,) * 2)
    return folder / name


def test_the_files_used_last_are_kept_of_both_folders(tmp_path):
    jax, programs = tmp_path / "jax", tmp_path / "programs" / "model"
    old, new = make(jax, "old-cache", 400, 900), make(jax, "new-cache", 400, 100)
    older, newer = make(programs, "read-1", 400, 1000), make(programs, "read-2", 400, 50)
    kept_programs.hold_limit([jax, programs.parent], 1200)
    assert [path.exists() for path in (old, new, older, newer)] == [True, True, False, True]
    kept_programs.hold_limit([jax, programs.parent, tmp_path / "missing"], 900)
    assert [path.exists() for path in (old, new, newer)] == [False, True, True]
    kept_programs.hold_limit([jax, programs.parent], 0)
    assert sorted(tmp_path.rglob("*")) == [jax, programs.parent]  # no folder of a model is left


def test_unfinished_files_are_removed_when_nobody_writes_them(tmp_path):
    left = make(tmp_path, ".read-abc", 4, 2 * ABANDONED)
    now = make(tmp_path, ".read-def", 4, 1)
    kept_programs.hold_limit([tmp_path])
    assert (left.exists(), now.exists()) == (False, True)


def test_links_are_not_followed(tmp_path):
    mine = make(tmp_path / "elsewhere", "precious", 4000, 1e6)
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "link").symlink_to(mine)
    (tmp_path / "jax" / "folder").symlink_to(mine.parent)
    kept_programs.hold_limit([tmp_path / "jax"], 0)
    assert mine.exists()


def test_nothing_is_removed_from_a_folder_of_others(tmp_path, caplog):
    for mode in (0o777, 0o775, 0o707):
        file = make(tmp_path / str(mode), "a", 4, 9)
        file.parent.chmod(mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "griffin_eval"):
            kept_programs.hold_limit([file.parent], 0)
            kept_programs.hold_limit([file.parent], 0)
        assert file.exists()
        (record,) = caplog.records
        assert f"in {file.parent} are not used: another user owns it" in record.message


@pytest.fixture
def jax_config(request):
    """Return jax.config, and restore its compilation cache after the test."""
    import jax

    for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"):
        request.addfinalizer(functools.partial(jax.config.update, name, getattr(jax.config, name)))
    jax.config.update("jax_compilation_cache_dir", None)
    return jax.config


@pytest.mark.parametrize("folder", ["", "griffin_eval", "griffin_eval/jax"])
def test_jax_keeps_nothing_where_others_may_write(
    folder, tmp_path, jax_config, monkeypatch, caplog
):
    """JAX runs the machine code in its cache unchecked. A missing folder is made private."""
    from griffin_eval.runners.jax_runner import keep_compilations

    made = tmp_path / "griffin_eval" / "jax"
    if folder:
        made.mkdir(parents=True)
        (tmp_path / folder).chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING, "griffin_eval"):
        keep_compilations()
    assert jax_config.jax_compilation_cache_dir == (None if folder else str(made))
    assert ("are not used" in caplog.text) == bool(folder)
    if not folder:
        assert {path.stat().st_mode & 0o777 for path in (made, made.parent)} == {0o700}

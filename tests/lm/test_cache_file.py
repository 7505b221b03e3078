"""A `--use_cache` file is read or refused, and the end of a run leaves no half result."""

import errno
import json
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import types
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from lm_eval.api.model import CachingLM
from lm_eval.loggers import EvaluationTracker
from sqlitedict import SqliteDict

import griffin_eval
from griffin_eval.errors import ArgumentError, BadInput
from griffin_eval.lm.kept_files import check_cache, guard_files, use_table, whole_or_absent
from griffin_eval.lm.model import GriffinLM
from griffin_eval.lm.token_sums import TokenScores

CHECKPOINT = Path(griffin_eval.__file__).parent / "checkpoints" / "bytes_griffin"
ANSWERS = {str(i): (-float(i), bool(i % 2)) for i in range(200)} | {
    "rolling": TokenScores(np.array([-1.0, -2.5])),
    "text": " a continuation\n" * 40,
}


def opened(path, fingerprint="a"):
    check_cache(path)
    cache = SqliteDict(str(path), autocommit=True)
    use_table(cache, fingerprint)
    return cache


@pytest.fixture
def file(tmp_path):
    cache = opened(tmp_path / "cache.db")
    cache.autocommit = False
    cache.update(ANSWERS)
    cache.close()
    return tmp_path / "cache.db"


@pytest.fixture
def interruptible():
    """SIGINT is a KeyboardInterrupt, however this process was started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_no_answer_on_its_way(interruptible, tmp_path):
    cache = opened(tmp_path / "cache.db")
    assert cache.conn is not None
    queue = cache.conn.reqs
    put = queue.put
    queue.put = lambda item: signal.raise_signal(signal.SIGINT) or put(item)
    with pytest.raises(KeyboardInterrupt):
        cache["question"] = (-1.0, True)
    with pytest.raises(KeyboardInterrupt):
        cache.commit()
    queue.put = put
    assert cache["question"] == (-1.0, True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    cache.close()


def found(path):
    cache = opened(path)
    try:
        return {key: cache[key] for key in ANSWERS if key in cache}
    finally:
        cache.close()


def test_what_was_kept_is_found_again(file):
    assert found(file) == ANSWERS
    assert found(file)["rolling"].tokens.tolist() == [-1.0, -2.5]
    assert os.listdir(file.parent) == [file.name]


def test_a_damaged_file_is_read_or_refused_in_one_sentence(file):
    content, rng = file.read_bytes(), np.random.default_rng(0)
    refused = 0
    for case in range(100):
        changed = bytearray(content)
        if case % 4 == 3:
            del changed[int(rng.integers(len(changed))) :]
        else:
            for at in rng.integers(len(changed), size=1 + 30 * (case % 4)):
                changed[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(changed)
        try:
            found(file)
        except ArgumentError as error:
            refused += 1
            message = str(error)
            assert message.startswith(f"--use_cache: {file} ") and "\n" not in message
            assert message.endswith("name another file, or delete this one")
    assert refused > 20


def test_files_of_others_and_of_earlier_versions_are_refused(file):
    with closing(sqlite3.connect(file)) as writer, writer:
        writer.execute("ALTER TABLE 'griffin-json-a' RENAME TO 'griffin-a'")
    with pytest.raises(ArgumentError, match="answers of an earlier version of griffin-eval: name"):
        check_cache(file)
    file.write_bytes(b"no cache " * 1000)
    with pytest.raises(ArgumentError, match=r"cannot be used \(file is not a database\): expected"):
        check_cache(file)


def test_an_interrupted_write_is_undone_and_is_no_damage(file, tmp_path):
    """A copy of a file and its journal, as a process leaves them that is killed as it writes."""
    with closing(sqlite3.connect(file, isolation_level=None)) as writer, writer:
        writer.execute("PRAGMA cache_size = 1")  # so that changed pages are in the file
        writer.execute("BEGIN")
        writer.execute("UPDATE 'griffin-json-a' SET value = zeroblob(3000)")
        for name in (file.name, f"{file.name}-journal"):
            (tmp_path / f"copy-{name}").write_bytes((file.parent / name).read_bytes())
        writer.execute("ROLLBACK")
    copy = tmp_path / "copy-cache.db"
    assert copy.read_bytes() != file.read_bytes()
    assert found(copy) == ANSWERS


class Poison:
    def __reduce__(self):
        return os.mkdir, ("ran",)


FOREIGN = [
    *(pickle.dumps(Poison()), pickle.dumps((0.0, True)), b"[" * 100_000, b'{"tokens": ["a"]}'),
    *(b'{"tokens": 3}', b"[0.0, 1]", b"[true, 0.0]", b"7", b"\xff", b"NaN", b"[-Infinity, true]"),
    *(b"1e999", b'{"tokens": [NaN]}'),
]


def test_nothing_in_a_foreign_file_is_run(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in FOREIGN:
        with closing(sqlite3.connect(file)) as writer, writer:
            writer.execute("UPDATE 'griffin-json-a' SET value = ? WHERE key = '3'", [content])
            writer.execute("CREATE TABLE IF NOT EXISTS unnamed (key TEXT PRIMARY KEY, value BLOB)")
            writer.execute(
                "INSERT OR REPLACE INTO unnamed VALUES ('3', ?)", [pickle.dumps(Poison())]
            )
        cache = opened(file)
        assert cache["4"] == ANSWERS["4"], content
        with pytest.raises(ArgumentError, match="which is no answer of a model"):
            print(content, cache["3"])
        cache.close()
    assert not (tmp_path / "ran").exists()


def test_a_folder_in_its_place_is_one_sentence(tmp_path):
    (tmp_path / "cache.db").mkdir()
    with pytest.raises(ArgumentError, match=r"--use_cache: .*cache.db cannot be used"):
        check_cache(tmp_path / "cache.db")


WRITE_MANY = """
import sys
from sqlitedict import SqliteDict
from griffin_eval.lm.kept_files import check_cache, use_table

path, name = sys.argv[1:]
check_cache(path)
cache = SqliteDict(path, autocommit=True)
use_table(cache, "a")
for i in range(100):
    cache[f"{name} {i}"] = (float(i), True)
cache.close()
"""


def test_two_processes_share_a_file(tmp_path):
    path = tmp_path / "cache.db"
    command = [sys.executable, "-c", WRITE_MANY, str(path)]
    both = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [process.wait(120) for process in both] == [0, 0]
    expected = {f"{name} {i}": (float(i), True) for name in "ab" for i in range(100)}
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT key, value FROM 'griffin-json-a'").fetchall()
    assert {key: tuple(json.loads(value)) for key, value in rows} == expected


def test_models_that_answer_otherwise_do_not_mix(tmp_path):
    ends = shutil.copytree(CHECKPOINT, tmp_path / "ends")
    (ends / "generation_config.json").write_text(json.dumps({"eos_token_id": 70}))
    tables = []
    for arguments in (
        {},
        {"dtype": "bfloat16"},
        {"window": 4},
        {"add_bos_token": False},
        {"max_length": 50},
        {"pretrained": str(ends)},
        {},
    ):
        common = {"pretrained": str(CHECKPOINT), "framework": "torch", "dtype": "float32"}
        cache = CachingLM(GriffinLM(**common | arguments), str(tmp_path / "cache.db")).dbdict
        tables.append(cache.tablename)
        cache.close()
    assert len(set(tables)) == len(tables) - 1 and tables[0] == tables[-1]


class Tracker:
    def __init__(self, path, source="griffin", broken=False):
        self.output_path, self.broken = str(path), broken
        self.general_config_tracker = types.SimpleNamespace(model_source=source)

    @whole_or_absent
    def save(self):
        path = Path(self.output_path)
        out = path.with_name("a_1.json") if path.suffix == ".json" else path / "model" / "a.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("half")
        if self.broken:
            raise KeyboardInterrupt
        out.write_text("whole")


@pytest.mark.parametrize(("given", "name"), [("out", "out/model/a.json"), ("x.json", "a_1.json")])
def test_results_are_whole_or_absent(tmp_path, given, name):
    with pytest.raises(KeyboardInterrupt):
        Tracker(tmp_path / given, broken=True).save()
    assert not list(tmp_path.rglob("*"))
    tracker = Tracker(tmp_path / given)
    tracker.save()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / name] and files[0].read_text() == "whole"
    assert tracker.output_path == str(tmp_path / given)


def test_results_that_cannot_be_saved_end_the_run(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(BadInput, match="out: the results are not saved: Not a directory"):
        Tracker(tmp_path / "out").save()
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_a_full_disk_ends_the_run_after_its_table(tmp_path, monkeypatch, capsys):
    guard_files()
    tracker = EvaluationTracker(output_path=str(tmp_path / "out"))
    tracker.general_config_tracker.model_source = "griffin"
    tracker.general_config_tracker.model_name_sanitized = "model"
    scores = {"alias": "a_task", "acc,none": 0.625, "acc_stderr,none": 0.1}
    results = {"results": {"a_task": scores}, "versions": {"a_task": 1}, "n-shot": {"a_task": 0}}
    results["higher_is_better"] = {"a_task": {"acc": True}}
    write = Path.write_text

    def until_full(path, text, **how):
        write(path, text[:100], **how)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", until_full)
        with pytest.raises(BadInput, match="out: the results are not saved: No space left"):
            tracker.save_results_aggregated(results=results, samples=None)
    assert not list(tmp_path.rglob("*")) and "0.625" in capsys.readouterr().out
    tracker.save_results_aggregated(results=results, samples=None)
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert json.loads(file.read_text())["results"] == {"a_task": scores}
    assert file.parent == tmp_path / "out" / "model"


def test_other_models_results_are_left_alone(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Tracker(tmp_path / "out", "hf", broken=True).save()
    assert (tmp_path / "out/model/a.json").read_text() == "half"

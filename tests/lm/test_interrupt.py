"""What ends a run early leaves a cache from which the next one goes on."""

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from slow import slow

from griffin_eval.cli import main
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.plan import make_plan
from griffin_eval.engine.scoring import NotFinite
from griffin_eval.lm import answering
from griffin_eval.lm.model import GriffinLM

BIN = Path(sys.executable).parent
PAIRS = [(f"{word} is a word, and", f" {i}") for i, word in enumerate("tea cup saucer pot".split())]
REQUESTS = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]


def cached(checkpoint, path):
    return CachingLM(GriffinLM(str(checkpoint), "torch", max_batch_size=1), str(path))


def rows(path) -> int:
    """Answers in the file, read as another process would."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        assert file.execute("pragma integrity_check").fetchall() == [("ok",)]
        tables = [name for (name,) in file.execute("select name from sqlite_master")]
        ours = [name for name in tables if name.startswith("griffin-")]
        return sum(file.execute(f"select count(*) from '{name}'").fetchone()[0] for name in ours)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return GriffinLM(str(checkpoint), "torch").loglikelihood(REQUESTS)


def finish(checkpoint, path, expected, known):
    """Check that a rerun gives all answers and computes only those that were missing."""
    lm = cached(checkpoint, path)
    asked = []
    method = lm.lm.loglikelihood
    lm.lm.loglikelihood = lambda requests: asked.extend(requests) or method(requests)
    for found, right in zip(lm.loglikelihood(REQUESTS), expected, strict=True):
        assert found == (pytest.approx(right[0], rel=1e-6), right[1])
    assert len(asked) == len(PAIRS) - known
    lm.dbdict.close()


@pytest.mark.parametrize("answers", [slow(0), 1, slow(3)])
def test_an_interrupted_run_goes_on(checkpoint, tmp_path, expected, answers, monkeypatch):
    lm = cached(checkpoint, tmp_path / "cache.db")
    read, keep, kept = lm.lm.runner.read, lm.lm.cache_hook.add_partial, []
    lm.lm.cache_hook.add_partial = lambda *answer: kept.append(answer) or keep(*answer)

    def interrupted(*arguments):
        if len(kept) == answers:
            raise KeyboardInterrupt
        return read(*arguments)

    lm.lm.runner.read, returned = interrupted, []
    monkeypatch.setattr(answering, "return_freed_memory", lambda: returned.append(True))
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood(REQUESTS)
    assert returned  # memory, to the system
    assert rows(tmp_path / "cache.db") == answers
    lm.dbdict.close()
    finish(checkpoint, tmp_path / "cache.db", expected, answers)


def test_a_request_that_is_not_finite_is_named_and_all_others_are_kept(
    checkpoint, tmp_path, expected
):
    lm = cached(checkpoint, tmp_path / "cache.db")
    score = lm.lm.runner.score
    bad = lm.lm.tok_encode(PAIRS[2][1], add_special_tokens=False)[-1]

    def some_nan(hidden, at, targets, *rest):
        logprobs, greedy = score(hidden, at, targets, *rest)
        return np.where(targets == bad, np.nan, logprobs), greedy

    lm.lm.runner.score = some_nan
    with pytest.raises(NotFinite, match="1 of 4 log-likelihoods.*saucer is a word, and'"):
        lm.loglikelihood(REQUESTS)
    assert rows(tmp_path / "cache.db") == 3
    lm.dbdict.close()
    finish(checkpoint, tmp_path / "cache.db", expected, 3)


def test_memory_that_is_out_is_one_sentence_and_exit_code_1(monkeypatch, capsys):
    def app():
        raise MemoryError("'saucer': not even 16 tokens at a time fit into memory")

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("griffin-eval: 'saucer': not even 16 tokens")


def command(checkpoint, out, *more) -> list[str]:
    return [
        *(str(BIN / "lm_eval"), "--model", "griffin", "--tasks", "griffin_phonebook"),
        *("--model_args", f"pretrained={checkpoint},framework=torch", "--device", "cpu"),
        *("--limit", "120", "--output_path", str(out), *more),
    ]


def scores(out) -> dict:
    (file,) = out.rglob("results_*.json")
    return json.loads(file.read_text())["results"]


@pytest.mark.slow
def test_ctrl_c_in_the_stock_command(checkpoint, tmp_path):
    cache = tmp_path / "cache"
    file = Path(f"{cache}_rank0.db")
    with_cache = command(checkpoint, tmp_path / "out", "--use_cache", str(cache))
    log = tmp_path / "log"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs behind a shell's & ignore it
    with log.open("w") as out:
        tells = os.environ | {"PYTHONFAULTHANDLER": "1"}  # on SIGABRT, where it is
        running = subprocess.Popen(with_cache, stdout=out, stderr=out, env=tells)
    while not (file.exists() and any_known(file)):
        assert running.poll() is None, log.read_text()
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    try:
        running.wait(timeout=120)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGABRT)
        running.wait()
    assert running.returncode in (1, -signal.SIGINT), log.read_text()
    assert "griffin: interrupted: no results are written" in log.read_text()
    assert "Traceback" not in log.read_text()
    known = rows(file)
    assert known > 0 and not (tmp_path / "out").exists()

    rerun = subprocess.run(with_cache, capture_output=True, text=True, timeout=600)
    assert rerun.returncode == 0, rerun.stderr
    (counts,) = re.findall(r"Cached requests: (\d+), Requests remaining: (\d+)", rerun.stderr)
    assert int(counts[0]) == known and int(counts[1]) > 0
    plain = subprocess.run(command(checkpoint, tmp_path / "plain"), capture_output=True)
    assert plain.returncode == 0
    assert scores(tmp_path / "out") == scores(tmp_path / "plain")


def coordinated(rank, port) -> dict[str, str]:
    """Return the environment of one of two processes of JAX with a device each."""
    return os.environ | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(rank),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
    }


# lm_eval, which is patient with a silent process for less than a minute.
IMPATIENT = """
import sys
from lm_eval.__main__ import cli_evaluate
from griffin_eval.runners import jax_parallel, torch_parallel

jax_parallel.PATIENCE = jax_parallel.PULSE + 5
torch_parallel.PATIENCE = 20
if __name__ == "__main__":
    cli_evaluate()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "name"), [("torch", "SIGKILL"), ("torch", "SIGSTOP"), ("jax", "SIGSTOP")]
)
def test_a_lost_process_ends_the_run_and_answers_are_kept(framework, name, checkpoint, tmp_path):
    file, log = tmp_path / "cache_rank0.db", tmp_path / "log"
    line = command(checkpoint, tmp_path / "out", "--use_cache", str(tmp_path / "cache"))
    line[:1] = [sys.executable, "-c", IMPATIENT]
    chosen = line.index("--model_args") + 1
    line[chosen] = f"pretrained={checkpoint},framework={framework},tensor_parallel_size=2"
    line += ["--batch_size", "2"]
    with log.open("w") as out:
        if framework == "jax":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            running, follower = (
                subprocess.Popen(line, stdout=out, stderr=out, env=coordinated(rank, port))
                for rank in (0, 1)
            )
        else:
            running = subprocess.Popen(line, stdout=out, stderr=out)
    while not (file.exists() and any_known(file)):
        assert running.poll() is None, log.read_text()
        time.sleep(0.02)
    if framework == "torch":
        (follower,) = [p for p in psutil.Process(running.pid).children() if "-c" in p.cmdline()]
    follower.send_signal(signal.Signals[name])
    assert running.wait(timeout=120) == 1
    if framework == "jax":
        follower.kill()
        follower.wait()
    sentence = "griffin: process 1 of the 2 that share the model"
    assert sentence in log.read_text() and "Traceback" not in log.read_text()
    assert rows(file) > 0 and not (tmp_path / "out").exists()


def any_known(file) -> bool:
    """Whether there is an answer, without the lock, which a writer may hold most of the time."""
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)) as found:
            tables = [name for (name,) in found.execute("select name from sqlite_master")]
            ours = [name for name in tables if name.startswith("griffin-")]
            return any(found.execute(f"select 1 from '{name}' limit 1").fetchone() for name in ours)
    except sqlite3.DatabaseError:  # it is being made, or written
        return False


@pytest.mark.slow
def test_bad_input_to_the_stock_command_is_one_sentence(checkpoint, tmp_path):
    bad = command(checkpoint, tmp_path, "--max_batch_size", "0")
    bad[bad.index("--model_args") + 1] += ",windw=4"
    done = subprocess.run(bad, capture_output=True, text=True, env=os.environ, timeout=600)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("griffin: model_args of griffin: windw=")


HASHES = """
import sys
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.states.weights_hash import start_hashing
start_hashing(Checkpoint(sys.argv[1]), True)
sys.exit(3)
"""


def test_a_process_ends_while_it_hashes(checkpoint, tmp_path):
    """Its exit code is its own, also where the weights are being read in another library's threads:
    of an Orbax checkpoint they are."""
    convert_checkpoint(make_plan(Checkpoint(checkpoint), FORMATS["griffin-orbax"]), tmp_path / "o")
    command = [sys.executable, "-P", "-c", HASHES, str(tmp_path / "o")]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in started:
        _, said = process.communicate()
        assert process.returncode == 3, said

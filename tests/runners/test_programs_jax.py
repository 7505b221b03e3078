"""Programs that JAX compiled for a model are reused by the next process, and only for it."""

import functools
import logging
import os
import pickle
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from fixtures_engine import continuations, random_ids, scores
from parity import BASE, MODELS, weights
from parity_twins import JaxTwin
from slow import slow
from xla_options import QUICK_COMPILE

from griffin_eval.config import HAWK
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.tree import Ablation, Scorable
from griffin_eval.kernels.devices import platform
from griffin_eval.runners import compiled_jax
from griffin_eval.runners.jax_runner import JaxRunner

PROMPT = random_ids(30, 1)
SEQUENCES = [
    Scorable([*PROMPT, 1, 2], 30),
    Scorable([*PROMPT, 3], 30, Ablation.ATTENTION),
    Scorable(PROMPT[:9] + PROMPT, 1),
]


# Whatever the model, its programs are kept alike: those of one layer are compiled quickly.
SMALL = replace(BASE, block_pattern=HAWK, num_layers=1)


def runner(folder, config=SMALL, options=QUICK_COMPILE):
    return JaxRunner(JaxTwin(config, weights(config)).model, options, folder)


def test_kernels_are_those_of_the_models_device(monkeypatch):
    """JAX's default device, such as a TPU, does not count."""
    expected = runner(None)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    found = JaxRunner(expected.model)
    assert found.kernel == expected.kernel
    assert found.attention_kernel == expected.attention_kernel
    with found._there():
        assert platform(jax.numpy.ones(1)) == "cpu"


@functools.cache
def answers_of_nothing_kept(config=SMALL):
    return answers(runner(None, config))


@functools.cache
def few_answers_of_nothing_kept():
    return few_answers(runner(None))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return a folder with the small model's compiled programs, and the model's answers."""
    folder = tmp_path_factory.mktemp("programs")
    return folder, few_answers(runner(folder))


def answers(subject):
    """Return the results of every function that is compiled."""
    found = scores(subject, SEQUENCES, Limits(16, 2), softmax_dtype="float64")
    ids = continuations(subject, [Prompt(PROMPT, 70)], Limits(16, 2))
    return [*(result.logprobs for result in found), np.array(ids)]


@pytest.fixture
def no_compiling(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("compiled again")

    def forbid():
        monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)

    return forbid


def test_programs_of_a_step_are_not_compiled_again(filled, tmp_path, no_compiling):
    kept, expected = filled
    nowhere = few_answers_of_nothing_kept()
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    no_compiling()
    again = runner(tmp_path)
    for one, other, third in zip(few_answers(again), expected, nowhere, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)
    assert again.compilations > 1
    with pytest.raises(AssertionError, match="compiled again"):
        few_answers(runner(None))


@pytest.mark.slow
@pytest.mark.parametrize("config", [MODELS["recurrent last"], MODELS["mqa"]])
def test_the_next_process_compiles_nothing(config, tmp_path, no_compiling):
    first, nowhere = answers(runner(tmp_path, config)), answers_of_nothing_kept(config)
    no_compiling()
    again = runner(tmp_path, config)
    for one, other, third in zip(first, answers(again), nowhere, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)
    assert again.compilations > 4
    with pytest.raises(AssertionError, match="compiled again"):
        answers(runner(None, config))


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [{"config": replace(SMALL, logits_soft_cap=5.0)}, {"options": None}],
    ids=["config", "compiler options"],
)
def test_another_models_programs_are_not_taken(other, tmp_path):
    """The other model has the same shapes everywhere."""
    first = answers(runner(tmp_path))
    found, expected = answers(runner(tmp_path, **other)), answers(runner(None, **other))
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, right)
    assert len(list(tmp_path.iterdir())) == 2
    if "config" in other:
        assert np.abs(first[0] - found[0]).max() > 1e-3


def test_what_programs_depend_on(tmp_path, monkeypatch):
    def key():
        return compiled_jax._digest(compiled_jax._surroundings(jax.devices("cpu")))

    keys = [key()]
    assert key() == keys[0]
    (tmp_path / "extra.py").write_text("C = 8")
    monkeypatch.setattr(compiled_jax, "CODE", [*compiled_jax.CODE, tmp_path])
    keys.append(key())
    (tmp_path / "extra.py").write_text("C = 9")
    keys.append(key())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    keys.append(key())
    monkeypatch.setattr(compiled_jax, "version", lambda library: "0.0.1")
    keys.append(key())
    monkeypatch.setattr(compiled_jax, "_processor", lambda: ["flags: avx9"])
    keys.append(key())
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_damaged_programs_are_made_again(tmp_path, no_compiling):
    expected = answers(runner(tmp_path))
    files = sorted(tmp_path.glob("*/*"))
    for number, file in enumerate(files):
        content = file.read_bytes()
        file.write_bytes([content[: len(content) // 2], b"", content[::-1]][number % 3])
    for one, right in zip(answers(runner(tmp_path)), expected, strict=True):
        np.testing.assert_array_equal(one, right)
    assert sorted(tmp_path.glob("*/*")) == files  # nor is anything left of what was written
    no_compiling()
    answers(runner(tmp_path))


def test_a_folder_that_is_a_file_is_said_once(tmp_path, caplog):
    folder = tmp_path / "here"
    folder.write_text("")
    with caplog.at_level(logging.WARNING, "griffin_eval"):
        found = few_answers(runner(folder))
    for one, right in zip(found, few_answers_of_nothing_kept(), strict=True):
        np.testing.assert_array_equal(one, right)
    (record,) = caplog.records
    assert "compiled programs are not kept in" in record.message


# Executables are pickles: they are read only where nobody else could have written them.


def another_owner(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def few_answers(subject):
    return [result.logprobs for result in scores(subject, SEQUENCES[:1], Limits(16, 2))]


@pytest.mark.parametrize(
    ("which", "mode"),
    [("all models'", 0o777), slow("the model's", 0o770), slow("foreign", None)],
)
def test_folders_that_others_may_write_are_not_used(
    which, mode, filled, tmp_path, monkeypatch, caplog
):
    kept, expected = filled
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    (folder,) = tmp_path.iterdir()
    poison(folder)
    if mode is None:
        another_owner(monkeypatch)
    else:
        (tmp_path if which == "all models'" else folder).chmod(mode)
    before = {file: file.stat() for file in folder.iterdir()}
    with caplog.at_level(logging.WARNING, "griffin_eval"):
        found = few_answers(runner(tmp_path))
    (record,) = caplog.records
    assert "are not used: another user owns it or may write to it" in record.message
    assert {file: file.stat() for file in folder.iterdir()} == before  # nothing is written either
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, right)


def test_a_file_that_others_may_write_is_made_again(filled, tmp_path, caplog, no_compiling):
    kept, expected = filled
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    (folder,) = tmp_path.iterdir()
    poison(folder)
    for file in folder.iterdir():
        file.chmod(0o664)
    with caplog.at_level(logging.WARNING, "griffin_eval"):
        found = few_answers(runner(tmp_path))
    (record,) = caplog.records
    assert "are not used: another user owns it or may write to it" in record.message
    no_compiling()
    for one, again, right in zip(found, few_answers(runner(tmp_path)), expected, strict=True):
        np.testing.assert_array_equal(one, right)
        np.testing.assert_array_equal(again, right)


def test_others_may_write_nothing_that_is_kept_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        few_answers(runner(tmp_path / "caches" / "programs"))
    finally:
        os.umask(before)
    kept = [tmp_path / "caches" / "programs", *(tmp_path / "caches" / "programs").rglob("*")]
    assert len(kept) > 3
    assert not any(path.stat().st_mode & 0o077 for path in kept)


def poison(folder):
    """Replace the executables by pickles that fail the test when they are read."""
    for file in folder.iterdir():
        file.write_bytes(pickle.dumps(Poison()))


class Poison:
    def __reduce__(self):
        return pytest.fail, ("a file was read that others could have written",)

"""Several devices in one process, and several processes, give the answers of one."""

import itertools
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fixtures_engine import (
    Around,
    continuations,
    random_ids,
    reference_scores,
    scores_and_stats,
    small_runner,
)
from hypothesis import given
from hypothesis import strategies as st
from parity import MODELS, weights
from safetensors.numpy import load_file, save_file

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.formats import FORMATS
from griffin_eval.engine import parallel
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.parallel import divide
from griffin_eval.engine.reading import read
from griffin_eval.engine.sampling import Sampling
from griffin_eval.engine.scoring import NotFinite
from griffin_eval.engine.tree import Scorable, build_prompts
from griffin_eval.errors import ArgumentError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.runners.identity import check_alike, identity
from griffin_eval.runners.replay import lead, repeat
from griffin_eval.sharding.launch import Launch

BIN = Path(sys.executable).parent
LIMITS = Limits(64, 4)

token_lists = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6)


def cost(paths, more, part) -> int:
    return build_prompts([paths[i] for i in part]).tokens + sum(more[i] for i in part)


@given(token_lists, st.integers(1, 3), st.data())
def test_no_other_division_of_the_leaves_is_better(tokens, parts, data):
    paths = [np.array(t, np.int32) for t in tokens]
    more = data.draw(st.lists(st.integers(0, 4), min_size=len(paths), max_size=len(paths)))
    found = divide(paths, more, parts)
    assert len(found) == parts
    assert sorted(itertools.chain(*map(list, found))) == list(range(len(paths)))
    assert all((np.diff(part) > 0).all() for part in found)
    ranked = sorted(range(len(paths)), key=lambda i: tokens[i])
    cuts = itertools.combinations_with_replacement(range(len(paths) + 1), parts - 1)
    best = min(
        max(cost(paths, more, ranked[a:b]) for a, b in itertools.pairwise([0, *cut, len(paths)]))
        for cut in cuts
    )
    assert max(cost(paths, more, part) for part in found) == best


@pytest.fixture(scope="module")
def runner():
    return small_runner("torch")


SEQUENCES = [Scorable(random_ids(40, i % 3) + random_ids(9, i), 38) for i in range(12)]


def together(runners, sequences=SEQUENCES, **more):
    found, threads = {}, set()

    def on_result(index, result):
        threads.add(threading.current_thread())
        found[index] = result

    read = []
    arguments = {"limits": LIMITS, "softmax_dtype": "float32", "describe": "sequence {}".format}
    stats = parallel.score(
        runners, sequences, on_result=on_result, progress=read.append, **arguments | more
    )
    assert threads == {threading.current_thread()}
    assert sum(read) == stats.tokens_unique
    return found, stats


def test_scores_are_those_of_one_device(runner):
    found, stats = together([runner] * 3)
    alone, stats_alone = scores_and_stats(runner, SEQUENCES, LIMITS)
    assert sorted(found) == list(range(12))
    for index, result in found.items():
        np.testing.assert_allclose(result.logprobs, alone[index].logprobs, atol=2e-5)
        assert (result.greedy == alone[index].greedy).all()
    assert stats.tokens_requested == stats_alone.tokens_requested
    assert stats.tokens_computed == stats_alone.tokens_computed  # three books, three devices
    assert stats.seconds > 0


def test_samples_are_those_of_one_device(runner):
    prompts = [
        Prompt(random_ids(5 + i, i), 4 + i % 3, Sampling(temperature=1.5 * (i % 2)))
        for i in range(7)
    ]
    found = {}
    stats = parallel.generate(
        [runner] * 2,
        prompts,
        limits=LIMITS,
        eos_ids=frozenset(),
        seed=3,
        should_stop=lambda index, ids: index == 2 and len(ids) == 2,
        on_result=found.__setitem__,
        describe="prompt {}".format,
    )
    expected = continuations(runner, prompts, LIMITS, seed=3)
    expected[2] = expected[2][:2]
    assert [found[i] for i in range(7)] == expected
    assert stats.tokens_generated == sum(map(len, expected))


class Broken(Around):
    """A runner whose reads fail, from the given one on."""

    def __init__(self, runner, error, after=0):
        super().__init__(runner)
        self._error, self.left = error, after

    def read(self, *arguments):
        if not self.left:
            raise self._error
        self.left -= 1
        return self._runner.read(*arguments)


def test_a_failure_on_one_device_ends_all(runner):
    with pytest.raises(ZeroDivisionError):
        together([runner, Broken(runner, ZeroDivisionError(), after=1), runner])
    assert not [t for t in threading.enumerate() if t.name.endswith("(run)")]


def test_what_is_not_finite_on_one_device_comes_after_all_others():
    runner = small_runner("torch")

    class Nan(Broken):
        def score(self, hidden, at, targets, *rest):
            logprobs, greedy = self._runner.score(hidden, at, targets, *rest)
            return np.where(targets == last, np.nan, logprobs), greedy

    found = {}
    last = SEQUENCES[4].tokens[-1]
    same = {i for i, s in enumerate(SEQUENCES) if last in s.tokens[s.start :]}
    numbers = "|".join(map(str, same))
    with pytest.raises(NotFinite, match=rf"sequence ({numbers});"):
        parallel.score(
            [Nan(runner, None, 10**6), Nan(runner, None, 10**6)],
            SEQUENCES,
            limits=LIMITS,
            softmax_dtype="float32",
            on_result=found.__setitem__,
            progress=lambda tokens: None,
            describe="sequence {}".format,
        )
    assert found.keys() == set(range(12)) - same


def test_what_the_caller_raises_ends_all_devices(runner):
    def on_result(index, result):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parallel.score(
            [runner] * 2,
            SEQUENCES,
            limits=LIMITS,
            softmax_dtype="float32",
            on_result=on_result,
            progress=lambda tokens: None,
            describe=str,
        )
    assert not [t for t in threading.enumerate() if t.name.endswith("(run)")]


# Launchers, and sizes of devices


def test_each_process_has_a_device_of_its_own(monkeypatch):
    assert Launch.of_environment() == Launch(0, 0, 1)
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    launch = Launch.of_environment()
    assert launch == Launch(5, 1, 8)
    assert (launch.part, launch.replica, launch.replicas) == (0, 5, 8)
    shared = launch.shared_by(4, None)
    assert (shared.part, shared.replica, shared.replicas) == (1, 1, 2)
    assert launch.shared_by(4, 2) == shared
    for processes, replicas, sentence in (
        (3, None, "tensor_parallel_size=3 with 8 processes: start a multiple of 3"),
        (4, 3, "data_parallel_size=3 with 8 processes"),
        (2, 2, "8 processes of which 2 share a model make 4 replicas"),
    ):
        with pytest.raises(ArgumentError, match=sentence):
            launch.shared_by(processes, replicas)
    for asked in (None, "cuda", "cuda:0"):
        assert launch.device(asked, 8) == "cuda:1"
        assert launch.device(asked, 0) == asked  # nobody has asked for what is not there
    assert launch.device("cpu", 8) == "cpu"
    with pytest.raises(ArgumentError, match=r"2 processes .* and it has 1: start 1 processes"):
        launch._replace(local_world_size=2).device(None, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Launch.of_environment().device("cuda:0", 0) == "cuda:0"
    for name, value in (("RANK", "x"), ("WORLD_SIZE", "")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(
                ArgumentError, match=f"{name} must be a whole number, found {value!r}"
            ):
                Launch.of_environment()


def test_what_does_not_fit_the_processes_is_refused(checkpoint, monkeypatch):
    for variables, arguments, sentence in (
        ({"WORLD_SIZE": "2"}, {"framework": "jax"}, "framework=jax takes no launcher of PyTorch"),
        ({"WORLD_SIZE": "3"}, {"tensor_parallel_size": 2}, "start a multiple of 2"),
        (
            {"WORLD_SIZE": "2"},
            {"device": "cpu"},
            "WORLD_SIZE=2, but its processes do not find",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"},
            {},
            "framework=torch takes no processes of jax.distribute",
        ),
        (
            {},
            {"framework": "jax", "tensor_parallel_size": 8},
            "need 8 devices, and this process has 1 of cpu",
        ),
        ({}, {"data_parallel_size": 2}, "start as many processes with torchrun"),
        ({}, {"tensor_parallel_size": 0}, "must be a positive integer, found 0"),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(ArgumentError, match=sentence):
                GriffinLM(str(checkpoint), **{"framework": "torch", **arguments})
            if "WORLD_SIZE=" not in sentence and variables.get("WORLD_SIZE"):
                patch.setenv("RANK", "2")  # the first process has said it
                with pytest.raises(SystemExit) as end:
                    GriffinLM(str(checkpoint), **{"framework": "torch", **arguments})
                assert end.value.code == 2


def evaluate(command, checkpoint, out, limit=5, more=""):
    """Return the results of lm_eval, and its answer to each request."""
    command = [
        *command,
        *("--model", "griffin", "--model_args", f"pretrained={checkpoint},framework=torch{more}"),
        *("--tasks", "griffin_pydoc_choice,griffin_phonebook", "--limit", str(limit)),
        *("--device", "cpu", "--log_samples", "--output_path", str(out), "--batch_size", "4"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=600)
    assert done.returncode == 0, done.stderr
    return *read_results(out), done.stderr


def read_results(out):
    """Return the results in a folder, and the answer to each request."""
    (file,) = out.rglob("results_*.json")
    samples = {}
    for path in out.rglob("samples_*.jsonl"):
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            key = path.name.rsplit("_", 1)[0], sample["doc_id"]
            samples[key] = [response[0] for response in sample["resps"]]
    return json.loads(file.read_text()), samples


def same_answers(found, expected):
    for key in found:
        for mine, theirs in zip(found[key], expected[key], strict=True):
            if isinstance(mine, str):
                assert mine == theirs
            else:
                assert float(mine[0]) == pytest.approx(float(theirs[0]), rel=1e-5)
                assert mine[1] == theirs[1]


@pytest.mark.slow
def test_processes_read_chunks_as_one(checkpoint, tmp_path):
    more, launcher = ",chunk_tokens=30", [*TORCHRUN, "2", "-m", "lm_eval"]
    one, two = (
        evaluate(command, checkpoint, tmp_path / name, more=more)
        for name, command in (("one", [str(BIN / "lm_eval")]), ("two", launched(launcher)))
    )
    assert one[0]["config"]["model_chunk_tokens"] == 30
    assert two[1].keys() == one[1].keys()
    same_answers(two[1], one[1])


@pytest.fixture(scope="module")
def alone(checkpoint, tmp_path_factory):
    return evaluate([str(BIN / "lm_eval")], checkpoint, tmp_path_factory.mktemp("alone"))


TORCHRUN = ["torchrun", "--master_port", "PORT", "--nproc_per_node"]
# This choice of accelerate's starts processes, whatever devices there are.
ACCELERATE = [
    *("accelerate", "launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "PORT"),
]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launched(launcher):
    """Return a launcher's command, with a port of its own."""
    program, *arguments = (free_port() if word == "PORT" else word for word in launcher)
    return [str(BIN / program), *arguments]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "processes", "sharing"),
    [([*TORCHRUN, "4"], 4, 2), (ACCELERATE, 2, 2)],
    ids=str,
)
def test_processes_answer_as_one(launcher, processes, sharing, alone, checkpoint, tmp_path):
    one, expected, _ = alone
    command, more = launched([*launcher, "-m", "lm_eval"]), f",tensor_parallel_size={sharing}"
    two, found, log = evaluate(command, checkpoint, tmp_path / "two", more=more)
    assert found.keys() == expected.keys()  # uneven: three documents and two
    same_answers(found, expected)
    for task, metrics in one["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                found_value = two["results"][task][metric]
                assert found_value == pytest.approx(value, rel=1e-5, nan_ok=True)
    # Counts of all replicas. Of two, lm_eval lets the second evaluate its last document once more.
    both, once = (run["config"]["griffin_tokens_requested"] for run in (two, one))
    assert once <= both <= 1.5 * once
    assert two["config"]["griffin_devices"] == processes
    device = "cpu" if sharing == 1 else "2 x cpu"
    assert log.count(f"griffin: torch on {device} in float32") == 1
    assert log.count("tokens requested") == 1


SPLIT = """
import json, sys
import numpy as np
from lm_eval.api.instance import Instance
from griffin_eval.lm.model import GriffinLM

text = "The unary minus operator yields the negation of its numeric argument. " * 9
pairs = [(text[i % 3:], f" word {i}") for i in range(9)]
prompts = [(text[i:], {"max_gen_toks": 5, "do_sample": i > 3}) for i in range(6)]
forgotten = [(text[:210], " word", name) for name in ("nothing", "recurrent", "attention")]
found = []
for sizes in json.loads(sys.argv[3]):
    lm = GriffinLM(sys.argv[1], sys.argv[2], device="cpu", dtype="float32", **sizes)
    answers = []
    for kind, arguments in (
        ("loglikelihood", pairs),
        ("loglikelihood_rolling", [(text,)]),
        ("generate_until", prompts),
        ("loglikelihood_ablated", forgotten),
    ):
        np.random.seed(0)
        requests = [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]
        answers.append(getattr(lm, kind)(requests))
    info = lm.get_model_info()
    found.append([answers, info["griffin_devices"], info.get("griffin_parity")])
print(json.dumps(found))
"""


def split_answers(checkpoint, framework, sizes, processes=1):
    """Return the answer of the first of several processes that share four devices of JAX."""
    command = [sys.executable, "-c", SPLIT, str(checkpoint), framework, json.dumps(sizes)]
    flags = f"--xla_force_host_platform_device_count={4 // processes}"
    environment = os.environ | {"XLA_FLAGS": flags}
    if processes > 1:
        address = f"127.0.0.1:{free_port()}"
        environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"JAX_PROCESS_ID": str(rank)},
        )
        for rank in range(processes)
    ]
    said = [process.communicate(timeout=600) for process in started]
    if any(process.returncode for process in started):
        raise AssertionError("\n".join(error for _, error in said))  # all of it
    return json.loads(said[0][0].splitlines()[-1])


CHUNKS = """
import json, sys
from lm_eval.api.instance import Instance
from griffin_eval.lm.model import GriffinLM

text = "The unary minus operator yields the negation of its numeric argument.\\n" * 9
requests = [Instance("generate_until", {}, (text[i:], {"max_gen_toks": 5}), i) for i in range(6)]
for replicas in (1, 2):
    lm = GriffinLM(sys.argv[1], "jax", data_parallel_size=replicas, chunk_tokens=40)
    print(json.dumps(lm.generate_until(requests)))
"""


@pytest.mark.slow
def test_devices_of_jax_read_chunks_as_one(checkpoint):
    command = [sys.executable, "-c", CHUNKS, str(checkpoint)]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    one, two = map(json.loads, done.stdout.splitlines()[-2:])
    assert one == two and all(one)


GROUPED = """
import json, sys
from fixtures_engine import scores
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.reading import read
from griffin_eval.engine.tree import Scorable
from griffin_eval.runners import torch_parallel
import numpy as np

ids = json.loads(sys.argv[2])
runner = torch_parallel.load(Checkpoint(sys.argv[1]), "float32", "cpu", 2)
state = read(runner, np.array(ids, np.int32), limits=Limits(32, 4))
(scored,) = scores(runner, [Scorable(ids, 1)])
print(json.dumps([scored.logprobs.tolist(), {n: t.tolist() for n, t in state.items()}]))
"""


@pytest.mark.ci
def test_processes_share_the_heads_of_keys(tmp_path):
    config = MODELS["every field changed"]
    save_file(weights(config), tmp_path / "model.safetensors")
    raw = config_json(config, FORMATS["griffin"], "float32")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ids = random_ids(40, 3)
    done = subprocess.run(
        [sys.executable, "-c", GROUPED, tmp_path, json.dumps(ids)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent / "support")},
    )
    assert done.returncode == 0, done.stderr
    logprobs, state = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(logprobs, reference_scores(tuple(ids), config)[0], atol=1e-4)
    whole = read(small_runner("torch", config), np.array(ids, np.int32), limits=Limits(32, 4))
    assert state.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_allclose(state[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_split_model_answers_as_on_one_device(checkpoint):
    one = {"tensor_parallel_size": 1, "data_parallel_size": 1}
    found = split_answers(
        checkpoint,
        "jax",
        [one, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4, "data_parallel_size": 1}],
    )
    checked = {"parity": "check"}
    found += split_answers(checkpoint, "jax", [{"tensor_parallel_size": 4} | checked], processes=2)
    found += split_answers(checkpoint, "torch", [{}])
    for size, more in ((2, checked), (3, {})):
        found += split_answers(checkpoint, "torch", [{"tensor_parallel_size": size} | more])
    (choices, rolling, texts, forgotten), *_ = found[0]
    assert len({round(total, 3) for total, _ in forgotten}) == 3
    for (others, other_rolling, other_texts, other_forgotten), *_ in found[1:]:
        assert other_texts[:4] == texts[:4]  # the others are sampled
        assert other_rolling == pytest.approx(rolling, rel=1e-5)
        both = zip([*others, *other_forgotten], [*choices, *forgotten], strict=True)
        for (mine, greedy), (theirs, also) in both:
            assert mine == pytest.approx(theirs, rel=1e-5) and greedy == also
    assert [devices for _, devices, _ in found] == [1, 4, 4, 4, 1, 2, 3]
    parities = [parity for *_, parity in found]
    assert [parity is not None for parity in parities] == [False] * 3 + [True, False, True, False]
    assert parities[3] == pytest.approx(parities[5])


def test_what_the_leader_drops_its_followers_drop():
    alone, messages = small_runner("torch"), []
    channel = SimpleNamespace(processes=2, send=messages.append, close=lambda: None)
    runner = lead(alone, channel)
    kept = [runner.open_pool(1, 8) for _ in range(3)]
    numbers = [pool.number for pool in kept]
    del kept[1]
    last = runner.open_pool(1, 8)
    del kept[0], last
    runner.open_pool(1, 8)
    calls = [pickle.loads(message) for message in messages]
    assert [call.dropped for call in calls[:4]] == [[], [], [], [numbers[1]]]
    assert sorted(calls[4].dropped) == [numbers[0], calls[3].numbers[0]]
    repeat(alone, iter([*messages, b""]).__next__)


def test_an_interrupt_takes_effect_after_the_call_of_a_shared_model():
    """Followers would otherwise wait in the interrupted call, and answer the next one."""
    alone, messages, ended = small_runner("torch"), [], []

    class Interrupted(Around):
        def open_pool(self, *arguments):
            signal.raise_signal(signal.SIGINT)
            ended.append(alone.open_pool(*arguments))
            return ended[-1]

    channel = SimpleNamespace(processes=2, send=messages.append, close=lambda: None)
    runner = lead(Interrupted(alone), channel)
    with pytest.raises(KeyboardInterrupt):
        runner.open_pool(1, 8)
    assert len(ended) == len(messages) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_followers_drop_the_results_of_failed_calls():
    alone, messages = small_runner("torch"), []
    channel = SimpleNamespace(
        processes=2, send=messages.append, close=lambda: None, recover=lambda error: error
    )
    runner = lead(alone, channel)
    with pytest.raises(RuntimeError):
        runner.open_pool(-1, 8)
    runner.open_pool(1, 8)
    failed, after = map(pickle.loads, messages)
    assert after.dropped == failed.numbers


def evaluate_in_processes(checkpoints, out, devices, sizes):
    """lm_eval in a process of JAX for each checkpoint: the exit codes and stderr of all."""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(len(checkpoints)),
    }
    started = [
        subprocess.Popen(
            [
                *(BIN / "lm_eval", "run", "--model", "griffin", "--device", "cpu", "--limit", "5"),
                *("--model_args", f"pretrained={checkpoint},framework=jax,{sizes}"),
                *("--tasks", "griffin_pydoc_choice,griffin_phonebook"),
                *("--log_samples", "--output_path", str(out)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"JAX_PROCESS_ID": str(rank)},
        )
        for rank, checkpoint in enumerate(checkpoints)
    ]
    said = [process.communicate(timeout=600)[1] for process in started]
    return [process.returncode for process in started], said


@pytest.mark.slow
def test_processes_of_jax_make_replicas(alone, checkpoint, tmp_path):
    sizes = "tensor_parallel_size=2,data_parallel_size=2"
    codes, said = evaluate_in_processes([checkpoint] * 2, tmp_path, 2, sizes)
    assert codes == [0, 0], "\n".join(said)
    one, expected, _ = alone
    found, samples = read_results(tmp_path)
    assert samples.keys() == expected.keys()
    same_answers(samples, expected)
    for task, metrics in one["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                found_value = found["results"][task][metric]
                assert found_value == pytest.approx(value, rel=1e-4, nan_ok=True)
    assert found["config"]["griffin_devices"] == 4


@pytest.mark.slow
def test_sizes_that_processes_of_jax_do_not_make(checkpoint, tmp_path):
    codes, said = evaluate_in_processes([checkpoint] * 2, tmp_path, 2, "tensor_parallel_size=3")
    assert codes == [2, 2]
    assert "tensor_parallel_size=3 with 2 processes of 2 devices each" in said[0].splitlines()[-1]
    assert "tensor_parallel_size is one of 1, 2, 4" in said[0] and "one of" not in said[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_with_different_files_end(rank, checkpoint):
    mine = identity(Checkpoint(checkpoint), "torch", "auto", 2)
    check_alike([mine, mine], rank)
    other = mine | {"weights": "0" * 16, "version of torch": "1.0"}
    if rank:
        with pytest.raises(SystemExit):
            check_alike([mine, mine, other], rank)
        return
    with pytest.raises(
        ArgumentError, match="processes 0 and 2 .* weights: .* and 0000000000000000"
    ):
        check_alike([mine, mine, other], rank)


@pytest.fixture
def other(checkpoint, tmp_path):
    """Another step of the training that gave the checkpoint."""
    folder = tmp_path / "other"
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.final_norm.weight"] += 1e-3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_processes_of_jax_with_different_files_end(checkpoint, other, tmp_path):
    sizes = "tensor_parallel_size=2"
    codes, said = evaluate_in_processes([checkpoint, other], tmp_path / "out", 1, sizes)
    assert codes == [2, 2]
    assert "processes 0 and 1 were not given the same: weights: " in said[0].splitlines()[-1]
    assert "not given the same" not in said[1] and not (tmp_path / "out").exists()


def test_identity_knows_another_step_of_a_training(checkpoint, other):
    found, expected = (identity(Checkpoint(p), "jax", "auto", 1) for p in (other, checkpoint))
    assert {name for name in found if found[name] != expected[name]} == {"weights"}

"""Measurements on a CUDA device, in two runs of five minutes: A of the model, B of ``lm_eval``.

In a checkout, collect wheels of missing packages for Python 3.12, each at most 64 MiB:

    make wheel && mkdir wheels && cp dist/*.whl wheels
    python3.12 -m pip wheel -w wheels lm-eval typer rich safetensors xxhash ml_dtypes jaxtyping \\
        psutil scipy matplotlib sentencepiece names pytest hypothesis

On the machine, which keeps its own torch, jax and transformers:

    python -m venv --system-site-packages env && env/bin/pip install --no-index --no-deps wheels/*
    env/bin/python benchmarks/gpu.py a --output a.json
    env/bin/python benchmarks/gpu.py b --output b.json

The JSON file is rewritten after every figure, so that an interrupted run keeps its results.
``--device cpu --tiny`` rehearses a run with tiny sizes.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # a script's path has the folder `benchmarks` but not its parent
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT / "benchmarks"))]
    import_module("benchmarks")  # removes the checkout from the path

from benchmarks.timing import interleave  # noqa: E402

SECONDS = 290.0  # time for a run, beside its start
ROUNDS = 5
PACKAGES = ("torch", "triton", "jax", "transformers", "griffin-eval", "lm-eval")


class Settings(NamedTuple):
    """Device and sizes of a run."""

    device: str
    tiny: bool

    def size(self, full: int, tiny: int) -> int:
        """Return the size for a device, or for a rehearsal."""
        return tiny if self.tiny else full


Report = Callable[[str, Any], None]  # function of a figure's name and its JSON value


def versions(settings: Settings, report: Report) -> None:
    """Report the versions of packages, and the device."""
    import torch

    report("python", platform.python_version())
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            report(package, metadata.version(package))
    if settings.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        report("device", properties.name)
        report("multiprocessors", properties.multi_processor_count)
        report("memory", properties.total_memory)


def copy_bandwidth(settings: Settings, report: Report) -> None:
    """Report the bytes that a copy reads and writes in a second."""
    import torch

    source = torch.ones(settings.size(2**30, 2**12), dtype=torch.bfloat16, device=settings.device)
    target = torch.empty_like(source)
    seconds = _times(settings, call=lambda: target.copy_(source))["call"]
    report("seconds", seconds)
    report("bytes_per_second", 2 * source.nbytes / seconds["median"])


def products(settings: Settings, report: Report) -> None:
    """Report the FLOP/s of square products in bfloat16."""
    import torch

    for full, tiny in ((4096, 16), (8192, 32), (16384, 64)):
        size = settings.size(full, tiny)
        left = torch.randn(size, size, device=settings.device).to(torch.bfloat16)
        seconds = _times(settings, call=lambda left=left: left @ left)["call"]
        report(str(size), 2 * size**3 / seconds["median"])


def profile_decoding(settings: Settings, report: Report) -> None:
    """Report a profile of a decoding step of one row, and of many."""
    model = _griffin(settings)
    for rows in (1, settings.size(64, 3)):
        _profile(_decoding_step(model, rows, settings), settings, f"{rows} rows", report)


def profile_reading(settings: Settings, report: Report) -> None:
    """Report a profile of reading one text."""
    tokens = settings.size(4096, 64)
    step = _reading_step(_griffin(settings), [tokens], settings)
    _profile(step, settings, f"{tokens} tokens", report)


def kernels(settings: Settings, report: Report) -> None:
    """Report the scan and the RG-LRU in Triton, forward and backward, beside a copy."""
    if settings.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.scan import gpu

    shapes = [(1, 4, 6)] if settings.tiny else [(8, 8192, 2560), (1, 8192, 2560)]
    seconds = None if settings.device == "cuda" else partial(_once, settings=settings)
    for shape in shapes:
        rows = gpu.measure([shape], ["bfloat16"], settings.device, seconds=seconds, peers=False)
        for row in rows:
            report(f"{row['operation']}, {row['shape']}", row)


def beside_transformers(settings: Settings, report: Report) -> None:
    """Report decoding and reading beside transformers, in interleaved rounds."""
    griffin, peer = _griffin(settings), _transformers(settings)
    text = settings.size(4096, 64)
    lengths = {f"reading {text}": [text], f"reading 8 x {text // 4}": [text // 4] * 8}
    for name, each in lengths.items():
        ours, theirs = _reading_step(griffin, each, settings), _peer_reading(peer, each, settings)
        report(name, _times(settings, griffin=ours, transformers=theirs))
    for rows in (1, settings.size(64, 3)):
        ours, theirs = _decoding_step(griffin, rows, settings), _peer_decoding(peer, rows, settings)
        report(f"decoding {rows}", _times(settings, griffin=ours, transformers=theirs))


def gpu_tests(settings: Settings, report: Report) -> None:
    """Report the tests that need a GPU; a rehearsal only collects them."""
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    files = ("engine/test_gpu.py", "kernels/test_kernels_triton.py")
    command += [str(ROOT / "tests" / file) for file in files]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda,cpu"}
    if settings.device == "cpu":
        command.append("--collect-only")
        environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    report("exit_code", done.returncode)
    report("output", (done.stdout + done.stderr).strip().splitlines()[-30:])


def lm_eval_commands(settings: Settings, report: Report) -> None:
    """Report whole ``lm_eval`` commands, each of a choice task and a task that generates."""
    from benchmarks.random_checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(checkpoint)
        if not settings.tiny:
            _transformers(settings).save_pretrained(checkpoint)
        griffin = "framework=torch,dtype=bfloat16"
        limit = settings.size(100, 2)
        for task, shots in (("griffin_pydoc_choice", 5), ("griffin_phonebook", 0)):
            # The first command compiles and tunes kernels; the second reuses them.
            for model, arguments, name in (
                ("griffin", griffin, "griffin, first"),
                ("griffin", griffin, "griffin, again"),
                ("hf", "dtype=bfloat16", "hf"),
            ):
                command = [
                    *(sys.executable, "-P", "-m", "lm_eval", "--model", model, "--tasks", task),
                    *("--model_args", f"pretrained={checkpoint},{arguments}"),
                    *("--num_fewshot", str(shots), "--limit", str(limit)),
                    *("--batch_size", "8", "--device", settings.device),
                ]
                begin = time.perf_counter()
                done = subprocess.run(command, capture_output=True, text=True)
                lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
                result = {"exit_code": done.returncode, "output": lines[-12:]}
                report(f"{task}, {name}", {"seconds": time.perf_counter() - begin} | result)


# Function and largest number of seconds of each measurement, in a run of `SECONDS`.
RUNS: dict[str, dict[str, tuple[Callable[[Settings, Report], None], float]]] = {
    "a": {
        "versions": (versions, 30),
        "copy": (copy_bandwidth, 30),
        "products": (products, 30),
        "profile of decoding": (profile_decoding, 60),
        "profile of reading": (profile_reading, 40),
        "kernels": (kernels, 60),
        "beside transformers": (beside_transformers, 90),
        "GPU tests": (gpu_tests, 200),
    },
    "b": {"versions": (versions, 30), "lm_eval": (lm_eval_commands, 290)},
}


def _config(settings: Settings) -> Any:
    import griffin_eval

    config = griffin_eval.PRESETS["recurrentgemma-2b"]
    if settings.tiny:
        small = {"width": 64, "mlp_width": 96, "lru_width": 64, "num_heads": 2, "gate_blocks": 2}
        small |= {"num_layers": 3, "vocab_size": 1024, "visible_keys": 17}
        config = dataclasses.replace(config, **small)
    return config


def _griffin(settings: Settings) -> Any:
    """Return a runner of this package's model, with random weights in bfloat16."""
    import torch

    from griffin_eval.model_torch.griffin import Griffin, param_dtype
    from griffin_eval.runners.torch_runner import TorchRunner

    def make(spec: Any) -> torch.nn.Parameter:
        dtype = param_dtype(spec, torch.bfloat16)
        values = torch.empty(spec.shape, dtype=dtype, device=settings.device)
        return torch.nn.Parameter(values.normal_(0, 0.02))

    return TorchRunner(Griffin(_config(settings), make))


def _decoding_step(runner: Any, rows: int, settings: Settings) -> Callable[[], Any]:
    """Return a warm step that continues rows by their likeliest tokens."""
    import numpy as np

    state = runner.start_decoding(rows, 2048)
    tokens, every = np.ones(rows, np.int64), np.arange(rows)

    def step() -> None:
        nonlocal state
        hidden, state = runner.decode_step(state, tokens, tokens)
        runner.greedy(hidden, every)

    for _ in range(settings.size(70, 1)):  # captures a graph for each of 64 offsets
        step()
    return step


def _reading_step(runner: Any, lengths: list[int], settings: Settings) -> Callable[[], Any]:
    """Return a warm step that reads packed texts, and finds the likeliest token after each."""
    import numpy as np

    pool = runner.open_pool(len(lengths), 2048)
    tokens, none = np.ones(sum(lengths), np.int64), np.full(len(lengths), -1)

    def step() -> None:
        hidden, _ = runner.read(pool, tokens, np.array(lengths), none, none)
        runner.greedy(hidden, np.cumsum(lengths) - 1)

    step()
    return step


def _transformers(settings: Settings) -> Any:
    """Return transformers' model of the same shapes, with random weights in bfloat16."""
    import torch
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    from griffin_eval.converters.configs.huggingface import to_huggingface

    config = RecurrentGemmaConfig(**to_huggingface(_config(settings)))
    with torch.device(settings.device):
        model: Any = RecurrentGemmaForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def _peer_reading(model: Any, lengths: list[int], settings: Settings) -> Callable[[], Any]:
    import torch

    tokens = torch.ones(len(lengths), lengths[0], dtype=torch.int64, device=settings.device)

    @torch.inference_mode()
    def step() -> None:
        model(tokens, use_cache=False, logits_to_keep=1).logits.argmax(-1).cpu()

    step()
    return step


def _peer_decoding(model: Any, rows: int, settings: Settings) -> Callable[[], Any]:
    """Return a step of transformers that continues rows by their likeliest tokens."""
    import torch
    from transformers import DynamicCache

    # transformers 5.24 renamed the argument.
    names = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"
    cache = {cache_name: DynamicCache(config=model.config)}
    tokens = torch.ones(rows, 16, dtype=torch.int64, device=settings.device)

    @torch.inference_mode()
    def step(tokens: torch.Tensor = tokens[:, :1]) -> None:
        logits = model(tokens, use_cache=True, logits_to_keep=1, **cache).logits
        logits.argmax(-1).cpu()

    step(tokens)  # a prompt, so that the next steps decode
    step()
    return step


def _profile(step: Callable[[], Any], settings: Settings, name: str, report: Report) -> None:
    """Report seconds, kernels by time, launches and gaps of a step."""
    from torch.profiler import ProfilerActivity, profile

    report(f"{name}, seconds", _times(settings, call=step)["call"])
    cuda, repeats = settings.device == "cuda", 3
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=activities) as trace:
        for _ in range(repeats):
            step()
        _wait(settings)
    events: list[Any] = list(trace.events() or ())
    launches = Counter(event.name for event in events if "Launch" in event.name)
    if cuda:
        run = [event for event in events if event.device_type.name == "CUDA"]
    else:  # PyTorch's operations in place of kernels
        run = [event for event in events if event.cpu_parent is None]
    busy, gaps = _busy_and_gaps([(e.time_range.start, e.time_range.end) for e in run])
    times: dict[str, list[float]] = {}
    for event in run:
        times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    slowest = sorted(times, key=lambda kernel: -sum(times[kernel]))[:40]
    by_time = [
        {"name": k, "count": len(times[k]) / repeats, "us": sum(times[k]) / repeats}
        for k in slowest
    ]
    figures = {"kernels": len(run) / repeats, "busy_us": busy / repeats, "gaps_us": gaps / repeats}
    calls = {call: count / repeats for call, count in launches.items()}
    report(name, figures | {"launch_calls": calls, "kernels_by_time": by_time})


def _busy_and_gaps(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the length of the union of intervals, and of the gaps between them."""
    if not intervals:
        return 0.0, 0.0
    busy, reached = 0.0, min(start for start, _ in intervals)
    first = reached
    for start, end in sorted(intervals):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy, reached - first - busy


def _times(settings: Settings, **calls: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """Return median and range of the seconds of calls that take turns, after one call of each."""
    for call in calls.values():
        call()
    timed = {name: partial(_once, call, settings) for name, call in calls.items()}
    return {
        name: {"median": median(seconds), "min": min(seconds), "max": max(seconds)}
        for name, seconds in interleave(ROUNDS, timed).items()
    }


def _once(call: Callable[[], Any], settings: Settings) -> float:
    _wait(settings)
    repeats = settings.size(4, 1)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait(settings)
    return (time.perf_counter() - begin) / repeats


def _wait(settings: Settings) -> None:
    import torch

    if settings.device == "cuda":
        torch.cuda.synchronize()


def run(which: str, settings: Settings, output: Path, seconds: float) -> None:
    """Run the measurements of a key of `RUNS`, each in a process of its own.

    Figures, seconds and error of each are written to a JSON file as they come.
    """
    end = time.monotonic() + seconds
    results: dict[str, Any] = {"run": which, **settings._asdict(), "measurements": {}}
    for name, (function, limit) in RUNS[which].items():
        begin = time.monotonic()
        limit *= seconds / SECONDS
        record: dict[str, Any] = {"figures": {}, "error": "under way", "seconds": 0.0}
        results["measurements"][name] = record
        for kind, key, value in _messages(function, settings, min(begin + limit, end)):
            if kind == "figure":
                record["figures"][key] = value
            else:
                record["error"] = value
            record["seconds"] = time.monotonic() - begin
            part = output.with_name(f"{output.name}.part")
            part.write_text(json.dumps(results, indent=1) + "\n")
            os.replace(part, output)
        print(f"{name}: {record['seconds']:.0f} s, {record['error'] or 'done'}", flush=True)


def _messages(
    function: Callable[[Settings, Report], None], settings: Settings, end: float
) -> Iterator[tuple[str, str, Any]]:
    """Yield the figures of a measurement, then its error or None; stop it at the time limit."""
    context = multiprocessing.get_context("fork")  # keeps imports; the device is still unused
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(function, settings, sender))
    process.start()
    assert process.pid
    sender.close()
    try:
        while True:
            if not receiver.poll(max(0.0, end - time.monotonic())):
                yield "error", "", "cut off, since its time was up"
                return
            message = receiver.recv()
            yield message
            if message[0] == "error":
                return
    except EOFError:
        process.join()
        yield "error", "", f"its process ended with exit code {process.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group holds its child processes
        process.kill()
        process.join()


def _measure(function: Callable[[Settings, Report], None], settings: Settings, sender: Any) -> None:
    os.setpgid(0, 0)
    try:
        function(settings, lambda key, value: sender.send(("figure", key, value)))
    except BaseException as error:
        traceback.print_exc()
        sender.send(("error", "", f"{type(error).__name__}: {error}"))
    else:
        sender.send(("error", "", None))


def main() -> None:
    """Parse the command line, and run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("run", choices=RUNS, help="measurements to run")
    parser.add_argument("--output", type=Path, help="JSON file to write, gpu-RUN.json by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use tiny sizes, for a rehearsal")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for the run")
    arguments = parser.parse_args()
    import torch

    # Import shared modules before the fork; each measurement reports an import that fails.
    with contextlib.suppress(Exception):
        import_module("griffin_eval.runners.torch_runner")
        import_module("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    if arguments.device == "cuda" and not torch.backends.cuda.is_built():
        parser.error("--device cuda needs a build of torch for CUDA: use --device cpu --tiny")
    settings = Settings(arguments.device, arguments.tiny)
    output = arguments.output or Path(f"gpu-{arguments.run}.json")
    run(arguments.run, settings, output, arguments.seconds)


if __name__ == "__main__":
    main()

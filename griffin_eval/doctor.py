"""The facts for a bug report: versions, devices, kernels and their self-tests, caches."""

import contextlib
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.arguments import DTYPES
from griffin_eval.messages import first_line
from griffin_eval.process import SPIN_COUNT, SPIN_VARIABLE
from griffin_eval.runners import kept_programs

LIBRARIES = ("jax", "jaxlib", "flax", "torch", "triton", "libtpu", "transformers", "tokenizers")
LIBRARIES += ("sentencepiece", "lm-eval", "orbax-checkpoint", "tensorstore", "safetensors")
LIBRARIES += ("huggingface-hub", "numpy", "ml-dtypes", "scipy", "matplotlib")
MODULES = {"torch": ("torch",), "jax": ("jax", "flax")}
# Maximum error of the RG-LRU against the float64 reference, over the largest value.
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3, "float64": 1e-12}
# Test of a whole model: a checkpoint of this package, a number of tokens beyond its window, and
# their log-likelihood in nats by transformers in float64.
CHECKPOINT, TOKENS, LOGLIKELIHOOD = "induction_heads_griffin", 600, -10928.2400
MODEL_TOLERANCE = 1e-5  # relative


class Kernel(NamedTuple):
    """The kernel implementation for some dtypes, and the reasons for its choice."""

    framework: str
    operator: str  # ``RG-LRU`` or ``attention``
    dtypes: tuple[str, ...]
    name: str
    reasons: str


class SelfTest(NamedTuple):
    """The result of a self-test; ``detail`` is its error, or the exception that was raised."""

    name: str
    passed: bool
    detail: str


class Cache(NamedTuple):
    """A cache folder."""

    holds: str  # description of the content
    folder: Path
    entries: int  # number of files
    nbytes: int


def versions() -> tuple[dict[str, str], list[str]]:
    """Return the versions of installed libraries, and the names of missing ones."""
    installed, missing = {}, []
    for name in ("griffin-eval", *LIBRARIES):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return {"Python": platform.python_version()} | installed, missing


def machine() -> dict[str, str]:
    """Return the system, its processor and memory, and the devices of each framework."""
    from griffin_eval.kernels.cpu import compiled

    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    facts = {
        "system": platform.platform(),
        "processor": f"{_processor()}, {compiled.usable_cpus()} usable, {gigabytes:.0f} GB",
        "compiled kernels": compiled.missing() or "built",
        "PyTorch's waiting threads": _waiting(),
    }
    for framework in MODULES:
        reason = _why_absent(*MODULES[framework])
        facts[f"{framework} devices"] = reason or ", ".join(_devices(framework))
    return facts


def _waiting() -> str:
    """Return how long OpenMP's threads spin in commands, and what to set for other programs."""
    if policy := os.environ.get("OMP_WAIT_POLICY"):
        return f"OMP_WAIT_POLICY={policy}"
    return (
        f"{SPIN_VARIABLE}={os.environ.get(SPIN_VARIABLE, SPIN_COUNT)} in commands; in a program "
        "of your own call griffin_eval.tune_process() first"
    )


def kernels(framework: str) -> Iterator[Kernel]:
    """Yield the implementations on an installed framework's default device, for each dtype."""
    for operator in ("RG-LRU", "attention"):
        chosen: dict[tuple[str, str], list[str]] = {}
        for dtype in DTYPES:
            with _dtype_scope(framework, dtype):
                chosen.setdefault(_chosen(operator, framework, dtype), []).append(dtype)
        for (name, reasons), dtypes in chosen.items():
            yield Kernel(framework, operator, tuple(dtypes), name, reasons)


def self_tests(framework: str) -> Iterator[SelfTest]:
    """Compare the RG-LRU in each dtype with its reference, and a whole model with transformers."""
    for dtype in DTYPES:
        with _dtype_scope(framework, dtype):
            name = f"RG-LRU, {framework}, {dtype}"
            yield _tested(name, TOLERANCES[dtype], lambda: _rglru_error(framework, dtype))  # noqa: B023
    yield _tested(f"model, {framework}, float32", MODEL_TOLERANCE, lambda: _model_error(framework))


def caches() -> list[Cache]:
    """Return the folders of JAX's compilations, this package's programs, and downloads."""
    folders = {"compilations of JAX": kept_programs.home() / "jax"}
    if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folders = {"compilations of JAX": Path(chosen)}
        folders["programs of models in JAX"] = Path(chosen) / "griffin_eval"
    else:
        folders["programs of models in JAX"] = kept_programs.home() / "programs"
    with contextlib.suppress(ImportError):
        from huggingface_hub.constants import HF_HUB_CACHE

        folders["downloads from the hub"] = Path(HF_HUB_CACHE)
    return [_cache(holds, folder) for holds, folder in folders.items()]


def _tested(name: str, tolerance: float, error: Callable[[], float]) -> SelfTest:
    try:
        value = error()
    except Exception as problem:  # compilers and drivers raise anything
        return SelfTest(name, False, f"{type(problem).__name__}: {first_line(problem)}")
    return SelfTest(name, value <= tolerance, f"error {value:.1e}, at most {tolerance:.0e}")


def _rglru_error(framework: str, dtype: str) -> float:
    """Return the largest error of a small RG-LRU, over the largest value."""
    from griffin_eval.kernels.rglru import api, reference

    rng = np.random.default_rng(0)
    shapes = [(64,), (2, 32, 32), (2, 32), (2, 32, 32), (2, 32), (2, 40, 64)]
    arrays = [0.3 * rng.standard_normal(shape) for shape in shapes]
    put, back = _array_functions(framework, dtype)
    *gates, x = map(put, arrays)
    h, _ = api.rglru(x, reference.Gates(*gates))
    *gates, x = (back(array) for array in (*gates, x))  # rounded to the dtype
    exact, _ = reference.rglru(x, reference.Gates(*gates))
    return float(np.abs(back(h) - exact).max() / np.abs(exact).max())


def _model_error(framework: str) -> float:
    """Return the relative error of a log-likelihood by a checkpoint of this package."""
    from griffin_eval.checkpoints import folder
    from griffin_eval.evaluator import Evaluator

    model = Evaluator(folder(CHECKPOINT), framework=framework, dtype="float32")
    ids = np.arange(TOKENS) ** 2 * 7 % model.config.vocab_size
    [score] = model.score([ids.tolist()])
    return abs(score.total / LOGLIKELIHOOD - 1)


def _chosen(operator: str, framework: str, dtype: str) -> tuple[str, str]:
    """Return an operator's implementation and the reason for it among those for this device. The
    dtype is left out of the reason, so that dtypes with the same reason can share a row."""
    from griffin_eval.kernels import devices, registry
    from griffin_eval.kernels.attention import api as attention
    from griffin_eval.kernels.rglru import api as rglru

    put, _ = _array_functions(framework, dtype)
    if operator == "RG-LRU":
        array = put(np.zeros((1, 1, 256)))
        choice = rglru.choose(array, None, array)
    else:
        array = put(np.zeros((1, 512, 1, 256)))
        choice = attention.choose(array)
    platform, reasons = devices.platform(array), []
    for name, reason in choice.refused.items():
        if registry.PLATFORMS[name] == platform:
            reason = reason.replace(f"torch.{dtype}", dtype).replace(f" {dtype}", " this dtype")
            reasons.append(f"{name}: {reason}")
    return choice.name, "; ".join(reasons) or f"the first choice on {platform}"


def _array_functions(framework: str, dtype: str) -> tuple[Callable, Callable]:
    """Return functions from numpy to an array of a dtype on the default device, and back."""
    if framework == "torch":
        import torch

        device, kind = _devices("torch")[0], getattr(torch, dtype)
        return (
            lambda array: torch.from_numpy(array).to(device, kind),
            lambda tensor: tensor.double().cpu().numpy(),
        )
    import jax.numpy as jnp

    return (
        lambda array: jnp.asarray(array.astype(jnp.dtype(dtype))),
        lambda array: np.asarray(array).astype(np.float64),
    )


def _dtype_scope(framework: str, dtype: str) -> contextlib.AbstractContextManager[Any]:
    if framework == "jax" and dtype == "float64":
        import jax

        return jax.enable_x64(True)
    return contextlib.nullcontext()


def _devices(framework: str) -> list[str]:
    """Return the names of the devices, the default one first."""
    if framework == "jax":
        import jax

        return [f"{device.platform}:{device.id}" for device in jax.devices()]
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cache(holds: str, folder: Path) -> Cache:
    # The hub's snapshots are links to its blobs, which are counted.
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    sizes = [path.stat().st_size for path in files]
    return Cache(holds, folder, len(sizes), sum(sizes))


def frameworks() -> list[str]:
    """Return the frameworks that can be imported."""
    return [name for name, modules in MODULES.items() if _why_absent(*modules) is None]


def _why_absent(*modules: str) -> str | None:
    """Return why some of the modules cannot be imported; None if all can."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            return f"{module} not installed"
        except Exception as error:  # a broken installation can raise anything
            return f"{module} cannot be imported: {type(error).__name__}: {first_line(error)}"
    return None

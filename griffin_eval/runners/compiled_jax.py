"""JAX executables of a model, cached on disk for the next process.

JAX's own cache only saves compilation: a process still traces and lowers the model for every shape,
and deserialises the executable while the model waits, which takes seconds. Here executables are
looked up by everything that they depend on, so nothing is traced, and a thread loads them early.

An executable is a pickle, and reading a pickle can run any code. So a file is read only if it and
its folder belong to this user and nobody else can write to them.
"""

import contextlib
import hashlib
import inspect
import logging
import os
import pickle
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from griffin_eval.kernels import devices
from griffin_eval.kernels.cpu.compiled import usable_cpus
from griffin_eval.model_jax import griffin
from griffin_eval.runners import kept_programs
from griffin_eval.sharding import mesh_jax

HERE = Path(__file__).parent
# Folders whose code affects executables; of the package's top folder only its own files do.
CODE = [HERE, *(Path(inspect.getfile(module)).parent for module in (devices, mesh_jax, griffin))]
SMALL = 1 << 29  # maximum bytes of the parameters of a model whose executables are run early
PRELOADED = 16  # maximum number of executables that are loaded early

logger = logging.getLogger(__name__)

_hits = [0]  # hits in JAX's own cache


def _count(event: str, **_: Any) -> None:
    _hits[0] += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_count)


class ExecutableCache:
    """The compiled functions of one model on one device or mesh.

    Args:
        depends_on: Other dependencies of the functions besides code and settings of JAX, compared
            by ``repr``.
        folder: Folder of all models' executables; None to disable the cache on disk, which is used
            on CPUs only.
    """

    def __init__(self, devices: list[Any], parameters: Any, depends_on: Any, folder: Path | None):
        self._parameters, self._devices = parameters, devices
        self._parameter_shapes = _signature(parameters)
        self._folder: Path | None = None
        self._loading: dict[str, Future[Any]] = {}
        self.count = 0
        if folder is not None and devices[0].platform == "cpu":
            key = _digest(_surroundings(devices), depends_on, self._parameter_shapes)
            if kept_programs.is_ours(folder) and kept_programs.is_ours(folder / key):
                self._folder = folder / key
                self._preload(self._folder)

    def compiled(
        self,
        name: str,
        function: Callable[..., Any],
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        **options: Any,
    ) -> Callable[..., Any]:
        """Return the function, compiled once for each combination of shapes and dtypes, and traced
        in a context. ``options`` are those of `jax.jit`."""
        jitted, executables = jax.jit(function, **options), {}
        described = repr(sorted(options.items()))

        def call(*arguments: Any) -> Any:
            shapes = tuple(map(self._signature_of, arguments))
            executable = executables.get(shapes)
            if executable is None:
                file = f"{name}-{_digest(shapes, described)}"
                executable = self._load(file) or self._compile(file, jitted, arguments, context)
                executables[shapes] = executable
                self.count += 1
            return executable(*arguments)

        return call

    def _signature_of(self, argument: Any) -> tuple[Any, ...]:
        return self._parameter_shapes if argument is self._parameters else _signature(argument)

    def _load(self, name: str) -> Any:
        """Return the executable on disk with this name, or None."""
        if self._folder is None:
            return None
        preloaded = self._loading.pop(name, None)
        if preloaded is not None and not preloaded.cancel():
            return preloaded.result()
        return self._read(self._folder / name)

    def _compile(
        self,
        name: str,
        jitted: Any,
        arguments: tuple[Any, ...],
        context: Callable[[], contextlib.AbstractContextManager],
    ) -> jax.stages.Compiled:
        before = _hits[0]
        with context():
            executable = jitted.lower(*arguments).compile()
        if _hits[0] == before:  # an executable from JAX's cache cannot be serialised again
            self._save(name, executable)
        return executable

    def _save(self, name: str, executable: jax.stages.Compiled) -> None:
        """Write an executable to disk."""
        if self._folder is None:
            return
        unfinished = None
        try:
            content = pickle.dumps(serialize_executable.serialize(executable))
            for folder in (*self._folder.parents[1::-1], self._folder):
                kept_programs.make_folder(folder)
            handle, unfinished = tempfile.mkstemp(prefix=f".{name}-", dir=self._folder)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(unfinished).replace(self._folder / name)
        except (OSError, ValueError, NotImplementedError) as error:
            logger.warning("compiled programs are not kept in %s: %s", self._folder, error)
            if unfinished is not None:
                Path(unfinished).unlink(missing_ok=True)
            self._folder = None

    def _read(self, path: Path) -> Any:
        try:
            with path.open("rb") as file:
                if not kept_programs.is_ours(path, os.fstat(file.fileno())):
                    return None
                payload, inputs, outputs = pickle.load(file)
            with contextlib.suppress(OSError):
                os.utime(path)  # for the removal of the least recently used
            return serialize_executable.deserialize_and_load(
                payload, inputs, outputs, self._devices[0].client, self._devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # damaged, or from another version: compile again
            logger.debug("%s cannot be loaded: %s", path, error)
            return None

    def _preload(self, folder: Path) -> None:
        """Start a thread that loads the first executables of this model."""
        if not folder.is_dir():
            return
        names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))[:PRELOADED]
        self._loading = {name: Future() for name in names}
        if names:
            waiting = list(self._loading.items())
            threading.Thread(target=self._load_all, args=(folder, waiting), name="programs").start()

    def _load_all(self, folder: Path, waiting: list[tuple[str, Future[Any]]]) -> None:
        for name, future in waiting:
            if not threading.main_thread().is_alive():  # do not delay the end of the process
                return
            if future.set_running_or_notify_cancel():
                executable = self._read(folder / name)
                with contextlib.suppress(Exception):  # only an optimisation; memory may be short
                    self._run_on_zeros(executable)
                future.set_result(executable)

    def _run_on_zeros(self, executable: jax.stages.Compiled | None) -> None:
        """Run an executable once, since the first run packs weights for matrix products. Only small
        models on a single device: others would take long, or memory from each other."""
        small = sum(x.nbytes for x in self._parameters) <= SMALL
        if executable is None or not small or jax.local_device_count() > 1:
            return

        def zeros(x: Any) -> jax.Array:
            return jax.device_put(np.zeros(x.shape, x.dtype), self._devices[0])

        arguments, _ = executable.args_info
        jax.block_until_ready(
            executable(
                *(
                    self._parameters
                    if _signature(each) == self._parameter_shapes
                    else jax.tree.map(zeros, each)
                    for each in arguments
                )
            )
        )


def cache_folder() -> Path | None:
    """Return the folder of all models' executables, inside JAX's own cache if the user chose one;
    None if that is disabled or remote. The least recently used files above a limit are removed."""
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    chosen = config.jax_compilation_cache_dir
    if chosen is None:
        folder = kept_programs.home() / "programs"
        if not kept_programs.is_ours(folder.parent):
            return None
        kept_programs.hold_limit([folder, folder.with_name("jax")])
        return folder
    if "://" in chosen:
        return None
    folder = Path(chosen, "griffin_eval")
    kept_programs.hold_limit([folder])
    return folder


def _signature(argument: Any) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(argument)
    return tree, tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves)


def _surroundings(devices: list[Any]) -> Iterator[Any]:
    """Yield everything but the model that executables depend on."""
    files = [*HERE.parent.glob("*"), *(f for folder in CODE for f in folder.rglob("*"))]
    for file in sorted(f for f in files if f.suffix in (".py", ".c", ".so")):
        yield file.name, hashlib.sha256(file.read_bytes()).hexdigest()
    yield [version(library) for library in ("jax", "jaxlib", "flax")], platform.python_version()
    first = devices[0]
    yield first.platform, first.device_kind, first.client.platform_version
    yield [device.id for device in devices]
    yield platform.machine(), _processor(), usable_cpus()
    yield sorted((k, repr(v)) for k, v in jax.config.values.items() if "cache" not in k)
    yield os.environ.get("XLA_FLAGS")


def _processor() -> list[str]:
    """Return the name and the instruction sets of the processor."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        known = ("model name", "flags", "Features", "CPU part")
        return [line for line in first if line.startswith(known)]
    return [platform.processor()]


def _digest(*values: Any) -> str:
    flat = [list(v) if isinstance(v, Iterator) else v for v in values]
    return hashlib.sha256(repr(flat).encode()).hexdigest()[:32]

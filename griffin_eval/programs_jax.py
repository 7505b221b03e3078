"""What JAX has compiled for a model, kept on disk for the next process.

JAX's own cache saves compiling. But a process that finds everything there still traces and lowers
the model for every shape, and loads what it finds while the model waits: seconds, where a shape is
used a few times. Here programs are found by what they were made from, so nothing is traced, and a
thread loads those that were used before while the process does something else.
"""

import contextlib
import hashlib
import inspect
import logging
import os
import pickle
import platform
import shutil
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
from griffin_eval.kernels.cpu import usable_cpus
from griffin_eval.model_jax import griffin

MODELS = 8  # for which programs are kept
CODE = [Path(inspect.getfile(module)).parent for module in (devices, griffin)]  # beside this folder
SMALL = 1 << 29  # bytes of parameters of a model whose steps take little time
AHEAD = 16  # programs that are loaded before anybody asks for them

logger = logging.getLogger(__name__)

_hits = [0]  # of JAX's own cache


def _count(event: str, **_: Any) -> None:
    _hits[0] += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_count)


class Programs:
    """The programs of one model on one device.

    Args:
        device: where they run.
        parameters: of the model, which all calls share.
        made_from: what they were made from, beside code and settings of JAX; told apart by repr.
        folder: where all models' programs are kept; None for nowhere, which it also is on anything
            but a CPU, where this was not tried.
    """

    def __init__(self, device: Any, parameters: Any, made_from: Any, folder: Path | None):
        self._parameters, self._device = parameters, device
        self._shapes = _signature(parameters)
        self._functions: list[Program] = []
        self._folder = None
        self._loading: dict[str, Future[Any]] = {}
        if folder is not None and device.platform == "cpu":
            self._folder = folder / _digest(_surroundings(device), made_from, self._shapes)
            self._load_ahead(self._folder)

    def program(
        self,
        name: str,
        function: Callable,
        context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        **options: Any,
    ) -> "Program":
        """A function to call with arrays.

        Args:
            name: tells it from the model's other functions.
            function: to be compiled.
            context: in which it is traced.
            options: of `jax.jit`.
        """
        self._functions.append(Program(self, name, function, context, options))
        return self._functions[-1]

    @property
    def count(self) -> int:
        """How many were compiled or loaded."""
        return sum(len(function.programs) for function in self._functions)

    def signature(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a program depends on of the arguments that it is called with."""
        return tuple(
            self._shapes if each is self._parameters else _signature(each) for each in arguments
        )

    def load(self, name: str) -> Any:
        """The program kept under this name, if there is one."""
        if self._folder is None:
            return None
        ahead = self._loading.pop(name, None)
        if ahead is not None and not ahead.cancel():
            return ahead.result()
        return _load(self._folder / name, self._device)

    def save(self, name: str, program: jax.stages.Compiled) -> None:
        """Keeps a program for the next process."""
        if self._folder is None:
            return
        unfinished = self._folder / f".{name}-{os.getpid()}"
        try:
            kept = pickle.dumps(serialize_executable.serialize(program))
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(kept)
            unfinished.replace(self._folder / name)
        except (OSError, ValueError, NotImplementedError) as error:
            logger.warning("compiled programs are not kept in %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._folder = None

    def _load_ahead(self, folder: Path) -> None:
        if not folder.is_dir():
            return
        with contextlib.suppress(OSError):
            os.utime(folder)  # the models used last are kept
            others = sorted(folder.parent.iterdir(), key=lambda path: -path.stat().st_mtime)
            for old in others[MODELS:]:
                shutil.rmtree(old, ignore_errors=True)
        names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))[:AHEAD]
        self._loading = {name: Future() for name in names}
        if names:
            waiting = list(self._loading.items())
            threading.Thread(target=self._load_all, args=(folder, waiting), name="programs").start()

    def _load_all(self, folder: Path, waiting: list[tuple[str, Future[Any]]]) -> None:
        for name, future in waiting:
            if not threading.main_thread().is_alive():  # the process ends: it need not wait
                return
            if future.set_running_or_notify_cancel():
                program = _load(folder / name, self._device)
                with contextlib.suppress(Exception):  # such as no memory: it has run once, or not
                    self._run_on_zeros(program)
                future.set_result(program)

    def _run_on_zeros(self, program: jax.stages.Compiled | None) -> None:
        """The first run prepares products of matrices; so one is made if the model is small, and
        alone."""
        small = sum(x.nbytes for x in self._parameters) <= SMALL
        if program is None or not small or jax.local_device_count() > 1:
            return

        def zeros(x: Any) -> jax.Array:
            return jax.device_put(np.zeros(x.shape, x.dtype), self._device)

        arguments, _ = program.args_info
        jax.block_until_ready(
            program(
                *(
                    self._parameters
                    if _signature(each) == self._shapes
                    else jax.tree.map(zeros, each)
                    for each in arguments
                )
            )
        )


class Program:
    """A function, compiled for every shape of arguments that it is called with.

    Attributes:
        programs: by `Programs.signature`.
    """

    def __init__(
        self,
        owner: Programs,
        name: str,
        function: Callable,
        context: Callable[[], contextlib.AbstractContextManager],
        options: dict[str, Any],
    ):
        self.programs: dict[Any, jax.stages.Compiled] = {}
        self._owner, self._name, self._context = owner, name, context
        self._function = jax.jit(function, **options)
        self._options = repr(sorted(options.items()))

    def __call__(self, *arguments: Any) -> Any:
        shapes = self._owner.signature(arguments)
        program = self.programs.get(shapes)
        if program is None:
            program = self.programs[shapes] = self._make(shapes, arguments)
        return program(*arguments)

    def _make(self, shapes: Any, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        name = f"{self._name}-{_digest(shapes, self._options)}"
        program = self._owner.load(name)
        if program is None:
            before = _hits[0]
            with self._context():
                program = self._function.lower(*arguments).compile()
            if _hits[0] == before:  # what JAX's cache has loaded cannot be saved again
                self._owner.save(name, program)
        return program


def kept_programs() -> Path | None:
    """The folder for all models' programs: in JAX's own cache where the user has one, none if it
    is switched off or not on this machine."""
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    chosen = config.jax_compilation_cache_dir
    if chosen is None:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(caches, "griffin_eval", "programs")
    return None if "://" in chosen else Path(chosen, "griffin_eval")


def _load(path: Path, device: Any) -> Any:
    try:
        payload, inputs, outputs = pickle.loads(path.read_bytes())
        return serialize_executable.deserialize_and_load(
            payload, inputs, outputs, device.client, [device]
        )
    except FileNotFoundError:
        return None
    except Exception as error:  # damaged, or by a version that wrote it otherwise: it is made again
        logger.debug("%s cannot be loaded: %s", path, error)
        return None


def _signature(argument: Any) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(argument)
    return tree, tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves)


def _surroundings(device: Any) -> Iterator[Any]:
    """All that makes what is compiled for the same model differ."""
    files = [*Path(__file__).parent.glob("*"), *(f for folder in CODE for f in folder.rglob("*"))]
    for file in sorted(f for f in files if f.suffix in (".py", ".c", ".so")):
        yield file.name, hashlib.sha256(file.read_bytes()).hexdigest()
    yield [version(library) for library in ("jax", "jaxlib", "flax")], platform.python_version()
    yield device.platform, device.device_kind, device.id, device.client.platform_version
    yield platform.machine(), _processor(), usable_cpus()
    yield sorted((k, repr(v)) for k, v in jax.config.values.items() if "cache" not in k)
    yield os.environ.get("XLA_FLAGS")


def _processor() -> list[str]:
    """What the system says of the processor and what it can do."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        known = ("model name", "flags", "Features", "CPU part")
        return [line for line in first if line.startswith(known)]
    return [platform.processor()]


def _digest(*values: Any) -> str:
    flat = [list(v) if isinstance(v, Iterator) else v for v in values]
    return hashlib.sha256(repr(flat).encode()).hexdigest()[:32]

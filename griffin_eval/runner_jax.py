"""The JAX runner."""

import contextlib
import functools
import logging
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError
from griffin_eval.kernels import attention_cpu_jax
from griffin_eval.kernels.rglru.api import choose
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.model_jax.chunks import has_kernel
from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.model_jax.loading import load
from griffin_eval.model_jax.state import State, gather, nbytes, rewind, store
from griffin_eval.model_jax.state import enter as enter_moved
from griffin_eval.model_jax.state import forget as forget_in
from griffin_eval.programs_jax import Program, Programs, kept_programs
from griffin_eval.runners import (
    DTYPES,
    ROOM,
    attention_tile,
    host_memory,
    in_blocks,
    peak_host_memory,
    step_tokens,
)

RARE = 4  # times that a shape of steps is wanted before it is compiled
SCORED = 64  # scored positions are padded to no fewer

logger = logging.getLogger(__name__)


class Decoding(NamedTuple):
    """States of documents that are continued, with `ROOM`, and how far their windows moved."""

    rows: State
    moved: int


class JaxRunner:
    """`Runner` over `griffin_eval.model_jax`: the model is split once and its methods compiled."""

    framework = "jax"

    def __init__(
        self,
        model: Griffin,
        compiler_options: dict[str, Any] | None = None,
        programs_folder: Path | None = None,
    ):
        weight = model.model.embed_tokens.weight[...]
        self.config = model.config
        self.dtype = weight.dtype.name
        (self._device,) = weight.devices()
        self.device = f"{self._device.platform}:{self._device.id}"
        self.step_tokens = self._full_step = step_tokens(self.device)
        one = jnp.empty((1, 1, 1), weight.dtype)
        gates = Gates(*[one] * 6) if self.config.complex_gates else None
        self.kernel = choose(one, gates, starts=one)
        queries = 1, self._full_step, self.config.num_heads, self.config.head_dim
        attention = "local_attention" in self.config.block_types
        if attention and has_kernel(jax.ShapeDtypeStruct(queries, weight.dtype)):
            self.kernel += ", splash attention in steps of one text"
        if self._device.platform == "cpu":  # registered before a program is loaded that calls it
            attention_cpu_jax.unsupported(jax.ShapeDtypeStruct(queries, weight.dtype))
        graph, values = nnx.split(model)
        self._params, tree = jax.tree.flatten(values)
        made_from = self.config, self.kernel, compiler_options
        self._programs = Programs(self._device, self._params, made_from, programs_folder)

        def merged(params: list[Array]) -> Griffin:
            return nnx.merge(graph, jax.tree.unflatten(tree, params))

        def take(pool: State, sources: Array) -> State:
            return gather(pool, jnp.where(sources < 0, len(pool.pos) - 1, sources))

        def read(
            pool: State,
            params: list[Array],
            tokens: Array,
            lengths: Array,
            sources: Array,
            targets: Array,
            forget: Array | None,
        ) -> tuple[Array, State]:
            state = take(pool, sources)
            if forget is not None:
                state = forget_in(state, recurrent=forget & 1 > 0, attention=forget & 2 > 0)
            tile = attention_tile(len(tokens), len(lengths))
            hidden, after = merged(params).step_packed(tokens, lengths, state, tile)
            # Whatever nobody wants goes to a row that is not there.
            return hidden[0], store(pool, jnp.where(targets < 0, len(pool.pos), targets), after)

        def decode(
            state: State, params: list[Array], tokens: Array, active: Array, moved: Array
        ) -> tuple[Array, State]:
            return merged(params).step_one(tokens, active, state, ROOM, moved)

        def enter(state: State, rows: Array, pool: State, sources: Array, moved: Array) -> State:
            return enter_moved(state, rows, take(pool, sources), moved)

        def grow(larger: State, pool: State) -> State:
            rows = jnp.arange(len(pool.pos) - 1)
            return store(larger, rows, gather(pool, rows))

        def logits(params: list[Array], hidden: Array, at: Array) -> Array:
            return merged(params).logits(hidden[at])

        def greedy(params: list[Array], hidden: Array, at: Array) -> Array:
            return _likeliest(logits(params, hidden, at))

        options = {"compiler_options": compiler_options}
        # The first argument is given up, so that its memory is written again.
        self._read, self._decode, self._enter, self._grow, self._rewind = (
            self._programs.program(name, function, self._exact, donate_argnums=0, **options)
            for name, function in {
                "read": read,
                "decode": decode,
                "enter": enter,
                "grow": grow,
                "rewind": lambda state: rewind(state, ROOM),
            }.items()
        )
        self._logits, self._greedy = (
            self._programs.program(name, function, self._exact, **options)
            for name, function in {"logits": logits, "greedy": greedy}.items()
        )
        self._normalise = {
            dtype: self._programs.program(
                f"normalise {dtype}", functools.partial(_normalise, dtype=dtype), _wide(dtype)
            )
            for dtype in DTYPES
        }
        self._init: dict[tuple[int, int | None, int], Program] = {}
        self._model = model
        # Shapes of steps that are compiled, and how often each was wanted, by size of the pool.
        self._shapes: dict[int, tuple[set[tuple[int, int]], Counter[tuple[int, int]]]] = {}

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str, device: str | None):
        """See `griffin_eval.runners.load_runner`."""
        if dtype == "float64" and not jax.config.read("jax_enable_x64"):
            raise ArgumentError(
                "dtype=float64 in JAX needs the environment variable JAX_ENABLE_X64=1"
            )
        chosen = None if dtype == "auto" else jnp.dtype(dtype)
        folder = kept_programs()  # before JAX's own cache is given a folder
        where = choose_device(device)
        if where.platform != "cpu":
            keep_compilations()
        return cls(load(checkpoint, chosen, where), programs_folder=folder)

    def bucket(self, count: int, smallest: int = 16) -> int:
        return 1 if count == 1 else max(smallest, 1 << (count - 1).bit_length())

    def row_bucket(self, count: int) -> int:
        """Powers of two; above 16 also what lies one to three quarters on the way to the next one,
        if it is a multiple of eight."""
        above = (count - 1).bit_length()
        step = 1 << max(above - 3, min(above, 3))
        return -(-count // step) * step

    def state_bytes(self, capacity: int) -> int:
        return nbytes(jax.eval_shape(lambda: self._model.init_state(1, capacity)))

    def free_memory(self) -> int:
        memory = self._device.memory_stats() or {}
        return memory.get("bytes_limit", host_memory()) - memory.get("bytes_in_use", 0)

    def open_pool(self, rows: int, capacity: int) -> State:
        return self._start(rows + 1, capacity, 0)  # one more, which stays at the start

    def grow_pool(self, pool: State, rows: int, capacity: int) -> State:
        return self._grow(self.open_pool(rows, capacity), pool)

    def read(
        self,
        pool: State,
        tokens: np.ndarray,
        lengths: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
        forget: np.ndarray | None = None,
    ) -> tuple[Array, State]:
        size, rows = self._step_shape(len(tokens), len(lengths), len(pool.pos))
        arrays = (
            self._padded(tokens, size),
            self._padded(lengths, rows),
            self._padded(sources, rows),
            self._padded(targets, rows, -1),
        )
        what = None if forget is None else self._put(self._padded(forget, rows))
        try:
            return self._read(pool, self._params, *map(self._put, arrays), what)
        except RuntimeError:  # such as no memory: what is tried next must not be padded to this
            self._full_step = size // 2
            self._shapes.clear()
            raise

    def _step_shape(self, tokens: int, rows: int, pool: int) -> tuple[int, int]:
        """What to pad a step to. While its own shape is rare it is a full step, or the smallest
        shape that is compiled already, since compiling takes the time of many steps. (What an
        earlier process compiled does not count, so that all processes round alike.)"""
        wanted = self.bucket(tokens), 8 ** math.ceil(math.log(rows, 8))
        compiled, count = self._shapes.setdefault(pool, (set(), Counter()))
        count[wanted] += 1
        if count[wanted] <= RARE and wanted not in compiled:
            full = max(wanted[0], self._full_step), max(wanted[1], 8)
            larger = [s for s in compiled if s[0] >= wanted[0] and s[1] >= wanted[1]]
            wanted = min(larger, default=full)
        compiled.add(wanted)
        return wanted

    def init_state(self, batch: int, capacity: int) -> "Decoding":
        return Decoding(self._start(batch, capacity, ROOM), 0)

    def decode(
        self, tokens: np.ndarray, active: np.ndarray, state: "Decoding"
    ) -> tuple[Array, "Decoding"]:
        rows, moved = state
        if moved == ROOM:
            rows, moved = self._rewind(rows), 0
        arrays = map(self._put, (tokens, active, np.array(moved)))
        hidden, rows = self._decode(rows, self._params, *arrays)
        return hidden, Decoding(rows, moved + 1)

    def enter(
        self, state: "Decoding", rows: np.ndarray, pool: State, sources: np.ndarray
    ) -> "Decoding":
        # One shape, however many rows enter: what is missing goes to a row that is not there.
        batch = len(state.rows.pos)
        rows, sources = self._padded(rows, batch, batch), self._padded(sources, batch)
        arrays = map(self._put, (sources, np.array(state.moved)))
        return Decoding(self._enter(state.rows, self._put(rows), pool, *arrays), state.moved)

    def score(
        self,
        hidden: Array,
        at: np.ndarray,
        targets: np.ndarray,
        which: np.ndarray,
        softmax_dtype: str,
    ) -> tuple[np.ndarray, np.ndarray]:
        logprobs = np.empty(len(targets), np.float64)
        greedy = np.empty(len(targets), bool)
        normalise, wide = self._normalise[softmax_dtype], _wide(softmax_dtype)
        first = 0
        for positions, mine in in_blocks(at, which, self.config.vocab_size):
            logits = self._logits_at(hidden, positions)
            size = self.bucket(len(mine), SCORED)
            row = self._padded(which[mine] - first, size)
            target = self._padded(targets[mine], size)
            with wide():
                chosen, best = normalise(logits, self._put(row), self._put(target))
            logprobs[mine] = np.asarray(chosen, np.float64)[: len(mine)]
            greedy[mine] = (np.asarray(best) == target)[: len(mine)]
            first += len(positions)
        return logprobs, greedy

    def logits(self, hidden: Array, at: np.ndarray) -> np.ndarray:
        return np.asarray(self._logits_at(hidden, at))[: len(at)]

    def greedy(self, hidden: Array, at: np.ndarray) -> np.ndarray:
        return np.asarray(self._greedy(self._params, hidden, self._put(at)))

    def peak_memory(self) -> int:
        memory = self._device.memory_stats() or {}
        return memory.get("peak_bytes_in_use") or peak_host_memory()

    @property
    def compilations(self) -> int:
        return self._programs.count

    def _start(self, batch: int, capacity: int, room: int) -> State:
        """`Griffin.init_state`."""
        needed = "global_attention" in self.config.block_types
        sizes = batch, capacity if needed else None, room
        if sizes not in self._init:
            self._init[sizes] = self._programs.program(
                f"start {sizes}",
                functools.partial(self._model.init_state, *sizes),
                # Placed as what steps return is.
                out_shardings=jax.sharding.SingleDeviceSharding(self._device),
            )
        return self._init[sizes]()

    def _logits_at(self, hidden: Array, at: np.ndarray) -> Array:
        positions = self._put(self._padded(at, self.bucket(len(at), SCORED)))
        return self._logits(self._params, hidden, positions)

    @staticmethod
    def _padded(array: np.ndarray, length: int, value: int = 0) -> np.ndarray:
        return np.pad(array, (0, length - len(array)), constant_values=value)

    def _put(self, array: np.ndarray) -> Array:
        return jax.device_put(array.astype(np.int32), self._device)

    def _exact(self):
        # Accelerators multiply float32 in bfloat16 passes unless told otherwise.
        return jax.default_matmul_precision(
            "default" if self.dtype in ("bfloat16", "float16") else "highest"
        )


def keep_compilations() -> None:
    """Keeps what is compiled for the next process, unless the user has said where, or not to."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(caches, "griffin_eval", "jax")
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)


def _wide(dtype: str) -> Callable[[], contextlib.AbstractContextManager]:
    return functools.partial(jax.enable_x64, True) if dtype == "float64" else contextlib.nullcontext


def _normalise(logits: Array, row: Array, target: Array, dtype: str) -> tuple[Array, Array]:
    logits = logits.astype(dtype)
    total = jax.nn.logsumexp(logits, axis=1)
    return logits[row, target] - total[row], _likeliest(logits)[row]


def _likeliest(logits: Array) -> Array:
    """The first of the largest of each row, or -1 where one is NaN. (On a CPU argmax takes several
    times as long.)"""
    place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    largest = logits == jnp.max(logits, axis=1, keepdims=True)
    first = jnp.min(jnp.where(largest, place, logits.shape[1]), axis=1)
    return jnp.where(first == logits.shape[1], -1, first)


def choose_device(device: str | None) -> Any:
    """The jax.Device asked for; lm_eval asks for cuda:0 unless told otherwise, so where none is
    there (or None is given) it is JAX's default device, and the log says so.

    Raises:
        ArgumentError: not the name of a device.
    """
    best = jax.devices()[0]
    if device is None:
        logger.info("running on %s", best)
        return best
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "gpu", "cuda", "rocm", "tpu") or not (index or "0").isdigit():
        raise ArgumentError(f"unknown device {device!r}: expected cpu, gpu, cuda:N or tpu:N")
    try:
        return jax.devices(kind)[int(index or 0)]
    except (RuntimeError, IndexError):
        logger.info("there is no device %s here: running on %s", device, best)
        return best


def other_devices(chosen: str, device: str | None) -> list[str]:
    """The local devices beside the chosen one that were meant too, since none was named."""
    platform, _, index = chosen.partition(":")
    kind, _, number = (device or "").partition(":")
    same = kind == platform or (kind, platform) in (("cuda", "gpu"), ("rocm", "gpu"))
    if number == index and same:
        return []
    names = [f"{platform}:{i}" for i in range(len(jax.local_devices(backend=platform)))]
    return [name for name in names if name != chosen]

"""The JAX runner."""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from griffin_eval.arguments import DTYPES
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.attention import api as attention_api
from griffin_eval.kernels.cpu.compiled import register_ffi_targets
from griffin_eval.kernels.rglru.api import choose
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.model_jax.decoding import DecodingState
from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.model_jax.loading import load, load_packed
from griffin_eval.model_jax.state import PoolRows, State, nbytes, scatter, without_attention
from griffin_eval.runners import jax_functions, kept_programs
from griffin_eval.runners.batching import (
    decode_rows,
    host_memory,
    logit_blocks,
    peak_host_memory,
    rows_or_start,
    step_rows,
    step_tokens,
)
from griffin_eval.runners.compiled_jax import ExecutableCache, cache_folder
from griffin_eval.runners.devices import chosen_device
from griffin_eval.runners.jax_functions import x64_if
from griffin_eval.sharding.mesh_jax import make_mesh
from griffin_eval.sharding.split import MODEL, split_over
from griffin_eval.states.saved_state import SavedState, tensors_of

COMPILE_AFTER_USES = 4  # uses of a step shape that are padded to a larger shape first
TOPS = (1, 5, 20)  # values of ``top`` that are compiled for
SCORED = 64  # minimum number that scored positions are padded to


class JaxRunner:
    """The `griffin_eval.runners.protocol.Runner` of `griffin_eval.model_jax`, on one device or a
    mesh. The model's methods are compiled once for every padded shape.

    ``compiler_options`` are those of `jax.jit`. ``executables`` is the folder of all models'
    executables; None to keep none.
    """

    framework = "jax"

    def __init__(
        self,
        model: Griffin,
        compiler_options: dict[str, Any] | None = None,
        executables: Path | None = None,
    ):
        weight = model.model.embed_tokens.weight[...]
        self.config, self.model = model.config, model
        self._saved: SavedState | None = None
        self.dtype = weight.dtype.name
        array = jax.tree.leaves(weight)[0]  # the first of several if it is quantised
        sharding: Any = array.sharding
        self._mesh: Any = sharding.mesh if isinstance(sharding, NamedSharding) else None
        self._devices = list(array.devices() if self._mesh is None else self._mesh.devices.flat)
        self.device = "+".join(f"{each.platform}:{each.id}" for each in self._devices)
        self.devices = len(self._devices)
        self._shards = split_over(self.config, self.devices)
        self.step_tokens = self._full_step = step_tokens(self.device)
        self.step_rows, self.decode_rows = step_rows(self.device), decode_rows(self.device)
        one = jnp.ones((1, 1, 1), weight.dtype)
        gates = Gates(*[one] * 6) if self.config.complex_gates else None
        with self._there():
            self.kernel = choose(one, gates, starts=one, c=self.config.lru_constant).name
        shape = 1, self._full_step, self.config.num_heads, self.config.head_size
        queries = jax.ShapeDtypeStruct(shape, weight.dtype)
        joined = *shape[:2], self.config.kv_width
        keys = jax.ShapeDtypeStruct(joined, weight.dtype)
        with self._there():
            packed = attention_api.choose(queries, keys, keys, lengths=[1, 1], starts=[0, 1]).name
            alone = attention_api.choose(queries, keys, keys).name
        differs = f", {alone} in steps of one text" * (alone != packed)
        attends = set(self.config.block_types) != {"recurrent"}
        self.attention_kernel = packed + differs if attends else "none"
        self._reads_in_place = packed == "cpu"
        if self._devices[0].platform == "cpu":  # cached programs that call a kernel need it
            register_ffi_targets()
        split, self._params = jax_functions.split(model)
        self._tree = split.tree
        depends_on = (
            *(self.config, self.kernel, self.attention_kernel, compiler_options),
            self._tree,  # contains the quantisation of matrices
        )
        self._cache = ExecutableCache(self._devices, self._params, depends_on, executables)

        def compiled(
            name: str,
            function: Callable[..., Any],
            results: Any,
            context: Callable[[], contextlib.AbstractContextManager] = self._precision,
            **options: Any,
        ) -> Callable[..., Any]:
            return self._cache.compiled(
                name,
                function,
                functools.partial(self._traced, context),
                out_shardings=results,
                **options,
            )

        bound = functools.partial
        # Output shardings, so that the next call takes results without a copy.
        pool, decoding, vocabulary, whole = self._result_shardings()
        # Donate the first argument, so that its memory is reused.
        donated: Any = {"donate_argnums": 0, "compiler_options": compiler_options}
        self._read = compiled("read", bound(jax_functions.read, split), (whole, pool), **donated)
        self._grow = compiled("grow", jax_functions.grow, pool, **donated)
        self._write = compiled("write", scatter, pool, **donated)
        self._row = compiled("row", bound(jax_functions.row_of, weight.dtype), whole)
        self._insert = compiled("insert", DecodingState.insert, decoding, **donated)
        self._decode = compiled(
            "decode", bound(jax_functions.decode_step, split), (whole, decoding), **donated
        )
        kept: Any = {"compiler_options": compiler_options}
        self._logits = compiled("logits", bound(jax_functions.logits, split), vocabulary, **kept)
        self._greedy = compiled("greedy", bound(jax_functions.greedy, split), whole, **kept)
        measures: dict[str, Callable[..., Any]] = {
            "": jax_functions.normalise,
            "details ": jax_functions.normalise_details,
        }
        measures |= {f"top {top} ": bound(jax_functions.normalise_top, top) for top in TOPS}
        self._normalise = {
            (measure, dtype): compiled(
                f"normalise {measure}{dtype}",
                bound(function, dtype),
                whole,
                functools.partial(x64_if, dtype == "float64"),
            )
            for measure, function in measures.items()
            for dtype in DTYPES
        }
        self._starts: dict[str, Callable[[], Any]] = {}
        # Step shapes in use since a pool was opened, and how often each was wanted, by pool rows.
        self._shapes: dict[int, tuple[set[tuple[int, int]], Counter[tuple[int, int]]]] = {}

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str, devices: list[Any], packed: bool = False):
        """Load a checkpoint onto one device, or a part of it onto each of several. See
        `griffin_eval.runners.load.load_runners`."""
        if dtype == "float64" and not jax.config.read("jax_enable_x64"):
            raise ArgumentError(
                "dtype=float64 in JAX needs the environment variable JAX_ENABLE_X64=1"
            )
        chosen = None if dtype == "auto" else jnp.dtype(dtype)
        # Read before JAX's own cache gets a folder. Several processes keep no programs.
        folder = cache_folder() if jax.process_count() == 1 else None
        if devices[0].platform != "cpu":
            keep_compilations()
        where = devices[0] if len(devices) == 1 else make_mesh(devices)
        model = (load_packed if packed else load)(checkpoint, chosen, where)
        return cls(model, executables=folder)

    def _state_sharding(self, state: Any) -> Any:
        """Return the shardings of a state's leaves."""
        if self._mesh is None:
            return SingleDeviceSharding(self._devices[0])
        return jax_functions.state_shardings(self._mesh, self._shards, state)

    def _result_shardings(self) -> tuple[Any, Any, Any, Any]:
        """Return the shardings of pools, decoding states, logits, and everything else."""
        pool = jax.eval_shape(lambda: self.model.init_state(1, 1))
        decoding = jax.eval_shape(lambda: DecodingState.start(self.model, 1, 1))
        whole = vocabulary = SingleDeviceSharding(self._devices[0])
        if self._mesh is not None:
            whole = NamedSharding(self._mesh, PartitionSpec())
            split = None if "vocab" in self._shards.whole else MODEL
            vocabulary = NamedSharding(self._mesh, PartitionSpec(None, split))
        return self._state_sharding(pool), self._state_sharding(decoding), vocabulary, whole

    def _pooled(self, state: State) -> State:
        """Return a state in the form that it has between steps."""
        return jax_functions.as_bits(state) if self._reads_in_place else state

    def _init_pool(self, rows: int, capacity: int | None) -> State:
        return self._pooled(self.model.init_state(rows, capacity))

    def _init_rows(self, batch: int, capacity: int | None) -> DecodingState:
        return DecodingState(self._pooled(DecodingState.start(self.model, batch, capacity).rows))

    def _traced(
        self, context: Callable[[], contextlib.AbstractContextManager]
    ) -> contextlib.AbstractContextManager:
        """Return the context in which a function is traced."""
        stack = contextlib.ExitStack()
        stack.enter_context(context())
        stack.enter_context(self._there())
        if self._mesh is not None:
            stack.enter_context(jax.set_mesh(self._mesh))
        return stack

    def _there(self) -> contextlib.AbstractContextManager:
        """Return a context in which kernels are chosen for the model's device, not the default."""
        if self._mesh is not None or self._devices[0].platform == jax.default_backend():
            return contextlib.nullcontext()
        return jax.default_device(self._devices[0])

    def padded_tokens(self, count: int, smallest: int = 16) -> int:
        return 1 if count == 1 else max(smallest, 1 << (count - 1).bit_length())

    def padded_batch(self, count: int) -> int:
        # 1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, …: a power of two, then
        # steps of a quarter of it that are multiples of 8, since padding costs as much as rows do.
        above = (count - 1).bit_length()
        step = 1 << max(above - 3, min(above, 3))
        return -(-count // step) * step

    def state_bytes(self, capacity: int) -> int:
        return self._bytes_a_device(self._start_shapes(capacity))

    def step_bytes(self, capacity: int) -> int:
        state = self._start_shapes(capacity)
        return self._bytes_a_device(without_attention(state) if self._reads_in_place else state)

    def _bytes_a_device(self, state: State) -> int:
        if self._mesh is None:
            return nbytes(state)
        where = jax.tree.leaves(self._state_sharding(state))
        leaves = zip(jax.tree.leaves(state), where, strict=True)
        return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves)

    def free_memory(self) -> int:
        memory = self._devices[0].memory_stats()
        if not memory:  # CPU devices share the host's memory
            return host_memory() // len(self._devices)
        return memory.get("bytes_limit", host_memory()) - memory.get("bytes_in_use", 0)

    def open_pool(self, rows: int, capacity: int) -> State:
        # Answers depend on the padding through rounding, so steps are padded as in a new process.
        self._shapes.clear()
        # The last row holds the start state.
        capacity = self._with_saved(capacity)
        pool = self._started("start pool", self._init_pool, rows + 1, capacity)
        if self._saved is None:
            return pool
        return self.write_state(pool, rows, self._saved.tensors, self._saved.read, capacity)

    def grow_pool(self, pool: State, rows: int, capacity: int) -> State:
        return self._grow(self.open_pool(rows, capacity), pool)

    def start_from(self, saved: SavedState) -> None:
        self._saved = saved

    def state_tensors(self, pool: State, row: int, read: int) -> dict[str, np.ndarray]:
        wide = np.float64 if pool.layers[0][0].dtype == np.float64 else np.float32
        rows = self._row(list(pool.layers), self._int32(np.array(row)))
        layers = jax.tree.map(lambda leaf: np.asarray(leaf, wide), rows)
        return tensors_of([layer._asdict() for layer in layers], read)

    def _with_saved(self, capacity: int) -> int:
        return capacity if self._saved is None else self.padded_tokens(capacity + self._saved.read)

    def _start_shapes(self, capacity: int) -> State:
        """Return the shapes of the state of a document with ``capacity`` tokens of its own."""
        capacity = self._with_saved(capacity)
        return jax.eval_shape(lambda: self.model.init_state(1, capacity))

    def write_state(
        self, pool: State, row: int, tensors: dict[str, np.ndarray], read: int, capacity: int
    ) -> State:
        shapes = jax.eval_shape(lambda: self.model.init_state(1, capacity))
        layers: list[Any] = []
        for index, layer in enumerate(shapes.layers):
            leaves = {}
            for name, leaf in layer._asdict().items():
                saved = tensors[f"layers.{index}.{name}"]
                leaves[name] = np.zeros(leaf.shape, leaf.dtype)
                leaves[name][0, leaf.shape[1] - len(saved) :] = saved
            layers.append(type(layer)(**leaves))
        pos, start = map(jnp.int32, ([read], [0]))
        state = self._pooled(State(pos, start, tuple(layers)))
        return self._write(pool, self._int32(np.array([row])), state)

    def read(
        self,
        pool: State,
        tokens: np.ndarray,
        lengths: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
        ablations: np.ndarray | None = None,
    ) -> tuple[Array, State]:
        pool_rows = len(pool.pos)
        size, rows = self._step_shape(len(tokens), len(lengths), pool_rows)
        kept = np.flatnonzero(targets >= 0)

        def padded(array: np.ndarray, value: int = 0) -> Any:
            return self._int32(self._padded(array, rows, value))

        states = PoolRows(
            padded(rows_or_start(sources, pool_rows)),
            padded(kept),
            padded(targets[kept], pool_rows),  # padding is out of range, so it is not written
        )
        ids = self._int32(self._padded(tokens, size))
        lost = None if ablations is None else padded(ablations)
        try:
            return self._read(pool, self._params, ids, padded(lengths), states, lost)
        except RuntimeError:  # maybe out of memory: never pad steps to this size again
            self._full_step = size // 2
            self._shapes.clear()
            raise

    def _step_shape(self, tokens: int, rows: int, pool: int) -> tuple[int, int]:
        """Return the numbers of tokens and rows to pad a step to.

        Compilation takes as long as many steps, so a shape is compiled only after
        `COMPILE_AFTER_USES` uses; before, the step is padded to the smallest larger shape in use,
        or to a full step. Shapes compiled by earlier calls or processes do not count, so that the
        same requests are always padded alike and get bit-identical results.
        """
        base = 64 if self._reads_in_place else 8  # rows that are not copied cost nothing
        most = max(self.step_rows, rows)
        wanted = self.padded_tokens(tokens), min(base ** math.ceil(math.log(rows, base)), most)
        used, count = self._shapes.setdefault(pool, (set(), Counter()))
        count[wanted] += 1
        if count[wanted] <= COMPILE_AFTER_USES and wanted not in used:
            full = max(wanted[0], self._full_step), max(wanted[1], base)
            larger = [s for s in used if s[0] >= wanted[0] and s[1] >= wanted[1]]
            wanted = min(larger, default=full)
        used.add(wanted)
        return wanted

    def start_decoding(self, batch: int, capacity: int) -> DecodingState:
        return self._started("start decoding", self._init_rows, batch, self._with_saved(capacity))

    def insert_rows(
        self, state: DecodingState, rows: np.ndarray, pool: State, sources: np.ndarray
    ) -> DecodingState:
        # One shape for any number of rows: padding is out of range, so it is not written.
        batch = len(state.rows.pos)
        written = self._int32(self._padded(rows, batch, batch))
        read = self._int32(self._padded(rows_or_start(sources, len(pool.pos)), batch))
        return self._insert(state, written, pool, read)

    def decode_step(
        self, state: DecodingState, tokens: np.ndarray, active: np.ndarray
    ) -> tuple[Array, DecodingState]:
        return self._decode(state, self._params, self._int32(tokens), self._int32(active))

    def score(
        self,
        hidden: Array,
        positions: np.ndarray,
        targets: np.ndarray,
        position_of: np.ndarray,
        softmax_dtype: str,
        *,
        details: bool = False,
        top: int = 0,
    ) -> tuple[np.ndarray, ...]:
        measure = "details " if details else ""
        if top:
            measure = f"top {next(most for most in TOPS if most >= top)} "
        normalise = self._normalise[measure, softmax_dtype]
        found, places, first = [], [], 0
        for block, mine in logit_blocks(positions, position_of, self.config.vocab_size):
            logits = self._logits_at(hidden, block)
            size = self.padded_tokens(len(mine), SCORED)
            row = self._padded(position_of[mine] - first, size)
            target = self._padded(targets[mine], size)
            with x64_if(softmax_dtype == "float64"):
                results = normalise(logits, self._int32(row), self._int32(target))
            found.append([np.asarray(result)[: len(mine)] for result in results])
            places.append(mine)
            first += len(block)
        in_order = np.argsort(np.concatenate(places))
        logprobs, *rest = (np.concatenate(parts)[in_order] for parts in zip(*found, strict=True))
        logprobs = logprobs.astype(np.float64)
        if top:
            tokens, likeliest = (each[:, :top] for each in rest)
            return logprobs, tokens.astype(np.int64), likeliest.astype(np.float64)
        if details:
            best, ranks, entropies = rest
            return logprobs, best == targets, ranks.astype(np.int64), entropies.astype(np.float64)
        return logprobs, rest[0] == targets

    def logits(self, hidden: Array, positions: np.ndarray) -> np.ndarray:
        logits = self._logits_at(hidden, positions)
        if not logits.is_fully_addressable:  # each process has a part of the vocabulary
            logits = multihost_utils.process_allgather(logits, tiled=True)
        return np.asarray(logits)[: len(positions)]

    def greedy(self, hidden: Array, positions: np.ndarray) -> np.ndarray:
        return np.asarray(self._greedy(self._params, hidden, self._int32(positions)))

    def stage(self, checkpoint: Checkpoint) -> Griffin:
        try:
            host = jax.devices("cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS excludes the CPU
            host = self._devices[0]
        return load(checkpoint, jnp.dtype(self.dtype), host)

    def adopt(self, staged: Griffin) -> None:
        _, params = jax_functions.split(staged)
        for index, param in enumerate(params):
            self._params[index] = jax.device_put(param, self._params[index].sharding)
        nnx.update(self.model, jax.tree.unflatten(self._tree, self._params))
        self._shapes.clear()  # pad steps as in a new process

    def peak_memory(self) -> int:
        memory = self._devices[0].memory_stats() or {}
        return memory.get("peak_bytes_in_use") or peak_host_memory()

    @property
    def compilations(self) -> int:
        return self._cache.count

    def _started(self, name: str, start: Callable[..., Any], batch: int, capacity: int) -> Any:
        """Return the compiled ``start(batch, capacity)``. Without global attention, its size does
        not depend on the capacity, so one executable serves every capacity."""
        needed = "global_attention" in self.config.block_types
        sizes = batch, capacity if needed else None
        key, function = f"{name} {sizes}", functools.partial(start, *sizes)
        if key not in self._starts:
            # The same shardings as those of states that steps return.
            where = self._state_sharding(jax.eval_shape(function))
            self._starts[key] = self._cache.compiled(key, function, out_shardings=where)
        return self._starts[key]()

    def _logits_at(self, hidden: Array, positions: np.ndarray) -> Array:
        padded = self._padded(positions, self.padded_tokens(len(positions), SCORED))
        return self._logits(self._params, hidden, self._int32(padded))

    @staticmethod
    def _padded(array: np.ndarray, length: int, value: int = 0) -> np.ndarray:
        return np.pad(array, (0, length - len(array)), constant_values=value)

    @staticmethod
    def _int32(array: np.ndarray) -> np.ndarray:
        # A private copy: an executable places it faster than `device_put` does.
        return array.astype(np.int32)

    def _precision(self):
        # By default accelerators multiply float32 in bfloat16 passes.
        return jax.default_matmul_precision(
            "default" if self.dtype in ("bfloat16", "float16") else "highest"
        )


def keep_compilations() -> None:
    """Enable JAX's own compilation cache, with a size limit, unless the user has configured it or
    others may write to the folder."""
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        folder = kept_programs.home() / "jax"
        if not (kept_programs.is_ours(folder.parent) and kept_programs.is_ours(folder)):
            return
        with contextlib.suppress(OSError):  # JAX reports it when it writes
            kept_programs.make_folder(folder.parent)
            kept_programs.make_folder(folder)
        kept_programs.hold_limit([folder, folder.with_name("programs")])
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)


def choose_device(device: str | None) -> Any:
    """Return the jax.Device to run on, see `griffin_eval.runners.devices.chosen_device`."""
    return chosen_device(device, jax.local_devices()[0], _find_device)


def _find_device(name: str) -> Any | None:
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "gpu", "cuda", "rocm", "tpu") or not (index or "0").isdigit():
        raise ArgumentError(f"unknown device {name!r}: expected cpu, gpu, cuda:N or tpu:N")
    try:
        return jax.local_devices(backend=kind)[int(index or 0)]
    except (RuntimeError, IndexError):
        return None


def devices_of_runners(device: str | None, tensor_parallel: int, data_parallel: int | None):
    """Return the devices of each of ``data_parallel`` runners, or raise ArgumentError.

    None stands for as many runners as the devices make, or one if ``device`` has a number.
    """
    chosen = choose_device(device)
    there = jax.local_devices(backend=chosen.platform)
    kind, _, number = (device or "").partition(":")
    same = kind == chosen.platform or (kind, chosen.platform) in (("cuda", "gpu"), ("rocm", "gpu"))
    by_number = same and number == str(chosen.id)
    ordered = [chosen, *(other for other in there if other != chosen)]
    runners = data_parallel or (1 if by_number else max(len(there) // tensor_parallel, 1))
    if runners * tensor_parallel > len(there):
        raise ArgumentError(
            f"tensor_parallel_size={tensor_parallel} and data_parallel_size={runners} need "
            f"{runners * tensor_parallel} devices, and this process has {len(there)} of "
            f"{chosen.platform}"
        )
    return [ordered[i * tensor_parallel : (i + 1) * tensor_parallel] for i in range(runners)]

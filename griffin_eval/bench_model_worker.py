"""One implementation of the model, in a process that `griffin_eval.bench_model` asks to work.

``python -m griffin_eval.bench_model_worker NAME FOLDER`` loads the checkpoint in a folder, then
reads requests from stdin, a JSON object each line: ``do``, a method of `Worker`, and its arguments.
Every answer is a line of JSON on stdout.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from griffin_eval.bench_worker import products_jax, products_torch
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.runners import ROOM, step_tokens

KEPT = 32  # positions of a document whose logits are compared
CHECKED = 3  # tokens after the prompts whose logits are compared
STEP = step_tokens("cpu")  # tokens that ours read at a time, as when they evaluate


class Implementation(Protocol):
    """A model as a benchmark uses it; what it returns has been computed, not only asked for."""

    def __init__(self, checkpoint: Checkpoint): ...

    def read(self, tokens: np.ndarray, every: bool) -> Any:
        """Reads int32 [1, T] from the start and keeps what decoding would need.

        Returns:
            Logits [T, V] of every position, or [1, V] of the last one. DeepMind's code gives all
            or none; asked for the last, it gives None.
        """
        ...

    def begin(self, tokens: np.ndarray) -> Any:
        """A state that has read int32 [B, T]."""
        ...

    def decode(self, state: Any, tokens: np.ndarray) -> tuple[Any, Any]:
        """Reads int32 [B]; logits [B, V] and the state after it. The state before may be lost."""
        ...


def make_torch(checkpoint: Checkpoint) -> Implementation:
    """`griffin_eval.model_torch`."""
    import torch

    from griffin_eval.model_torch.loading import load
    from griffin_eval.model_torch.state import enter, rewind
    from griffin_eval.runner_torch import keep_freed_memory

    keep_freed_memory()
    model = load(checkpoint, torch.float32).eval()

    class Torch:
        def read(self, tokens, every):
            hidden, _ = self._read(tokens)
            return model.logits(torch.cat(hidden, 1)[0] if every else hidden[-1][0, -1:])

        def begin(self, tokens):
            rows = model.init_state(len(tokens), room=ROOM)
            return enter(rows, torch.arange(len(tokens)), self._read(tokens)[1], 0), 0

        def decode(self, state, tokens):
            rows, moved = state
            if moved == ROOM:
                rows, moved = rewind(rows, ROOM), 0
            ones = torch.ones(len(tokens), dtype=torch.int64)
            hidden, rows = model.step_one(torch.from_numpy(tokens), ones, rows, ROOM, moved)
            return model.logits(hidden), (rows, moved + 1)

        def _read(self, tokens):
            state, hidden = model.init_state(len(tokens)), []
            for chunk in torch.from_numpy(tokens).split(STEP, 1):
                lengths = torch.full((len(tokens),), chunk.shape[1])
                h, state = model.step(chunk, lengths, state)
                hidden.append(h)
            return hidden, state

    return Torch()  # type: ignore[return-value]


def make_jax(checkpoint: Checkpoint) -> Implementation:
    """`griffin_eval.model_jax`: its methods compiled, the state given up, as the runner does."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from griffin_eval.model_jax.loading import load
    from griffin_eval.model_jax.state import enter, rewind

    model = load(checkpoint, jnp.float32)
    graph, params = nnx.split(model)

    def step(state, params, tokens):
        lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
        return nnx.merge(graph, params).step(tokens, lengths, state)

    def logits(params, hidden):
        return nnx.merge(graph, params).logits(hidden)

    def decode(rows, params, tokens, moved):
        active = jnp.ones(len(tokens), jnp.int32)
        hidden, rows = nnx.merge(graph, params).step_one(tokens, active, rows, ROOM, moved)
        return logits(params, hidden), rows

    read_chunk, read_one, back, take = (
        jax.jit(function, donate_argnums=0)
        for function in (step, decode, lambda rows: rewind(rows, ROOM), enter)
    )
    compiled_logits = jax.jit(logits)

    class Jax:
        def read(self, tokens, every):
            hidden, state = self._read(tokens)
            wanted = jnp.concatenate(hidden, 1)[0] if every else hidden[-1][0, -1:]
            return jax.block_until_ready((compiled_logits(params, wanted), state))[0]

        def begin(self, tokens):
            rows = model.init_state(len(tokens), room=ROOM)
            return take(rows, jnp.arange(len(tokens)), self._read(tokens)[1], 0), 0

        def decode(self, state, tokens):
            rows, moved = state
            if moved == ROOM:
                rows, moved = back(rows), 0
            found, rows = jax.block_until_ready(read_one(rows, params, tokens, moved))
            return found, (rows, moved + 1)

        def _read(self, tokens):
            state, hidden = model.init_state(len(tokens)), []
            for start in range(0, tokens.shape[1], STEP):
                h, state = read_chunk(state, params, tokens[:, start : start + STEP])
                hidden.append(h)
            return hidden, state

    return Jax()  # type: ignore[return-value]


def make_transformers(checkpoint: Checkpoint) -> Implementation:
    """transformers' RecurrentGemmaForCausalLM. Its cache holds keys and values; what its recurrent
    blocks remember they keep to themselves, so that it is taken out and put back."""
    import torch
    from transformers import DynamicCache, RecurrentGemmaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = RecurrentGemmaForCausalLM.from_pretrained(
        checkpoint.folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    blocks: list[Any] = [
        layer.temporal_block
        for layer, kind in zip(model.model.layers, checkpoint.config.block_types, strict=True)
        if kind == "recurrent"
    ]

    class Transformers:
        def read(self, tokens, every):
            return self._call(tokens, DynamicCache(config=model.config), not every)[0]

        def begin(self, tokens):
            for block in blocks:
                block.conv1d_state = None
            cache = DynamicCache(config=model.config)
            self._call(tokens, cache, True)
            return cache, self._taken()

        def decode(self, state, tokens):
            cache, memory = state
            for block, (conv, h) in zip(blocks, memory, strict=True):
                block.conv1d_state, block.rg_lru.recurrent_states = conv, h
            logits = self._call(tokens[:, None], cache, True)[:, 0]
            return logits, (cache, self._taken())

        def _taken(self):
            return [(b.conv1d_state, b.rg_lru.recurrent_states) for b in blocks]

        def _call(self, tokens, cache, last):
            return model(
                input_ids=torch.from_numpy(tokens).long(),
                use_cache=True,
                past_key_values=cache,
                logits_to_keep=int(last),
            ).logits

    return Transformers()  # type: ignore[return-value]


def make_deepmind_torch(checkpoint: Checkpoint) -> Implementation:
    """DeepMind's recurrentgemma in PyTorch."""
    import torch
    from recurrentgemma.torch.griffin import Griffin

    from griffin_eval.verify_logits import deepmind_config

    model = Griffin(
        deepmind_config(checkpoint.config), gradient_checkpointing=False, dtype=torch.float32
    )
    weights = {n: torch.from_numpy(a) for n, a in _foreign(checkpoint, "deepmind-torch").items()}
    model.load_state_dict(weights, assign=True)

    def call(tokens, position, cache, **options):
        length = tokens.shape[1]
        positions = torch.arange(position, position + length).expand(len(tokens), length)
        return model(torch.from_numpy(tokens).long(), positions, cache, **options)

    class DeepMindTorch:
        def read(self, tokens, every):
            logits, _ = call(tokens, 0, None, return_logits=every)
            return logits if logits is None else logits[0]

        def begin(self, tokens):
            return tokens.shape[1], call(tokens, 0, None, return_logits=False)[1]

        def decode(self, state, tokens):
            position, cache = state
            logits, cache = call(tokens[:, None], position, cache)
            return logits[:, 0], (position + 1, cache)

    return DeepMindTorch()  # type: ignore[return-value]


def make_deepmind_jax(checkpoint: Checkpoint) -> Implementation:
    """DeepMind's recurrentgemma in JAX, compiled, the cache given up while decoding."""
    import jax
    import jax.numpy as jnp
    from recurrentgemma.jax.griffin import Griffin

    from griffin_eval.verify_logits import deepmind_config

    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    model = Griffin(deepmind_config(checkpoint.config), gradient_checkpointing=False)
    params: dict[str, Any] = {}
    for name, array in _foreign(checkpoint, "deepmind-flax").items():
        *path, leaf = name.split("/")
        node = params
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = jnp.asarray(array)

    def call(cache, params, tokens, position, logits):
        positions = position + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(positions, tokens.shape)
        return model.apply({"params": params}, tokens, positions, cache, return_logits=logits)

    call = jax.jit(call, donate_argnums=0, static_argnums=4)

    class DeepMindJax:
        def read(self, tokens, every):
            logits, _ = jax.block_until_ready(call(None, params, tokens, 0, every))
            return logits if logits is None else logits[0]

        def begin(self, tokens):
            return tokens.shape[1], call(None, params, tokens, 0, False)[1]

        def decode(self, state, tokens):
            position, cache = state
            logits, cache = jax.block_until_ready(
                call(cache, params, tokens[:, None], position, True)
            )
            return logits[:, 0], (position + 1, cache)

    return DeepMindJax()  # type: ignore[return-value]


def _foreign(checkpoint: Checkpoint, name: str) -> dict[str, np.ndarray]:
    """The weights as a format names and lays them out."""
    from griffin_eval.converters.formats import FORMATS
    from griffin_eval.converters.naming import bind

    return {
        binding.foreign: np.array(
            binding.op.to_foreign(*(checkpoint.numpy(s.name) for s in binding.canonical)), order="C"
        )
        for binding in bind(FORMATS[name].table, checkpoint.config)
    }


MAKERS: dict[str, Callable[[Checkpoint], Implementation]] = {
    "torch": make_torch,
    "jax": make_jax,
    "transformers": make_transformers,
    "deepmind-torch": make_deepmind_torch,
    "deepmind-jax": make_deepmind_jax,
}


def draw_tokens(vocab_size: int, batch: int, length: int) -> np.ndarray:
    """Random tokens, int32 [B, T], the same for the same arguments."""
    rng = np.random.default_rng([batch, length])
    return rng.integers(vocab_size, size=(batch, length), dtype=np.int32)


class Worker:
    """What can be asked of an implementation."""

    def __init__(self, name: str, folder: str):
        self._checkpoint = Checkpoint(folder)
        self._config = self._checkpoint.config
        self._model = MAKERS[name](self._checkpoint)
        self._states: dict[int, Any] = {}

    def check(self, tokens: int, batches: list[int], prompt: int, path: str) -> dict[str, Any]:
        """Compiles, warms up, starts decoding, and writes logits to compare to an .npz file.

        Args:
            tokens: of the document that `read` reads.
            batches: that `decode` will be asked for.
            prompt: tokens that their rows have read before.
            path: of the file.
        """
        document = draw_tokens(self._config.vocab_size, 1, tokens)
        keep = np.unique(np.linspace(0, tokens - 1, KEPT).astype(int))
        every = np.asarray(self._model.read(document, True)).reshape(tokens, -1)
        found = {"prefill, all logits": every[keep]}
        last = self._model.read(document, False)
        if last is not None:
            found["prefill"] = np.asarray(last).reshape(1, -1)
        for batch in batches:
            rows = draw_tokens(self._config.vocab_size, batch, prompt + CHECKED)
            state, logits = self._model.begin(rows[:, :prompt]), []
            for i in range(prompt, prompt + CHECKED):
                step, state = self._model.decode(state, rows[:, i].copy())
                logits.append(np.array(step))
            found[f"decode, batch {batch}"] = np.stack(logits)
            self._states[batch] = state
        np.savez(path, **found)  # type: ignore[arg-type]
        return {}

    def read(self, tokens: int, every: bool) -> dict[str, float]:
        """Seconds to read a document."""
        document = draw_tokens(self._config.vocab_size, 1, tokens)
        begin = time.perf_counter()
        self._model.read(document, every)
        return {"seconds": time.perf_counter() - begin}

    def decode(self, batch: int, steps: int) -> dict[str, float]:
        """Seconds of one step, the mean of several; the tokens are random."""
        tokens = draw_tokens(self._config.vocab_size, steps, batch)
        state = self._states[batch]
        _, state = self._model.decode(state, tokens[0])
        begin = time.perf_counter()
        for step in tokens:
            _, state = self._model.decode(state, step)
        seconds = (time.perf_counter() - begin) / steps
        self._states[batch] = state
        return {"seconds": seconds}

    def products(self, framework: str, tokens: int) -> dict[str, float]:
        """FLOP/s by each way of multiplying matrices, on the shapes of the MLP."""
        products = {"torch": products_torch, "jax": products_jax}[framework]
        return products(tokens, self._config.width, self._config.mlp_width)

    def bandwidth(self, framework: str, nbytes: int) -> dict[str, float]:
        """Bytes read per second by each way of reading an array of so many."""
        ways = _reading_torch(nbytes) if framework == "torch" else _reading_jax(nbytes)
        return {f"{framework} {name}": nbytes / _best_seconds(way) for name, way in ways.items()}

    def linears(self, framework: str, batch: int) -> dict[str, float]:
        """Seconds of the products of B vectors with every weight that a step multiplies with."""
        names = [n for n, shape in self._checkpoint_shapes() if len(shape) > 1 and "conv" not in n]
        weights = [self._checkpoint.numpy(name) for name in names]
        make = _linears_torch if framework == "torch" else _linears_jax
        return {
            f"{framework} {name}": _best_seconds(way) for name, way in make(weights, batch).items()
        }

    def _checkpoint_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        from griffin_eval.layout import param_specs

        return [(name, spec.shape) for name, spec in param_specs(self._config).items()]


def _reading_torch(nbytes: int) -> dict[str, Callable[[], Any]]:
    import torch

    array = torch.ones(nbytes // 4096, 1024)
    vector = torch.ones(1024)
    return {"sum": array.sum, "matrix times vector": lambda: array @ vector}


def _reading_jax(nbytes: int) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    array = jnp.ones(nbytes // 4)
    total = jax.jit(jnp.sum)
    return {"sum": lambda: total(array).block_until_ready()}


def _linears_torch(weights: list[np.ndarray], batch: int) -> dict[str, Callable[[], Any]]:
    import torch
    import torch.nn.functional as F

    tensors = [torch.from_numpy(np.array(w)) for w in weights]
    pointwise = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

    def run(product: Callable) -> Callable[[], None]:
        inputs = [
            torch.ones(*w.shape[:-2], batch, w.shape[-1 if w.ndim == 2 else -2]) for w in tensors
        ]

        def all_of_them() -> None:
            for x, w in zip(inputs, tensors, strict=True):
                product(x, w) if w.ndim == 2 else torch.bmm(x, w)

        return all_of_them

    ways = {"F.linear": run(F.linear)}
    if pointwise is not None:
        ways["mkldnn._linear_pointwise"] = run(lambda x, w: pointwise(x, w, None, "none", [], ""))
    return ways


def _linears_jax(weights: list[np.ndarray], batch: int) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    arrays = [jnp.array(w) for w in weights]
    inputs = [jnp.ones((*w.shape[:-2], batch, w.shape[-1 if w.ndim == 2 else -2])) for w in weights]

    @jax.jit
    def all_of_them(inputs, arrays):
        return [x @ (w.T if w.ndim == 2 else w) for x, w in zip(inputs, arrays, strict=True)]

    return {"x @ w.T": lambda: jax.block_until_ready(all_of_them(inputs, arrays))}


def _best_seconds(work: Callable[[], Any], seconds: float = 0.5) -> float:
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    name, folder = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    no_gradients: Any = None
    if name not in ("jax", "deepmind-jax"):
        import torch

        no_gradients = torch.inference_mode()
        no_gradients.__enter__()
    worker = Worker(name, folder)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(worker, request.pop("do"))(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

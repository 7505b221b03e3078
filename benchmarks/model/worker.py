"""One implementation of the model, in a process that `benchmarks.model.run` asks to work.

``python -m benchmarks.model.worker NAME FOLDER DTYPE`` answers requests for the methods of
`Worker` (`benchmarks.timing.serve`), first of all `Worker.load`.
"""

import sys
import time
from typing import Any

import numpy as np

from benchmarks.model.implementations import CHECKED, KEPT, MAKERS, Implementation
from benchmarks.model.run import NEEDS
from benchmarks.peers import check_peer, why_absent
from benchmarks.products import products_jax, products_torch, reading_jax, reading_torch
from benchmarks.timing import serve
from griffin_eval.converters.checkpoint import Checkpoint


def draw_tokens(vocab_size: int, batch: int, length: int) -> np.ndarray:
    """Random tokens, int32 [B, T], the same for the same arguments."""
    rng = np.random.default_rng([batch, length])
    return rng.integers(vocab_size, size=(batch, length), dtype=np.int32)


def in_float32(logits: Any) -> np.ndarray:
    """A copy of the logits of any framework, which numpy has no type for if they are of 16 bits."""
    return np.array(logits.float() if hasattr(logits, "float") else logits, np.float32)


class Worker:
    """What can be asked of an implementation.

    Args:
        name: one of `MAKERS`.
        folder: with the checkpoint.
        dtype: of weights and activations.
    """

    _model: Implementation

    def __init__(self, name: str, folder: str, dtype: str):
        self._name, self._dtype = name, dtype
        self._checkpoint = Checkpoint(folder)
        self._config = self._checkpoint.config
        self._states: dict[int, Any] = {}

    def load(self) -> None:
        """Loads the model.

        Raises:
            Absent: a library of the implementation is missing or broken.
        """
        check_peer(*NEEDS[self._name])
        self._model = MAKERS[self._name](self._checkpoint, self._dtype)

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
        every = in_float32(self._model.read(document, True)).reshape(tokens, -1)
        found = {"prefill, all logits": every[keep]}
        last = self._model.read(document, False)
        if last is not None:
            found["prefill"] = in_float32(last).reshape(1, -1)
        for batch in batches:
            rows = draw_tokens(self._config.vocab_size, batch, prompt + CHECKED)
            state, logits = self._model.begin(rows[:, :prompt]), []
            for i in range(prompt, prompt + CHECKED):
                step, state = self._model.decode(state, rows[:, i].copy())
                logits.append(in_float32(step))
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
        return products(tokens, self._config.width, self._config.mlp_width, dtype=self._dtype)

    def bandwidth(self, framework: str, nbytes: int) -> dict[str, float]:
        """Bytes read per second by each way of reading an array of so many."""
        return {"torch": reading_torch, "jax": reading_jax}[framework](nbytes)


def main() -> None:
    name, folder, dtype = sys.argv[1:]
    if name not in ("jax", "deepmind-jax") and why_absent("torch") is None:
        import torch

        no_gradients = torch.inference_mode()  # while this object lives
        no_gradients.__enter__()
    worker = Worker(name, folder, dtype)
    asked = ("load", "check", "read", "decode", "products", "bandwidth")
    serve({each: getattr(worker, each) for each in asked})


if __name__ == "__main__":
    main()

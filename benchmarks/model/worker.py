"""One implementation of the model, in a process that serves `benchmarks.model.run`.

``python -m benchmarks.model.worker NAME FOLDER DTYPE`` answers requests for the methods of
`Worker` (`benchmarks.timing.serve`), first `Worker.load`. For this package's models it imports only
public names of the package, so that it runs with other versions of it.
"""

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import check_peer
from benchmarks.products import products_jax, products_torch, reading_jax, reading_torch
from benchmarks.timing import serve

KEPT = 32  # compared positions of a document
CHECKED = 3  # compared tokens after the prompts


class Worker:
    """An implementation that answers the requests of a `Job`."""

    _model: Any

    def __init__(self, name: str, folder: str, dtype: str):
        self._name, self._folder, self._dtype = name, folder, dtype
        self._config = json.loads(Path(folder, "config.json").read_text())
        self._states: dict[int, Any] = {}
        self._stack = ExitStack()

    def load(self) -> None:
        """Load the model; Absent if a library is missing or broken."""
        if self._name in ("torch", "jax"):
            from benchmarks.model.griffin import MAKERS

            self._model = MAKERS[self._name](self._folder, self._dtype)
        else:
            from benchmarks.model import implementations
            from griffin_eval.converters.checkpoint import Checkpoint

            check_peer(*implementations.PEER_NEEDS[self._name])
            make = implementations.MAKERS[self._name]
            self._model = make(Checkpoint(self._folder), self._dtype)
        if "jax" not in self._name:
            import torch

            self._stack.enter_context(torch.inference_mode())

    def check(self, tokens: int, batches: list[int], prompt: int, path: str) -> None:
        """Compile, warm up, start decoding, and write logits to compare to an .npz file."""
        document = self._draw(1, tokens)
        keep = np.unique(np.linspace(0, tokens - 1, KEPT).astype(int))
        every = in_float32(self._model.read(document, True)).reshape(tokens, -1)
        logits = {"prefill, all logits": every[keep]}
        last = self._model.read(document, False)
        if last is not None:
            logits["prefill"] = in_float32(last).reshape(1, -1)
        for batch in batches:
            rows = self._draw(batch, prompt + CHECKED)
            state, steps = self._model.begin(rows[:, :prompt]), []
            for i in range(prompt, prompt + CHECKED):
                step, state = self._model.decode(state, rows[:, i].copy())
                steps.append(in_float32(step))
            logits[f"decode, batch {batch}"] = np.stack(steps)
            self._states[batch] = state
        np.savez(path, **logits)  # type: ignore[arg-type]

    def read(self, tokens: int, every: bool) -> float:
        """Return the seconds to read a document."""
        document = self._draw(1, tokens)
        begin = time.perf_counter()
        self._model.read(document, every)
        return time.perf_counter() - begin

    def decode(self, batch: int, steps: int) -> float:
        """Return the mean seconds of a step, with random tokens."""
        tokens = self._draw(steps, batch)
        state = self._states[batch]
        _, state = self._model.decode(state, tokens[0])
        begin = time.perf_counter()
        for step in tokens:
            _, state = self._model.decode(state, step)
        seconds = (time.perf_counter() - begin) / steps
        self._states[batch] = state
        return seconds

    def products(self, framework: str, **sizes: int) -> float:
        """Return the FLOP/s of the fastest matrix product for the shapes of the MLP."""
        products = {"torch": products_torch, "jax": products_jax}[framework]
        return max(products(**sizes, dtype=self._dtype).values())

    def bandwidth(self, framework: str, nbytes: int) -> float:
        """Return the bytes per second of the fastest way to read an array."""
        return max({"torch": reading_torch, "jax": reading_jax}[framework](nbytes).values())

    def _draw(self, batch: int, length: int) -> np.ndarray:
        """Return random tokens, int32 [B, T], the same for the same arguments."""
        rng = np.random.default_rng([batch, length])
        return rng.integers(self._config["vocab_size"], size=(batch, length), dtype=np.int32)


def in_float32(logits: Any) -> np.ndarray:
    """Return a float32 copy of any framework's logits, including 16-bit ones."""
    return np.array(logits.float() if hasattr(logits, "float") else logits, np.float32)


if __name__ == "__main__":
    serve(Worker(*sys.argv[1:]))

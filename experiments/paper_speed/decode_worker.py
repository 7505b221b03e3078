"""One model in one framework, in a process that `experiments.paper_speed.decoding` asks to sample.

``python -m experiments.paper_speed.decode_worker FRAMEWORK MODEL DEVICE`` answers requests for the
methods of `Worker` (`benchmarks.timing.serve`), first of all `Worker.load`.
"""

import json
import sys
import time

from benchmarks.model.run import NEEDS
from benchmarks.peers import check_peer, why_absent
from benchmarks.products import products_jax, products_torch, reading_jax, reading_torch
from benchmarks.timing import serve
from experiments.paper_speed.samplers import MAKERS, MOST_STEPS, Sampler
from griffin_eval.config import GriffinConfig

WARM_UP = 2  # steps before those that are timed; the first may compile
LONG_ENOUGH = 2.0  # seconds of steps after which no more are timed


class Worker:
    """What can be asked of a model.

    Args:
        framework: one of `experiments.paper_speed.samplers.MAKERS`.
        config: the fields of its `GriffinConfig` as JSON.
        device: as the framework names it.
    """

    _sampler: Sampler

    def __init__(self, framework: str, config: str, device: str):
        self._framework, self._device = framework, device
        self._config = GriffinConfig(**json.loads(config))

    def load(self) -> None:
        """Makes the model.

        Raises:
            Absent: a library of the framework is missing or broken.
            ArgumentError: the framework finds no such device.
        """
        check_peer(*NEEDS[self._framework])
        self._sampler = MAKERS[self._framework](self._config, self._device)

    def steps(self, batch: int, context: int, steps: int) -> float:
        """Seconds of a decoding step, the mean of some, with their share of a compaction.

        A state of known length, which is all that global attention has, could be allocated whole;
        so the Transformer is spared compactions, which move its whole cache.

        Args:
            batch: rows.
            context: tokens that each row has read.
            steps: that are timed, fewer where they take long.
        """
        tokens, state = self._sampler.begin(batch, context)
        for _ in range(WARM_UP):
            tokens, state = self._sampler.sample(tokens, state)
        done, begin = 0, time.perf_counter()
        while done < steps and time.perf_counter() - begin < LONG_ENOUGH:
            tokens, state = self._sampler.sample(tokens, state)
            done += 1
        seconds = (time.perf_counter() - begin) / done
        if "global_attention" in self._config.block_types:
            return seconds
        state = self._sampler.compact(state)
        begin = time.perf_counter()
        self._sampler.compact(state)
        return seconds + (time.perf_counter() - begin) / MOST_STEPS

    def state_bytes(self, context: int) -> int | None:
        """Bytes of the state of one document of so many tokens."""
        return self._sampler.state_bytes(context)

    def products(self, tokens: int) -> dict[str, float]:
        """FLOP/s by each way of multiplying matrices, on the shapes of the MLP."""
        shape = tokens, self._config.width, self._config.mlp_width
        if self._framework == "jax":
            return products_jax(*shape)
        return products_torch(*shape, self._device)

    def reading(self, nbytes: int) -> dict[str, float]:
        """Bytes per second by each way of reading an array of so many."""
        if self._framework == "jax":
            return reading_jax(nbytes)
        return reading_torch(nbytes, self._device)


def main() -> None:
    framework, config, device = sys.argv[1:]
    if framework != "jax" and why_absent("torch") is None:
        import torch

        no_gradients = torch.inference_mode()  # while this object lives
        no_gradients.__enter__()
    worker = Worker(framework, config, device)
    asked: tuple[str, ...] = ("load", "steps", "state_bytes", "products", "reading")
    serve({each: getattr(worker, each) for each in asked})


if __name__ == "__main__":
    main()

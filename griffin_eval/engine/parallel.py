"""Data parallelism in one process: one runner, engine and thread for each device."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from griffin_eval.engine import generation, scoring
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.scoring import NotFinite, Scored
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Scorable, common_prefix, order
from griffin_eval.runners.protocol import Runner

# Queues a function and its arguments, to be called in the thread that waits for the workers.
_Tell = Callable[..., None]


def score(
    runners: Sequence[Runner],
    sequences: Sequence[Scorable],
    *,
    on_result: Callable[[int, Scored], None],
    progress: Callable[[int], Any],
    describe: Callable[[int], str],
    **arguments: Any,
) -> Stats:
    """Run `griffin_eval.engine.scoring.score` on several devices.

    Sequences with a shared prefix go to one device as far as that keeps all devices busy.
    ``on_result`` and ``progress`` are called in the caller's thread.
    """
    if len(runners) == 1:
        return scoring.score(
            runners[0],
            sequences,
            on_result=on_result,
            progress=progress,
            describe=describe,
            **arguments,
        )

    def work(runner: Runner, mine: np.ndarray, tell: _Tell) -> Stats:
        return scoring.score(
            runner,
            [sequences[i] for i in mine],
            on_result=lambda i, result: tell(on_result, int(mine[i]), result),
            progress=lambda tokens: tell(progress, tokens),
            describe=lambda i: describe(int(mine[i])),
            **arguments,
        )

    paths = [sequence.path for sequence in sequences]
    return _together(runners, divide(paths, [1] * len(paths), len(runners)), work)


def generate(
    runners: Sequence[Runner],
    prompts: Sequence[Prompt],
    *,
    should_stop: Callable[[int, list[int]], bool],
    on_result: Callable[[int, list[int]], None],
    progress: Callable[[int], object] = lambda tokens: None,
    **arguments: Any,
) -> Stats:
    """Run `griffin_eval.engine.generation.generate` on several devices.

    ``on_result`` and ``progress`` are called in the caller's thread, ``should_stop`` in one thread
    at a time.
    """
    if len(runners) == 1:
        return generation.generate(
            runners[0],
            prompts,
            should_stop=should_stop,
            on_result=on_result,
            progress=progress,
            **arguments,
        )
    lock = threading.Lock()

    def work(runner: Runner, mine: np.ndarray, tell: _Tell) -> Stats:
        def stop_here(index: int, ids: list[int]) -> bool:
            tell(bool)  # raises in this thread if another one failed
            with lock:
                return should_stop(index, ids)

        return generation.generate(
            runner,
            prompts,
            subset=mine.tolist(),
            should_stop=stop_here,
            on_result=lambda i, ids: tell(on_result, i, ids),
            progress=lambda tokens: tell(progress, tokens),
            **arguments,
        )

    paths = [np.asarray(prompt.tokens, np.int32) for prompt in prompts]
    new = [prompt.max_new_tokens for prompt in prompts]
    return _together(runners, divide(paths, new, len(runners)), work)


def divide(paths: Sequence[np.ndarray], more: Sequence[int], parts: int) -> list[np.ndarray]:
    """Return the indices of parts of sequences whose largest number of tokens to read is minimal.

    A part is a range of the radix tree's leaves, and reads the edges above them once. It may be
    empty. ``more`` is a cost of each sequence beyond reading, such as its tokens to generate.
    """
    ranked = order(paths)
    alone = [len(paths[i]) + more[i] for i in ranked]  # cost if the sequence begins a part
    shared = [0] + [common_prefix(paths[a], paths[b]) for a, b in itertools.pairwise(ranked)]

    def starts(max_load: int) -> list[int]:
        begin, load = [], max_load
        for place, cost in enumerate(alone):
            load += cost - shared[place]
            if load > max_load:
                begin.append(place)
                load = cost
        return begin

    low, high = max(alone, default=0), sum(alone)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(starts(middle)) <= parts else (middle + 1, high)
    cuts = starts(high)[1:]
    ranges = np.split(np.array(ranked, np.int64), cuts)
    return [np.sort(part) for part in ranges] + [np.empty(0, np.int64)] * (parts - len(ranges))


class _Stopped(Exception):
    """Ends a thread because another one failed."""


def _together(
    runners: Sequence[Runner],
    parts: Sequence[np.ndarray],
    work: Callable[[Runner, np.ndarray, _Tell], Stats],
) -> Stats:
    """Run each part in a thread. An error stops all threads; `NotFinite` is raised at the end."""
    begin = time.perf_counter()
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stopped = threading.Event()
    total, failures = Stats(), []

    def tell(function: Callable[..., Any], *arguments: Any) -> None:
        if stopped.is_set():
            raise _Stopped
        calls.put((function, arguments))

    def run(runner: Runner, mine: np.ndarray) -> None:
        try:
            stats = work(runner, mine, tell)
            calls.put((total.__iadd__, (stats,)))
        except BaseException as error:
            calls.put((failures.append, (error,)))
        calls.put(None)

    threads = [
        threading.Thread(target=run, args=pair)
        for pair in zip(runners, parts, strict=True)
        if len(pair[1])
    ]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            call = calls.get()
            if call is None:
                running -= 1
                continue
            function, arguments = call
            function(*arguments)
            if any(not isinstance(failure, NotFinite) for failure in failures):
                stopped.set()
    finally:
        stopped.set()  # also after Ctrl-C
        for thread in threads:
            thread.join()
    for failure in sorted(failures, key=lambda failure: isinstance(failure, _Stopped)):
        raise failure
    total.seconds = time.perf_counter() - begin
    return total

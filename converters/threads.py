"""Work in threads that ends as a whole when one part of it fails."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Job = TypeVar("Job")


def run_all(
    function: Callable[[Job, Callable[[], bool]], None], jobs: Iterable[Job], *, workers: int
) -> None:
    """Calls ``function(job, stopped)`` for every job, in threads, and waits for all of them.

    Args:
        function: does one job; ``stopped()`` says whether another one failed, so that this one
            may end early, by whatever exception.
        jobs: started in this order.
        workers: number of threads.

    Raises:
        BaseException: the first failure.
    """
    failed = threading.Event()
    futures: list[Future[None]] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            futures += (pool.submit(function, job, failed.is_set) for job in jobs)
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            failed.set()  # also for jobs that run while this thread is interrupted
            pool.shutdown(cancel_futures=True)
    for future in done:
        future.result()

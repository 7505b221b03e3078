"""Work in threads that ends as a whole when one part of it fails."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Job = TypeVar("Job")


def run_all(
    function: Callable[[Job, Callable[[], bool]], None], jobs: Iterable[Job], *, workers: int
) -> None:
    """Call ``function(job, stopped)`` for every job, in threads and in order, and wait for all of
    them.

    ``stopped()`` returns whether another job failed, so that this one may end early with any
    exception. The first failure is raised.
    """
    failed, lock = threading.Event(), threading.Lock()
    failures: list[BaseException] = []

    def run(job: Job) -> None:
        if failed.is_set():
            return
        try:
            function(job, failed.is_set)
        except BaseException as error:
            with lock:
                failures.append(error)
                failed.set()  # set here, since the waiting thread may notice late
            raise

    futures: list[Future[None]] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            futures += (pool.submit(run, job) for job in jobs)
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            failed.set()  # stop the running jobs, too, if this thread is interrupted
            pool.shutdown(cancel_futures=True)
    if failures:
        raise failures[0]

"""Work in threads: the first failure stops all threads and is raised to the caller."""

import threading
from time import sleep

import pytest
from slow import slow

from griffin_eval.converters.threads import run_all


class _Cause(Exception):
    pass


class _Consequence(Exception):
    pass


@pytest.mark.parametrize("late", [0, slow(1), slow(2)])
def test_the_first_failure_is_told(late):
    """Other threads stop with uninformative exceptions as a consequence."""
    begun = threading.Barrier(3)
    started = []

    def work(job, stopped):
        started.append(job)
        if job > 2:
            return
        begun.wait(10)
        if job == late:
            raise _Cause
        while not stopped():
            sleep(1e-4)
        raise _Consequence

    with pytest.raises(_Cause):
        run_all(work, range(1000), workers=3)
    assert sorted(started) == [0, 1, 2]

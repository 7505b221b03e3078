"""NaN and infinity in a state are named with the request that reads them, and with no other."""

import numpy as np
import pytest
from fake_runner import FakeRunner
from fixtures_engine import Around, random_ids, scores

from griffin_eval.engine.generation import Prompt, generate
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.scoring import NotFinite
from griffin_eval.engine.tree import Scorable

LONG, SHORT = random_ids(60, 1), random_ids(12, 2)  # only the first needs a second step


class Spoilt(Around):
    """A fake runner whose states are one value after every step."""

    def __init__(self, value):
        super().__init__(FakeRunner())
        self._value = value

    def read(self, pool, *arguments):
        hidden, pool = self._runner.read(pool, *arguments)
        pool.rows[:] = self._value
        return hidden, pool


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_is_named(value):
    subject, limits, found = Spoilt(value), Limits(32, 2), {}
    with pytest.raises(
        NotFinite, match="1 of 2 log-likelihoods are NaN or infinite: sequence 0"
    ) as told:
        scores(subject, [Scorable(LONG, 1), Scorable(SHORT, 1)], limits)
    assert "dtype" not in str(told.value)  # float32 is not too narrow
    with pytest.raises(NotFinite, match="1 of 1 generations are NaN or infinite: prompt 0"):
        generate(
            subject,
            [Prompt(LONG, 3)],
            limits=limits,
            eos_ids=frozenset(),
            on_result=found.__setitem__,
        )
    assert not found

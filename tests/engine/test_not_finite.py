"""NaN and infinity in a state are named with the request that reads them, and with no other."""

import jax
import numpy as np
import pytest
from fixtures_engine import random_ids, scores, small_runner
from slow import slow

from griffin_eval.engine.generation import Prompt, generate
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.scoring import NotFinite
from griffin_eval.engine.tree import Scorable

LONG, SHORT = random_ids(60, 1), random_ids(12, 2)  # only the first needs a second step


def poisoned(leaf, value):
    """Return the array with one value in all places, if it holds floating-point numbers."""
    if "float" not in str(leaf.dtype):
        return leaf
    return leaf * 0 + value


@pytest.fixture
def subject(request):
    runner = small_runner(request.param)
    yield runner
    runner.__dict__.pop("read", None)


@pytest.mark.parametrize(
    ("subject", "value"),
    [
        ("torch", np.nan),
        ("torch", np.inf),
        slow("torch", -np.inf),
        slow("jax", np.nan),
        slow("jax", np.inf),
        slow("jax", -np.inf),
    ],
    indirect=["subject"],
)
def test_a_state_that_is_not_finite_is_named(subject, value):
    read = subject.read

    def spoil(pool, *rest):
        hidden, pool = read(pool, *rest)
        return hidden, jax.tree.map(lambda leaf: poisoned(leaf, float(value)), pool)

    subject.read = spoil
    limits, found = Limits(32, 2), {}
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

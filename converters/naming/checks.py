"""Tensors that are no parameters, but must be what a table of names expects of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.containers.container import Container
from griffin_eval.converters.naming.ops import Change
from griffin_eval.converters.naming.tables import Binding, Names, matches
from griffin_eval.converters.tensors import FLOATS, LazyTensor, together
from griffin_eval.messages import listed

if TYPE_CHECKING:
    import numpy as np


def failed_checks(
    container: Container, bindings: Sequence[Binding], config: GriffinConfig, names: Names
) -> list[str]:
    """Compare the tensors that a table of names checks, those of them that are there; return a
    clause for each check that fails."""
    problems, tensors = [], container.tensors
    for check in names.checks:
        found = [name for _, name, _ in matches([check.rule], tensors)]
        if check.value is None:
            (parameter,) = check.rule.canonical
            what = f"{parameter} once more"
            (home,) = (b.foreign for b in bindings if b.canonical[0].name == parameter)
            change = check.rule.change and check.rule.change.of(config.width)
            wrong = [
                name
                for name in found
                if not _once_more(container.tensors[home], container.tensors[name], change)
            ]
        else:
            what = f"{check.value:g} everywhere"
            wrong = [
                name for name in found if not _is_constant(container.tensors[name], check.value)
            ]
        if wrong:
            problems.append(f"{listed(wrong, repr)}: expected {what}, as {names.path.name} says")
    return problems


def _is_constant(tensor: LazyTensor, value: float) -> bool:
    """Whether all of a tensor is one number, to within the rounding of its dtype."""
    import numpy as np

    if tensor.dtype not in FLOATS:
        return False
    return all(
        bool(np.all(np.abs(piece.astype(np.float64) - value) <= _rounding(piece)[0] * abs(value)))
        for piece in tensor.pieces()
    )


def _once_more(home: LazyTensor, copy: LazyTensor, change: Change | None) -> bool:
    """Whether a tensor, once it is changed, is another one to within the rounding of both."""
    import numpy as np

    if home.shape != copy.shape or copy.dtype not in FLOATS:
        return False
    factor = 1.0 if change is None else abs(float(change.factor))
    for expected, again in together(home.pieces(), copy.pieces()):
        (eps, least), (eps_again, least_again) = _rounding(expected), _rounding(again)
        expected, again = expected.astype(np.float64), again.astype(np.float64)
        again = again if change is None else change.apply(again)
        limit = max(eps, eps_again) * np.abs(expected) + least + factor * least_again
        if not np.all(np.abs(again - expected) <= limit):
            return False
    return True


def _rounding(values: "np.ndarray") -> tuple[float, float]:
    """Twice the largest relative error of rounding to a dtype, and the smallest step in it."""
    import ml_dtypes

    facts = ml_dtypes.finfo(values.dtype)
    return float(facts.eps), float(facts.smallest_subnormal)

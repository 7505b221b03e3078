"""The parameters of a model as lazy tensors, made from a container's tensors; and checks of tensors
that are no parameters, but must have the values that a names table expects.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.containers.container import Container
from griffin_eval.converters.naming.ops import Change
from griffin_eval.converters.naming.tables import EMBEDDING, HEAD, Binding, Names, matches
from griffin_eval.converters.tensors import (
    FLOATS,
    Kept,
    LazyTensor,
    changed,
    cut,
    filled,
    index,
    together,
)
from griffin_eval.messages import listed


class Parameter(NamedTuple):
    """A parameter in canonical layout.

    Attributes:
        stored: Tensor of the container that holds it, alone or with others; None for zeros.
        foreign: Name of that tensor, empty for zeros.
    """

    tensor: LazyTensor
    stored: LazyTensor | None
    foreign: str


def parameters_of(
    tensors: Mapping[str, LazyTensor], bindings: Sequence[Binding]
) -> dict[str, Parameter]:
    """Return the parameters that bindings make of a container's tensors, by canonical name: they
    may be parts of a tensor, have other values, or be zeros."""
    memo = Kept()
    homes = {spec.name: binding.foreign for binding in bindings for spec in binding.canonical}
    parameters: dict[str, Parameter] = {}
    for binding in bindings:
        if not binding.foreign:
            (spec,) = binding.canonical
            beside = homes.get(spec.name.removesuffix("bias") + "weight") or homes[EMBEDDING]
            tensor = filled(spec.shape, tensors[beside].dtype)
            parameters[spec.name] = Parameter(tensor, None, "")
            continue
        stored = tensors[binding.foreign]
        for spec, tensor in zip(binding.canonical, _canonical(binding, stored, memo), strict=True):
            if binding.change is not None:
                tensor = changed(tensor, binding.change.apply)
            parameters[spec.name] = Parameter(tensor, stored, binding.foreign)
    return parameters


def _canonical(binding: Binding, stored: LazyTensor, memo: Kept) -> Sequence[LazyTensor]:
    """Return the parameters in a stored tensor, with their stored values."""
    if binding.entry is not None:
        stored = index(memo(stored), binding.entry)
    elif len(binding.canonical) > 1:
        stored = memo(stored)
    if binding.cut is None:
        return binding.op.to_canonical(stored)
    parts, start = [], 0
    for shape in binding.part_shapes():
        stop = start + shape[binding.cut]
        parts += binding.op.to_canonical(cut(stored, binding.cut, start, stop))
        start = stop
    return parts


def failed_checks(
    container: Container, bindings: Sequence[Binding], config: GriffinConfig, names: Names
) -> list[str]:
    """Compare all tensors that are present and have a check in a names table; return a clause for
    each check that fails."""
    problems, tensors = [], container.tensors
    parameters = parameters_of(tensors, bindings)
    for check in names.checks:
        home = change = None
        if check.value is not None:
            what = f"{check.value:g} everywhere"
        else:
            (parameter,) = check.rule.canonical
            what = f"{parameter} once more"
            tied = parameter == HEAD and config.tie_embeddings
            home = parameters[EMBEDDING if tied else parameter].tensor
            change = check.rule.change and check.rule.change.of(config.width)
        wrong = []
        for _, name, _ in matches([check.rule], tensors):
            if check.value is not None:
                home = filled(tensors[name].shape, "float64", check.value)
            assert home is not None
            if not _once_more(home, tensors[name], change):
                wrong.append(name)
        if wrong:
            problems.append(f"{listed(wrong, repr)}: expected {what}, as {names.path.name} says")
    return problems


def _once_more(home: LazyTensor, copy: LazyTensor, change: Change | None) -> bool:
    """Return whether a tensor, after a change, equals another to within the rounding of both."""
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


def _rounding(values: np.ndarray) -> tuple[float, float]:
    """Return a dtype's eps (twice the largest relative rounding error) and its smallest step."""
    import ml_dtypes

    facts = ml_dtypes.finfo(values.dtype)
    return float(facts.eps), float(facts.smallest_subnormal)

"""The parameters of a model as lazy tensors, made of the tensors of a container."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from griffin_eval.converters.naming.tables import EMBEDDING, Binding
from griffin_eval.converters.tensors import Kept, LazyTensor, changed, cut, index, zeros


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
    kept = Kept()
    homes = {spec.name: binding.foreign for binding in bindings for spec in binding.canonical}
    parameters: dict[str, Parameter] = {}
    for binding in bindings:
        if not binding.foreign:
            (spec,) = binding.canonical
            beside = homes.get(spec.name.removesuffix("bias") + "weight") or homes[EMBEDDING]
            tensor = zeros(spec.shape, tensors[beside].dtype)
            parameters[spec.name] = Parameter(tensor, None, "")
            continue
        stored = tensors[binding.foreign]
        for spec, tensor in zip(binding.canonical, _canonical(binding, stored, kept), strict=True):
            if binding.change is not None:
                tensor = changed(tensor, binding.change.apply)
            parameters[spec.name] = Parameter(tensor, stored, binding.foreign)
    return parameters


def _canonical(binding: Binding, stored: LazyTensor, kept: Kept) -> Sequence[LazyTensor]:
    """The parameters in a stored tensor, with their stored values."""
    if binding.entry is not None:
        stored = index(kept(stored), binding.entry)
    elif len(binding.canonical) > 1:
        stored = kept(stored)
    if binding.cut is None:
        return binding.op.to_canonical(stored)
    parts, start = [], 0
    for shape in binding.part_shapes():
        stop = start + shape[binding.cut]
        parts += binding.op.to_canonical(cut(stored, binding.cut, start, stop))
        start = stop
    return parts

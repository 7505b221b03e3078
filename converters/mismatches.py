"""The differences between a container's tensors and those a config asks for, rule by rule."""

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.containers.container import natural_key
from griffin_eval.converters.naming.ops import Shape
from griffin_eval.converters.naming.tables import (
    EMBEDDING,
    HEAD,
    Binding,
    NameRule,
    Names,
    foreign_name,
)
from griffin_eval.converters.tensors import FLOATS, LazyTensor, same_bits
from griffin_eval.layout import param_specs
from griffin_eval.messages import listed

_MAX_COMPARED = 2_000  # names that are searched for one like another; 100,000 take a minute


def mismatches(
    tensors: Mapping[str, LazyTensor],
    table: Sequence[NameRule],
    bindings: Sequence[Binding],
    config: GriffinConfig,
    names: Names | None,
    left_out: Mapping[str, str],
) -> tuple[list[str], bool]:
    """Compare tensors with those of a table, written out as ``bindings`` for a config.

    Args:
        names: User's table, if it is one.
        left_out: Whatever the container holds beside tensors, each with the reason.

    Returns:
        Clauses for people, none if the tensors hold the parameters of the config; and whether
        names and shapes are those that it asks for.
    """
    file = None if names is None else names.path.name
    clauses = [] if file is None else _coverage(bindings, config, file)
    others = _names_and_shapes(tensors, table, bindings, file, left_out)
    return clauses + others + _dtypes(tensors, bindings), not others


def stored_head(
    tensors: Mapping[str, LazyTensor], table: Sequence[NameRule], bindings: Sequence[Binding]
) -> tuple[str, bool] | None:
    """Return the name of an output head, and whether it is the embedding, bit for bit; None if
    not both are there."""
    head = foreign_name(table, HEAD)
    embedding = next((b for b in bindings if b.canonical[0].name == EMBEDDING), None)
    if head not in tensors or embedding is None or embedding.foreign not in tensors:
        return None
    (rule,) = [rule for rule in table if rule.foreign == head]
    one, other = tensors[head], tensors[embedding.foreign]
    shape = rule.op.foreign_shape(embedding.canonical[0].shape)
    change = rule.change and rule.change.of(embedding.canonical[0].shape[1])  # its width
    if change != embedding.change or (one.shape, other.shape) != (shape, embedding.shape):
        return head, False
    (one,), (other,) = rule.op.to_canonical(one), embedding.op.to_canonical(other)
    return head, same_bits(one, other)


def _coverage(bindings: Sequence[Binding], config: GriffinConfig, file: str) -> list[str]:
    """Return clauses about parameters and tensors that a user's table does not cover once. (The
    built-in tables cover every parameter once.)"""
    given = Counter(spec.name for binding in bindings for spec in binding.canonical)
    uses = Counter((b.foreign, b.entry) for b in bindings if b.foreign)
    lacking = [name for name in param_specs(config) if name not in given]
    twice = [name for name, count in given.items() if count > 1]
    named = list(dict.fromkeys(name for (name, _), count in uses.items() if count > 1))
    return [
        *_clause(lacking, f"parameters that no row of {file} gives ({{}})"),
        *_clause(twice, f"parameters that several rows of {file} give ({{}})"),
        *_clause(named, f"tensors that several rows of {file} name ({{}})"),
    ]


def _clause(names: Collection[str], said: str, show: Callable[[str], str] = repr) -> list[str]:
    """Return a clause with the number of names, and the names in the place of ``{}``; no clause
    without names."""
    return [f"{len(names)} {said.replace('{}', listed(names, show))}"] if names else []


def _shower(bindings: Sequence[Binding]) -> Callable[[str], str]:
    """Return a function that shows a tensor's name, and its parameters' if these are different."""
    parameters: dict[str, list[str]] = {}
    for binding in bindings:
        parameters.setdefault(binding.foreign, []).extend(s.name for s in binding.canonical)

    def show(name: str) -> str:
        ours = parameters.get(name, [name])
        if ours == [name]:
            return repr(name)
        between = " and " if len(ours) == 2 else " … "
        return f"{name!r} ({between.join(dict.fromkeys((ours[0], ours[-1])))})"

    return show


def _names_and_shapes(
    tensors: Mapping[str, LazyTensor],
    table: Sequence[NameRule],
    bindings: Sequence[Binding],
    file: str | None,
    left_out: Mapping[str, str],
) -> list[str]:
    """Return clauses about names and shapes that are not those the config asks for. ``file`` is the
    name of the user's table, and ``left_out`` what the container holds beside tensors."""
    expected: dict[str, Shape] = {b.foreign: b.shape for b in bindings if b.foreign}
    show = _shower(bindings)
    bare = [n for n in tensors if n not in expected and f"model.{n}" in expected]
    present = {*tensors, *(f"model.{name}" for name in bare)}
    missing = sorted(expected.keys() - present, key=natural_key)
    unexpected = [name for name in tensors if name not in {*expected, *bare}]
    uses = Counter(binding.foreign for binding in bindings)
    stacks = {rule.foreign: rule.stack for rule in table if rule.foreign in uses}
    beyond = {
        name: f"{show(name)}: {uses[name]} of {len(stack)}"
        for name, stack in stacks.items()
        if isinstance(stack, Sequence) and uses[name] != len(stack)
    }
    reshaped = {
        name: f"{show(name)} is {tensors[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    }

    def show_missing(name: str) -> str:
        for key, why in left_out.items():
            if f"/{key}".endswith(f"/{name}") and "not floating point" in why:
                return f"{show(name)}, which is {why}"
        return show(name)

    def hint(name: str) -> str:
        # A renamed key is near one that is missing; a surplus layer near one that is there.
        for candidates in (missing[:_MAX_COMPARED], list(expected)[:_MAX_COMPARED]):
            if near := difflib.get_close_matches(name, candidates, n=1, cutoff=0.75):
                return f"{name!r}, nearest {show(near[0])}"
        return repr(name)

    more = ""
    if file is not None:
        more = f", which no row of {file} names"
    elif missing and not expected.keys() & tensors.keys():
        more = ": if they are named otherwise, give a table of names (--names, names=)"
    return [
        *_clause(
            bare,
            "names lack the prefix 'model.' ({}), as a bare RecurrentGemmaModel saves them: save "
            "the RecurrentGemmaForCausalLM instead",
        ),
        *_clause(missing, "missing ({})", show_missing),
        *_clause(unexpected, f"unexpected ({{}}){more}", hint),
        *_clause(beyond, "stacks with layers that the model lacks ({})", beyond.__getitem__),
        *_clause(reshaped, "of another shape ({})", reshaped.__getitem__),
    ]


def _dtypes(tensors: Mapping[str, LazyTensor], bindings: Sequence[Binding]) -> list[str]:
    """Return a clause about parameters in dtypes that cannot be read, if there are any."""
    show, names = _shower(bindings), dict.fromkeys(b.foreign for b in bindings)
    refused = [n for n in names if n in tensors and tensors[n].dtype not in FLOATS]
    return _clause(
        refused,
        f"of a dtype other than {', '.join(FLOATS)} ({{}}), without scales of a quantisation that "
        "is read: save them in one of these dtypes, or with the scales that bitsandbytes or MLX "
        "saves beside them",
        lambda name: f"{show(name)} is {tensors[name].dtype}",
    )

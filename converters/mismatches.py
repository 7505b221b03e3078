"""The differences between a container's tensors and those a config asks for, rule by rule."""

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.containers.container import Container, natural_key
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


class Comparison(NamedTuple):
    """The outcome of `compare`.

    Attributes:
        problems: Clauses for people; none if the container holds the parameters of the config.
        left_out: Tensors that are no parameters, each with the reason.
        notes: Further facts that a conversion should record.
        fits_config: Whether names and shapes are those that the config asks for.
    """

    problems: list[str]
    left_out: dict[str, str]
    notes: dict[str, str]
    fits_config: bool


def compare(
    container: Container,
    table: Sequence[NameRule],
    bindings: Sequence[Binding],
    config: GriffinConfig,
    names: Names | None,
    ignored: Mapping[str, str],
) -> Comparison:
    """Compare the tensors of a container with those of a table, written out as ``bindings`` for a
    config. ``names`` is the user's table, if it is one, and ``ignored`` what that leaves out."""
    tensors = {name: t for name, t in container.tensors.items() if name not in ignored}
    left_out, notes = {}, {}
    head = foreign_name(table, HEAD)
    if config.tie_embeddings and _stored_twice(tensors, table, bindings) is not None:
        del tensors[head]
        notes["lm_head"] = f"{head!r} equals the embedding, and is tied to it"
        left_out[head] = "equal to the embedding, and tied to it"
    file = None if names is None else names.path.name
    problems = _coverage(bindings, config, file) if file is not None else []
    fits = _names_and_shapes(tensors, table, bindings, file, container.left_out)
    problems += fits + _dtypes(tensors, bindings)
    return Comparison(problems, left_out, notes, not fits)


def has_own_head(
    container: Container,
    table: Sequence[NameRule],
    bindings: Sequence[Binding],
    ignored: Mapping[str, str],
) -> bool:
    """Whether a container has an output head that is not the embedding, bit for bit."""
    tensors = {name: t for name, t in container.tensors.items() if name not in ignored}
    stored = _stored_twice(tensors, table, bindings)
    if stored is None:
        return False
    head, embedding = stored
    (rule,) = [rule for rule in table if rule.foreign == head]
    one, other = tensors[head], tensors[embedding.foreign]
    shape = rule.op.foreign_shape(embedding.canonical[0].shape)
    if rule.change != embedding.change or (one.shape, other.shape) != (shape, embedding.shape):
        return True
    (one,), (other,) = rule.op.to_canonical(one), embedding.op.to_canonical(other)
    return not same_bits(one, other)


def _stored_twice(
    tensors: Mapping[str, LazyTensor], table: Sequence[NameRule], bindings: Sequence[Binding]
) -> tuple[str, Binding] | None:
    """The name of an output head and the binding of the embedding, if both are there."""
    head = foreign_name(table, HEAD)
    embedding = next((b for b in bindings if b.canonical[0].name == EMBEDDING), None)
    if head not in tensors or embedding is None or embedding.foreign not in tensors:
        return None
    return head, embedding


def _coverage(bindings: Sequence[Binding], config: GriffinConfig, file: str) -> list[str]:
    """Clauses about a user's table; the built-in ones cover every parameter once."""
    given = Counter(spec.name for binding in bindings for spec in binding.canonical)
    uses = Counter((b.foreign, b.entry) for b in bindings if b.foreign)
    lacking = [name for name in param_specs(config) if name not in given]
    twice = [name for name, count in given.items() if count > 1]
    named = list(dict.fromkeys(name for (name, _), count in uses.items() if count > 1))
    clauses = (
        (lacking, "parameters that no row of {} gives"),
        (twice, "parameters that several rows of {} give"),
        (named, "tensors that several rows of {} name"),
    )
    return [
        f"{len(names)} {said.format(file)} ({listed(names, repr)})"
        for names, said in clauses
        if names
    ]


def _shower(bindings: Sequence[Binding]) -> Callable[[str], str]:
    """A function that names a tensor, and the parameters it holds if these have other names."""
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
    show, clauses = _shower(bindings), []
    bare = [n for n in tensors if n not in expected and f"model.{n}" in expected]
    if bare:
        clauses.append(
            f"{len(bare)} names lack the prefix 'model.' ({listed(bare, repr)}), as a bare "
            "RecurrentGemmaModel saves them: save the RecurrentGemmaForCausalLM instead"
        )
    present = {*tensors, *(f"model.{name}" for name in bare)}
    missing = sorted(expected.keys() - present, key=natural_key)

    def show_missing(name: str) -> str:
        for key, why in left_out.items():
            if f"/{key}".endswith(f"/{name}") and "not floating point" in why:
                return f"{show(name)}, which is {why}"
        return show(name)

    if missing:
        clauses.append(f"{len(missing)} missing ({listed(missing, show_missing)})")
    known = {*expected, *bare}
    unexpected = [name for name in tensors if name not in known]

    def hint(name: str) -> str:
        # A renamed key is near one that is missing; a surplus layer near one that is there.
        for candidates in (missing, list(expected)):
            if near := difflib.get_close_matches(name, candidates, n=1, cutoff=0.75):
                return f"{name!r}, nearest {show(near[0])}"
        return repr(name)

    if unexpected:
        more = ""
        if file is not None:
            more = f", which no row of {file} names"
        elif missing and not expected.keys() & tensors.keys():
            more = ": if they are named otherwise, give a table of names (--names, names=)"
        clauses.append(f"{len(unexpected)} unexpected ({listed(unexpected, hint)}){more}")
    uses = Counter(binding.foreign for binding in bindings)
    stacks = {rule.foreign: rule.stack for rule in table if rule.foreign in uses}
    beyond = {
        name: f"{uses[name]} of {len(stack)}"
        for name, stack in stacks.items()
        if isinstance(stack, Sequence) and uses[name] != len(stack)
    }
    if beyond:
        text = listed(beyond, lambda name: f"{show(name)}: {beyond[name]}")
        clauses.append(f"{len(beyond)} stacks with layers that the model lacks ({text})")
    reshaped = [n for n, shape in expected.items() if n in tensors and tensors[n].shape != shape]
    if reshaped:
        text = listed(
            reshaped, lambda n: f"{show(n)} is {tensors[n].shape}, expected {expected[n]}"
        )
        clauses.append(f"{len(reshaped)} of another shape ({text})")
    return clauses


def _dtypes(tensors: Mapping[str, LazyTensor], bindings: Sequence[Binding]) -> list[str]:
    """A clause about parameters of dtypes that are not read."""
    show, names = _shower(bindings), dict.fromkeys(b.foreign for b in bindings)
    refused = [n for n in names if n in tensors and tensors[n].dtype not in FLOATS]
    if not refused:
        return []
    text = listed(refused, lambda name: f"{show(name)} is {tensors[name].dtype}")
    return [
        f"{len(refused)} of a dtype other than {', '.join(FLOATS)} ({text}), without scales of a "
        "quantisation that is read: save them in one of these dtypes, or with the scales that "
        "bitsandbytes or MLX saves beside them"
    ]

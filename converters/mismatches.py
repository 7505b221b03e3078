"""The differences between a container's tensors and those a config asks for, rule by rule."""

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.arrays.dtypes import FLOATS
from griffin_eval.converters.arrays.pieces import CHUNK_BYTES
from griffin_eval.converters.containers.container import Container, Tensor, natural_key
from griffin_eval.converters.naming.ops import SAME, Op, Shape
from griffin_eval.converters.naming.tables import (
    EMBEDDING,
    HEAD,
    Binding,
    NameRule,
    foreign_name,
)
from griffin_eval.converters.naming.user_table import Names
from griffin_eval.layout import param_specs
from griffin_eval.messages import listed


class Comparison(NamedTuple):
    """The outcome of `compare`.

    Attributes:
        problems: clauses for people; none if the container holds the parameters of the config.
        left_out: tensors that are no parameters, each with the reason.
        notes: further facts that a conversion should record.
        fits_config: whether names and shapes are those that the config asks for.
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
    """Compares the tensors of a container with those that a config asks for.

    Args:
        container: the open container.
        table: its naming.
        bindings: the table, written out for the config.
        config: the architecture.
        names: the user's table, if the naming is from one.
        ignored: tensors that the table leaves out.
    """
    tensors = {name: t for name, t in container.tensors.items() if name not in ignored}
    left_out, notes, problems = {}, {}, []
    head = foreign_name(table, HEAD)
    if config.tie_embeddings and _stored_twice(tensors, table, bindings) is not None:
        del tensors[head]
        notes["lm_head"] = f"{head!r} equals the embedding, and is tied to it"
        left_out[head] = "equal to the embedding, and tied to it"
    file = None if names is None else names.path
    contents = _Contents(tensors, table, bindings, config, file, container.left_out)
    clauses = [clause for rule in _RULES if (clause := rule(contents))]
    fits = not any(rule(contents) for rule in _RULES if rule is not _other_dtypes)
    if names is not None:
        problems = [clause for rule in _COVERAGE if (clause := rule(contents))] + problems
    return Comparison(problems + clauses, left_out, notes, fits)


def has_own_head(
    container: Container,
    table: Sequence[NameRule],
    bindings: Sequence[Binding],
    ignored: Mapping[str, str],
) -> bool:
    """Whether a container has an output head that is not the embedding, bit for bit.

    Args:
        container, table, bindings, ignored: as of `compare`.
    """
    tensors = {name: t for name, t in container.tensors.items() if name not in ignored}
    stored = _stored_twice(tensors, table, bindings)
    if stored is None:
        return False
    head, embedding = stored
    (rule,) = [rule for rule in table if rule.foreign == head]
    if rule.change != embedding.change:
        return True
    return not _same_bits(container, head, rule.op, embedding)


def _stored_twice(
    tensors: Mapping[str, Tensor], table: Sequence[NameRule], bindings: Sequence[Binding]
) -> tuple[str, Binding] | None:
    """The name of an output head and the binding of the embedding, if both are there."""
    head = foreign_name(table, HEAD)
    embedding = next((b for b in bindings if b.canonical[0].name == EMBEDDING), None)
    if head not in tensors or embedding is None or embedding.foreign not in tensors:
        return None
    return head, embedding


class _Contents:
    """The facts that the rules are about.

    Attributes:
        tensors: the tensors of the container by name, without those that are left out.
        table: its naming.
        bindings: the table, written out for the config.
        config: the architecture.
        names_file: the user's table, if the naming is from one.
        expected: shapes of the tensors that the config asks for, by name.
        left_out: what the container holds beside tensors, by name, each with the reason.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        table: Sequence[NameRule],
        bindings: Sequence[Binding],
        config: GriffinConfig,
        names_file: Path | None,
        left_out: Mapping[str, str],
    ):
        self.tensors, self.table, self.bindings = tensors, table, bindings
        self.config, self.names_file, self.left_out = config, names_file, left_out
        self.expected: dict[str, Shape] = {b.foreign: b.shape for b in bindings if b.foreign}

    @cached_property
    def parameters(self) -> dict[str, list[str]]:
        """The parameters that each expected tensor holds, by canonical name."""
        parameters: dict[str, list[str]] = {}
        for binding in self.bindings:  # of zeros, too, which are in no tensor
            parameters.setdefault(binding.foreign, []).extend(s.name for s in binding.canonical)
        return parameters

    @cached_property
    def bare(self) -> list[str]:
        """Tensors whose names lack a prefix."""
        absent = [name for name in self.tensors if name not in self.expected]
        return [name for name in absent if f"model.{name}" in self.expected]

    @cached_property
    def missing(self) -> list[str]:
        present = {*self.tensors, *(f"model.{name}" for name in self.bare)}
        return sorted(self.expected.keys() - present, key=natural_key)

    @cached_property
    def both(self) -> list[str]:
        """Expected tensors that are there."""
        return [name for name in self.expected if name in self.tensors]

    def show(self, name: str) -> str:
        """A tensor, and the parameters it holds if these have other names."""
        ours = self.parameters.get(name, [name])
        if ours == [name]:
            return repr(name)
        between = " and " if len(ours) == 2 else " … "
        return f"{name!r} ({between.join(dict.fromkeys((ours[0], ours[-1])))})"


def _parameters_not_given(contents: _Contents) -> str | None:
    given = {spec.name for binding in contents.bindings for spec in binding.canonical}
    lacking = [name for name in param_specs(contents.config) if name not in given]
    if not lacking:
        return None
    file = _file(contents)
    return f"{len(lacking)} parameters that no row of {file} gives ({listed(lacking, repr)})"


def _parameters_given_twice(contents: _Contents) -> str | None:
    given = Counter(spec.name for binding in contents.bindings for spec in binding.canonical)
    twice = [name for name, count in given.items() if count > 1]
    if not twice:
        return None
    file = _file(contents)
    return f"{len(twice)} parameters that several rows of {file} give ({listed(twice, repr)})"


def _tensors_named_twice(contents: _Contents) -> str | None:
    uses = Counter((b.foreign, b.entry) for b in contents.bindings if b.foreign)
    twice = list(dict.fromkeys(name for (name, _), count in uses.items() if count > 1))
    if not twice:
        return None
    file = _file(contents)
    return f"{len(twice)} tensors that several rows of {file} name ({listed(twice, repr)})"


def _file(contents: _Contents) -> str:
    assert contents.names_file is not None
    return contents.names_file.name


def _lacking_prefix(contents: _Contents) -> str | None:
    if not (bare := contents.bare):
        return None
    return (
        f"{len(bare)} names lack the prefix 'model.' ({listed(bare, repr)}), as a bare "
        "RecurrentGemmaModel saves them: save the RecurrentGemmaForCausalLM instead"
    )


def _missing(contents: _Contents) -> str | None:
    if not (missing := contents.missing):
        return None

    def show(name: str) -> str:
        for key, why in contents.left_out.items():
            if f"/{key}".endswith(f"/{name}") and "not floating point" in why:
                return f"{contents.show(name)}, which is {why}"
        return contents.show(name)

    return f"{len(missing)} missing ({listed(missing, show)})"


def _unexpected(contents: _Contents) -> str | None:
    expected, missing = contents.expected, contents.missing
    known = {*expected, *contents.bare}
    unexpected = [name for name in contents.tensors if name not in known]
    if not unexpected:
        return None

    def hint(name: str) -> str:
        # A renamed key is near one that is missing; a surplus layer near one that is there.
        for candidates in (missing, list(expected)):
            if near := difflib.get_close_matches(name, candidates, n=1, cutoff=0.75):
                return f"{name!r}, nearest {contents.show(near[0])}"
        return repr(name)

    more = ""
    if contents.names_file is not None:
        more = f", which no row of {contents.names_file.name} names"
    elif missing and not contents.both:
        more = ": if they are named otherwise, give a table of names (--names, names=)"
    return f"{len(unexpected)} unexpected ({listed(unexpected, hint)}){more}"


def _surplus_layers(contents: _Contents) -> str | None:
    uses = Counter(binding.foreign for binding in contents.bindings)
    stacks = {rule.foreign: rule.stack for rule in contents.table if rule.foreign in uses}
    beyond = {
        name: f"{uses[name]} of {len(stack)}"
        for name, stack in stacks.items()
        if isinstance(stack, Sequence) and uses[name] != len(stack)
    }
    if not beyond:
        return None
    text = listed(beyond, lambda name: f"{contents.show(name)}: {beyond[name]}")
    return f"{len(beyond)} stacks with layers that the model lacks ({text})"


def _other_shapes(contents: _Contents) -> str | None:
    tensors, expected = contents.tensors, contents.expected
    reshaped = [name for name in contents.both if tuple(tensors[name].shape) != expected[name]]
    if not reshaped:
        return None

    def show(name: str) -> str:
        return f"{contents.show(name)} is {tuple(tensors[name].shape)}, expected {expected[name]}"

    return f"{len(reshaped)} of another shape ({listed(reshaped, show)})"


def _other_dtypes(contents: _Contents) -> str | None:
    dtypes = {name: contents.tensors[name].dtype for name in contents.both}
    refused = [name for name, dtype in dtypes.items() if dtype not in FLOATS]
    if not refused:
        return None
    text = listed(refused, lambda name: f"{contents.show(name)} is {dtypes[name]}")
    return (
        f"{len(refused)} of a dtype other than {', '.join(FLOATS)} ({text}), without scales of a "
        "quantisation that is read: save them in one of these dtypes, or with the scales that "
        "bitsandbytes or MLX saves beside them"
    )


_Rule = Callable[[_Contents], str | None]
# Of a user's table alone, since the built-in ones cover every parameter once.
_COVERAGE: tuple[_Rule, ...] = (
    _parameters_not_given,
    _parameters_given_twice,
    _tensors_named_twice,
)
_RULES: tuple[_Rule, ...] = (
    _lacking_prefix,
    _missing,
    _unexpected,
    _surplus_layers,
    _other_shapes,
    _other_dtypes,
)


def _same_bits(container: Container, head: str, op: Op, embedding: Binding) -> bool:
    """Whether an output head equals the embedding, bit for bit, read a chunk at a time."""
    import numpy as np

    one, other = container.tensors[head], container.tensors[embedding.foreign]
    if one.dtype != other.dtype or tuple(other.shape) != embedding.shape:
        return False
    shape = embedding.canonical[0].shape
    if tuple(one.shape) != op.foreign_shape(shape):
        return False

    def rows(name: str, op: Op) -> Callable[[int, int], np.ndarray]:
        if op is SAME:
            return lambda start, stop: np.ascontiguousarray(container.slice(name, start, stop))
        (whole,) = op.to_canonical(container.numpy(name))
        return lambda start, stop: np.ascontiguousarray(whole[start:stop])

    left, right = rows(head, op), rows(embedding.foreign, embedding.op)
    step = max(1, CHUNK_BYTES // max(1, one.nbytes // max(1, shape[0])))
    return all(
        np.array_equal(left(i, i + step).view(np.uint8), right(i, i + step).view(np.uint8))
        for i in range(0, shape[0], step)
    )

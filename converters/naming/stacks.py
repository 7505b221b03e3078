"""Tables whose foreign tensors hold several layers, stacked along their first axis."""

import re
from collections.abc import Mapping, Sequence

from griffin_eval.converters.naming.ops import Shape
from griffin_eval.converters.naming.tables import TEMPLATES, NameRule, matches, stacked_layers


def fit_stacks(table: Sequence[NameRule], stored: Mapping[str, Shape]) -> list[NameRule]:
    """Return the table with the layers of every stack that the container has, by their shapes."""
    return [
        rule._replace(stack=stacked_layers(rule, stored[rule.foreign][0]))
        if rule.stack is not None and stored.get(rule.foreign)
        else rule
        for rule in table
    ]


def place_stacks(
    table: Sequence[NameRule], stored: Mapping[str, Shape]
) -> tuple[Sequence[NameRule], list[str]]:
    """Recognise layers that are stacked along a first axis, where names leave no choice.

    Names without the number of a layer (``blocks/mlp_block/…``), all with a first axis of one
    length, hold all layers in order. Of numbered ones (``blocks.0`` to ``blocks.2``, as a scan
    over groups of three leaves them) nobody can tell whether groups or blocks come first.

    Returns:
        The table for these tensors, and the names of stacked tensors whose layers are not
            certain.
    """

    def has_axis(rule: NameRule, name: str) -> bool:
        shapes = (TEMPLATES[canonical] for canonical in rule.canonical)
        return len(stored[name]) == 1 + len(rule.op.foreign_shape(*shapes))

    by_layer = [rule for rule in table if "{layer}" in rule.foreign]
    every = slice(0, None, 1)
    joined = [
        rule._replace(foreign=re.sub(r"[./]\{layer\}", "", rule.foreign), stack=every)
        for rule in by_layer
    ]
    numbered = [(rule, name) for rule, name, _ in matches(by_layer, stored)]
    together = [(rule, rule.foreign) for rule in joined if rule.foreign in stored]
    seen = numbered + together
    if not seen or not all(has_axis(rule, name) for rule, name in seen):
        return table, []
    if numbered or len({stored[name][0] for _, name in together}) > 1:
        return table, [name for _, name in seen]
    return [*(rule for rule in table if rule not in by_layer), *joined], []

"""Reads a table of names that a user wrote, for checkpoints with names of their own.

The file is TOML. A row names a tensor as the checkpoint does, and the parameter that it holds by
its canonical name, which is the one in Hugging Face's format; ``{layer}`` stands for the number of
a layer in both::

    ignore = ["opt_state/*", "step"]    # patterns of tensors that are left out, and listed

    [[tensor]]
    foreign = "decoder/embed"
    canonical = "model.embed_tokens.weight"

    [[tensor]]
    foreign = "decoder/layer_{layer}/rec/w_x"
    canonical = "model.layers.{layer}.temporal_block.linear_x.weight"
    op = "transpose"

    [[tensor]]                          # one tensor that holds layers 2, 5, 8, …
    foreign = "decoder/scan/2/mlp/w_up"
    canonical = [
        "model.layers.{layer}.mlp_block.gate_proj.weight",
        "model.layers.{layer}.mlp_block.up_proj.weight",
    ]
    op = "split, transpose"
    stack = "2::3"                      # or a list: [2, 5, 8]

``op`` is how the parameter is laid out in the tensor, and is undone:

    as it is            the default
    transpose           the axes in reverse: (in, out), or (K, 1, L) for a convolution
    taps last           (K, L): a convolution of K taps
    split               (2, 1, 1, E): two biases
    split, transpose    (2, W, E): two matrices, each transposed

A ``stack`` has one axis more, the first one, along which layers lie: ``"2::3"`` means layer 2 and
every third one after it, as many as the tensor has; ``"2:24:3"`` ends before layer 24; a list says
each. Layers that are not in the stack have rows of their own, with their numbers written out:
``canonical = "model.layers.24.…"``. A separate output head is ``canonical = "lm_head.weight"``.
What a row names is never ignored.
"""

import fnmatch
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from griffin_eval.converters.naming import ops
from griffin_eval.converters.naming.ops import Op
from griffin_eval.converters.naming.tables import TEMPLATES, NameRule
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import brief, did_you_mean, listed

OPS = {op.name: op for op in vars(ops).values() if isinstance(op, Op)}

_LAYER = "{layer}"
_SLICE = re.compile(r"([0-9]{1,6})?:([0-9]{1,6})?(?::([0-9]{1,6}))?")


class Names(NamedTuple):
    """A user's naming: the file, its rows, and patterns of tensors that are left out."""

    path: Path
    rows: tuple[NameRule, ...]
    ignore: tuple[str, ...]

    def ignored(self, names: Iterable[str]) -> dict[str, str]:
        """Those of the names that a pattern fits, and why they are left out."""
        return {
            name: f"ignored by {self.path.name}"
            for name in names
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)
        }


def read_names(path: str | Path) -> Names:
    """Reads a table of names; see the head of this file for what stands in it.

    Raises:
        ArgumentError: it cannot be read, or naming every entry that is not as it must be.
    """
    path = Path(path).expanduser()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(
            f"{path}: expected a table of names (TOML), which cannot be read: "
            f"{error.strerror or error}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path}: expected TOML, found {error}") from None
    problems = [
        f"unknown key {key!r}{did_you_mean(key, ('tensor', 'ignore'))}"
        for key in content
        if key not in ("tensor", "ignore")
    ]
    ignore, entries = content.get("ignore", []), content.get("tensor", [])
    if not _texts(ignore):
        problems.append(f"ignore is {brief(ignore)}, expected a list of patterns")
    if not isinstance(entries, list) or not entries:
        problems.append("expected one [[tensor]] or more, found none")
        entries = []
    rows = []
    for number, entry in enumerate(entries, 1):
        row, wrong = _row(entry)
        foreign = entry.get("foreign") if isinstance(entry, dict) else None
        where = f"[[tensor]] {number}" + (f", {foreign!r}" if isinstance(foreign, str) else "")
        problems += [f"{where}: {problem}" for problem in wrong]
        rows += [] if row is None else [row]
    for kind, names in (
        ("foreign", [row.foreign for row in rows]),
        # The same template may be stacked in several tensors, of other layers each.
        ("canonical", [n for row in rows if row.stack is None for n in row.canonical]),
    ):
        problems += [f"{kind} {n!r} stands {k} times" for n, k in Counter(names).items() if k > 1]
    if problems:
        raise ArgumentError(f"{path}: {listed(problems)}")
    return Names(path, tuple(rows), tuple(ignore))


def _row(entry: Any) -> tuple[NameRule | None, list[str]]:
    """A row, or what is wrong with it."""
    if not isinstance(entry, dict):
        return None, [f"is {brief(entry)}, expected a table"]
    known = ("foreign", "canonical", "op", "stack")
    problems = [
        f"unknown key {key!r}{did_you_mean(key, known)}" for key in entry if key not in known
    ]
    foreign, canonical = entry.get("foreign"), entry.get("canonical")
    if not isinstance(foreign, str) or not foreign:
        problems.append(f"foreign is {brief(foreign)}, expected the name of a tensor")
        foreign = ""
    names = [canonical] if isinstance(canonical, str) else canonical
    if not names or not _texts(names):
        problems.append(f"canonical is {brief(canonical)}, expected a name or a list of names")
        names = []
    for name in names:
        if _template(name) not in TEMPLATES:
            problems.append(
                f"no parameter is called {name!r}{did_you_mean(_template(name), TEMPLATES)}"
            )
    op = entry.get("op", ops.SAME.name)
    if not isinstance(op, str) or op not in OPS:
        problems.append(f"unknown op {brief(op)}, expected one of {listed(OPS, repr)}")
        op = ops.SAME.name
    if names and len(names) != (expected := OPS[op].parts):
        problems.append(f"op {op!r} has {expected} canonical names, found {len(names)}")
    elif not problems and not _fits(OPS[op], names):
        problems.append(f"op {op!r} cannot give {listed(names)}: these have other axes")
    stack = None
    if "stack" in entry:
        stack = _stack(entry["stack"])
        if stack is None:
            problems.append(
                f"stack is {brief(entry['stack'])}, expected layers such as '2::3' or [2, 5, 8]"
            )
    layered = {_LAYER in name for name in names}
    if len(layered) > 1:
        problems.append(f"{_LAYER} stands in some of its canonical names only")
    elif "stack" in entry and (_LAYER in foreign or layered == {False}):
        problems.append(f"with stack, {_LAYER} stands in canonical and not in foreign")
    elif "stack" not in entry and layered == {_LAYER not in foreign}:
        problems.append(f"{_LAYER} stands in foreign and canonical, or in neither")
    return (None if problems else NameRule(foreign, tuple(names), OPS[op], stack)), problems


def _fits(op: Op, names: Iterable[str]) -> bool:
    """Whether parameters can be laid out so, and back."""
    shapes = tuple(TEMPLATES[_template(name)] for name in names)
    try:
        foreign = op.foreign_shape(*shapes)
    except IndexError:
        return False
    return op.rank in (None, len(foreign)) and op.canonical_shapes(foreign) == shapes


def _template(name: str) -> str:
    """A canonical name with a placeholder for the number of its layer."""
    return re.sub(r"\.[0-9]{1,6}\.", f".{_LAYER}.", name)


def _stack(value: Any) -> slice | tuple[int, ...] | None:
    if isinstance(value, str) and (match := _SLICE.fullmatch(value)):
        start, stop, step = (None if part is None else int(part) for part in match.groups())
        return slice(start or 0, stop, 1 if step is None else step) if step != 0 else None
    if isinstance(value, list) and value and all(type(n) is int and n >= 0 for n in value):
        return tuple(value) if len(set(value)) == len(value) else None
    return None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)

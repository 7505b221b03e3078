"""Reads a table of names that a user wrote, for checkpoints with names of their own.

The file is TOML: ``[[tensor]]`` and ``[[check]]`` are rows, ``[config]`` holds fields of
`GriffinConfig`, and ``ignore``, ``title``, ``config_file`` and ``differs`` stand at its top. With
``like = "nemo"`` it is a table that ships, with other fields in ``[config]``. docs/convert.md has
all of it under "Checkpoints with names of their own".
"""

import dataclasses
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from griffin_eval.config import PRESETS, GriffinConfig
from griffin_eval.converters.naming import ops
from griffin_eval.converters.naming.ops import FACTORS, MINUS_ONE, SCALE_BY, Change, Op
from griffin_eval.converters.naming.tables import EMBEDDING, HEAD, TEMPLATES, Check, NameRule, Names
from griffin_eval.converters.naming.trainers import TRAINERS
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import brief, did_you_mean, listed

OPS = {op.name: op for op in vars(ops).values() if isinstance(op, Op)}
CUT, ABSENT = "cut", "absent means zeros"

_LAYER = "{layer}"
_SLICE = re.compile(r"([0-9]{1,6})?:([0-9]{1,6})?(?::([0-9]{1,6}))?")
_LONG = re.compile(r"[0-9A-Fa-f_]{3000}")
_BLOCKS = ("recurrent", "attention")
_BEFORE = (CUT, MINUS_ONE, SCALE_BY)  # operations that may stand before one of OPS
_KEYS = ("tensor", "ignore", "check", "config", "title", "config_file", "differs", "like")
_ROW = ("foreign", "canonical", "op", "stack", "layers", "block", "axis", "factor")
_CHECK = ("foreign", "value", "canonical", "op", "factor")
_FIELDS = {field.name for field in dataclasses.fields(GriffinConfig)}


class _Table:
    """A table of the file; each fault adds a clause to ``problems``."""

    def __init__(self, raw: Any, keys: Collection[str], problems: list[str], where: str = ""):
        self.raw: Mapping[str, Any] = raw if isinstance(raw, dict) else {}
        self.problems, self._where = problems, where
        if not isinstance(raw, dict):
            self.refuse(f"is {brief(raw)}, expected a table")
        for key in self.raw:
            if key not in keys:
                self.refuse(f"unknown key {key!r}{did_you_mean(key, keys)}")

    def refuse(self, clause: str) -> None:
        self.problems.append(f"{self._where}{clause}")

    def take(
        self, key: str, fits: Callable[[Any], bool], expected: str, default: Any = None
    ) -> Any:
        """Return the value of a key; the default, and a problem, if it does not fit."""
        if fits(value := self.raw.get(key, default)):
            return value
        self.refuse(f"{key} is {brief(value)}, expected {expected}")
        return default

    def tables(self, key: str, keys: Collection[str]) -> list["_Table"]:
        """Return the tables of a list."""
        tables = []
        for i, raw in enumerate(self.take(key, lambda v: isinstance(v, list), "tables", []), 1):
            foreign = raw.get("foreign") if isinstance(raw, dict) else None
            named = f", {foreign!r}" if isinstance(foreign, str) else ""
            tables.append(_Table(raw, keys, self.problems, f"[[{key}]] {i}{named}: "))
        return tables


def read_names(path: str | Path) -> Names:
    """Read a table of names.

    Args:
        path: File, or name of a table that ships with the package.

    Raises:
        ArgumentError: it cannot be read, or naming every entry that is not as it must be.
    """
    given, path = str(path), Path(os.path.expanduser(path))
    if given in TRAINERS:
        return TRAINERS[given]
    try:
        text = path.read_text(encoding="utf-8")
        if _LONG.search(text):  # Python refuses to print such numbers
            raise ValueError("a number of thousands of digits")
        content = tomllib.loads(text)
    except OSError as error:
        raise ArgumentError(
            f"{path}: expected a table of names (TOML) or one of {', '.join(TRAINERS)}"
            f"{did_you_mean(given, TRAINERS)}, which cannot be read: {error.strerror or error}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: expected TOML, found {error}") from None
    file = _Table(content, _KEYS, [])
    names = _like(file, path) if "like" in content else _names(file, path)
    if file.problems:
        raise ArgumentError(f"{path}: {listed(file.problems)}")
    return names


def _like(file: _Table, path: Path) -> Names:
    """Return a table that ships with the package, with other fields of the config."""
    shipped = TRAINERS.get(file.raw["like"]) if isinstance(file.raw["like"], str) else None
    config = _config(file)
    if shipped is None:
        file.refuse(f"like is {brief(file.raw['like'])}, expected one of {', '.join(TRAINERS)}")
    for key in file.raw.keys() - {"like", "config"}:
        file.refuse(f"{key} stands beside like")
    shipped = shipped or Names(path, ())
    return shipped._replace(path=path, config={**shipped.config, **config})


def _names(file: _Table, path: Path) -> Names:
    ignore, differs = (
        tuple(file.take(key, _are_lines, "a list of texts of one line", []))
        for key in ("ignore", "differs")
    )
    title = file.take("title", _is_line, "a text of one line", "")
    config_file = file.take("config_file", lambda v: type(v) is bool, "true or false", True)
    config = _config(file)
    rows = [row for table in file.tables("tensor", _ROW) for row in _rows(table)]
    if not file.raw.get("tensor"):
        file.refuse("expected one [[tensor]] or more, found none")
    checks = [check for table in file.tables("check", _CHECK) for check in _check(table)]
    plain = [row for row in rows if row == NameRule(row.foreign, row.canonical, ops.SAME)]
    as_it_is = {name for row in plain for name in row.canonical}
    for name in (name for check in checks for name in check.rule.canonical):
        if name not in as_it_is:
            file.refuse(f"check of {name!r}: no row gives it as it is")
    foreign = [rule.foreign for rule in (*rows, *(c.rule for c in checks)) if rule.foreign]
    # Several tensors may hold one template's parameters, if each holds other layers.
    alone = [row for row in rows if row.stack is row.layers is row.block is None]
    canonical = [name for row in alone for name in row.canonical]
    for kind, names in (("foreign", foreign), ("canonical", canonical)):
        for name, count in Counter(names).items():
            if count > 1:
                file.refuse(f"{kind} {name!r} stands {count} times")
    return Names(path, tuple(rows), ignore, tuple(checks), config, title, config_file, differs)


def _config(file: _Table) -> dict[str, Any]:
    """Return the fields of the config, lists as tuples; each must be like the field of a preset."""
    config = file.take("config", lambda v: isinstance(v, dict), "a table", {})
    example = dataclasses.asdict(PRESETS["recurrentgemma-2b"])
    kinds = {tuple: (list,), float: (int, float), type(None): (int,)}  # None: a number, or absent
    for name, value in config.items():
        if name not in _FIELDS:
            file.refuse(f"config has no field {name!r}{did_you_mean(name, _FIELDS)}")
            continue
        like = example[name]
        fits = type(value) in kinds.get(type(like), (type(like),))
        if not fits or (isinstance(value, list) and not _are_texts(value)):
            file.refuse(f"config has {name} = {brief(value)}, expected one like {brief(like)}")
    return {name: tuple(v) if isinstance(v, list) else v for name, v in config.items()}


def _rows(table: _Table) -> list[NameRule]:
    """Return the rules of a [[tensor]]: one, or one for each parameter that is zeros; none if it is
    wrong."""
    before, names = len(table.problems), _canonical_names(table)
    if table.raw.get("op") == ABSENT:
        if EMBEDDING in names:
            table.refuse(f"{EMBEDDING} cannot be absent")
        for key in table.raw:
            if key in _ROW and key not in ("canonical", "op"):
                table.refuse(f"{key} stands beside op {ABSENT!r}, which has only canonical")
        rules = [NameRule("", (name,), ops.SAME) for name in names]
    else:
        rules = [_rule(table, names)]
    return rules if len(table.problems) == before else []


def _rule(table: _Table, names: Sequence[str]) -> NameRule:
    before = len(table.problems)
    foreign = table.take("foreign", _is_text, "the name of a tensor") or ""
    steps, op = _op(table)
    cut, change = _cut(table, steps), _change(table, steps)
    if names and cut is None and len(names) != op.parts:
        table.refuse(f"op {op.name!r} has {op.parts} canonical names, found {len(names)}")
    elif names and cut is not None and (len(names) < 2 or op.parts > 1 or HEAD in names):
        table.refuse(
            f"op {CUT!r} has two canonical names or more, of which each has a part and none is "
            f"{HEAD}, found {listed(names)} as {op.name!r}"
        )
    elif names and len(table.problems) == before and not _fits(op, names, cut):
        table.refuse(f"op {op.name!r} cannot give {listed(names)}: these have other axes")
    stack, layers = _layers(table, "stack"), _layers(table, "layers")
    layered = {_LAYER in name for name in names}
    if len(layered) > 1:
        table.refuse(f"{_LAYER} stands in some of its canonical names only")
    elif "stack" in table.raw and (_LAYER in foreign or layered == {False}):
        table.refuse(f"with stack, {_LAYER} stands in canonical and not in foreign")
    elif "stack" not in table.raw and layered == {_LAYER not in foreign}:
        table.refuse(f"{_LAYER} stands in foreign and canonical, or in neither")
    elif "layers" in table.raw and ("stack" in table.raw or layered == {False}):
        table.refuse(f"layers stands without stack, where {_LAYER} is in both names")
    block = table.raw.get("block")
    if "block" in table.raw and (block not in _BLOCKS or layered != {True}):
        table.refuse(f"block is {brief(block)}, expected {' or '.join(_BLOCKS)} for a {_LAYER}")
    return NameRule(foreign, tuple(names), op, stack, layers, block, cut, change)


def _check(table: _Table) -> list[Check]:
    """Return the check of a [[check]] in a list, which is empty if the table is wrong."""
    before = len(table.problems)
    foreign = table.take("foreign", _is_text, "the name of a tensor") or ""
    rule, value = NameRule(foreign, (), ops.SAME), None
    if ("value" in table.raw) == ("canonical" in table.raw):
        table.refuse("expected either value or canonical")
    elif "value" in table.raw:
        value = table.take("value", _is_number, "a number")
    if "canonical" in table.raw:
        names, (steps, op) = _canonical_names(table), _op(table)
        rule = NameRule(foreign, tuple(names), op, change=_change(table, steps))
        if len(names) != 1 or any(_LAYER in name for name in (foreign, *names)):
            table.refuse(f"expected one canonical name, and no {_LAYER}")
        if CUT in steps or op is not ops.SAME:
            table.refuse(f"op is {brief(table.raw.get('op'))}, expected one that lays nothing out")
    return [Check(rule, value)] if len(table.problems) == before else []


def _canonical_names(table: _Table) -> list[str]:
    names = canonical = table.raw.get("canonical")
    names = [canonical] if isinstance(canonical, str) else canonical
    if not names or not _are_texts(names):
        table.refuse(f"canonical is {brief(canonical)}, expected a name or a list of names")
        return []
    for name in names:
        if _template(name) not in TEMPLATES:
            near = did_you_mean(_template(name), TEMPLATES)
            table.refuse(f"no parameter is called {name!r}{near}")
    return names


def _op(table: _Table) -> tuple[list[str], Op]:
    """Return the steps before one of ``OPS``, and that operation."""
    text = table.raw.get("op", ops.SAME.name)
    steps = [step.strip() for step in text.split(",")] if isinstance(text, str) else []
    before = [step for step in steps if step in _BEFORE]
    name = ", ".join(steps[len(before) :]) if before else text
    name = ops.SAME.name if before and not name else name
    if not isinstance(name, str) or name not in OPS or before != steps[: len(before)]:
        expected = listed((*OPS, *_BEFORE, ABSENT), repr)
        table.refuse(f"unknown op {brief(text)}, expected one of {expected}")
        return before, ops.SAME
    if len(set(before)) < len(before) or {MINUS_ONE, SCALE_BY} <= set(before):
        table.refuse(f"op {brief(text)} says twice what becomes of the tensor")
    return before, OPS[name]


def _cut(table: _Table, steps: Sequence[str]) -> int | None:
    if "axis" in table.raw and CUT not in steps:
        table.refuse(f"axis stands without op {CUT!r}")
        return None
    axis = table.take(
        "axis", lambda n: type(n) is int and 0 <= n < 4, "the number of an axis, from 0", 0
    )
    return axis if CUT in steps else None


def _change(table: _Table, steps: Sequence[str]) -> Change | None:
    if ("factor" in table.raw) != (SCALE_BY in steps):
        table.refuse(f"expected op {SCALE_BY!r} and factor, or none of them")
    elif SCALE_BY in steps:
        expected = f"a number, not 0, or {listed(FACTORS, repr)}"
        factor = table.take("factor", lambda v: v in list(FACTORS) or _is_number(v) and v, expected)
        return Change(SCALE_BY, factor if isinstance(factor, str) else float(factor or 0))
    return Change(MINUS_ONE) if MINUS_ONE in steps else None


def _fits(op: Op, names: Iterable[str], cut: int | None) -> bool:
    """Return whether an operation fits the parameters' shapes in both directions; in a tensor that
    is cut, each parameter alone."""
    shapes = tuple(TEMPLATES.get(_template(name), ()) for name in names)
    if cut is not None:
        parts = [op.foreign_shape(shape) for shape in shapes if _is_of(op, (shape,))]
        beside = {(*part[:cut], *part[cut + 1 :]) for part in parts}
        return len(parts) == len(shapes) and len(beside) == 1 and cut < len(parts[0])
    return _is_of(op, shapes)


def _is_of(op: Op, shapes: tuple[ops.Shape, ...]) -> bool:
    try:
        foreign = op.foreign_shape(*shapes)
    except IndexError:
        return False
    return op.rank in (None, len(foreign)) and op.canonical_shapes(foreign) == shapes


def _template(name: str) -> str:
    """Return a canonical name with a placeholder for the number of its layer."""
    return re.sub(r"\.[0-9]{1,6}\.", f".{_LAYER}.", name)


def _layers(table: _Table, key: str) -> Any:
    """Return the layers under a key as a slice, or as a tuple (only of a stack); None if absent or
    wrong."""
    value = table.raw.get(key)
    match = _SLICE.fullmatch(value) if isinstance(value, str) else None
    if match is not None and int(match[3] or 1):
        return slice(int(match[1] or 0), int(match[2]) if match[2] else None, int(match[3] or 1))
    numbers = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    if key == "stack" and numbers and value and len(set(value)) == len(value):
        return tuple(value)
    if key in table.raw:
        expected = "'2::3' or [2, 5, 8]" if key == "stack" else "'1::2'"
        table.refuse(f"{key} is {brief(value)}, expected layers such as {expected}")
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_lines(value: Any) -> bool:
    return _are_texts(value) and all(map(_is_line, value))

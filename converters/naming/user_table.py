"""Reads a table of names that a user wrote, for checkpoints with names of their own.

The file is TOML: ``[[tensor]]`` and ``[[check]]`` are rows, ``[config]`` holds fields of
`GriffinConfig`, and ``ignore``, ``title``, ``config_file`` and ``differs`` stand at its top. With
``like = "nemo"`` it is a table that ships, with other fields in ``[config]``. docs/convert.md has
all of it under "Checkpoints with names of their own".
"""

import dataclasses
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
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
_BEFORE = (CUT, MINUS_ONE, SCALE_BY)  # what may stand before an op of OPS
_KEYS = ("tensor", "ignore", "check", "config", "title", "config_file", "differs", "like")
_FIELDS = {field.name for field in dataclasses.fields(GriffinConfig)}


def read_names(path: str | Path) -> Names:
    """Reads a table of names; see the head of this file for what stands in it.

    Args:
        path: a file, or the name of a table that ships with the package.

    Raises:
        ArgumentError: it cannot be read, or naming every entry that is not as it must be.
    """
    given, path = str(path), Path(path).expanduser()
    if given in TRAINERS:
        return TRAINERS[given]
    try:
        text = path.read_text(encoding="utf-8")
        if _LONG.search(text):  # which Python does not print
            raise ValueError("a number of thousands of digits")
        content = tomllib.loads(text)
    except OSError as error:
        raise ArgumentError(
            f"{path}: expected a table of names (TOML) or one of {', '.join(TRAINERS)}"
            f"{did_you_mean(given, TRAINERS)}, which cannot be read: {error.strerror or error}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: expected TOML, found {error}") from None
    if "like" in content:
        return _like(path, content)
    problems = [
        f"unknown key {key!r}{did_you_mean(key, _KEYS)}" for key in content if key not in _KEYS
    ]
    for key in ("ignore", "differs"):
        if not _texts(value := content.get(key, [])) or not all(map(str.isprintable, value)):
            problems.append(f"{key} is {brief(value)}, expected a list of texts of one line")
    title, config_file = content.get("title", ""), content.get("config_file", True)
    if not isinstance(title, str) or not title.isprintable():
        problems.append(f"title is {brief(title)}, expected a text of one line")
    if not isinstance(config_file, bool):
        problems.append(f"config_file is {brief(config_file)}, expected true or false")
    problems += _config_problems(content.get("config", {}))
    entries, rows, checks = content.get("tensor", []), [], []
    if not isinstance(entries, list) or not entries:
        problems.append("expected one [[tensor]] or more, found none")
        entries = []
    for number, entry in enumerate(entries, 1):
        row, wrong = _row(entry)
        problems += [f"{_where('tensor', number, entry)}: {problem}" for problem in wrong]
        if row is not None and row.foreign:
            rows.append(row)
        elif row is not None:  # each is zeros by itself
            rows += [row._replace(canonical=(name,)) for name in row.canonical]
    entries = content.get("check", [])
    if not isinstance(entries, list):
        problems.append(f"check is {brief(entries)}, expected tables")
        entries = []
    for number, entry in enumerate(entries, 1):
        check, wrong = _check(entry)
        problems += [f"{_where('check', number, entry)}: {problem}" for problem in wrong]
        checks += [] if check is None else [check]
    as_it_is = {
        name
        for row in rows
        if row == NameRule(row.foreign, row.canonical, ops.SAME)
        for name in row.canonical
    }
    problems += [
        f"check of {name!r}: no row gives it as it is"
        for check in checks
        for name in check.rule.canonical
        if name not in as_it_is
    ]
    for kind, names in (
        ("foreign", [row.foreign for row in (*rows, *(c.rule for c in checks)) if row.foreign]),
        # The same template may be stacked in several tensors, of other layers each.
        (
            "canonical",
            [
                n
                for row in rows
                if row.stack is row.layers is row.block is None
                for n in row.canonical
            ],
        ),
    ):
        problems += [f"{kind} {n!r} stands {k} times" for n, k in Counter(names).items() if k > 1]
    if problems:
        raise ArgumentError(f"{path}: {listed(problems)}")
    return Names(
        path,
        tuple(rows),
        tuple(content.get("ignore", [])),
        tuple(checks),
        _config_of(content),
        title,
        config_file,
        tuple(content.get("differs", [])),
    )


def _like(path: Path, content: Mapping[str, Any]) -> Names:
    """A table that ships with the package, with other fields of the config."""
    like, config = content["like"], content.get("config", {})
    problems = _config_problems(config)
    if like not in TRAINERS:
        problems.append(f"like is {brief(like)}, expected one of {', '.join(TRAINERS)}")
    problems += [f"{key} stands beside like" for key in content if key not in ("like", "config")]
    if problems:
        raise ArgumentError(f"{path}: {listed(problems)}")
    shipped = TRAINERS[like]
    return shipped._replace(path=path, config={**shipped.config, **_config_of(content)})


def _config_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config in a table, lists as tuples."""
    config = content.get("config", {})
    return {key: tuple(v) if isinstance(v, list) else v for key, v in config.items()}


def _where(kind: str, number: int, entry: Any) -> str:
    """A table in the file, for messages."""
    foreign = entry.get("foreign") if isinstance(entry, dict) else None
    return f"[[{kind}]] {number}" + (f", {foreign!r}" if isinstance(foreign, str) else "")


def _config_problems(config: Any) -> list[str]:
    """What is wrong with the fields of a config, as far as one shows it alone."""
    if not isinstance(config, dict):
        return [f"config is {brief(config)}, expected a table"]
    problems = []
    example = dataclasses.asdict(PRESETS["recurrentgemma-2b"])
    kinds: dict[type, tuple[type, ...]] = {
        tuple: (list,),
        float: (int, float),
        type(None): (int,),  # of a number that need not be there
    }
    for name, value in config.items():
        if name not in _FIELDS:
            problems.append(f"config has no field {name!r}{did_you_mean(name, _FIELDS)}")
            continue
        like = example[name]
        kind = kinds.get(type(like), (type(like),))
        if type(value) not in kind or (isinstance(value, list) and not _texts(value)):
            problems.append(f"config has {name} = {brief(value)}, expected one like {brief(like)}")
    return problems


def _row(entry: Any) -> tuple[NameRule | None, list[str]]:
    """A row, or what is wrong with it."""
    if not isinstance(entry, dict):
        return None, [f"is {brief(entry)}, expected a table"]
    known = ("foreign", "canonical", "op", "stack", "layers", "block", "axis", "factor")
    problems = [
        f"unknown key {key!r}{did_you_mean(key, known)}" for key in entry if key not in known
    ]
    foreign, absent = entry.get("foreign", ""), entry.get("op") == ABSENT
    if not isinstance(foreign, str) or (not foreign and not absent):
        problems.append(f"foreign is {brief(entry.get('foreign'))}, expected the name of a tensor")
        foreign = ""
    names = _canonical_names(entry, problems)
    if absent:
        if EMBEDDING in names:
            problems.append(f"{EMBEDDING} cannot be absent")
        problems += [
            f"{key} stands beside op {ABSENT!r}, which has only canonical"
            for key in entry
            if key in known and key not in ("canonical", "op")
        ]
        return (None if problems else NameRule("", tuple(names), ops.SAME)), problems
    before, op = _op(entry, problems)
    cut, change = _cut(entry, before, problems), _change(entry, before, problems)
    if names and cut is None and len(names) != (expected := op.parts):
        problems.append(f"op {op.name!r} has {expected} canonical names, found {len(names)}")
    elif names and cut is not None and (len(names) < 2 or op.parts > 1 or HEAD in names):
        problems.append(
            f"op {CUT!r} has two canonical names or more, of which each has a part and none is "
            f"{HEAD}, found {listed(names)} as {op.name!r}"
        )
    elif not problems and not _fits(op, names, cut):
        problems.append(f"op {op.name!r} cannot give {listed(names)}: these have other axes")
    stack = _layers(entry, "stack", problems)
    layers = _layers(entry, "layers", problems)
    if layers is not None and not isinstance(layers, slice):
        problems.append(f"layers is {brief(entry['layers'])}, expected layers such as '1::2'")
        layers = None
    layered = {_LAYER in name for name in names}
    if len(layered) > 1:
        problems.append(f"{_LAYER} stands in some of its canonical names only")
    elif "stack" in entry and (_LAYER in foreign or layered == {False}):
        problems.append(f"with stack, {_LAYER} stands in canonical and not in foreign")
    elif "stack" not in entry and layered == {_LAYER not in foreign}:
        problems.append(f"{_LAYER} stands in foreign and canonical, or in neither")
    elif "layers" in entry and ("stack" in entry or layered == {False}):
        problems.append(f"layers stands without stack, where {_LAYER} is in both names")
    block = entry.get("block")
    if "block" in entry and (block not in _BLOCKS or layered != {True}):
        problems.append(f"block is {brief(block)}, expected {' or '.join(_BLOCKS)} for a {_LAYER}")
    row = NameRule(foreign, tuple(names), op, stack, layers, block, cut, change)
    return (None if problems else row), problems


def _check(entry: Any) -> tuple[Check | None, list[str]]:
    """A check, or what is wrong with it."""
    if not isinstance(entry, dict):
        return None, [f"is {brief(entry)}, expected a table"]
    known = ("foreign", "value", "canonical", "op", "factor")
    problems = [
        f"unknown key {key!r}{did_you_mean(key, known)}" for key in entry if key not in known
    ]
    foreign, value = entry.get("foreign"), entry.get("value")
    if not isinstance(foreign, str) or not foreign:
        problems.append(f"foreign is {brief(foreign)}, expected the name of a tensor")
        foreign = "?"
    if ("value" in entry) == ("canonical" in entry):
        problems.append("expected either value or canonical")
    elif "value" in entry and not _is_number(value):
        problems.append(f"value is {brief(value)}, expected a number")
    if "canonical" not in entry:
        rule = NameRule(foreign, (), ops.SAME)
        return (Check(rule, float(value)) if not problems and value is not None else None), problems
    names = _canonical_names(entry, problems)
    before, op = _op(entry, problems)
    change = _change(entry, before, problems)
    if len(names) != 1 or _LAYER in foreign or any(_LAYER in n for n in names):
        problems.append(f"expected one canonical name, and no {_LAYER}")
    if CUT in before or op is not ops.SAME:
        problems.append(f"op is {brief(entry.get('op'))}, expected one that lays nothing out")
    rule = NameRule(foreign, tuple(names), op, change=change)
    return (None if problems else Check(rule, None)), problems


def _canonical_names(entry: Mapping[str, Any], problems: list[str]) -> list[str]:
    canonical = entry.get("canonical")
    names = [canonical] if isinstance(canonical, str) else canonical
    if not names or not _texts(names):
        problems.append(f"canonical is {brief(canonical)}, expected a name or a list of names")
        return []
    for name in names:
        if _template(name) not in TEMPLATES:
            problems.append(
                f"no parameter is called {name!r}{did_you_mean(_template(name), TEMPLATES)}"
            )
    return names


def _op(entry: Mapping[str, Any], problems: list[str]) -> tuple[list[str], Op]:
    """What stands before an op of ``OPS``, and that op."""
    text = entry.get("op", ops.SAME.name)
    steps = [step.strip() for step in text.split(",")] if isinstance(text, str) else []
    before = [step for step in steps if step in _BEFORE]
    name = ", ".join(steps[len(before) :]) if before else text
    name = ops.SAME.name if before and not name else name
    if not isinstance(name, str) or name not in OPS or before != steps[: len(before)]:
        expected = listed((*OPS, *_BEFORE, ABSENT), repr)
        problems.append(f"unknown op {brief(text)}, expected one of {expected}")
        return before, ops.SAME
    if len(set(before)) < len(before) or {MINUS_ONE, SCALE_BY} <= set(before):
        problems.append(f"op {brief(text)} says twice what becomes of the tensor")
    return before, OPS[name]


def _cut(entry: Mapping[str, Any], before: list[str], problems: list[str]) -> int | None:
    axis = entry.get("axis", 0)
    if "axis" in entry and CUT not in before:
        problems.append(f"axis stands without op {CUT!r}")
    elif type(axis) is not int or not 0 <= axis < 4:
        problems.append(f"axis is {brief(axis)}, expected the number of an axis, from 0")
        return None
    return axis if CUT in before else None


def _change(entry: Mapping[str, Any], before: list[str], problems: list[str]) -> Change | None:
    factor = entry.get("factor")
    if ("factor" in entry) != (SCALE_BY in before):
        problems.append(f"expected op {SCALE_BY!r} and factor, or none of them")
    elif SCALE_BY in before:
        if _is_number(factor) and factor:
            return Change(SCALE_BY, float(factor))
        if isinstance(factor, str) and factor in FACTORS:
            return Change(SCALE_BY, factor)
        problems.append(
            f"factor is {brief(factor)}, expected a number, not 0, or {listed(FACTORS, repr)}"
        )
    return Change(MINUS_ONE) if MINUS_ONE in before else None


def _fits(op: Op, names: Iterable[str], cut: int | None) -> bool:
    """Whether parameters can be laid out so, and back; of a tensor that is cut, each of them."""
    shapes = tuple(TEMPLATES[_template(name)] for name in names)
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
    """A canonical name with a placeholder for the number of its layer."""
    return re.sub(r"\.[0-9]{1,6}\.", f".{_LAYER}.", name)


def _layers(
    entry: Mapping[str, Any], key: str, problems: list[str]
) -> slice | tuple[int, ...] | None:
    """The layers under a key, None if it is not there or wrong."""
    if key not in entry:
        return None
    layers = _parsed_layers(entry[key])
    if layers is None:
        problems.append(
            f"{key} is {brief(entry[key])}, expected layers such as '2::3' or [2, 5, 8]"
        )
    return layers


def _parsed_layers(value: Any) -> slice | tuple[int, ...] | None:
    if isinstance(value, str) and (match := _SLICE.fullmatch(value)):
        start, stop, step = (None if part is None else int(part) for part in match.groups())
        return slice(start or 0, stop, 1 if step is None else step) if step != 0 else None
    if isinstance(value, list) and value and all(type(n) is int and n >= 0 for n in value):
        return tuple(value) if len(set(value)) == len(value) else None
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)

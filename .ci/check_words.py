"""Check names and the wording of docstrings, comments and help texts, as in CONTRIBUTING.md.

    python .ci/check_words.py FILE...

Print one line for each fault and exit with 1 if there is one. Ruff's D401 checks the first line of
a function's docstring.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PRONOUNS = {"that", "what", "which", "who", "whom", "whose", "it", "its", "they", "their", "them"}
PREPOSITIONS = {
    *("about", "above", "after", "among", "as", "at", "before", "behind", "below", "beside"),
    *("between", "but", "by", "during", "else", "for", "from", "in", "into", "of", "on", "than"),
    *("to", "under", "until", "up", "with", "within", "without"),
}
# The first words with which a comment continues a sentence that stands nowhere.
CONTINUING = {"of", "which", "whose", "who", "what", "that", "else", "as", "than", "but"}
# Names that say how a value came about, and not what it is.
NO_NOUNS = set("asked each found given held kept known least most own told wanted".split())
FIELDS_THAT_STAY = {"Claim.found", "PoolRows.kept"}  # in files of results, and in a public tuple
SECTIONS = re.compile(r"\s*(Args|Attributes|Returns|Yields|Raises):$")
ENTRY = re.compile(r"\s*\**([\w., *]+?)(?: \([^)]*\))?: (\S+)")


def first_word(text: str) -> str:
    """Return the first word of a text in lower case, without punctuation."""
    words = text.split()
    return words[0].strip(".,:;`'\"()").lower() if words else ""


def docstring_faults(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and a sentence for each faulty entry of a docstring's sections."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
        return
    docstring = ast.get_docstring(node, clean=True)
    if docstring is None:
        return
    first, section, depth = node.body[0].lineno, "", 0
    for number, line in enumerate(docstring.splitlines()):
        if match := SECTIONS.match(line):
            section, depth = match[1], len(line) - len(line.lstrip()) + 4
        elif section in ("Args", "Attributes") and len(line) - len(line.lstrip()) == depth:
            entry = ENTRY.match(line)
            if entry and first_word(entry[2]) in PREPOSITIONS | PRONOUNS:
                yield first + number, f"{entry[1]}: begins with {entry[2]!r}; name the thing first"


def comment_faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and a sentence for each comment that begins in the middle of a sentence."""
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        number, alone = token.start[0], token.line.lstrip().startswith("#")
        follows = alone and number == last + 1
        last = number if alone else 0
        word = first_word(token.string.lstrip("#! "))
        if not follows and word in CONTINUING:
            yield number, f"a comment begins with {word!r}; name the thing first"


def help_faults(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and a sentence for each ``help=`` that is no sentence or value phrase."""
    if not isinstance(node, ast.Call):
        return
    sentences = getattr(node.func, "attr", "") != "add_argument"  # argparse's are fragments
    for argument in node.keywords:
        value = argument.value.value if isinstance(argument.value, ast.Constant) else None
        if argument.arg != "help" or not isinstance(value, str):
            continue
        word = first_word(value)
        if sentences and (value[0].islower() or not value.endswith(".")):
            yield argument.value.lineno, f"help {value!r}: expected a capital and a full stop"
        if word in PREPOSITIONS | PRONOUNS or re.fullmatch(r"\w{3,}(ed|ing)", word):
            yield argument.value.lineno, f"help {value!r}: expected a verb, or the value's name"


def name_faults(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and a sentence for each name that names no thing. Local variables may."""
    names: list[str] = []
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
            names = [name]
        case ast.Attribute(attr=name, ctx=ast.Store()):
            names = [name]
        case ast.ClassDef(name=name, body=body):
            fields = [part.target for part in body if isinstance(part, ast.AnnAssign)]
            names = [f"{name}.{ast.unparse(field)}" for field in fields]
        case ast.Name(id=name, ctx=ast.Store()) if re.match("_?(MOST|LEAST)(_|$)", name):
            yield node.lineno, f"{name}: begin limits with MAX_ or MIN_"
    for name in names:
        if name not in FIELDS_THAT_STAY and name.split(".")[-1].strip("_") in NO_NOUNS:
            yield node.lineno, f"{name}: expected a noun, or max_ or min_ and a noun"


def faults(file: Path) -> list[str]:
    """Return one line for each fault of a Python file."""
    source = file.read_text(encoding="utf-8")
    lines = list(comment_faults(source))
    for node in ast.walk(ast.parse(source)):
        lines += [*docstring_faults(node), *help_faults(node)]
        if not file.name.startswith("test_"):
            lines += name_faults(node)
    return [f"{file}:{line}: {sentence}" for line, sentence in sorted(lines)]


if __name__ == "__main__":
    printed = [line for name in sys.argv[1:] for line in faults(Path(name))]
    print(*printed, sep="\n", end="\n" if printed else "")
    sys.exit(bool(printed))

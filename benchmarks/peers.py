"""Which other implementations a benchmark can measure; the others are left out with one line."""

from importlib import import_module
from importlib.util import find_spec

from griffin_eval.messages import first_line


class Absent(Exception):
    """Why a peer is left out of a benchmark, in words."""


def check_peer(*modules: str) -> None:
    """Imports the modules that a peer needs.

    Args:
        modules: names as in an import statement.

    Raises:
        Absent: some are not installed, or one of them cannot be imported, for whatever reason.
    """
    roots = dict.fromkeys(module.partition(".")[0] for module in modules)
    if missing := [root for root in roots if find_spec(root) is None]:
        raise Absent(f"{' and '.join(missing)} not installed")
    for module in modules:
        try:
            import_module(module)
        except Exception as error:  # a broken installation can raise anything
            kind = type(error).__name__
            raise Absent(f"{module} cannot be imported: {kind}: {first_line(error)}") from error


def why_absent(*modules: str) -> str | None:
    """The reason that `check_peer` gives, or None if the peer can be measured."""
    try:
        check_peer(*modules)
    except Absent as error:
        return str(error)
    return None


def left_out(name: str, reason: str) -> str:
    """The line about a peer that is not measured."""
    return f"{name} is left out: {reason}"

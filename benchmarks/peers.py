"""Checks of the peers of a benchmark; missing ones are reported with one line."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec


class Absent(Exception):
    """The reason why a peer is left out of a benchmark."""


def check_peer(*modules: str) -> None:
    """Import the modules that a peer needs.

    Raises:
        Absent: A module is not installed or cannot be imported.
    """
    roots = dict.fromkeys(module.partition(".")[0] for module in modules)
    if missing := [root for root in roots if find_spec(root) is None]:
        raise Absent(f"{' and '.join(missing)} not installed")
    for module in modules:
        try:
            import_module(module)
        except Exception as error:  # A broken installation can raise anything.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise Absent(f"{module} cannot be imported: {reason}") from error


def why_absent(*modules: str) -> str | None:
    """Return the reason that `check_peer` gives, or None if the peer can be measured."""
    try:
        check_peer(*modules)
    except Absent as error:
        return str(error)
    return None


def absent_peers(needs: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return why peers are left out, by name, from the modules that each of them needs."""
    reasons = {name: why_absent(*modules) for name, modules in needs.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def left_out(name: str, reason: str) -> str:
    """Return the line about a peer that is not measured."""
    return f"{name} is left out: {reason}"

"""Checks of the headers Host and Origin against malicious web pages in the user's browser.

A page can send requests to a server on the user's machine, and can read the answers if a host name
of its own resolves to 127.0.0.1 (DNS rebinding). The headers of such requests name that host.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.errors import ArgumentError
from griffin_eval.server.refused import Refused

if TYPE_CHECKING:
    from starlette.datastructures import Headers

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_NAME = r"[^][:/@?#*\s]+"
_AUTHORITY = re.compile(rf"(?:\[([^][]+)\]|({_NAME}))(?::\d*)?")


class Hosts(NamedTuple):
    """Hosts that requests may name, in the form of `_canonical`. Servers that listen at all
    addresses of their machine accept every IP address, since only names can be rebound."""

    names: frozenset[str] = LOOPBACK
    any_address: bool = False

    def check(self, headers: "Headers") -> None:
        """Refuse a request whose header Host or Origin names another host."""
        hosts = {given: _host(given) for given in headers.getlist("host")}
        for given, host in hosts.items():
            if host not in self.names and not (self.any_address and _is_address(host)):
                raise Refused(
                    f"this server does not answer for the host {given!r:.120}: use "
                    f"{' or '.join(sorted(self.names))}, or start it with --allowed-host NAME",
                    421,
                )
        for given in headers.getlist("origin"):
            # A page from an IP address may only use the server at that address.
            if _host(given.partition("://")[2]) not in self.names | {*hosts.values()}:
                raise Refused(
                    f"this server does not answer pages of {given!r:.120}: start it with "
                    "--allowed-host NAME to accept pages of that host",
                    403,
                )


def accepted_hosts(host: str, addresses: Iterable[str], allowed: Iterable[str]) -> Hosts:
    """Return the hosts that requests to a server may name.

    Args:
        host: Value of ``--host``.
        addresses: IP addresses that the server listens at.
        allowed: Values of ``--allowed-host``, checked here.
    """
    for name in allowed:
        if not _is_address(name.strip("[]")) and not re.fullmatch(_NAME, name):
            raise ArgumentError(
                f"--allowed-host {name}: expected a host name or an IP address without scheme and "
                "port"
            )
    listening = [ipaddress.ip_address(address) for address in addresses]
    everywhere = any(address.is_unspecified for address in listening)
    names = {host, *map(str, listening), *(name.strip("[]") for name in allowed)}
    if everywhere or any(address.is_loopback for address in listening):
        names |= LOOPBACK
    if not all(address.is_loopback for address in listening):
        names.add(socket.gethostname())
    return Hosts(frozenset(map(_canonical, names)), everywhere)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens at a host."""
    return host in LOOPBACK or _is_address(host) and ipaddress.ip_address(host).is_loopback


def _host(authority: str) -> str | None:
    """Return the host of ``host:port``, or None if it is malformed."""
    match = _AUTHORITY.fullmatch(authority)
    return _canonical(match[1] or match[2]) if match else None


def _canonical(host: str) -> str:
    host = host.lower().removesuffix(".")
    return str(ipaddress.ip_address(host)) if _is_address(host) else host


def _is_address(host: str | None) -> bool:
    try:
        ipaddress.ip_address(host or "")
    except ValueError:
        return False
    return True

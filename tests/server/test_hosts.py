"""The hosts and pages that a server answers, and the URL that it prints."""

import socket

import pytest
from starlette.datastructures import Headers

from griffin_eval.cli import serve
from griffin_eval.errors import ArgumentError
from griffin_eval.server.hosts import Hosts, accepted_hosts, is_loopback
from griffin_eval.server.refused import Refused

HERE = accepted_hosts("127.0.0.1", ["127.0.0.1"], ["Proxy.Example", "[2001:db8::1]"])
EVERYWHERE = accepted_hosts("0.0.0.0", ["0.0.0.0"], [])
THERE = accepted_hosts("box.lan", ["192.168.1.5"], [])


def answer(hosts, *, host="127.0.0.1", origin=None):
    """Return the status with which a request is refused, or 200."""
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    try:
        hosts.check(Headers(headers))
    except Refused as refused:
        assert "--allowed-host NAME" in str(refused)
        assert repr(host) in str(refused) or repr(origin) in str(refused)
        return refused.status
    return 200


def test_a_host_that_the_server_does_not_have_is_refused():
    for hosts, host, status in (
        *((HERE, host, 200) for host in ("127.0.0.1", "127.0.0.1:80", "localhost:8000", "[::1]")),
        *((HERE, host, 200) for host in ("LOCALHOST", "localhost.", "[0:0::1]:9", "[::1]:")),
        *((HERE, host, 200) for host in ("proxy.example", "[2001:db8:0::1]:80")),
        *((HERE, host, 421) for host in ("evil.example:8000", "localhost.evil.example", "0.0.0.0")),
        *((HERE, host, 421) for host in ("192.168.1.5", "", "a b", "127.0.0.1@evil.example", "[")),
        *((HERE, host, 421) for host in ("127.0.0.1:80:80", "127.0.0.1, evil.example", "::1")),
        *((EVERYWHERE, host, 200) for host in ("0.0.0.0:80", "10.1.2.3", "[fe80::1%eth0]:1")),
        *((EVERYWHERE, host, 200) for host in ("localhost", socket.gethostname())),
        *((EVERYWHERE, host, 421) for host in ("evil.example", "10.1.2.3.evil.example", "1.2.3")),
        *((THERE, host, 200) for host in ("box.lan", "192.168.1.5:8000", socket.gethostname())),
        *((THERE, host, 421) for host in ("192.168.1.6", "evil.example", "other.lan")),
    ):
        assert answer(hosts, host=host) == status


@pytest.mark.parametrize(
    ("origin", "here", "everywhere"),
    [
        ("http://localhost:3000", 200, 200),
        ("https://proxy.example", 200, 403),
        ("http://evil.example", 403, 403),
        ("http://10.9.9.9", 403, 403),  # a page may be opened by its address, too
        ("http://10.1.2.3:8000", 403, 200),  # the address that the request names
        *((origin, 403, 403) for origin in ("null", "", "file://", "chrome-extension://abcd")),
    ],
)
def test_a_page_of_another_host_is_refused(origin, here, everywhere):
    assert answer(HERE, origin=origin) == here
    assert answer(EVERYWHERE, host="10.1.2.3:8000", origin=origin) == everywhere


def test_every_header_counts_and_none_is_needed():
    Hosts().check(Headers({}))  # HTTP/1.0
    for name in ("host", "origin"):
        both = [(b"host", b"localhost"), (name.encode(), b"http://localhost"), (name.encode(), b"")]
        with pytest.raises(Refused):
            Hosts().check(Headers(raw=both))


def test_what_is_not_a_host_is_refused():
    for name in (
        "http://a.example",
        "a.example:80",
        "*",
        "*.example",
        "",
        "a b",
    ):
        with pytest.raises(ArgumentError, match="--allowed-host .*expected a host name"):
            accepted_hosts("127.0.0.1", ["127.0.0.1"], [name])


def test_only_this_machine_reaches_loopback_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.8.8.8")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "box.lan", "10.0.0.1", "")))


def test_the_url_of_a_server():
    for host, url in (
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("localhost", "http://localhost:80"),
        ("::1", "http://[::1]:80"),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:80"),
    ):
        assert serve._url(host, 80) == url

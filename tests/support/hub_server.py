"""A hub on this machine, with the part of the HTTP interface that lists, downloads and uploads
files (large files by git-lfs)."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class Fault(NamedTuple):
    """An error answer of the hub: an HTTP status and the hub's error code."""

    status: int
    code: str = ""


class Hub:
    """A server of models that runs until `close`.

    Attributes:
        url: Address for HF_ENDPOINT.
        log: Every request so far, such as ``GET /org/name/resolve/0123…/config.json``.
        faults: (repository, file, or "" for the repository itself) -> the error answer.
        cuts: File name -> how often the connection will still break in the middle of the file.
        listed: Function to call after a repository was listed.
        users: Token -> description of its user.
        made: Repository id -> the request that created the repository.
    """

    def __init__(self):
        self._refs: dict[tuple[str, str], str] = {}
        self._commits: dict[tuple[str, str], Files] = {}
        self.log: list[str] = []
        self.faults: dict[tuple[str, str], Fault] = {}
        self.cuts: dict[str, int] = {}
        self.listed: Callable[[], None] = lambda: None
        self.users: dict[str, dict] = {}
        self.made: dict[str, dict] = {}
        self.large: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self})
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def push(self, repository: str, source: Path | Files, *refs: str) -> str:
        """Commit a folder or files, point the refs (default: ``main``) there, and return its id."""
        if isinstance(source, Path):
            paths = [path for path in source.rglob("*") if path.is_file()]
            source = {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}
        names = json.dumps([repository, {n: _etag(data) for n, data in source.items()}])
        commit = hashlib.sha1(names.encode()).hexdigest()
        self._commits[repository, commit] = source
        for ref in refs or ("main",):
            self._refs[repository, ref] = commit
        return commit

    def downloads(self) -> list[str]:
        """Return the files fetched since the last call, sorted."""
        files = [
            line.split("/resolve/")[1]
            for line in self.log
            if line.startswith("GET /") and "/resolve/" in line
        ]
        self.log.clear()
        return sorted(file.split("/", 1)[1] for file in files)

    def make(self, body: dict) -> Fault | None:
        """Create a repository and return None or an error."""
        repository = f"{body['organization']}/{body['name']}"
        if (repository, "") in self.faults:
            return self.faults[repository, ""]
        if (repository, "main") in self._refs:
            return Fault(409)
        self._refs[repository, "main"], self.made[repository] = "", body
        return None

    def commit(self, repository: str, lines: list[dict]) -> str:
        """Add the files of a commit in the client's format and return the commit's id."""
        _, before = self.find(repository, "main")
        files = dict(before) if isinstance(before, dict) else {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
        return self.push(repository, files)

    def find(self, repository: str, revision: str) -> tuple[str, Files] | Fault:
        if ("models", repository) in self.faults:
            return self.faults["models", repository]
        if not any(name == repository for name, _ in self._refs):
            return Fault(401, "RepoNotFound")  # the hub's answer without a token
        commit = self._refs.get((repository, revision), revision)
        if not commit:  # an empty repository
            return "0" * 40, {".gitattributes": b""}
        files = self._commits.get((repository, commit))
        return Fault(404, "RevisionNotFound") if files is None else (commit, files)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        data = self._body()
        self.hub.large[hashlib.sha256(data).hexdigest()] = data
        self._json({})

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        self.hub.log.append(f"POST {unquote(path)}")
        body, parts = self._body(), path.strip("/").split("/")
        repository = "/".join(parts[2:4])
        fault = self.hub.faults.get((repository, parts[-2]))  # (org/name, "commit")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = asked["organization"] or self._user()["name"]
            fault = self.hub.make(asked | {"organization": name})
        if fault is not None:
            self._fail(fault)
        elif path == "/api/repos/create":
            self._json({"url": f"{self.hub.url}/{name}/{asked['name']}"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "preupload" in parts:
            self._json({"files": [_mode(file) for file in json.loads(body)["files"]]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            there = {"href": f"{self.hub.url}/lfs"}
            objects = [o | {"actions": {"upload": there}} for o in json.loads(body)["objects"]]
            self._json({"transfer": "basic", "objects": objects})
        elif "commit" in parts:
            commit = self.hub.commit(repository, [json.loads(x) for x in body.splitlines()])
            url = f"{self.hub.url}/{repository}/commit/{commit}"
            self._json({"commitUrl": url, "commitOid": commit, "success": True})
        else:
            self._fail(Fault(404))

    def _user(self) -> dict:
        return self.hub.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "), {})

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def log_message(self, format: str, *args: object) -> None:
        pass  # nothing on stderr

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.log.append(f"{self.command} {unquote(path)}")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts == ["api", "whoami-v2"]:
            self._json(self._user()) if self._user() else self._fail(Fault(401))
            return
        if parts[:2] == ["api", "models"]:
            repository, (what, revision) = "/".join(parts[2:4]), [*parts[4:6], "", ""][:2]
            found = self.hub.find(repository, revision or "main")
            if isinstance(found, Fault):
                self._fail(found)
            elif what == "tree":
                self._send(json.dumps([_entry(*item) for item in found[1].items()]).encode())
            else:
                names = [{"rfilename": name} for name in found[1]]
                self._send(
                    json.dumps({"id": repository, "sha": found[0], "siblings": names}).encode()
                )
                self.hub.listed()
            return
        if parts[2:3] != ["resolve"]:  # the client also asks for other paths
            self._fail(Fault(404))
            return
        repository, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        found = self.hub.find(repository, revision)
        if isinstance(found, Fault):
            self._fail(found)
        elif (repository, file) in self.hub.faults:
            self._fail(self.hub.faults[repository, file])
        elif file not in found[1]:
            self._fail(Fault(404, "EntryNotFound"))
        else:
            data = found[1][file]
            headers = {
                "ETag": f'"{_etag(data)}"',
                "X-Repo-Commit": found[0],
                "Accept-Ranges": "bytes",
            }
            self._send(data, file, **headers)

    def _send(self, data: bytes, file: str = "", **headers: str) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        rest = data[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(rest)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cuts.get(file, 0) > 0:
            self.hub.cuts[file] -= 1
            rest = rest[: len(rest) // 2]  # the connection is closed after it
        self.wfile.write(rest)

    def _fail(self, fault: Fault) -> None:
        self.send_response(fault.status)
        if fault.code:
            self.send_header("X-Error-Code", fault.code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}


def _mode(file: dict) -> dict[str, object]:
    """Return the upload mode of a file: git-lfs for weights, else in the commit."""
    large = file["path"].endswith(".safetensors")
    mode = "lfs" if large else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()

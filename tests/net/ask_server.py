"""Start ``griffin-eval serve`` with the given arguments and print its answers to fixed requests.

Ids and creation times are left out. The last request but one is not JSON.
"""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PROMPT = "Judith Hoffman: 8118401194\nIsaac Li: 6247546817\nJudith Hoffman:"
FIXED = {"model": "bytes", "temperature": 0, "max_tokens": 6}
CHAT = [{"role": "user", "content": "def main("}]
REQUESTS = {
    "models": ("/v1/models", None),
    "continue": ("/v1/completions", FIXED | {"prompt": PROMPT, "echo": True, "logprobs": 3}),
    "score only": (
        "/v1/completions",
        FIXED
        | {"prompt": ["import os", [2, 103, 104]], "max_tokens": 0, "echo": True, "logprobs": 1},
    ),
    "sampled": (
        "/v1/completions",
        FIXED
        | {"prompt": "def ", "temperature": 0.8, "top_p": 0.9, "seed": 3, "n": 2, "stop": "\n"},
    ),
    "stream": ("/v1/completions", FIXED | {"prompt": "import ", "stream": True}),
    "state": ("/v1/completions", FIXED | {"model": "bytes:book", "prompt": "Isaac Li:"}),
    "chat": (
        "/v1/chat/completions",
        FIXED | {"messages": CHAT, "logprobs": True, "top_logprobs": 2},
    ),
    "generate": ("/generate", {"prompt": "import ", "max_tokens": 4, "temperature": 0}),
    "tokenize": ("/tokenize", {"model": "bytes", "prompt": "é"}),
    "unknown parameter": ("/v1/completions", FIXED | {"prompt": "a", "max_token": 3}),
    "unknown model": ("/v1/completions", FIXED | {"prompt": "a", "model": "other"}),
    "wrong type": ("/v1/completions", FIXED | {"prompt": 3}),
    "too many logprobs": ("/v1/completions", FIXED | {"prompt": "a", "logprobs": 21}),
    "temperature": ("/v1/completions", FIXED | {"prompt": "a", "temperature": -1}),
    "token out of bounds": ("/v1/completions", FIXED | {"prompt": [5000]}),
    "best_of": ("/v1/completions", FIXED | {"prompt": "a", "best_of": 2}),
    "role": ("/v1/chat/completions", FIXED | {"messages": [{"role": 1, "content": "a"}]}),
    "no messages": ("/v1/chat/completions", FIXED | {"messages": []}),
    "chat with a state": (
        "/v1/chat/completions",
        FIXED | {"model": "bytes:book", "messages": CHAT},
    ),
    "too large": ("/v1/completions", FIXED | {"prompt": "a" * 20000}),
    "no JSON": ("/v1/completions", b"{"),
    "no address": ("/v1/nothing", None),
}


def ask(url: str, body) -> str:
    """Return the status and the body of the answer to a request."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return f"{answer.status} {answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("griffin-eval")
    server = subprocess.Popen([program, "serve", *sys.argv[1:], "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while server.poll() is None:
            try:
                print("health", ask(url + "/health", None))
                break
            except OSError:
                time.sleep(0.2)
        else:
            return server.returncode
        for name, (path, body) in REQUESTS.items():
            answer = ask(url + path, body)
            answer = re.sub(r'"(id|created)": ?("[^"]*"|\d+),?', "", answer)
            print(f"{name}\n    {answer}".replace(',"', ',\n    "'))
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
    return server.wait(timeout=60)


if __name__ == "__main__":
    sys.exit(main())

"""`griffin-eval serve` under many clients, beside the same requests in the engine itself.

Two kinds of requests: texts to continue, with examples that all of them begin with; and choices,
four to a question, of which a client asks the log-probabilities with the prompt, as lm-eval's does.
The server is a process of its own on this machine. Rounds alternate with those of the engine.

Then the texts are continued once more as streams, for the times of single tokens; and afterwards by
`mlx_lm.server` and `transformers serve`, one after the other, if they are installed; they give no
log-probabilities of prompts.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.peers import Absent, check_peer, left_out
from benchmarks.serving.clients import PEERS, Body, Client, own_server, served
from benchmarks.timing import Failed
from griffin_eval.api import convert
from griffin_eval.process import tune_process

CHOICES = (" yes", " no", " it depends", " nobody knows")
_EXAMPLES, _OWN = 2000, 400  # characters that all texts begin with, and that each has of its own


def run(
    console: Console,
    checkpoint: str,
    framework: str,
    dtype: str,
    clients: int,
    requests: int,
    new_tokens: int,
    rounds: int,
) -> None:
    """Measures and prints.

    Args:
        console: to print on.
        checkpoint: path or hub id.
        framework, dtype: as of `griffin-eval serve`.
        clients: requests at a time.
        requests: of each kind.
        new_tokens: that are generated for each text.
        rounds: of each measurement.

    Raises:
        BadInput: the checkpoint cannot be used.
        Failed: the server ended, or did not answer.
    """
    from lm_eval.api.instance import Instance

    tune_process()
    from griffin_eval.lm.model import GriffinLM

    lm = GriffinLM(checkpoint, framework, dtype=dtype)
    texts = make_texts(requests)
    pairs = [(texts[i // len(CHOICES)], CHOICES[i % len(CHOICES)]) for i in range(requests)]
    how = {"until": [], "max_gen_toks": new_tokens}
    asked = {
        "continuations": [
            Instance("generate_until", {}, (text, how), i) for i, text in enumerate(texts)
        ],
        "choices": [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)],
    }
    bodies: dict[str, list[Body]] = {
        "continuations": [
            {"prompt": text, "max_tokens": new_tokens, "temperature": 0} for text in texts
        ],
        "choices": [
            {"prompt": context + choice, "max_tokens": 0, "echo": True, "logprobs": 1}
            for context, choice in pairs
        ],
    }
    streamed: list[Body] = [body | {"stream": True} for body in bodies["continuations"]]
    direct: dict[str, Callable[[], Any]] = {
        "continuations": lambda: lm.generate_until(asked["continuations"], disable_tqdm=True),
        "choices": lambda: lm.loglikelihood(asked["choices"], disable_tqdm=True),
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    own = Streams([], [])
    with served(own_server(checkpoint, framework, dtype)) as port:
        client = Client(port, clients)
        # Each round has texts of its own, since a server remembers what it has read.
        for number in track(
            range(rounds + 1), "rounds", console=console, disable=not console.is_terminal
        ):
            for kind, mine in bodies.items():
                fresh = _fresh(mine, number)
                begin = time.perf_counter()
                direct[kind]()
                took = {"engine": time.perf_counter() - begin}
                took["server"], _ = client.all("/v1/completions", fresh)
                plain = [{"prompt": body["prompt"]} for body in fresh]
                took["transport"], _ = client.all("/tokenize", plain)
                if number == 0:  # which may compile
                    continue
                for who, value in took.items():
                    seconds.setdefault((kind, who), []).append(value)
            took_streamed, times = client.all("/v1/completions", _fresh(streamed, f"{number}s"))
            if number:
                own.seconds.append(took_streamed)
                own.parts.extend(times)
    _print(console, clients, requests, new_tokens, seconds)
    streams = {"griffin-eval serve": own}
    with tempfile.TemporaryDirectory() as root:
        for name in PEERS:
            try:
                streams[name] = _peer(
                    name, checkpoint, Path(root), dtype, clients, streamed, rounds
                )
            except (Absent, Failed) as reason:
                console.print(left_out(name, str(reason)), markup=False)
    _print_streams(console, streams)


class Streams(NamedTuple):
    """What a server did with the texts to continue.

    Attributes:
        seconds: of each round.
        parts: of each request, the seconds at which parts of its answer came.
    """

    seconds: list[float]
    parts: list[list[float]]


def _fresh(bodies: Sequence[Body], number: int | str) -> list[Body]:
    return [body | {"prompt": f"{number}. {body['prompt']}"} for body in bodies]


def _peer(
    name: str,
    checkpoint: str,
    root: Path,
    dtype: str,
    clients: int,
    bodies: Sequence[Body],
    rounds: int,
) -> Streams:
    """Asks another server for the same continuations. Only one of them runs at a time.

    Args:
        root: folder for the checkpoint in transformers' format, which they share.

    Raises:
        Absent: it is not installed.
        Failed: it does not start, or does not answer.
    """
    modules, command = PEERS[name]
    check_peer(*modules)
    folder = root / "hf"
    if not folder.exists():
        convert(checkpoint, folder, to="hf", dtype=None if dtype == "auto" else dtype)
    found = Streams([], [])
    with served(command(str(folder))) as port:
        # Of MLX's server a model that is named is one to load.
        named = {} if name == "mlx_lm.server" else {"model": str(folder)}
        for number in range(rounds + 1):
            fresh = [body | named for body in _fresh(bodies, number)]
            took, times = Client(port, clients).all("/v1/completions", fresh)
            if number:
                found.seconds.append(took)
                found.parts.extend(times)
    return found


def make_texts(count: int) -> list[str]:
    """Texts with the same examples before each, and something of its own after them."""
    names = sorted(topics)
    examples = "".join(topics[name] for name in names)[:_EXAMPLES]
    rest = "".join(topics[name] for name in names[::-1])
    starts = np.linspace(0, len(rest) - _OWN, count).astype(int)
    return [f"{examples}\n\n{rest[at : at + _OWN]}" for at in starts]


def _print(
    console: Console,
    clients: int,
    requests: int,
    new_tokens: int,
    seconds: dict[tuple[str, str], list[float]],
) -> None:
    table = Table(
        title=f"{requests} requests of each kind, {clients} clients, {new_tokens} new tokens"
    )
    for heading in (
        "requests",
        "engine, s",
        "server, s",
        "range",
        "engine / server",
        "transport, s",
    ):
        table.add_column(heading, justify="left" if heading == "requests" else "right")
    for kind in dict.fromkeys(kind for kind, _ in seconds):
        engine, server, transport = (
            seconds[kind, who] for who in ("engine", "server", "transport")
        )
        table.add_row(
            kind,
            f"{median(engine):.3g}",
            f"{median(server):.3g}",
            f"{min(server):.3g}-{max(server):.3g}",
            f"{median(engine) / median(server):.2f}",
            f"{median(transport):.3g}",
        )
    console.print(table)


def _print_streams(console: Console, streams: dict[str, Streams]) -> None:
    table = Table(title="Continuations, by server")
    for heading in (
        *("server", "seconds", "to the first token, s: p50", "p99"),
        *("between parts, s: p50", "p99"),
    ):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for name, (seconds, parts) in streams.items():
        first = [times[0] for times in parts if times] or [float("nan")]
        gaps = [np.diff(times) for times in parts if len(times) > 1] or [np.array([np.nan])]
        numbers = [*np.percentile(first, (50, 99)), *np.percentile(np.concatenate(gaps), (50, 99))]
        table.add_row(name, f"{median(seconds):.3g}", *(f"{each:.3g}" for each in numbers))
    console.print(table)

"""The command ``serve``."""

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from griffin_eval.cli.options import RUNNING, CheckpointPath, takes_model_options, takes_options
from griffin_eval.errors import ArgumentError, MissingExtraError
from griffin_eval.process import tune_process
from griffin_eval.server.options import LIMITS, ServerOptions

if TYPE_CHECKING:
    from griffin_eval.engine.live.requests import Request
    from griffin_eval.server.model import ServedModel

GRACE = 5  # seconds for running requests after Ctrl-C
MAX_NAMED = 10  # cancelled requests that the last message names
MAX_TRIES = 20  # attempts to find a port that is free at every address of a host


@takes_model_options(
    "peft",
    *RUNNING,
    "load",
    "tensor_parallel_size",
    "state_budget",
    "state_cache",
    "state_cache_size",
)
@takes_options("limits", LIMITS)
def serve(
    checkpoint: CheckpointPath,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send.", envvar="GRIFFIN_EVAL_API_KEY"),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Another host NAME that requests may use, such as a proxy's."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model (default: the checkpoint as given).")
    ] = None,
    state: Annotated[
        list[Path] | None,
        typer.Option(help="State file, such as book.state, served as the model NAME:book."),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="Chat template file to use instead of the tokenizer's, or plain."),
    ] = None,
    system_role: Annotated[
        str,
        typer.Option(
            help="Treatment of system messages if the template has no system role: refuse, or "
            "merge them into the first user message."
        ),
    ] = "refuse",
    *,
    limits: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Serve a checkpoint to clients of the OpenAI API, with log-probabilities of prompts.

    Common beginnings of requests are read once. Without an --api-key the server listens only at
    this machine's own address.
    """
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.server.hosts import accepted_hosts, is_loopback

    if not is_loopback(host) and not api_key:
        raise ArgumentError(
            f"--host {host} lets other machines connect: add --api-key, or listen at 127.0.0.1"
        )
    if system_role not in ("merge", "refuse"):
        raise ArgumentError(f"--system-role {system_role}: expected merge or refuse")
    arguments = parse_arguments(options | {"pretrained": checkpoint, "data_parallel_size": 1})
    tune_process()
    from griffin_eval.text.chat import template_option

    template = template_option(chat_template)
    try:
        import orjson  # noqa: F401
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise MissingExtraError(error.name or "starlette", "serve") from None
    from griffin_eval.opened import open_model
    from griffin_eval.server.app import make_app
    from griffin_eval.server.model import ServedModel

    sockets = _bound(host, port)
    addresses = [each.getsockname()[0] for each in sockets]
    allowed = ServerOptions(
        name=served_model_name or checkpoint,
        states=tuple(state or ()),
        chat_template=template,
        system_role=system_role,
        api_key=api_key,
        hosts=accepted_hosts(host, addresses, allowed_host or ()),
        **limits,
    )
    with contextlib.ExitStack() as unused:
        for each in sockets:
            unused.enter_context(each)
        model = _load(lambda: ServedModel(open_model(arguments), allowed))
        unused.pop_all()
    config = uvicorn.Config(
        make_app(model), lifespan="off", log_level="warning", timeout_graceful_shutdown=5
    )

    class Server(uvicorn.Server):
        cut: "list[Request]" = []

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                names = ", ".join(model.models)
                where = _url(host, sockets[0].getsockname()[1])
                typer.echo(f"{names}: listening at {where}", err=True)

        async def shutdown(self, sockets: Any = None) -> None:
            model.scheduler.refuse()
            end = time.monotonic() + GRACE
            while model.scheduler.unfinished and time.monotonic() < end and not self.force_exit:
                await asyncio.sleep(0.05)
            self.cut = model.scheduler.cancel_all()
            self.force_exit = False  # clients of cancelled requests get an answer without delay
            await super().shutdown(sockets)

    server = Server(config)
    try:
        server.run(sockets)
    except KeyboardInterrupt:  # uvicorn raises it again after its shutdown
        pass
    except OSError:  # another process bound the address too, and was ready first
        model.scheduler.close()
        raise _not_there(host, port, "something listens there now") from None
    if server.cut:
        typer.echo(_cut(server.cut), err=True)
    model.scheduler.close()  # PyTorch aborts a process that exits during a step


def _bound(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to every address of a host at one port, not listening yet.

    Raises:
        ArgumentError: The address does not exist here, or is in use.
    """
    tries = 1 if port else MAX_TRIES
    while True:
        try:
            return _bound_once(host, port)
        except UnicodeError:  # a label of the name is empty or too long
            raise _not_there(host, port, "this is no name of a host") from None
        except OSError as error:
            tries -= 1  # a port that is free at the first address may be taken at the next one
            if error.errno != errno.EADDRINUSE or not tries:
                raise _not_there(host, port, str(error.strerror)) from None


def _bound_once(host: str, port: int) -> list[socket.socket]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    bound: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            each = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                each.bind((address[0], port, *address[2:]))
            except OSError as error:
                if not bound or error.errno != errno.EADDRNOTAVAIL:  # IPv6 may be unavailable
                    raise
            else:
                bound.append(each)
                port = each.getsockname()[1]
        opened.pop_all()
    return bound


def _url(host: str, port: int) -> str:
    """Return the URL of a server, with an IPv6 address in brackets and its zone escaped."""
    return f"http://[{host.replace('%', '%25')}]:{port}" if ":" in host else f"http://{host}:{port}"


def _not_there(host: str, port: int, why: str) -> ArgumentError:
    return ArgumentError(
        f"cannot listen at --host {host} --port {port} ({why}): name another address or port"
    )


def _load(make: Callable[[], "ServedModel"]) -> "ServedModel":
    """Load a model and serve its scheduler in one thread. With several threads, OpenMP lets those
    that wait for matrix products sleep, which makes products take twice as long."""
    loaded: Future[ServedModel] = Future()

    def work() -> None:
        try:
            model = make()
            model.scheduler.warm_up()
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(model)
        model.scheduler.serve()

    threading.Thread(target=work, name="model", daemon=True).start()
    return loaded.result()


def _cut(requests: "list[Request]") -> str:
    """Return a message that names the cancelled requests."""
    each = [
        f"{len(one.tokens)} tokens, {len(one.new)} of {one.max_new_tokens} new"
        for one in requests[:MAX_NAMED]
    ]
    more = f"; and {len(requests) - MAX_NAMED} more" if len(requests) > MAX_NAMED else ""
    return f"cut off: {len(requests)} requests that had not been answered ({'; '.join(each)}{more})"

"""Settings of a server, and the options of ``griffin-eval serve`` that set them."""

import dataclasses
from pathlib import Path

from griffin_eval.arguments import option
from griffin_eval.server.hosts import Hosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of a server.

    Attributes:
        states: Files of saved states, each of which becomes a model ``NAME:STEM``.
        chat_template: Template that replaces the tokenizer's; ``plain`` joins the contents of the
            messages with blank lines.
        system_role: ``refuse``, or ``merge`` to put system messages in front of the first user
            message if the template has no system role.
        api_key: Key that clients have to send; None for none.
    """

    name: str
    states: tuple[Path, ...] = ()
    chat_template: str | None = None
    system_role: str = "refuse"
    api_key: str | None = None
    hosts: Hosts = Hosts()
    max_tokens: int | None = option(
        "Largest number of tokens of a prompt and its answer.",
        kind=int,
        minimum=1,
        flag="--max-length",
    )
    rows: int | None = option(
        "Largest number of requests that are continued at a time.", kind=int, minimum=1
    )
    queue: int = option(
        "Largest number of requests that wait or run.", None, 1024, kind=int, minimum=1
    )
    timeout: float = option(
        "Largest number of seconds of a request.", None, 3600.0, kind=float, minimum=0
    )
    max_body: int = option(
        "Largest number of bytes of a request.", None, 64 << 20, kind=int, minimum=1
    )
    tokenizer_info: bool = option(
        "Answer at /tokenizer_info.", None, False, kind=bool, flag="--tokenizer-info"
    )


LIMITS = {field.name: field for field in dataclasses.fields(ServerOptions) if field.metadata}

"""What a server allows, and the options of ``griffin-eval serve`` that say so."""

import dataclasses
from pathlib import Path

from griffin_eval.arguments import option
from griffin_eval.server.hosts import Hosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a server allows.

    Attributes:
        name: Name of the model.
        states: Files of saved states, each of which is a model ``NAME:STEM`` of its own.
        chat_template: Text of a template instead of the tokenizer's; ``plain`` for the contents of
            the messages, a blank line between them.
        system_role: ``refuse``, or ``merge`` to put what the system says in front of what the user
            says first, where the template has no system role.
        max_tokens, rows, queue, timeout, max_body, tokenizer_info: Options of the same names, but
            for ``--max-length``.
        api_key: Key that clients have to send; None for none.
        hosts: Hosts that requests may name.
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

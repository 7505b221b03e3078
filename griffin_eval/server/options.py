"""Settings of a server, and the options of ``griffin-eval serve`` that set them."""

import dataclasses
from pathlib import Path

from griffin_eval.arguments import option
from griffin_eval.server.hosts import Hosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of a server."""

    name: str
    states: tuple[Path, ...] = ()  # files of saved states, which become models ``NAME:STEM``
    chat_template: str | None = None  # replaces the tokenizer's; may be ``plain``
    system_role: str = "refuse"  # or ``merge`` into the first user message
    api_key: str | None = None  # key that clients have to send
    hosts: Hosts = Hosts()
    max_tokens: int | None = option(
        "Maximum number of tokens of a prompt and its answer.",
        kind=int,
        minimum=1,
        flag="--max-length",
    )
    rows: int | None = option(
        "Maximum number of requests that are decoded together.", kind=int, minimum=1
    )
    queue: int = option(
        "Maximum number of requests that wait or run.", None, 1024, kind=int, minimum=1
    )
    timeout: float = option(
        "Maximum duration of a request in seconds.", None, 3600.0, kind=float, minimum=0
    )
    max_body: int = option(
        "Maximum size of a request in bytes.", None, 64 << 20, kind=int, minimum=1
    )
    tokenizer_info: bool = option(
        "Answer at /tokenizer_info.", None, False, kind=bool, flag="--tokenizer-info"
    )


LIMITS = {field.name: field for field in dataclasses.fields(ServerOptions) if field.metadata}

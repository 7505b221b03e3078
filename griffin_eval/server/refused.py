"""The exception for refused requests."""

from griffin_eval.errors import BadInput


class Refused(BadInput):
    """A request that gets an error of the API; ``param`` names the wrong field, if any."""

    def __init__(self, message: str, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param

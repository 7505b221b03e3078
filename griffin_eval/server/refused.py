"""The error of a request."""

from griffin_eval.errors import BadInput


class Refused(BadInput):
    """A request that is answered with an error of the API.

    Args:
        message: One sentence.
        param: Name of the field, if one is wrong.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param

"""Choice of the device."""

import logging
from collections.abc import Callable
from typing import TypeVar

from griffin_eval.errors import ArgumentError

Device = TypeVar("Device")

logger = logging.getLogger(__name__)


def asked_or_best(asked: str | None, best: Device, find: Callable[[str], Device | None]) -> Device:
    """Return the named device, or the best one of this machine, which is logged.

    Args:
        best: Default device of the framework.
        find: Function from a name to the device, or None if this machine does not have it; raises
            `ArgumentError` for a malformed name.

    Raises:
        ArgumentError: This machine does not have the device.
    """
    if asked is None:
        logger.info("running on %s", best)
        return best
    device = find(asked)
    if device is None:
        raise ArgumentError(f"there is no device {asked} here: leave it out, or name another")
    return device

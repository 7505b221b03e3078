"""The choice of the device to run on."""

import logging
from collections.abc import Callable
from typing import TypeVar

from griffin_eval.errors import ArgumentError

Device = TypeVar("Device")

logger = logging.getLogger(__name__)


def asked_or_best(asked: str | None, best: Device, find: Callable[[str], Device | None]) -> Device:
    """Return the named device, or the best one of this machine, which the log names.

    Args:
        asked: Name of the device in the framework; None for the best one.
        best: Default device of the framework.
        find: Function from a name to the device or None; it raises `ArgumentError` for a text that
            names no device at all.

    Raises:
        ArgumentError: there is no such device.
    """
    if asked is None:
        logger.info("running on %s", best)
        return best
    device = find(asked)
    if device is None:
        raise ArgumentError(f"there is no device {asked} here: leave it out, or name another")
    return device

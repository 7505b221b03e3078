"""The device to run on, where the one asked for may not exist."""

import logging
from collections.abc import Callable
from typing import TypeVar

Device = TypeVar("Device")

logger = logging.getLogger(__name__)


def asked_or_best(asked: str | None, best: Device, find: Callable[[str], Device | None]) -> Device:
    """The device asked for, or the best one of this machine, which the log names.

    lm-eval asks for ``cuda:0`` unless told otherwise, so a device that does not exist is no error.

    Args:
        asked: its name in the framework; None for the best one.
        best: the framework's default device.
        find: from a name to the device, None if there is none; raises `ArgumentError` for what is
            not the name of a device.
    """
    if asked is None:
        logger.info("running on %s", best)
        return best
    device = find(asked)
    if device is None:
        logger.info("there is no device %s here: running on %s", asked, best)
        return best
    return device

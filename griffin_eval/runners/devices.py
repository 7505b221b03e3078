"""The device to run on, where the one that lm-eval asks for may not exist."""

import logging
from collections.abc import Callable
from typing import TypeVar

from griffin_eval.errors import ArgumentError

Device = TypeVar("Device")

logger = logging.getLogger(__name__)


def asked_or_best(asked: str | None, best: Device, find: Callable[[str], Device | None]) -> Device:
    """The device asked for, or the best one of this machine, which the log names.

    lm-eval asks for ``cuda:0`` unless told otherwise, so it is no error if that does not exist.

    Args:
        asked: its name in the framework; None for the best one.
        best: the framework's default device.
        find: from a name to the device, None if there is none; raises `ArgumentError` for what is
            not the name of a device.

    Raises:
        ArgumentError: there is no such device, and it is another one than ``cuda:0``.
    """
    if asked is None:
        logger.info("running on %s", best)
        return best
    device = find(asked)
    if device is None and asked != "cuda:0":
        raise ArgumentError(f"there is no device {asked} here: leave it out, or name another")
    if device is None:
        logger.info("there is no device %s here: running on %s", asked, best)
        return best
    return device

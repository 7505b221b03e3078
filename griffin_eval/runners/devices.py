"""Choice of the device."""

import logging
from collections.abc import Callable
from typing import TypeVar

from griffin_eval.errors import ArgumentError

Device = TypeVar("Device")

logger = logging.getLogger(__name__)


def chosen_device(name: str | None, best: Device, find: Callable[[str], Device | None]) -> Device:
    """Return the named device, or the framework's best one, which is logged.

    ``find`` returns None for a device that is missing here, which raises ArgumentError, and raises
    ArgumentError itself for a malformed name.
    """
    if name is None:
        logger.info("running on %s", best)
        return best
    device = find(name)
    if device is None:
        raise ArgumentError(f"there is no device {name} here: leave it out, or name another")
    return device

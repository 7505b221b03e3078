"""Facts that a user states because a checkpoint's files lack them or state them wrongly."""

import dataclasses
from pathlib import Path
from typing import Any

from griffin_eval.config import PRESETS
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides:
    """Facts that a user states because a checkpoint's files lack them or state them wrongly.

    Attributes:
        preset: Preset that supplies the fields that neither a config nor shapes state.
        item: Item of an Orbax checkpoint, or of a ``.pt`` file, that holds the parameters.
        names: Table of names; see `griffin_eval.converters.naming.user_table`.
        accept_differences: Whether weights are read although the trainer of ``names`` computes what
            this model does not.
        check_parts: Whether parts of tensors that are read alone are compared with the manifest.
        adapters: Folders of adapters that are merged into the weights, each with its weight.
    """

    preset: str | None = None
    item: str | None = None
    visible_keys: int | None = None
    embedding_scale: bool | None = None
    logits_soft_cap: float | None = None
    names: str | Path | None = None
    accept_differences: bool = False
    check_parts: bool = True
    adapters: tuple[tuple[Path, float], ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config that are set."""
        names = ("visible_keys", "embedding_scale", "logits_soft_cap")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check(self) -> None:
        """Raise ArgumentError for values that no checkpoint can have."""
        if self.preset is not None and self.preset not in PRESETS:
            raise ArgumentError(
                f"unknown preset {self.preset!r}: expected one of {', '.join(PRESETS)}"
                f"{did_you_mean(self.preset, PRESETS)}"
            )
        if self.accept_differences and self.names is None:
            raise ArgumentError(
                "--accept-differences (accept_differences=True) needs a table of names: add "
                "--names (names=), or leave it out"
            )
        dataclasses.replace(PRESETS["recurrentgemma-2b"], **self.fields)


NO_OVERRIDES = Overrides()

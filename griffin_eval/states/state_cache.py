"""States at the ends of long beginnings of texts, in a folder for later runs.

A file holds the state after some tokens, and its name is a hash of these tokens and of the model.
Another one may hold the log-probabilities of these tokens, for who asks for them. So a later run,
of whatever task and in either framework, finds the longest beginning that was read before. Any
number of processes may share a folder.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from griffin_eval.errors import BadInput, CheckpointError
from griffin_eval.json_files import over_limit
from griffin_eval.states.saved_state import (
    LAYOUT,
    SavedState,
    config_of,
    fits,
    hash_of,
    origin_of,
    read_state,
    read_whole,
    save_whole,
)

if TYPE_CHECKING:
    from griffin_eval.config import GriffinConfig

STEP = 32  # tokens: beginnings of multiples of it are looked for and kept
LEAST = 512  # tokens that keeping a state must save

logger = logging.getLogger(__name__)

Kept = TypeVar("Kept")

_FILE = re.compile(r"[0-9a-f]{64}\.(state|scores)")
_OWN = re.compile(rf"{_FILE.pattern}|\.{_FILE.pattern}\..+")  # finished or unfinished
_SCORES = "griffin_eval_scores"  # key of the metadata of log-probabilities


class Beginning(NamedTuple):
    """A beginning of texts whose state can be kept.

    Attributes:
        tokens: how many it has; its state has read all but the last.
        key: hash of these tokens and the model.
    """

    tokens: int
    key: str
    sha256: Any

    def scores_key(self, softmax_dtype: str) -> str:
        """Name of the file of its tokens' log-probabilities."""
        return f"{hashlib.sha256(f'{self.key} {softmax_dtype}'.encode()).hexdigest()}.scores"

    def longer(self, path: np.ndarray, end: int) -> "Iterator[Beginning]":
        """Longer beginnings of a text.

        Args:
            path: int32 [N], what is read of the text.
            end: most tokens of a beginning.
        """
        whole = self.sha256
        for stop in range(self.tokens + STEP, end + 1, STEP):
            whole = whole.copy()
            whole.update(np.asarray(path[stop - STEP : stop], "<i4").tobytes())
            yield Beginning(stop, f"{whole.hexdigest()}.state", whole)


class StateCache:
    """The states of one model in a folder.

    Attributes:
        writes: whether something can be kept; False once that has failed.

    Args:
        folder: made if it is not there.
        limit: bytes of all files in it; those that were not used for longest are removed.
        config, weights_sha256, tokenizer, dtype: of the model, as `Origin` has them.
        framework: that writes, for people.

    Raises:
        BadInput: the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: str | Path,
        limit: int,
        config: "GriffinConfig",
        weights_sha256: str,
        tokenizer: str | None,
        dtype: str,
        framework: str,
    ):
        self._folder, self._limit = Path(folder), limit
        self._origin = config, weights_sha256, tokenizer, dtype
        self._framework = framework
        model = [LAYOUT, weights_sha256, config_of(config), tokenizer, dtype]
        self._model = json.dumps(model, sort_keys=True).encode()
        self._known: set[str] = set()
        self._told = False  # of a state that is too large
        self._listed = 0  # when the folder had been changed last
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._list()
        except OSError as error:
            raise BadInput(f"state_cache={folder} cannot be used: {error.strerror}") from None
        self.writes = True

    def refresh(self) -> None:
        """Looks for what other processes have kept or removed meanwhile."""
        try:
            if self._folder.stat().st_mtime_ns != self._listed:
                self._list()
        except OSError:  # it is gone
            self._known = set()

    def beginning(self) -> "Beginning":
        """The beginning of every text, without a token."""
        return Beginning(0, "", hashlib.sha256(self._model))

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def load(self, key: str, tokens: np.ndarray) -> SavedState | None:
        """The state before the last of some tokens; None, and a line in the log if it is damaged,
        where it cannot be had."""

        def read(file: Path) -> SavedState:
            state = read_state(file)
            config, _, _, dtype = self._origin
            there = state.origin
            mine = self._make(tokens, state.tensors).origin
            same = there._replace(written_by="", text="") == mine._replace(written_by="", text="")
            if not same or not fits(state, config, dtype):
                raise CheckpointError(f"{file} is not the state that its name says")
            return state

        return self._load(key, read)

    def save(self, key: str, tokens: np.ndarray, tensors: dict[str, np.ndarray]) -> None:
        """Keeps the state before the last of some tokens. If that fails, a line in the log says
        so, and nothing else is kept in this run."""
        self._save(key, tensors, self._make(tokens, tensors).save)

    def load_scores(self, key: str, tokens: int) -> dict[str, np.ndarray] | None:
        """What `save_scores` kept; None, and a line in the log if it is damaged, where it cannot be
        had."""

        def read(file: Path) -> dict[str, np.ndarray]:
            scores, metadata = read_whole(file, "log-probabilities that griffin-eval has kept")
            whole = metadata.get(_SCORES) == hash_of(key, scores)
            if not whole or not self._are_scores(scores, tokens):
                raise CheckpointError(f"{file} does not hold what its name says")
            return scores

        return self._load(key, read)

    def save_scores(self, key: str, scores: dict[str, np.ndarray]) -> None:
        """Keeps the log-probabilities of the tokens of a beginning. If that fails, a line in the
        log says so, and nothing else is kept in this run.

        Args:
            key: of `Beginning.scores_key`.
            scores: of its N tokens but the first, as `PromptScores` has them: ``logprobs`` [N - 1],
                ``top_tokens`` and ``top_logprobs`` [N - 1, K].
        """
        metadata = {_SCORES: hash_of(key, scores)}
        self._save(key, scores, lambda file: save_whole(file, scores, metadata))

    def _are_scores(self, scores: dict[str, np.ndarray], tokens: int) -> bool:
        found = {name: (one.dtype.name, one.ndim, len(one)) for name, one in scores.items()}
        expected = {
            "logprobs": ("float64", 1, tokens - 1),
            "top_tokens": ("int64", 2, tokens - 1),
            "top_logprobs": ("float64", 2, tokens - 1),
        }
        if found != expected or scores["top_tokens"].shape != scores["top_logprobs"].shape:
            return False
        ids = scores["top_tokens"]
        known = bool(((ids >= 0) & (ids < self._origin[0].vocab_size)).all())
        return known and all(np.isfinite(each).all() for each in scores.values())

    def _load(self, key: str, read: Callable[[Path], Kept]) -> Kept | None:
        """What a file holds; None, with a line in the log if it is damaged, if it cannot be had."""
        file = self._folder / key
        self._known.discard(key)  # until it was read
        try:
            if not file.exists():  # another process removed it
                return None
            found = read(file)
            with contextlib.suppress(OSError):  # it is another user's, or the folder is read-only
                os.utime(file)
        except (CheckpointError, OSError) as error:
            logger.warning("state_cache: %s; its tokens are read again", error)
            return None
        self._known.add(key)
        return found

    def _save(self, key: str, arrays: dict[str, np.ndarray], write: Callable[[Path], None]) -> None:
        if not self.writes or not all(np.isfinite(each).all() for each in arrays.values()):
            return
        if (size := sum(each.nbytes for each in arrays.values())) > self._limit:
            if not self._told:
                self._told = True
                logger.warning(
                    "state_cache: one of %d bytes is more than all may take (%d), and is not kept",
                    size,
                    self._limit,
                )
            return
        try:
            write(self._folder / key)
            self._known.add(key)
            self._hold_limit()
        except (BadInput, OSError) as error:
            self.writes = False
            logger.warning("state_cache: %s; no more states are kept", error)

    def _make(self, tokens: np.ndarray, tensors: dict[str, np.ndarray]) -> SavedState:
        # BOS is among the tokens, if there is one.
        origin = origin_of(*self._origin, tokens, bos=False, text="", framework=self._framework)
        return SavedState(origin, tensors)

    def _list(self) -> None:
        self._listed = self._folder.stat().st_mtime_ns
        self._known = {path.name for path in self._folder.iterdir() if _FILE.fullmatch(path.name)}

    def _hold_limit(self) -> None:
        """Remove the files used least recently, and those that a killed process left unfinished.
        Other processes may do so at the same time."""
        own = (file for file in self._folder.iterdir() if _OWN.fullmatch(file.name))
        for file in over_limit(own, self._limit):
            file.unlink(missing_ok=True)
            self._known.discard(file.name)

"""A folder of states after long beginnings of texts, for later runs.

A file holds the state after some tokens; its name is a hash of these tokens and of the model.
Another file may hold the log-probabilities of these tokens. A later run of any task, in either
framework, starts from the longest beginning in the folder. Several processes can share a folder.
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

STEP = 32  # beginnings have a multiple of this number of tokens
MIN_TOKENS = 512  # minimum number of tokens that a kept state must save

logger = logging.getLogger(__name__)

Kept = TypeVar("Kept")

_FILE = re.compile(r"[0-9a-f]{64}\.(state|scores)")
_OWN = re.compile(rf"{_FILE.pattern}|\.{_FILE.pattern}\..+")  # finished and temporary files
_SCORES = "griffin_eval_scores"  # key of the metadata of log-probabilities


class Beginning(NamedTuple):
    """A beginning of texts whose state can be kept."""

    tokens: int  # number of its tokens; its state has read all but the last
    key: str  # hash of these tokens and the model, as a file name
    sha256: Any

    def scores_key(self, softmax_dtype: str) -> str:
        """Return the file name of its tokens' log-probabilities."""
        return f"{hashlib.sha256(f'{self.key} {softmax_dtype}'.encode()).hexdigest()}.scores"

    def longer(self, path: np.ndarray, end: int) -> "Iterator[Beginning]":
        """Yield longer beginnings of int32 [N] tokens, up to ``end`` tokens long."""
        whole = self.sha256
        for stop in range(self.tokens + STEP, end + 1, STEP):
            whole = whole.copy()
            whole.update(np.asarray(path[stop - STEP : stop], "<i4").tobytes())
            yield Beginning(stop, f"{whole.hexdigest()}.state", whole)


class StateCache:
    """The states of one model in a folder, which is created if it does not exist.

    The least recently used files are removed when all files take more than ``limit`` bytes.
    ``writes`` becomes False after a failure to write. The other arguments are those of `origin_of`.
    Raises BadInput if the folder cannot be used.
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
        self._keys: set[str] = set()
        self._size_reported = False  # whether a too large state was reported
        self._listed = 0  # modification time of the folder when it was last listed
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._list()
        except OSError as error:
            raise BadInput(f"state_cache={folder} cannot be used: {error.strerror}") from None
        self.writes = True

    def refresh(self) -> None:
        """Look for files that other processes have added or removed."""
        try:
            if self._folder.stat().st_mtime_ns != self._listed:
                self._list()
        except OSError:  # the folder was removed
            self._keys = set()

    def beginning(self) -> "Beginning":
        """Return the empty beginning of every text."""
        return Beginning(0, "", hashlib.sha256(self._model))

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def load(self, key: str, tokens: np.ndarray) -> SavedState | None:
        """Return the state before the last of some tokens, or None if it is missing or damaged;
        damage is logged."""

        def read(file: Path) -> SavedState:
            state = read_state(file)
            config, _, _, dtype = self._origin
            there = state.origin
            mine = self._make(tokens, state.tensors).origin
            same = there._replace(written_by="", text="") == mine._replace(written_by="", text="")
            if not same or not fits(state, config, dtype):
                raise CheckpointError(f"{file} does not match the hash in its name")
            return state

        return self._load(key, read)

    def save(self, key: str, tokens: np.ndarray, tensors: dict[str, np.ndarray]) -> None:
        """Keep the state before the last of some tokens. A failure is logged and ends writing."""
        self._save(key, tensors, self._make(tokens, tensors).save)

    def load_scores(self, key: str, tokens: int) -> dict[str, np.ndarray] | None:
        """Return the result of `save_scores`, or None if it is missing or damaged; damage is
        logged."""

        def read(file: Path) -> dict[str, np.ndarray]:
            scores, metadata = read_whole(file, "log-probabilities that griffin-eval has kept")
            whole = metadata.get(_SCORES) == hash_of(key, scores)
            if not whole or not self._are_scores(scores, tokens):
                raise CheckpointError(f"{file} is damaged: its hash does not match")
            return scores

        return self._load(key, read)

    def save_scores(self, key: str, scores: dict[str, np.ndarray]) -> None:
        """Keep the log-probabilities of a beginning of N tokens. A failure is logged and ends
        writing. The fields are those of `PromptScores`, for all tokens but the first:
        ``logprobs`` [N - 1], ``top_tokens`` and ``top_logprobs`` [N - 1, K]."""
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
        """Return the content of a file, or None if it is missing or damaged; damage is logged."""
        file = self._folder / key
        self._keys.discard(key)  # until it has been read
        try:
            if not file.exists():  # another process removed it
                return None
            content = read(file)
            with contextlib.suppress(OSError):  # read-only, or another user's
                os.utime(file)
        except (CheckpointError, OSError) as error:
            logger.warning("state_cache: %s; its tokens are read again", error)
            return None
        self._keys.add(key)
        return content

    def _save(self, key: str, arrays: dict[str, np.ndarray], write: Callable[[Path], None]) -> None:
        if not self.writes or not all(np.isfinite(each).all() for each in arrays.values()):
            return
        if (size := sum(each.nbytes for each in arrays.values())) > self._limit:
            if not self._size_reported:
                self._size_reported = True
                logger.warning(
                    "state_cache: one of %d bytes is more than all may take (%d), and is not kept",
                    size,
                    self._limit,
                )
            return
        try:
            write(self._folder / key)
            self._keys.add(key)
            self._hold_limit()
        except (BadInput, OSError) as error:
            self.writes = False
            logger.warning("state_cache: %s; no more states are kept", error)

    def _make(self, tokens: np.ndarray, tensors: dict[str, np.ndarray]) -> SavedState:
        # The tokens already include BOS, if there is one.
        origin = origin_of(*self._origin, tokens, bos=False, text="", framework=self._framework)
        return SavedState(origin, tensors)

    def _list(self) -> None:
        self._listed = self._folder.stat().st_mtime_ns
        self._keys = {path.name for path in self._folder.iterdir() if _FILE.fullmatch(path.name)}

    def _hold_limit(self) -> None:
        """Remove the least recently used files, and temporary files of killed processes. Other
        processes may do so at the same time."""
        own = (file for file in self._folder.iterdir() if _OWN.fullmatch(file.name))
        for file in over_limit(own, self._limit):
            file.unlink(missing_ok=True)
            self._keys.discard(file.name)

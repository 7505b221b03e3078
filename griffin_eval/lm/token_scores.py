"""Files of ``token_scores=``: the scores of every token as JSON lines, one file for each task. With
``token_states=`` also the states of every layer, one file for each request."""

import contextlib
import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance

from griffin_eval.converters.files import writing
from griffin_eval.engine.scoring import Scored
from griffin_eval.engine.tree import Ablation, Scorable
from griffin_eval.errors import ArgumentError
from griffin_eval.opened import OpenModel
from griffin_eval.states.saved_state import save_whole
from griffin_eval.text.tokenizer import Tokenizer

UNNAMED = "requests"  # file name for requests without a task

# Function of a request's index, its tokens, and the scores of the scored tokens.
Record = Callable[[int, Scorable, Scored], None]


class TokenScoreFiles:
    """The files of one run in a folder, which must not have such files yet.

    ``rank`` is the index of this process; each process writes its own files. ``states`` returns the
    tensors of all layers for int32 [T] tokens.
    """

    def __init__(
        self,
        folder: str,
        tokenizer: Tokenizer,
        rank: int,
        states: Callable[[np.ndarray], dict[str, np.ndarray]] | None = None,
    ):
        self._states = states
        self._folder, self._suffix = Path(folder), f".rank{rank}" if rank else ""
        if self._folder.exists() and not self._folder.is_dir():
            raise ArgumentError(f"token_scores={folder} is a file: expected a folder")
        written = ["*.jsonl"] if states is None else ["*.jsonl", "*.safetensors"]
        if not rank and any(any(self._folder.glob(pattern)) for pattern in written):
            raise ArgumentError(
                f"token_scores={folder} has files of an earlier run: name another folder, or "
                "delete them"
            )
        with writing(folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        self._text = functools.cache(lambda token: decode([token]))

    @classmethod
    def of(cls, model: OpenModel, rank: int) -> "TokenScoreFiles | None":
        """Return the files that a model's ``token_scores=`` names; None if it is not set."""
        if model.arguments.token_scores is None:
            return None
        runner: Any = model.runner

        def states(tokens: np.ndarray) -> dict[str, np.ndarray]:
            from griffin_eval.analysis.layer_states import layer_states

            return layer_states(
                model.checkpoint, tokens, framework=runner.framework, model=runner.model
            )

        wanted = states if model.arguments.token_states else None
        return cls(model.arguments.token_scores, model.tokenizer, rank, wanted)

    @contextlib.contextmanager
    def records(self, kind: str, requests: Sequence[Instance]) -> Iterator[Record]:
        """Yield the function that takes the scores of requests of a kind (lm_eval's name);
        afterwards write them to disk in the order of the requests."""
        found: dict[int, dict[str, list]] = {}
        read: dict[int, Scorable] = {}

        def record(index: int, scorable: Scorable, scored: Scored) -> None:
            assert scored.ranks is not None and scored.entropies is not None
            ids = np.asarray(scorable.tokens, np.int32)[scorable.start :]
            read[index] = scorable
            found[index] = {
                "tokens": ids.tolist(),
                "texts": [self._text(token) for token in ids.tolist()],
                "nats": (0.0 - scored.logprobs).tolist(),
                "rank": scored.ranks.tolist(),
                "entropy": scored.entropies.tolist(),
            }

        yield record
        lines: dict[str, list[str]] = {}
        seen = Counter[tuple[str, int | None, int]]()
        for index in sorted(found):
            request = requests[index]
            task = request.task_name or UNNAMED
            key = task, request.doc_id, request.idx
            if seen[key] >= (request.repeats or 1):
                continue  # lm_eval repeats a request if another process has more
            line = {"task": task, "doc_id": request.doc_id, "index": request.idx}
            line |= {"repeat": seen[key], "type": kind} | found[index]
            if self._states is not None:
                name = f"{_file_name(task)}.{request.doc_id}.{request.idx}"
                line["states"] = self._write_states(f"{name}.{seen[key]}", read[index])
            seen[key] += 1
            lines.setdefault(task, []).append(json.dumps(line, ensure_ascii=False) + "\n")
        for task, of_task in lines.items():
            path = self._folder / f"{_file_name(task)}{self._suffix}.jsonl"
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(of_task)

    def _write_states(self, name: str, scorable: Scorable) -> str | None:
        """Write the states of every layer after each token of a request, and return the file name;
        None for a request with an ablation."""
        assert self._states is not None
        if scorable.ablation is not Ablation.NOTHING:
            return None
        tokens = np.asarray(scorable.tokens, np.int32)
        path = self._folder / f"{name}{self._suffix}.safetensors"
        save_whole(path, {"tokens": tokens} | self._states(tokens), {})
        return path.name


def records_of(
    files: TokenScoreFiles | None, kind: str, requests: Sequence[Instance]
) -> contextlib.AbstractContextManager[Record | None]:
    """Return `TokenScoreFiles.records`, or a context that yields None without files."""
    return contextlib.nullcontext() if files is None else files.records(kind, requests)


def _file_name(task: str) -> str:
    return task.replace(os.sep, "__")

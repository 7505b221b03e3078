"""Requests to a scheduler. As a program it prints answers of a model on several devices as JSON.

python scheduler_worker.py CHECKPOINT FRAMEWORK DEVICES
"""

import json
import sys
import threading

import numpy as np

from griffin_eval.engine.live.requests import Request


class Answer:
    """A listener that records all its events."""

    def __init__(self, stop_after=None):
        self.scores, self.tokens, self.reason, self.error = None, [], None, None
        self.ended, self.stop_after = threading.Event(), stop_after

    def prompt(self, scores):
        self.scores = scores

    def token(self, token):
        self.tokens.append(token)
        return len(self.tokens) == self.stop_after

    def done(self, reason, error):
        assert self.reason is None
        self.reason, self.error = reason, error
        self.ended.set()

    @property
    def ids(self):
        return [token.id for token in self.tokens]


def ask(scheduler, tokens, **arguments):
    answer = Answer(arguments.pop("stop_after", None))
    request = Request(np.array(tokens, np.int32), answer, **arguments)
    scheduler.add(request)
    answer.request = request
    return answer


def shared(checkpoint, framework, devices):
    """Return answers of a scheduler in a separate thread, and ranks and entropies of the engine."""
    from griffin_eval.converters.checkpoint import Checkpoint
    from griffin_eval.engine.limits import limits_for
    from griffin_eval.engine.live.scheduler import Scheduler
    from griffin_eval.engine.sampling import Sampling
    from griffin_eval.engine.scoring import score
    from griffin_eval.engine.tree import Scorable
    from griffin_eval.runners.load import load_runners

    (runner,) = load_runners(
        Checkpoint(checkpoint),
        framework=framework,
        dtype="float32",
        device="cpu",
        tensor_parallel=devices,
        data_parallel=1,
    )
    rng = np.random.default_rng(0)
    book = rng.integers(256, size=150)
    texts = [[*book[: 30 * (i + 1)], *rng.integers(256, size=2 + 5 * i)] for i in range(5)]
    scheduler = Scheduler(runner, capacity=1 << 10, state_bytes=1 << 24, rows=4)
    scheduler.start()
    scored = [ask(scheduler, ids, score_from=1, top=3, max_new_tokens=1) for ids in texts]
    answers = [*scored, *(ask(scheduler, ids, max_new_tokens=5) for ids in texts[::-1])]
    how = Sampling(1.2, 50, 0.9)
    answers += [
        ask(scheduler, ids, max_new_tokens=4, sampling=how, seed=(1, i))
        for i, ids in enumerate(texts)
    ]
    scheduler.close()
    details = {}
    score(
        runner,
        [Scorable(ids, len(ids) - 3) for ids in texts],
        limits=limits_for(runner),
        softmax_dtype="float32",
        on_result=details.__setitem__,
        details=True,
    )
    return {
        "devices": runner.devices,
        "reasons": [answer.reason for answer in answers],
        "ids": [list(map(int, answer.ids)) for answer in answers],
        "logprobs": [answer.scores.logprobs.tolist() for answer in scored],
        "top": [answer.scores.top_tokens.tolist() for answer in scored],
        "top_logprobs": [answer.scores.top_logprobs.tolist() for answer in scored],
        "ranks": [details[i].ranks.tolist() for i in range(len(texts))],
        "entropies": [details[i].entropies.tolist() for i in range(len(texts))],
        "tokens_read": scheduler.counts.tokens_read,
    }


if __name__ == "__main__":
    print(json.dumps(shared(sys.argv[1], sys.argv[2], int(sys.argv[3]))))

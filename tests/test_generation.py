"""Generation equals transformers' own, and does not depend on who shares the batch."""

import numpy as np
import pytest
import torch

from griffin_eval import generation
from griffin_eval.generation import Prompt, Sampling, generate

NEVER = frozenset()


def continuations(runner, prompts, batch_size, **arguments):
    found = [None] * len(prompts)
    arguments = {"eos_ids": NEVER} | arguments
    generate(
        runner,
        prompts,
        batch_size=batch_size,
        done=lambda i, ids: found.__setitem__(i, ids),
        **arguments,
    )
    return found


@pytest.mark.parametrize("length", [1, 2, 130])
def test_greedy_equals_transformers(runner, transformers_model, random_tokens, length):
    prompt = random_tokens(length)
    (found,) = continuations(runner, [Prompt(prompt, 12)], 1)
    with torch.no_grad():
        ids = list(prompt)
        for _ in range(12):  # full passes: transformers' cached decoding is no oracle
            logits = transformers_model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    assert found == ids[length:]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(1.3, 20, 0.9)])
def test_a_prompt_gets_the_same_in_any_batch(runner, random_tokens, sampling, monkeypatch):
    monkeypatch.setattr(generation, "CHUNK", 32)
    prompts = [
        Prompt(random_tokens(n), new) for n, new in [(3, 9), (50, 4), (33, 0), (1, 6), (64, 9)]
    ]
    together = continuations(runner, prompts, 4, sampling=sampling, seed=7)
    for index, prompt in enumerate(prompts):
        alone = {}
        generate(
            runner,
            [
                Prompt(p.tokens, p.max_new_tokens if i == index else 0)
                for i, p in enumerate(prompts)
            ],
            batch_size=1,
            eos_ids=NEVER,
            sampling=sampling,
            seed=7,
            done=alone.__setitem__,
        )
        assert together[index] == alone[index]
        assert len(together[index]) == prompt.max_new_tokens


def test_ends_at_eos_which_is_left_out(runner, random_tokens):
    prompts = [Prompt(random_tokens(20, seed), 10) for seed in range(3)]
    free = continuations(runner, prompts, 3)
    eos = free[0][3]
    ended = continuations(runner, prompts, 3, eos_ids=frozenset([eos]))
    for before, after in zip(free, ended, strict=True):
        assert after == (before[: before.index(eos)] if eos in before else before)


def test_stop_ends_one_row_and_not_the_others(runner, random_tokens):
    prompts = [Prompt(random_tokens(20, seed), 10) for seed in range(3)]
    free = continuations(runner, prompts, 3)
    stopped = continuations(runner, prompts, 3, stop=lambda i, ids: i == 1 and len(ids) == 4)
    assert stopped == [free[0], free[1][:4], free[2]]


def test_seeds(runner, random_tokens):
    prompts = [Prompt(random_tokens(20), 12)]
    hot = Sampling(1.5)
    first = continuations(runner, prompts, 1, sampling=hot, seed=1)
    assert first == continuations(runner, prompts, 1, sampling=hot, seed=1)
    assert first != continuations(runner, prompts, 1, sampling=hot, seed=2)


def test_draws_follow_the_tempered_probabilities():
    logits = np.array([1.0, 3.0, 2.0, -1.0], np.float32)
    chooser = generation._Chooser(Sampling(2.0), 0, 0)
    counts = np.bincount([chooser(logits) for _ in range(20_000)], minlength=4) / 20_000
    p = np.exp(logits / 2.0)
    np.testing.assert_allclose(counts, p / p.sum(), atol=0.015)


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [(Sampling(1.0, 2), {1, 2}), (Sampling(1.0, 0, 0.7), {1, 2}), (Sampling(1.0, 0, 1e-9), {1})],
)
def test_top_k_and_top_p_leave_out_the_rest(sampling, possible):
    logits = np.log(np.array([0.1, 0.6, 0.29, 0.01]))
    chooser = generation._Chooser(sampling, 0, 0)
    assert {chooser(logits) for _ in range(2_000)} == possible

"""The compiled attention: against attention written out in float64, in every layout of a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from griffin_eval.kernels import attention_cpu_jax, attention_cpu_torch, cpu
from griffin_eval.model_jax import blocks as jax_blocks
from griffin_eval.model_jax import chunks as jax_chunks
from griffin_eval.model_torch import blocks as torch_blocks
from griffin_eval.model_torch import chunks as torch_chunks

FRAMEWORKS = {
    "torch": (torch_chunks, torch.from_numpy),
    "jax": (jax_chunks, jnp.asarray),
}
each_framework = pytest.mark.parametrize("framework", FRAMEWORKS)


def never(tile):
    raise AssertionError("by tiles")


@dataclasses.dataclass
class Problem:
    """Segments with ``past`` remembered keys, NaN where no query sees them."""

    lengths: list[int]
    past: int
    heads: int = 2
    size: int = 8
    room: int = 3
    moved: int = 2
    scale: float = 1.0
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        # What was read of each document before; 0 is one that starts here.
        read = rng.integers(0, 2 * self.past + 1, len(self.lengths))
        self.reach = [n + np.arange(length) for n, length in zip(read, self.lengths, strict=True)]
        for reach in self.reach:
            if len(reach) > 4 and rng.integers(2):
                reach[3:] -= reach[3]  # another document starts
        self.q, self.k, self.v = (
            [rng.standard_normal((n, *shape)) for n in self.lengths]
            for shape in ((self.heads, self.size), (self.size,), (self.size,))
        )
        self.q = [q * self.scale for q in self.q]
        shape = len(self.lengths), self.past, self.size
        self.past_k, self.past_v = rng.standard_normal(shape), rng.standard_normal(shape)
        for s, reach in enumerate(self.reach):
            seen = max((np.minimum(reach, self.past) - np.arange(len(reach))).max(initial=0), 0)
            self.past_k[s, : self.past - seen] = self.past_v[s, : self.past - seen] = np.nan

    def answers(self) -> list[np.ndarray]:
        """What each segment's queries get, heads joined."""
        found = []
        for s, length in enumerate(self.lengths):
            keys = np.concatenate([self.past_k[s], self.k[s]])
            values = np.concatenate([self.past_v[s], self.v[s]])
            rows = np.empty((length, self.heads, self.size))
            for t in range(length):
                end = self.past + t + 1
                seen = slice(end - 1 - min(self.reach[s][t], self.past), end)
                scores = self.q[s][t] @ keys[seen].T / self.size**0.5
                weights = np.exp(scores - scores.max(1, keepdims=True))
                rows[t] = weights / weights.sum(1, keepdims=True) @ values[seen]
            found.append(rows.reshape(length, self.heads * self.size))
        return found

    def packed(self, chunks, array, padding=3):
        """Arguments of `local_attention`, and which of its rows are the answers."""
        total = sum(self.lengths)

        def behind(parts, *shape):
            return np.concatenate([*parts, np.full((padding, *shape), np.nan)])

        q = behind(self.q, self.heads, self.size)[None]
        keys, values = (
            np.concatenate([past.reshape(-1, self.size), behind(new, self.size)])
            for past, new in ((self.past_k, self.k), (self.past_v, self.v))
        )
        reach = np.concatenate([*self.reach, np.zeros(padding)])[None]
        layout = chunks.pack(array(np.array(self.lengths, np.int32)), total + padding, 4)
        where = np.split(np.arange(total), np.cumsum(self.lengths)[:-1])
        return layout, [q, keys, values], reach, [(0, at) for at in where]

    def rows(self, chunks, array):
        most = max(self.lengths)

        def padded(parts, fill):
            return np.stack(
                [np.concatenate([x, np.full((most - len(x), *x.shape[1:]), fill)]) for x in parts]
            )

        keys, values = (
            np.concatenate([past, padded(new, np.nan)], 1)
            for past, new in ((self.past_k, self.k), (self.past_v, self.v))
        )
        layout = chunks.Rows(array(np.array(self.lengths, np.int32)))
        where = [(s, np.arange(length)) for s, length in enumerate(self.lengths)]
        return layout, [padded(self.q, np.nan), keys, values], padded(self.reach, 0), where

    def single(self, chunks, array):
        layout, (q, keys, values), reach, where = self.rows(chunks, array)
        layout = chunks.Single(layout.lengths, self.room, self.moved)
        around = [(0, 0), (self.moved, self.room - self.moved - 1), (0, 0)]
        keys, values = (np.pad(x, around, constant_values=np.nan) for x in (keys, values))
        if chunks is torch_chunks:  # whose window is a view
            window = slice(self.moved, self.moved + self.past + 1)
            keys, values = keys[:, window], values[:, window]
        return layout, [q, keys, values], reach, where


def attention(framework, problem, kind, dtype=np.float32, attend=never):
    """What each segment's queries get by `local_attention`, and the whole of it."""
    chunks, array = FRAMEWORKS[framework]
    layout, floats, reach, where = getattr(problem, kind)(chunks, array)
    arrays = []
    for x in floats:
        converted = array(np.ascontiguousarray(x, dtype))
        if framework == "torch" and x.base is not None and x.ndim == 3:
            converted = array(x.base.astype(dtype))[:, problem.moved :][:, : x.shape[1]]
        arrays.append(converted)
    with torch.inference_mode():
        out = chunks.local_attention(layout, attend, *arrays, array(reach.astype(np.int32)))
    out = np.asarray(out)
    return [out[row][at] for row, at in where], out


def check(framework, problem, kind):
    found, _ = attention(framework, problem, kind)
    for mine, right in zip(found, problem.answers(), strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=3e-6 * problem.scale)


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)
problems = st.builds(
    Problem,
    lengths,
    past=st.integers(0, 90),
    heads=st.sampled_from([1, 3, 10]),
    size=st.sampled_from([2, 8, 24]),
    scale=st.sampled_from([1.0, 20.0]),
    seed=st.integers(0, 9),
)


@each_framework
@pytest.mark.parametrize("kind", ["packed", "rows"])
@settings(max_examples=12, deadline=None)
@example(Problem([300, 1, 7], past=200, heads=8, size=64))
@example(Problem([3, 1], past=70, heads=70, size=256))
@given(problem=problems)
def test_numbers_are_those_of_attention_written_out(framework, kind, problem):
    check(framework, problem, kind)


@each_framework
@settings(max_examples=12, deadline=None)
@given(
    problem=problems,
    places=st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
)
def test_one_token_of_rows_whose_window_moved(framework, problem, places):
    problem = dataclasses.replace(
        problem, lengths=[min(n, 1) for n in problem.lengths], room=places[0], moved=places[1]
    )
    check(framework, problem, "single")


@each_framework
def test_tokens_of_no_segment_get_zeros(framework):
    _, out = attention(framework, Problem([3, 0, 2], past=4), "packed")
    assert not out[0, 5:].any()


@each_framework
def test_nan_stays_with_its_query(framework):
    problem = Problem([5, 9], past=20)
    problem.q[1][4] = np.nan
    found, _ = attention(framework, problem, "packed")
    assert np.isnan(found[1][4]).all()
    assert np.isfinite(found[0]).all() and np.isfinite(np.delete(found[1], 4, 0)).all()


@each_framework
def test_scores_beyond_the_exponentials_range(framework):
    check(framework, Problem([40], past=80, scale=1e4, seed=3), "packed")


@each_framework
def test_what_the_kernel_does_not_take_goes_by_tiles(framework, monkeypatch):
    blocks = {"torch": torch_blocks, "jax": jax_blocks}[framework]
    asked = []

    def attend(tile):
        asked.append(tile)
        return blocks._attend(tile)

    problem = Problem([3, 2], past=0)
    large = Problem([3, 2], past=0, size=257)
    jax.config.update("jax_enable_x64", True)
    try:
        found, _ = attention(framework, problem, "rows", np.float64, attend)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert found[0].dtype == np.float64 and len(asked) == 1
    attention(framework, large, "rows", attend=attend)
    assert len(asked) == 2
    missing = {"torch": (cpu, "library"), "jax": (attention_cpu_jax, "_missing")}[framework]
    monkeypatch.setattr(*missing, {"torch": lambda: None, "jax": lambda: cpu.NOT_BUILT}[framework])
    attention(framework, problem, "rows", attend=attend)
    assert len(asked) == 3


def test_reasons():
    q = torch.zeros(1, 1, 1, 8)
    reason = attention_cpu_torch.unsupported
    assert reason(q, q, q) is None
    assert "not torch.float64 on cpu" in reason(q, q, q.double())
    assert "torch.bfloat16 on cpu" in reason(q.bfloat16(), q, q)
    assert "256 dimensions, not 300" in reason(torch.zeros(1, 1, 1, 300), q, q)
    assert "no derivative" in reason(q, q, q.clone().requires_grad_())
    with torch.no_grad():
        assert reason(q, q, q.clone().requires_grad_()) is None
    assert "not bfloat16" in attention_cpu_jax.unsupported(jnp.zeros((1, 1, 1, 8), jnp.bfloat16))
    assert "256 dimensions" in attention_cpu_jax.unsupported(jnp.zeros((1, 1, 1, 300)))


def test_keys_that_lie_elsewhere_than_values():
    problem = Problem([5, 3], past=6)
    layout, (q, keys, values), reach, _ = problem.rows(torch_chunks, torch.from_numpy)
    q, keys, values = (torch.from_numpy(x).float() for x in (q, keys, values))
    reach = torch.from_numpy(reach.astype(np.int32))
    right = torch_chunks.local_attention(layout, never, q, keys, values, reach)
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([values, values], 2)[:, :, : values.shape[2]]
    for other in ((turned, values), (keys, wide), (turned, wide)):
        found = torch_chunks.local_attention(layout, never, q, *other, reach)
        assert torch.equal(found.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("kind", ["packed", "rows"])
def test_gradients_in_jax_are_those_of_the_tiles(kind):
    problem = Problem([5, 1, 9], past=6, seed=1)
    layout, floats, reach, where = getattr(problem, kind)(jax_chunks, jnp.asarray)
    floats = [jnp.asarray(np.nan_to_num(x), jnp.float32) for x in floats]
    reach = jnp.asarray(reach, jnp.int32)
    weights = np.zeros((*floats[0].shape[:2], 16), np.float32)
    for row, at in where:
        weights[row, at] = np.random.default_rng(2).standard_normal((len(at), 16))

    def total(by_kernel, *floats):
        if by_kernel:
            out = jax_chunks.local_attention(layout, jax_blocks._attend, *floats, reach)
        else:
            out = layout.by_tiles(jax_blocks._attend, *floats, reach)
        return (out * weights).sum()

    found, right = (
        jax.jit(jax.grad(lambda *x, by=by: total(by, *x), argnums=(0, 1, 2)))(*floats)
        for by in (True, False)
    )
    for mine, other in zip(found, right, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-6)
        assert np.abs(np.asarray(mine)).max() > 0.1

"""Contract of local attention: every implementation on a CPU, in every layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow import examples, fast
from xla_options import QUICK_COMPILE

from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.attention import api, cpu_torch, reference
from griffin_eval.kernels.cpu import compiled
from griffin_eval.model_jax import layouts as jax_layouts
from griffin_eval.model_torch import layouts as torch_layouts

FRAMEWORKS = {
    "torch": (torch_layouts, torch.from_numpy),
    "jax": (jax_layouts, jnp.asarray),
}
each_framework = pytest.mark.parametrize("framework", FRAMEWORKS)
LAYOUTS = ["packed", "padded", "ring"]


@dataclasses.dataclass
class Problem:
    """Segments with ``past`` remembered keys, NaN where no query sees them."""

    lengths: list[int]
    past: int
    heads: int = 2
    size: int = 8
    key_heads: int = 1
    newest: tuple[int, ...] = (5, 0, 2)  # slots of the rows' own keys in rings
    spare_slots: int = 2  # slots of a ring beyond those that a query sees
    scale: float = 1.0
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        # Tokens that were read of each document before; 0 for one that starts here.
        read = rng.integers(0, 2 * self.past + 1, len(self.lengths))
        self.max_age = [n + np.arange(length) for n, length in zip(read, self.lengths, strict=True)]
        for age in self.max_age:
            if len(age) > 4 and rng.integers(2):
                age[3:] -= age[3]  # another document starts
        joined = self.key_heads * self.size
        self.q, self.k, self.v = (
            [rng.standard_normal((n, *shape)) for n in self.lengths]
            for shape in ((self.heads, self.size), (joined,), (joined,))
        )
        self.q = [q * self.scale for q in self.q]
        shape = len(self.lengths), self.past, joined
        self.past_k, self.past_v = rng.standard_normal(shape), rng.standard_normal(shape)
        for s, age in enumerate(self.max_age):
            seen = max((np.minimum(age, self.past) - np.arange(len(age))).max(initial=0), 0)
            self.past_k[s, : self.past - seen] = self.past_v[s, : self.past - seen] = np.nan

    def packed(self, padding=3):
        """Arguments of the reference, and which of its rows each segment's queries are."""
        total = sum(self.lengths)

        def behind(parts, *shape):
            return np.concatenate([*parts, np.full((padding, *shape), np.nan)])

        # A pool with rows that no segment remembers, in any order; two may remember the same.
        rows = np.random.default_rng(self.seed + 1).permutation(len(self.lengths) + 2)
        pools = []
        for past in (self.past_k, self.past_v):
            pool = np.full((len(rows), *past.shape[1:]), np.nan)
            pool[rows[: len(past)]] = past
            pools.append(pool)
        rows = rows[: len(self.lengths)].astype(np.int32)
        arrays = [behind(x, *x[0].shape[1:]) for x in (self.q, self.k, self.v)]
        arrays[0] = arrays[0][None]
        max_age = np.concatenate([*self.max_age, np.zeros(padding)])[None].astype(np.int32)
        starts = np.cumsum([0, *self.lengths[:-1]]).astype(np.int32)
        where = [(0, at) for at in np.split(np.arange(total), starts[1:])]
        remembered = reference.Remembered(*pools, rows)
        return [*arrays, max_age], self._layout(starts=starts, remembered=remembered), where

    def padded(self):
        most = max(self.lengths)

        def rows(parts, fill):
            return np.stack(
                [np.concatenate([x, np.full((most - len(x), *x.shape[1:]), fill)]) for x in parts]
            )

        keys, values = (
            np.concatenate([past, rows(new, np.nan)], 1)
            for past, new in ((self.past_k, self.k), (self.past_v, self.v))
        )
        where = [(s, np.arange(length)) for s, length in enumerate(self.lengths)]
        max_age = rows(self.max_age, 0).astype(np.int32)
        return [rows(self.q, np.nan), keys, values, max_age], self._layout(), where

    def ring(self):
        (q, keys, values, max_age), layout, where = self.padded()
        slots = keys.shape[1] + self.spare_slots
        newest = np.resize(self.newest, len(keys)).astype(np.int32) % slots
        spare = [(0, 0), (0, self.spare_slots), (0, 0)]

        def turned(x):
            rows = zip(np.pad(x, spare, constant_values=np.nan), newest, strict=True)
            return np.stack([np.roll(row, at - self.past, 0) for row, at in rows])

        return [q, turned(keys), turned(values), max_age], layout | {"newest": newest}, where

    def _layout(self, **others):
        return {"past": self.past, "lengths": np.array(self.lengths, np.int32), **others}


def split_layout(layout, convert):
    """Return a layout with its arrays converted and its numbers as they are."""
    arrays = {name: x for name, x in layout.items() if not isinstance(x, int)}
    return (
        {name: x for name, x in layout.items() if name not in arrays},
        {
            name: reference.Remembered(*map(convert, x)) if name == "remembered" else convert(x)
            for name, x in arrays.items()
        },
    )


def query_blocks(layouts, lengths, tokens):
    unused = layouts.PoolRows(lengths, lengths, lengths)
    return layouts.pack(lengths, tokens, 4, unused).blocks


def attention(framework, problem, kind, impl="cpu", dtype=np.float32):
    """Return the output of `local_attention` for each segment's queries, and the whole output."""
    layouts, array = FRAMEWORKS[framework]
    (*floats, max_age), layout, where = getattr(problem, kind)()

    def converted(x):
        if x.dtype.kind != "f":
            return array(x)
        # The plain one multiplies what no query sees by zero.
        return array(np.ascontiguousarray(np.nan_to_num(x) if impl == "plain" else x, dtype))

    arrays = [*map(converted, floats), array(max_age)]
    sizes, placed = split_layout(layout, converted)

    def run(arrays, layout):
        blocks = None
        if "starts" in layout:
            blocks = query_blocks(layouts, layout["lengths"], max_age.shape[1])
        return api.local_attention(*arrays, **layout, **sizes, blocks=blocks, impl=impl)

    if framework == "jax":  # compiled once instead of operation by operation
        run = jax.jit(run, compiler_options=QUICK_COMPILE)
    with torch.inference_mode():
        out = run(arrays, placed)
    out = np.asarray(out)
    return [out[row][at] for row, at in where], out


def check(framework, problem, kind, impl="cpu"):
    found, _ = attention(framework, problem, kind, impl)
    arrays, layout, where = getattr(problem, kind)()
    right = api.local_attention(*arrays, **layout)  # the reference, since the arrays are numpy's
    for mine, (row, at) in zip(found, where, strict=True):
        np.testing.assert_allclose(mine, right[row][at], rtol=0, atol=3e-6 * problem.scale)


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)
problems = st.builds(
    lambda heads, **problem: Problem(heads=heads[0], key_heads=heads[1], **problem),
    lengths=lengths,
    past=st.integers(0, 90),
    heads=st.sampled_from([(1, 1), (3, 1), (10, 1), (3, 3), (10, 2)]),
    size=st.sampled_from([2, 8, 24]),
    scale=st.sampled_from([1.0, 20.0]),
    seed=st.integers(0, 9),
)


# JAX compiles a program for each problem, and calls the same kernel as torch.
each_with_jax_slow = pytest.mark.parametrize("framework", fast(["torch"], FRAMEWORKS))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_numbers_in_jax_are_those_of_the_reference(kind):
    most = 1 if kind == "ring" else 300
    lengths = [min(n, most) for n in (300, 0, 7)]
    check("jax", Problem(lengths, past=200, heads=8, size=64, key_heads=4), kind)


@each_with_jax_slow
@pytest.mark.parametrize("kind", ["packed", "padded"])
@settings(max_examples=examples(12))
@example(Problem([300, 1, 7], past=200, heads=8, size=64))
@example(Problem([3, 1], past=70, heads=70, size=256))
@example(Problem([300, 1, 7], past=200, heads=8, size=64, key_heads=4))
@given(problem=problems)
def test_numbers_are_those_of_the_reference(framework, kind, problem):
    check(framework, problem, kind)


@each_with_jax_slow
@settings(max_examples=examples(12))
@given(
    problem=problems,
    newest=st.lists(st.integers(0, 200), min_size=6, max_size=6),
    spare=st.integers(0, 70),
)
def test_one_token_of_rows_whose_keys_are_in_a_ring(framework, problem, newest, spare):
    lengths = [min(n, 1) for n in problem.lengths]
    problem = dataclasses.replace(problem, lengths=lengths, newest=tuple(newest), spare_slots=spare)
    check(framework, problem, "ring")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_where_a_ring_is_turned(dtype):
    """Not even where a block of keys that are worked on together lies around its end."""
    problem = Problem([1, 1], past=150, heads=3, size=8)
    found = {}
    for turn in (0, 1, 37, 64, 149, 150):
        problem = dataclasses.replace(problem, newest=(turn, turn + 3), spare_slots=0)
        (*floats, max_age), layout, _ = problem.ring()
        floats = [torch.tensor(x, dtype=getattr(torch, dtype)) for x in floats]
        sizes, arrays = split_layout(layout, torch.from_numpy)
        found[turn] = api.local_attention(
            *floats, torch.from_numpy(max_age), **sizes, **arrays, impl="cpu"
        )
    for turn, out in found.items():
        assert torch.equal(out, found[0]), turn


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@each_with_jax_slow
def test_sixteen_bits_are_rounded_once(framework, dtype, kind):
    """The result is that of the same numbers in float64, rounded to the nearest of 16 bits."""
    lengths = [1, 0, 1] if kind == "ring" else [90, 0, 3]
    problem = Problem(lengths, past=70, heads=10, size=24, key_heads=5)
    arrays, layout, where = getattr(problem, kind)()
    array = FRAMEWORKS[framework][1]

    def rounded(x):
        if x.dtype.kind != "f":
            return x
        return x.astype(np.float32).astype(jnp.dtype(dtype)).astype(float)

    def narrow(x):
        if x.dtype.kind != "f":
            return array(x)
        x = array(x.astype(np.float32))
        return x.to(getattr(torch, dtype)) if framework == "torch" else x.astype(dtype)

    sizes, exact = split_layout(layout, rounded)
    right = api.local_attention(*map(rounded, arrays), **sizes, **exact)
    placed = split_layout(layout, narrow)[1]
    found = api.local_attention(*map(narrow, arrays), **sizes, **placed, impl="cpu")
    assert str(found.dtype).endswith(dtype)
    found = np.asarray(found.float() if framework == "torch" else found.astype(jnp.float32))
    for row, at in where:
        ulp = np.abs(right[row][at]) * float(jnp.finfo(dtype).eps)
        assert (np.abs(found[row][at] - right[row][at]) <= 0.51 * ulp + 3e-6).all()


# The longest row is more than one block of queries; a state remembers nothing, some, or more.
SHARED = [
    Problem([150, 0, 7], past=20, heads=3),
    Problem([9, 2], past=0, scale=20.0),
    Problem([150, 0, 7], past=20, heads=6, key_heads=3),
]


@each_framework
@pytest.mark.parametrize("kind", LAYOUTS)
def test_plain_numbers_are_those_of_the_reference(framework, kind):
    # JAX compiles each; the last has rows, heads of keys and documents of every kind.
    for problem in SHARED if framework == "torch" else SHARED[-1:]:
        if kind == "ring":
            problem = dataclasses.replace(problem, lengths=[min(n, 1) for n in problem.lengths])
        check(framework, problem, kind, "plain")


def test_the_reference_is_attention_written_out():
    """Equal scores give a mean; the window moves with the query."""
    values = np.arange(5.0)[None, :, None]
    q, keys = np.zeros((1, 3, 1, 1)), np.random.default_rng(0).standard_normal((1, 5, 1))
    max_age = np.array([[2, 1, 9]])
    y = reference.local_attention(q, keys, values, max_age, past=2, lengths=[3])
    np.testing.assert_allclose(y[0, :, 0], [1.0, 2.5, 3.0])
    y = reference.local_attention(q + 1, keys, values, max_age, past=2, lengths=[2])
    e = np.exp(keys[0, :, 0])
    expected = (e[:3] @ values[0, :3, 0]) / e[:3].sum()
    np.testing.assert_allclose(y[0, :, 0], [expected, y[0, 1, 0], 0.0])
    packed = reference.local_attention(
        q,
        keys[0, 2:],
        values[0, 2:],
        max_age,
        past=2,
        lengths=[1, 1],
        starts=[0, 2],
        remembered=reference.Remembered(
            np.zeros((2, 2, 1)), np.array([[[0.0], [1.0]], [[2.0], [3.0]]]), [0, 1]
        ),
    )
    np.testing.assert_allclose(packed[0, :, 0], [1.0, 0.0, 3.0])


@each_framework
def test_tokens_of_no_segment_get_zeros(framework):
    _, out = attention(framework, Problem([3, 0, 2], past=4), "packed")
    assert not out[0, 5:].any()


@each_framework
def test_lengths_beyond_a_segment_read_the_segment(framework):
    array = FRAMEWORKS[framework][1]
    rng = np.random.default_rng(0)

    def run(q, keys, lengths, starts=None, remembered=None):
        layout = {"lengths": array(np.array(lengths, np.int32)), "remembered": remembered}
        layout["starts"] = None if starts is None else array(np.array(starts, np.int32))
        max_age = array(np.full(q.shape[:2], 9, np.int32))
        q, keys = (array(x.astype(np.float32)) for x in (q, keys))
        return np.asarray(api.local_attention(q, keys, keys, max_age, past=3, **layout, impl="cpu"))

    q, keys = rng.standard_normal((2, 5, 4, 8)), rng.standard_normal((2, 8, 8))
    right = run(q, keys, [5, 5])
    for lengths in ([6, 5], [5, 1000], [2**31 - 1, 2**31 - 1]):
        assert np.array_equal(run(q, keys, lengths), right), lengths
    none = run(q, keys, [0, 5])
    assert np.array_equal(none[1], right[1]) and not none[0].any()
    assert np.array_equal(run(q, keys, [-7, 5]), none)

    pool = array(rng.standard_normal((2, 3, 8)).astype(np.float32))
    remembered = reference.Remembered(pool, pool, array(np.array([1, 0, 1], np.int32)))
    q, keys = rng.standard_normal((1, 10, 4, 8)), rng.standard_normal((10, 8))
    right = run(q, keys, [4, 0, 6], [0, 0, 4], remembered)
    for lengths in ([7, 0, 6], [4, 0, 1000], [2**31 - 1, -1, 2**31 - 1]):
        assert np.array_equal(run(q, keys, lengths, [0, 0, 4], remembered), right), lengths
    outside = run(q, keys, [3, 5, 8], [-4, 12, 2**31 - 1], remembered)
    assert np.array_equal(outside[0, :3], right[0, :3]) and not outside[0, 3:].any()


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
def test_what_the_kernel_does_not_take_goes_to_the_plain_one(framework, monkeypatch):
    array = FRAMEWORKS[framework][1]
    problem = Problem([3, 2], past=0)
    jax.config.update("jax_enable_x64", True)
    try:
        found, _ = attention(framework, problem, "padded", "auto", np.float64)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert found[0].dtype == np.float64
    q, large = (array(np.zeros((1, 2, 1, size), np.float32)) for size in (8, 257))
    assert api.choose(q) == ("cpu", api.choose(q).refused)
    choice = api.choose(large)
    assert choice.name == "plain" and "257" in choice.refused["cpu"]
    with pytest.raises(NotImplementedError, match="256 dimensions, not 257"):
        api.choose(large, impl="cpu")
    missing = {"torch": (compiled, "missing"), "jax": (compiled, "register_ffi_targets")}[framework]
    monkeypatch.setattr(*missing, lambda: compiled.NOT_BUILT)
    assert api.choose(q).name == "plain" and api.choose(q).refused["cpu"] == compiled.NOT_BUILT
    assert api.choose(q, impl="plain") == ("plain", {})


@each_framework
def test_what_does_not_belong_together_is_refused(framework):
    array = FRAMEWORKS[framework][1]
    arrays, layout, _ = Problem([3, 2], past=4).padded()
    arrays = [array(np.nan_to_num(x).astype(x.dtype)) for x in arrays]
    layout["lengths"] = array(layout["lengths"])
    for wrong, said in (
        ({1: arrays[1][:, :-1]}, "keys must have the shape"),
        ({1: arrays[1][:, :, 1:]}, "the last axis of keys must be 8 or a multiple of it"),
        ({1: array(np.zeros((2, 7, 24)))}, "of as many heads as divide 2"),
        ({2: arrays[2][:, :-1]}, "values must have the shape"),
        ({3: arrays[3][:1]}, "max_age must have the shape"),
    ):
        with pytest.raises(ArgumentError, match=said):
            api.local_attention(*(wrong.get(i, x) for i, x in enumerate(arrays)), **layout)
    with pytest.raises(ArgumentError, match="must lie in one row"):
        api.local_attention(*arrays, **layout, starts=layout["lengths"])
    with pytest.raises(NotImplementedError, match="no implementation 'gpu'.*cpu, plain"):
        api.local_attention(*arrays, **layout, impl="gpu")
    arrays, layout, _ = Problem([3, 2], past=4).packed()
    remembered = layout.pop("remembered")
    with pytest.raises(ArgumentError, match="need remembered="):
        api.local_attention(*arrays, **layout)
    for wrong in ({"keys": remembered.values[:, 1:]}, {"rows": remembered.rows[:1]}):
        with pytest.raises(
            ArgumentError, match=f"remembered.{next(iter(wrong))} must have the shape"
        ):
            api.local_attention(*arrays, **layout, remembered=remembered._replace(**wrong))
    narrow = remembered._replace(values=remembered.values.astype(np.float16))
    with pytest.raises(ArgumentError, match="remembered.values must have the dtype of q"):
        api.local_attention(*arrays, **layout, remembered=narrow)


def test_reasons():
    q = torch.zeros(1, 1, 1, 8)
    reason = cpu_torch.unsupported
    assert reason(q, q, q) is None
    assert "arrays of one dtype, not torch.float32 and torch.float16" in reason(q, q, q.half())
    assert "not on meta" in reason(q.to("meta"), q, q)
    assert "no derivative" in reason(q, q, q.clone().requires_grad_())


def test_keys_that_lie_elsewhere_than_values():
    arrays, layout, _ = Problem([5, 3], past=6).padded()
    q, keys, values = (torch.from_numpy(x).float() for x in arrays[:3])
    max_age = torch.from_numpy(arrays[3])
    layout["lengths"] = torch.from_numpy(layout["lengths"])
    right = api.local_attention(q, keys, values, max_age, **layout, impl="cpu")
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([values, values], 2)[:, :, : values.shape[2]]
    for other in ((turned, values), (keys, wide), (turned, wide)):
        found = api.local_attention(q, *other, max_age, **layout, impl="cpu")
        assert torch.equal(found.nan_to_num(), right.nan_to_num())

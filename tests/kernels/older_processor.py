"""The compiled kernels against the references, with numpy alone, for processors that are emulated.

    qemu-x86_64 -cpu Nehalem .venv/bin/python tests/kernels/older_processor.py

Instructions that the emulated processor lacks end the process (SIGILL). PyTorch and JAX are not
imported: jaxlib refuses processors without AVX.
"""

import ctypes
import itertools

import ml_dtypes
import numpy as np

from griffin_eval.kernels.attention.reference import local_attention
from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.rglru.reference import linear_scan

THREADS = 2
SCAN, SCAN_BACKWARD, GATED, GATED_BACKWARD = range(4)  # of rglru/cpu.c
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}  # over the largest value
DRAW = np.random.default_rng(0)


def main() -> None:
    library = compiled.library()
    assert library is not None, compiled.NOT_BUILT
    for dtype, rows, then in itertools.product(DTYPES, (1, 2, 7), ("none", "gelu", "mul")):
        check_linear(library, dtype, rows, then)
    for dtype, (tokens, window) in itertools.product(DTYPES, [(1, 5), (37, 9), (150, 200)]):
        check_attention(library, dtype, tokens, window)
    for tokens, width in [(1, 4), (7, 33), (40, 300)]:
        check_scan(library, tokens, width)
    for tokens, gates, size in [(1, 1, 5), (9, 2, 17), (33, 3, 48)]:
        check_gated(library, tokens, gates, size)
    print("the compiled kernels compute here what their references do")


def check_linear(library, dtype, rows, then):
    depth, outputs = 97, 21
    x, weight, bias, other = (
        normal(*shape) for shape in [(rows, depth), (outputs, depth), (outputs,), (rows, outputs)]
    )
    weight, bias, other = (array.astype(DTYPES[dtype]) for array in (weight, bias, other))
    out = np.empty((rows, outputs), DTYPES[dtype])
    kind, number = ("none", "gelu", "mul").index(then), compiled.TYPES[dtype]
    sizes = int64(rows, depth, outputs, number, number, kind, THREADS)
    library.griffin_linear(sizes, *map(address, (x, weight, bias, other, out)))
    y = x.astype(float) @ weight.astype(float).T + bias.astype(float)
    if then == "gelu":
        y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    close(out, y * other.astype(float) if then == "mul" else y, dtype)


def check_attention(library, dtype, tokens, window):
    heads, size, past = 3, 24, window - 1
    q = normal(1, tokens, heads, size).astype(DTYPES[dtype])
    keys, values = (normal(1, past + tokens, size).astype(DTYPES[dtype]) for _ in range(2))
    age = np.minimum(np.arange(tokens, dtype=np.int32), past)[None]  # nothing was read before
    starts, lengths = np.zeros(1, np.int32), np.array([tokens], np.int32)
    out = np.empty((1, tokens, heads * size), DTYPES[dtype])
    newest = np.array([past], np.int32)
    arrays = [newest, starts, lengths, age, None, q, keys, values, keys, values]
    sizes = int64(tokens, heads, 1, size, 1, past + tokens, compiled.TYPES[dtype])
    library.griffin_attention(sizes, addresses(arrays), address(out), THREADS)
    close(out, local_attention(q, keys, values, age, past=past, lengths=lengths), dtype)


def check_scan(library, tokens, width):
    a = DRAW.uniform(0.2, 1, (tokens, width)).astype(np.float32)
    x, h0, h, dh, dlast = (
        normal(*shape) for shape in [a.shape, (1, width), a.shape, a.shape, (1, width)]
    )
    last = h0.copy()
    rglru(library, SCAN, [a, x], [h, last])
    expected, expected_last = linear_scan(a[None], x[None], h0)
    close(h, expected[0])
    close(last, expected_last)
    da, dx, dh0 = np.empty_like(a), np.empty_like(x), np.empty_like(h0)
    rglru(library, SCAN_BACKWARD, [a, h0, h, dh, dlast], [da, dx, dh0])
    inputs = (a, x, h0)
    check_slope(
        lambda a, x, h0: linear_scan(a[None], x[None], h0), inputs, (da, dx, dh0), dh, dlast
    )


def check_gated(library, tokens, gates, size):
    width = gates * size
    x, h0, h, dh, dlast = (
        normal(*shape)
        for shape in [(tokens, width), (1, width), (tokens, width), (tokens, width), (1, width)]
    )
    products = [normal(gates, tokens, size) for _ in range(2)]  # of x with the gates' weights
    biases = [normal(width) for _ in range(2)]
    decay = -DRAW.uniform(0.05, 2, width).astype(np.float32)
    inputs = (x, *products, *biases, decay, h0)

    def expected(x, input, recurrent, input_bias, recurrent_bias, decay, h0):
        i, r = (
            1 / (1 + np.exp(-(p.transpose(1, 0, 2).reshape(tokens, width) + bias)))
            for p, bias in ((input, input_bias), (recurrent, recurrent_bias))
        )
        a = np.exp(decay * r)
        return linear_scan(a[None], (np.sqrt(1 - a * a) * i * x)[None], h0)

    last = h0.copy()
    rglru(library, GATED, inputs[:-1], [h, last], gates)
    found = expected(*inputs)
    close(h, found[0][0])
    close(last, found[1])
    slopes = [np.empty_like(array) for array in (x, *products, decay, h0)]
    rglru(library, GATED_BACKWARD, [*inputs, h, dh, dlast], slopes, gates)
    into = (x, *products, decay, h0)
    check_slope(
        lambda x, i, r, decay, h0: expected(x, i, r, *biases, decay, h0), into, slopes, dh, dlast
    )


def rglru(library, kind, inputs, outputs, gates=0):
    tokens, width = outputs[0].shape if gates == 0 else inputs[0].shape
    sizes = int64(tokens, width, gates, 1, 0, tokens)
    into = addresses([None, None, None, *inputs])
    library.griffin_rglru(kind, sizes, into, addresses(outputs), THREADS)


def check_slope(function, inputs, slopes, dh, dlast):
    """Gradients, against a central difference in float64 along a random direction of each input."""
    for at, (array, slope) in enumerate(zip(inputs, slopes, strict=True)):
        direction, step = DRAW.standard_normal(array.shape), 1e-6

        def value(sign, at=at, direction=direction, step=step):
            moved = [np.asarray(x, float) for x in inputs]
            moved[at] = moved[at] + sign * step * direction
            h, last = function(*moved)
            return np.sum(h[0] * dh) + np.sum(last * dlast)

        found, expected = np.sum(slope * direction), (value(1) - value(-1)) / (2 * step)
        scale = np.sqrt(np.sum(np.square(slope, dtype=float))) + abs(expected)
        assert abs(found - expected) < 1e-4 * scale, (at, found, expected)


def normal(*shape):
    return DRAW.standard_normal(shape).astype(np.float32)


def int64(*numbers):
    return (ctypes.c_int64 * len(numbers))(*numbers)


def address(array):
    return None if array is None else array.ctypes.data


def addresses(arrays):
    return (ctypes.c_void_p * len(arrays))(*map(address, arrays))


def close(found, expected, dtype="float32"):
    error = np.max(np.abs(found.astype(float) - expected)) / np.max(np.abs(expected))
    assert error < ROUNDING[dtype], (error, dtype)


if __name__ == "__main__":
    main()

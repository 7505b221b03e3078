"""Random initial weights, equal in both frameworks."""

import zlib

import numpy as np

from griffin_eval.layout import ParamSpec


def initial_value(spec: ParamSpec, seed: int) -> np.ndarray:
    """Draw one parameter as a float32 array. Every name has its own random stream, so the order of
    parameters does not matter."""
    if spec.init == "zeros":
        return np.zeros(spec.shape, np.float32)
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    if spec.init == "normal":
        return rng.standard_normal(spec.shape, np.float32) * np.float32(spec.std)
    if spec.init == "theta":
        return rng.uniform(0, np.pi / 10, spec.shape).astype(np.float32)
    # lambda: sigmoid(-Λ)^c = u, hence Λ = log(u^(-1/c) - 1); expm1 keeps u near 1 exact.
    u = rng.uniform(0.9, 0.999, spec.shape)
    return np.log(np.expm1(-np.log(u) / spec.constant)).astype(np.float32)

"""Models of other packages; a release without one skips the tests that need it."""

from typing import Any

import pytest
import transformers


def recurrent_gemma() -> Any:
    """Return RecurrentGemmaForCausalLM."""
    found = getattr(transformers, "RecurrentGemmaForCausalLM", None)
    if found is None:
        pytest.skip(f"transformers {transformers.__version__} has no RecurrentGemma")
    return found


def deepmind_with_complex_gates(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `parity_oracles`, and let DeepMind's blocks have the CG-LRU until the test ends."""
    modules = pytest.importorskip("recurrentgemma.jax.modules")

    class ComplexBlock(modules.ResidualBlock):
        lru_only_real: bool = False

    monkeypatch.setattr(modules, "ResidualBlock", ComplexBlock)
    return pytest.importorskip("parity_oracles")

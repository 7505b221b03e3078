"""The model class of transformers; a release without it skips the tests that need it."""

from typing import Any

import pytest
import transformers


def recurrent_gemma() -> Any:
    """Return RecurrentGemmaForCausalLM."""
    found = getattr(transformers, "RecurrentGemmaForCausalLM", None)
    if found is None:
        pytest.skip(f"transformers {transformers.__version__} has no RecurrentGemma")
    return found

"""Experiments whose findings docs/results.md, memory.md and performance.md show."""

import benchmarks as benchmarks  # Imported first, since it removes the checkout from the path.

MODEL_NAMES = {
    "griffin": "Griffin",
    "hawk": "Hawk",
    "mqa": "MQA Transformer",
    "local_mqa": "local MQA Transformer",
}

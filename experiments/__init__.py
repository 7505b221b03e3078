"""Experiments whose findings docs/results.md, memory.md and performance.md show."""

import benchmarks as benchmarks  # It takes the checkout from the path, so it must be found first.

MODEL_NAMES = {
    "griffin": "Griffin",
    "hawk": "Hawk",
    "mqa": "MQA Transformer",
    "local_mqa": "local MQA Transformer",
}

"""What results.json records of a run: the model, its settings, and the work that was done."""

import contextlib
import copy
import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import griffin_eval
from griffin_eval.config import GriffinConfig
from griffin_eval.engine.stats import Stats
from griffin_eval.layout import parameter_count
from griffin_eval.lm.load import LoadedModel
from griffin_eval.runners.protocol import Runner

_LIBRARIES = ("torch", "jax", "jaxlib", "flax", "transformers", "lm_eval")


def identity(model: LoadedModel) -> dict[str, Any]:
    """The model and the settings that its answers depend on, but for weights and tokenizer."""
    runner = model.runners[0]
    state = model.state
    settings = {} if state is None else {"model_state": state.sha256}
    return settings | {
        "model_num_parameters": parameter_count(runner.config),
        "model_dtype": runner.dtype,
        "model_revision": model.arguments.revision or "",
        "model_framework": runner.framework,
        "model_device": runner.device,
        "model_visible_keys": window_of(runner.config),
        "model_softmax_dtype": model.softmax_dtype,
        "model_add_bos_token": model.add_bos,
        "griffin_eval_version": griffin_eval.__version__,
    }


def window_of(config: GriffinConfig) -> int | None:
    """Return the keys that local attention sees; None for a model without local attention."""
    return config.visible_keys if "local_attention" in config.block_types else None


def measured(
    runners: Sequence[Runner], stats: Stats, others: Sequence[Stats], processes: int
) -> dict[str, Any]:
    """The work that was done, summed over processes, and what it took.

    Args:
        runners: the models of this process.
        stats: counts of this process.
        others: counts of the other processes.
    """
    total = copy.copy(stats)
    for other in others:
        total += other
    total.seconds = max(one.seconds for one in (stats, *others))
    return dataclasses.asdict(total) | {
        "saved_ratio": total.saved_ratio,
        "tokens_per_second": total.tokens_computed / max(total.seconds, 1e-9),
        "compilations": sum(runner.compilations for runner in runners),
        "peak_memory_bytes": max(runner.peak_memory() for runner in runners),
        "devices": sum(runner.devices for runner in runners) * processes,
        "kernel": f"kernels.rglru, {runners[0].kernel}",
        "attention_kernel": f"kernels.attention, {runners[0].attention_kernel}",
    }


def fingerprint(model: LoadedModel, weights_sha256: str) -> str:
    """32 hexadecimal digits that differ wherever an answer may: a hash of weights, config,
    tokenizer and settings."""
    settings = identity(model) | {
        "weights": weights_sha256,
        "config": model.runners[0].config,
        "tokenizer": model.tokenizer.name,
        "max_length": model.arguments.max_length,
        "prefix_token_id": model.prefix_token_id,
        "eos_ids": sorted(model.eos_ids),
    }
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:32]


def versions() -> dict[str, str]:
    """Versions of those libraries that compute and are installed."""
    installed = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed

"""The record of a run in results.json: model, settings, and work done."""

import contextlib
import copy
import dataclasses
import hashlib
import importlib.metadata
import logging
from collections.abc import Sequence
from typing import Any

import griffin_eval
from griffin_eval.config import GriffinConfig
from griffin_eval.engine.stats import Stats
from griffin_eval.layout import parameter_count
from griffin_eval.lm.chunks import chunking_of
from griffin_eval.opened import OpenModel
from griffin_eval.runners.protocol import Runner

logger = logging.getLogger(__name__)

_LIBRARIES = ("torch", "jax", "jaxlib", "flax", "transformers", "lm_eval")


def identity(model: OpenModel) -> dict[str, Any]:
    """Return the model and the settings that change its answers, except weights and tokenizer."""
    runner, state = model.runner, model.state
    settings: dict[str, Any] = {} if state is None else {"model_state": state.sha256}
    if (chunking := chunking_of(model.arguments)) is not None:
        settings |= {f"model_chunk_{name}": value for name, value in chunking._asdict().items()}
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
    """Return the number of keys that local attention sees; None without local attention."""
    return config.visible_keys if "local_attention" in config.block_types else None


def measured(
    runners: Sequence[Runner], stats: Stats, others: Sequence[Stats], processes: int
) -> dict[str, Any]:
    """Return the work that was done and the time it took, summed over processes."""
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


def fingerprint(model: OpenModel) -> str:
    """Return 32 hexadecimal digits of a hash of everything that an answer depends on: weights,
    config, tokenizer and settings."""
    settings = identity(model) | {
        "weights": model.weights_sha256,
        "config": model.runner.config,
        "tokenizer": model.tokenizer.name,
        "max_length": model.arguments.max_length,
        "prefix_token_id": model.prefix_token_id,
        "eos_ids": sorted(model.eos_ids),
    }
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:32]


def model_info(
    model: OpenModel, stats: Stats, others: Sequence[Stats], processes: int
) -> dict[str, Any]:
    """Return, and log, what results.json records of a model and of the work so far; see `measured`.
    lm_eval calls this at the end of a run."""
    work = measured(model.runners, stats, others, processes)
    logger.info(
        "griffin: %d tokens requested, %d computed (ratio %.3g), %d states evicted, "
        "%.0f tokens/s, %d compilations, %.3g GB at most; %s; %s",
        work["tokens_requested"],
        work["tokens_computed"],
        work["saved_ratio"],
        work["states_evicted"],
        work["tokens_per_second"],
        work["compilations"],
        work["peak_memory_bytes"] / 1e9,
        work["kernel"],
        work["attention_kernel"],
    )
    adapters = model.checkpoint.adapters
    return (
        identity(model)
        | {f"griffin_{name}": value for name, value in work.items()}
        | {
            "griffin_weights_sha256": model.weights_sha256,
            "griffin_weights_checked": model.arguments.check,
            "griffin_versions": versions(),
        }
        | ({} if model.parity is None else {"griffin_parity": model.parity})
        | ({"griffin_adapters": [a.record() for a in adapters]} if adapters else {})
    )


def versions() -> dict[str, str]:
    """Return the versions of installed libraries that affect results."""
    installed = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed

"""``parity=check``: comparison of both frameworks on a checkpoint before its evaluation."""

import logging
from typing import Any

import numpy as np

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.crosscheck.logits import (
    IMPLEMENTATIONS,
    TOLERANCE,
    compare_traces,
    log_softmax,
    make_probe,
)
from griffin_eval.errors import ArgumentError, BadInput

TWINS = tuple(one for one in IMPLEMENTATIONS if one.format is None)

logger = logging.getLogger(__name__)


def check_parity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Run a fixed probe through both twins in float32 on the CPU, one model in memory at a time.

    Returns:
        Entries of results.json: the number of tokens of the probe, whether it exceeds
        ``visible_keys``, the largest differences of logits and of log-probabilities (in nats), and
        the relative tolerance.

    Raises:
        ArgumentError: A framework is not installed.
        BadInput: The twins differ by more than the tolerance in some array.
    """
    for twin in TWINS:
        if reason := twin.obstacle(checkpoint.config):
            raise ArgumentError(
                f"parity=check runs the model in PyTorch and in JAX ({reason}): "
                "pip install 'griffin-eval[all]'"
            )
    probe = make_probe([checkpoint.config])
    logger.info("parity=check: %d tokens in both frameworks", probe.tokens.size)
    traces = [twin.run(checkpoint, probe) for twin in TWINS]
    agreement = compare_traces(*traces)
    if agreement.first is not None:
        raise BadInput(
            f"parity=check: PyTorch and JAX differ by {agreement.largest:.3g} in {agreement.first},"
            f" more than {TOLERANCE:g} of the largest value there; look at the checkpoint with "
            "griffin-eval verify --logits, or leave parity=check out"
        )
    one, other = (log_softmax(trace.logits) for trace in traces)
    report = {
        "tokens": int(probe.tokens.size),
        "past_window": probe.past_window,
        "largest_difference_logits": agreement.logits,
        "largest_difference_logprobs": float(np.abs(one - other).max()),
        "relative_tolerance": TOLERANCE,
    }
    logger.info(
        "parity=check: logits differ by %.2g at most, log-probabilities by %.2g",
        report["largest_difference_logits"],
        report["largest_difference_logprobs"],
    )
    return report

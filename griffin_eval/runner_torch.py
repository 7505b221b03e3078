"""The PyTorch runner."""

import logging

import numpy as np
import torch

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError
from griffin_eval.model_torch.griffin import Griffin
from griffin_eval.model_torch.loading import load
from griffin_eval.model_torch.state import State
from griffin_eval.runners import in_blocks

logger = logging.getLogger(__name__)


class TorchRunner:
    """`Runner` over `griffin_eval.model_torch`."""

    framework = "torch"

    def __init__(self, model: Griffin):
        weight = model.model.embed_tokens.weight
        self.model = model.requires_grad_(False).eval()
        self.config = model.config
        self.device = str(weight.device)
        self.dtype = str(weight.dtype).removeprefix("torch.")

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str, device: str | None):
        """See `griffin_eval.runners.load_runner`."""
        chosen = None if dtype == "auto" else getattr(torch, dtype)
        return cls(load(checkpoint, chosen, choose_device(device)))

    def bucket(self, count: int, smallest: int = 16) -> int:
        return count

    def init_state(self, batch: int, capacity: int) -> State:
        return self.model.init_state(batch, capacity)

    @torch.inference_mode()
    def step(
        self, tokens: np.ndarray, lengths: np.ndarray, state: State
    ) -> tuple[torch.Tensor, State]:
        return self.model.step(self._put(tokens), self._put(lengths), state)

    @torch.inference_mode()
    def score(
        self, hidden: torch.Tensor, at: np.ndarray, targets: np.ndarray, softmax_dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        logprobs = np.empty(len(at), np.float64)
        greedy = np.empty(len(at), bool)
        for block in in_blocks(at, self.config.vocab_size):
            logits = self._logits(hidden, at[block]).to(getattr(torch, softmax_dtype))
            target = self._put(targets[block])
            chosen = logits.gather(1, target[:, None])[:, 0]
            logprobs[block] = (chosen - logits.logsumexp(1)).double().cpu().numpy()
            greedy[block] = (logits.argmax(1) == target).cpu().numpy()
        return logprobs, greedy

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, at: np.ndarray) -> np.ndarray:
        return self._logits(hidden, at).cpu().numpy()

    @torch.inference_mode()
    def greedy(self, hidden: torch.Tensor, at: np.ndarray) -> np.ndarray:
        return self._logits(hidden, at).argmax(1).cpu().numpy()

    def _logits(self, hidden: torch.Tensor, at: np.ndarray) -> torch.Tensor:
        rows, columns = self._put(at.T)
        return self.model.logits(hidden[rows, columns])

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, torch.int64)


def choose_device(device: str | None) -> torch.device:
    """The device asked for; lm_eval asks for cuda:0 unless told otherwise, so where there is none
    (or None is given) it is the accelerator there is, or the CPU, and the log says so.

    Raises:
        ArgumentError: not the name of a device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    best = accelerator or torch.device("cpu")
    if device is None:
        logger.info("running on %s", best)
        return best
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise ArgumentError(
            f"unknown device {device!r}: expected one that torch names, such as cpu or cuda:0"
        ) from None
    if asked.type != "cpu" and (
        accelerator is None
        or asked.type != accelerator.type
        or (asked.index or 0) >= torch.accelerator.device_count()
    ):
        logger.info("there is no device %s here: running on %s", asked, best)
        return best
    return asked

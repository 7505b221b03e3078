"""The PyTorch runner."""

from pathlib import Path

import numpy as np
import torch

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.attention import api as attention_api
from griffin_eval.kernels.cuda_graphs import Graph
from griffin_eval.kernels.rglru.api import choose
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.model_torch.decoding import DecodingState
from griffin_eval.model_torch.griffin import Griffin
from griffin_eval.model_torch.loading import load, load_packed
from griffin_eval.model_torch.state import (
    PoolRows,
    State,
    gather,
    map_leaves,
    nbytes,
    scatter,
    without_attention,
)
from griffin_eval.runners.batching import (
    decode_rows,
    host_memory,
    logit_blocks,
    peak_host_memory,
    query_block,
    rows_or_start,
    step_rows,
    step_tokens,
)
from griffin_eval.runners.devices import chosen_device
from griffin_eval.sharding import processes_torch
from griffin_eval.states.saved_state import SavedState, tensors_of

RANKED = 64  # number of targets ranked at a time
WARM_UP = 2  # steps before the graph is captured, in which kernels are compiled and chosen


class GraphedDecoding:
    """A `DecodingState` on a CUDA device whose step is one CUDA graph, since launching the thousand
    kernels of a step takes longer than running them. Its tensors stay at their addresses, and so
    must the model's weights. Consumes ``state``, which is before the first token."""

    def __init__(self, model: Griffin, state: DecodingState):
        self._model, self._state = model, state
        pos = state.rows.pos
        self._tokens, self._active = pos.new_zeros(2, len(pos), dtype=torch.int64)
        self._graph, self._warm_up = Graph(pos.device), WARM_UP

    def insert(self, rows: torch.Tensor, pool: State, sources: torch.Tensor) -> "GraphedDecoding":
        """See `DecodingState.insert`."""
        self._state = self._state.insert(rows, pool, sources)
        return self

    def step(
        self, model: Griffin, tokens: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, "GraphedDecoding"]:
        """See `DecodingState.step`."""
        assert model is self._model
        self._tokens.copy_(tokens)
        self._active.copy_(active)
        if self._warm_up:
            self._warm_up -= 1
            return self._in_place(), self
        return self._graph.run(self._in_place).clone(), self

    def _in_place(self) -> torch.Tensor:
        """Run a step that leaves every tensor of the state at its address."""
        before = self._state.rows
        hidden, after = self._state.step(self._model, self._tokens, self._active)
        map_leaves(lambda old, new: old if new is old else old.copy_(new), before, after.rows)
        return hidden


class TorchRunner:
    """The `griffin_eval.runners.protocol.Runner` of `griffin_eval.model_torch` on one device. Puts
    ``model`` into evaluation mode."""

    framework, devices = "torch", 1

    def __init__(self, model: Griffin):
        weight = model.model.embed_tokens.weight
        self.model = model.requires_grad_(False).eval()
        self.config = model.config
        self._saved: SavedState | None = None
        # Whether this process has the logits of a part of the vocabulary, and its first token.
        self._split = len(weight) < self.config.vocab_size
        self._first_token = processes_torch.rank() * len(weight)
        self.device = str(weight.device)
        self.dtype = str(weight.dtype).removeprefix("torch.")
        self.step_tokens, self.step_rows = step_tokens(self.device), step_rows(self.device)
        self.decode_rows = decode_rows(self.device)
        one = torch.empty(1, 1, 1, dtype=weight.dtype, device=weight.device)
        gates = Gates(*[one] * 6) if self.config.complex_gates else None
        self.kernel = choose(one, gates, starts=one, c=self.config.lru_constant).name
        queries = one.new_empty(1, 1, self.config.num_heads, self.config.head_size)
        keys = one.new_empty(1, 1, self.config.kv_width)
        attends = set(self.config.block_types) != {"recurrent"}
        self.attention_kernel = (
            attention_api.choose(queries, keys, keys).name if attends else "none"
        )

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, dtype: str, device: str | None, packed: bool = False
    ) -> "TorchRunner":
        """Load a checkpoint onto a device. See `griffin_eval.runners.load.load_runners`."""
        chosen, where = None if dtype == "auto" else getattr(torch, dtype), choose_device(device)
        return cls((load_packed if packed else load)(checkpoint, chosen, where))

    def padded_tokens(self, count: int, smallest: int = 16) -> int:
        return count

    def padded_batch(self, count: int) -> int:
        return count

    def state_bytes(self, capacity: int) -> int:
        return nbytes(self._start(capacity))

    def step_bytes(self, capacity: int) -> int:
        state = self._start(capacity)
        return nbytes(without_attention(state) if self.attention_kernel == "cpu" else state)

    def free_memory(self) -> int:
        device = torch.device(self.device)
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()

    def open_pool(self, rows: int, capacity: int) -> State:
        start = self._start(capacity)
        # Memory that is never written costs nothing. The last row holds the start state.
        pool = map_leaves(lambda leaf: leaf.new_empty(rows + 1, *leaf.shape[1:]), start)
        return scatter(pool, self._put(np.array([rows])), start)

    def grow_pool(self, pool: State, rows: int, capacity: int) -> State:
        old = torch.arange(len(pool.pos) - 1, device=self.device)
        return scatter(self.open_pool(rows, capacity), old, gather(pool, old))

    def start_from(self, saved: SavedState) -> None:
        self._saved = saved

    def state_tensors(self, pool: State, row: int, read: int) -> dict[str, np.ndarray]:
        wide = torch.promote_types(pool.layers[0][0].dtype, torch.float32)

        def whole(leaf: torch.Tensor, channels: int) -> np.ndarray:
            mine = leaf[row].to(wide, copy=True)
            if mine.shape[-1] < channels:
                mine = torch.cat(list(processes_torch.gathered(mine)), -1)
            return mine.cpu().numpy()

        kinds = zip(pool.layers, self.config.block_types, strict=True)
        config = self.config
        layers = [
            {
                name: whole(leaf, config.lru_width if kind == "recurrent" else config.kv_width)
                for name, leaf in layer._asdict().items()
            }
            for layer, kind in kinds
        ]
        return tensors_of(layers, read)

    def write_state(
        self, pool: State, row: int, tensors: dict[str, np.ndarray], read: int, capacity: int
    ) -> State:
        return scatter(pool, self._put(np.array([row])), self._state_of(tensors, read, capacity))

    def _start(self, capacity: int) -> State:
        """Return the start state of a document with ``capacity`` tokens of its own."""
        if self._saved is None:
            return self.model.init_state(1, capacity)
        return self._state_of(self._saved.tensors, self._saved.read, capacity + self._saved.read)

    def _state_of(self, tensors: dict[str, np.ndarray], read: int, capacity: int) -> State:
        """Return the state of one document from the result of `state_tensors`."""
        state = self.model.init_state(1, capacity)
        state.pos.fill_(read)
        for index, layer in enumerate(state.layers):
            for name, leaf in layer._asdict().items():
                saved, width = tensors[f"layers.{index}.{name}"], leaf.shape[-1]
                if width < saved.shape[-1]:  # this process has a part of the channels
                    first = processes_torch.rank() * width
                    saved = saved[..., first : first + width]
                leaf[0, leaf.shape[1] - len(saved) :] = torch.tensor(saved)
        return state

    @torch.inference_mode()
    def read(
        self,
        pool: State,
        tokens: np.ndarray,
        lengths: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
        ablations: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, State]:
        kept = np.flatnonzero(targets >= 0)
        rows = PoolRows(
            self._put(rows_or_start(sources, len(pool.pos))),
            self._put(kept),
            self._put(targets[kept]),
        )
        ablated = None
        if ablations is not None:
            ablated = self._put(ablations & 1) > 0, self._put(ablations & 2) > 0
        block = query_block(len(tokens), len(lengths))
        hidden, pool = self.model.step_packed(
            self._put(tokens), self._put(lengths), pool, rows, block, ablated
        )
        return hidden[0], pool

    @torch.inference_mode()
    def start_decoding(self, batch: int, capacity: int) -> DecodingState | GraphedDecoding:
        read = self._saved.read if self._saved else 0
        state = DecodingState.start(self.model, batch, capacity + read)
        if state.rows.pos.is_cuda and processes_torch.parts() == 1:
            return GraphedDecoding(self.model, state)
        return state

    @torch.inference_mode()
    def insert_rows(
        self,
        state: DecodingState | GraphedDecoding,
        rows: np.ndarray,
        pool: State,
        sources: np.ndarray,
    ) -> DecodingState | GraphedDecoding:
        sources = rows_or_start(sources, len(pool.pos))
        return state.insert(self._put(rows), pool, self._put(sources))

    @torch.inference_mode()
    def decode_step(
        self, state: DecodingState | GraphedDecoding, tokens: np.ndarray, active: np.ndarray
    ) -> tuple[torch.Tensor, DecodingState | GraphedDecoding]:
        return state.step(self.model, self._put(tokens), self._put(active))

    @torch.inference_mode()
    def score(
        self,
        hidden: torch.Tensor,
        positions: np.ndarray,
        targets: np.ndarray,
        position_of: np.ndarray,
        softmax_dtype: str,
        *,
        details: bool = False,
        top: int = 0,
    ) -> tuple[np.ndarray, ...]:
        found: list[tuple[np.ndarray, ...]] = []
        places, first = [], 0
        for block, mine in logit_blocks(positions, position_of, self.config.vocab_size):
            logits = self._logits(hidden, block).to(getattr(torch, softmax_dtype))
            row, target = self._put(position_of[mine] - first), self._put(targets[mine])
            if top:
                results = self._score_top(logits, row, target, top)
            elif details:
                results = self._score_details(logits, row, target)
            else:
                results = self._score_greedy(logits, row, target)
            found.append(tuple(map(_float64_or_same, results)))
            places.append(mine)
            first += len(block)
        in_order = np.argsort(np.concatenate(places))
        return tuple(np.concatenate(parts)[in_order] for parts in zip(*found, strict=True))

    def _score_greedy(
        self, logits: torch.Tensor, row: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        chosen = self._of_targets(logits, row, target)
        largest, best = self._likeliest(logits)
        total = self._logsumexp_(logits, largest)
        return chosen - total[row], best[row] == target

    def _score_details(
        self, logits: torch.Tensor, row: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        chosen = self._of_targets(logits, row, target)
        largest, best = self._likeliest(logits)
        likelier = [  # each target reads a whole row of logits, so rank a few at a time
            (logits[some] > one[:, None]).sum(1)
            for some, one in zip(row.split(RANKED), chosen.split(RANKED), strict=True)
        ]
        spread = logits.sub_(largest[:, None])
        weights = spread.exp()
        total = self._summed(weights.sum(1))
        entropy = total.log() - self._summed(weights.mul_(spread).sum(1)) / total
        logprobs = chosen - (total.log() + largest)[row]
        return logprobs, best[row] == target, 1 + self._summed(torch.cat(likelier)), entropy[row]

    def _score_top(
        self, logits: torch.Tensor, row: torch.Tensor, target: torch.Tensor, top: int
    ) -> tuple[torch.Tensor, ...]:
        chosen = self._of_targets(logits, row, target)
        values, ids = logits.topk(min(top, logits.shape[1]), 1)
        if self._split:
            ids = torch.cat(list(processes_torch.gathered(ids + self._first_token)), 1)
            values, order = torch.cat(list(processes_torch.gathered(values)), 1).topk(top, 1)
            ids = ids.gather(1, order)
        total = self._logsumexp_(logits, values[:, 0])
        return chosen - total[row], ids[row], (values - total[:, None])[row]

    def _logsumexp_(self, logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Return ``logits.logsumexp(1)``, and overwrite the logits."""
        return self._summed(logits.sub_(largest[:, None]).exp_().sum(1)).log_().add_(largest)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, positions: np.ndarray) -> np.ndarray:
        logits = self._logits(hidden, positions)
        if self._split:
            logits = torch.cat(list(processes_torch.gathered(logits)), 1)
        return logits.cpu().numpy()

    @torch.inference_mode()
    def greedy(self, hidden: torch.Tensor, positions: np.ndarray) -> np.ndarray:
        best, token = self._likeliest(self._logits(hidden, positions))
        return torch.where(best.isnan(), -1, token).cpu().numpy()

    def stage(self, checkpoint: Checkpoint) -> Griffin:
        return load(checkpoint, getattr(torch, self.dtype), torch.device("cpu"))

    def adopt(self, staged: Griffin) -> None:
        # Do not copy into the old weights: on a CPU they may be mapped from a file.
        for mine, other in zip(self.model.parameters(), staged.parameters(), strict=True):
            mine.data = other.data.to(mine.device)

    def replace_weights(self, path: Path, overrides: Overrides) -> None:
        """Replace this process's part of the weights by those of the checkpoint at a path."""
        self.adopt(self.stage(Checkpoint(path, overrides)))

    def peak_memory(self) -> int:
        device = torch.device(self.device)
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return peak_host_memory()

    @property
    def compilations(self) -> int:
        return 0

    def _of_targets(
        self, logits: torch.Tensor, row: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Return the logit of each target, summed over processes if the vocabulary is split."""
        if not self._split:
            return logits[row, target]
        mine = target - self._first_token
        here = (mine >= 0) & (mine < logits.shape[1])
        found = logits[row, torch.where(here, mine, 0)]
        return processes_torch.summed(found.masked_fill(~here, 0.0))

    def _likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit of each row, and its token."""
        largest, token = logits.max(1)
        if not self._split:
            return largest, token
        token = token + self._first_token
        values, tokens = processes_torch.gathered(largest), processes_torch.gathered(token)
        largest, part = values.max(0)
        return largest, tokens.gather(0, part[None])[0]

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        return processes_torch.summed(partial, self._split)

    def _logits(self, hidden: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        return self.model.logits(hidden[self._put(positions)])

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, torch.int64)


def _float64_or_same(values: torch.Tensor) -> np.ndarray:
    values = values.cpu()
    return (values.double() if values.is_floating_point() else values).numpy()


def choose_device(device: str | None) -> torch.device:
    """Return the device to run on, see `griffin_eval.runners.devices.chosen_device`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)

    def find(name: str) -> torch.device | None:
        try:
            asked = torch.device(name)
        except RuntimeError:
            raise ArgumentError(
                f"unknown device {name!r}: expected one that torch names, such as cpu or cuda:0"
            ) from None
        if asked.type == "cpu":
            return None if asked.index else asked
        exists = (
            accelerator is not None
            and asked.type == accelerator.type
            and (asked.index or 0) < torch.accelerator.device_count()
        )
        return asked if exists else None

    return chosen_device(device, accelerator or torch.device("cpu"), find)

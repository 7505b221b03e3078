"""Steps by CUDA graphs, without a device: what they leave in place, and where the windows begin.

`test_gpu` has the same with graphs.
"""

import pytest
import torch
from parity import MODELS

from griffin_eval.model_torch import decoding
from griffin_eval.model_torch.decoding import DecodingState
from griffin_eval.model_torch.griffin import initialize
from griffin_eval.runners import torch_runner
from griffin_eval.runners.torch_runner import GraphedDecoding

ROWS, CAPACITY, SPARE_SLOTS = 3, 20, 5


class Calls:
    """Stands for `Graphs`: calls functions, whose results the next call with a key overwrites."""

    def __init__(self, device):
        self.results = {}

    def run(self, key, function):
        found = function()
        return self.results.setdefault(key, found.clone()).copy_(found)


@pytest.mark.parametrize("model", ["recurrent last", "mqa"])
def test_every_tensor_stays_where_it_is(model, monkeypatch):
    monkeypatch.setattr(torch_runner, "Graphs", Calls)
    for module in (decoding, torch_runner):
        monkeypatch.setattr(module, "DECODE_STEPS_PER_COMPACTION", SPARE_SLOTS)
    config = MODELS[model]
    network = initialize(config).requires_grad_(False)
    graphed = GraphedDecoding(network, DecodingState.start(network, ROWS, CAPACITY))
    plain = DecodingState.start(network, ROWS, CAPACITY)
    before = [leaf.data_ptr() for leaf in leaves(graphed._state.rows)]
    generator = torch.Generator().manual_seed(0)
    first = None
    for step in range(3 * SPARE_SLOTS + 2):
        tokens = torch.randint(config.vocab_size, (ROWS,), generator=generator)
        active = torch.ones(ROWS, dtype=torch.int64)
        found, graphed = graphed.step(network, tokens, active)
        wanted, plain = plain.step(network, tokens, active)
        assert torch.equal(found, wanted), step
        assert graphed._state.offset == plain.offset
        first = found if step == 3 else first
    again = leaves(graphed._state.rows)
    assert [leaf.data_ptr() for leaf in again] == before
    kept = graphed._graphs.results[4]
    assert first is not None and not torch.equal(first, kept)  # later ones did not overwrite it


def leaves(state):
    return [state.pos, state.attention_start, *(leaf for layer in state.layers for leaf in layer)]

"""Steps by a CUDA graph, without a device: what they leave in place.

`test_gpu` has the same with a graph.
"""

import pytest
import torch
from parity import MODELS

from griffin_eval.model_torch.decoding import DecodingState
from griffin_eval.model_torch.griffin import initialize
from griffin_eval.runners import torch_runner
from griffin_eval.runners.torch_runner import GraphedDecoding

ROWS, CAPACITY = 3, 20


class Calls:
    """Stands for `Graph`: calls the function, whose result the next call overwrites."""

    def __init__(self, device):
        self.result = None

    def run(self, function):
        found = function()
        self.result = found.clone() if self.result is None else self.result.copy_(found)
        return self.result


@pytest.mark.parametrize("model", ["recurrent last", "mqa"])
def test_every_tensor_stays_where_it_is(model, monkeypatch):
    monkeypatch.setattr(torch_runner, "Graph", Calls)
    config = MODELS[model]
    network = initialize(config).requires_grad_(False)
    graphed = GraphedDecoding(network, DecodingState.start(network, ROWS, CAPACITY))
    plain = DecodingState.start(network, ROWS, CAPACITY)
    before = [leaf.data_ptr() for leaf in leaves(graphed._state.rows)]
    generator = torch.Generator().manual_seed(0)
    first = None
    for step in range(CAPACITY - 1):  # the window of 8 keys wraps twice
        tokens = torch.randint(config.vocab_size, (ROWS,), generator=generator)
        active = torch.ones(ROWS, dtype=torch.int64)
        found, graphed = graphed.step(network, tokens, active)
        wanted, plain = plain.step(network, tokens, active)
        assert torch.equal(found, wanted), step
        first = found if step == 3 else first
    again = leaves(graphed._state.rows)
    assert [leaf.data_ptr() for leaf in again] == before
    assert first is not None and not torch.equal(first, found)  # later ones did not overwrite it


def test_a_step_never_waits_for_the_device():
    """It cannot read a number of tensors that hold none."""
    network = initialize(MODELS["recurrent last"]).requires_grad_(False).to("meta")
    state = DecodingState.start(network, ROWS)
    every = torch.arange(ROWS, device="meta")
    state = state.insert(every, network.init_state(ROWS), every)
    hidden, state = state.step(network, every, every)
    assert hidden.is_meta and state.rows.pos.is_meta


def leaves(state):
    return [state.pos, state.attention_start, *(leaf for layer in state.layers for leaf in layer)]

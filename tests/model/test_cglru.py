"""Models with the CG-LRU of appendix B against DeepMind's.

Other tests compare them with the equations, as the model "complex gates".
"""

from dataclasses import replace

import numpy as np
import pytest
from parity import BASE, compare, weights
from parity_gradients import WHOLE, batch, compare_gradients
from parity_twins import TWINS, twin
from peers import deepmind_with_complex_gates

from griffin_eval.config import HAWK


@pytest.mark.slow
def test_logits_and_gradients_equal_deepminds(record_parity, monkeypatch):
    parity_oracles = deepmind_with_complex_gates(monkeypatch)
    ours, theirs = "rg_lru.imaginary_param", "rg_lru.a_imag_param"
    row = (f"recurrent_block.{theirs}", lambda a: a)
    monkeypatch.setitem(parity_oracles._BLOCK, f"temporal_block.{ours}", row)
    config = replace(BASE, complex_gates=True, block_pattern=HAWK, num_layers=1)
    oracle, ids_and_targets = parity_oracles.DeepMindJax(config, weights(config)), batch(config)
    resets = np.zeros_like(WHOLE)
    resets[0, [6, 7, 15]] = True
    logits = oracle.logits(ids_and_targets[0], resets)
    gradients = oracle.gradients(*ids_and_targets, resets)
    for name in TWINS:
        model, pair = twin(name, config), f"{name} - deepmind-jax"
        found = model.logits(ids_and_targets[0], resets=resets)
        compare(record_parity, pair, "logits, packed", found, logits)
        found = model.gradients(*ids_and_targets, resets)
        compare_gradients(record_parity, pair, "gradients", found, gradients)

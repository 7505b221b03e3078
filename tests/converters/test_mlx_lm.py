"""mlx_lm loads ``hf`` outputs; its logits differ from ours only where its model differs."""

import dataclasses
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from adapters import load_base, logits, write_base
from parity import BASE, relative_error, tokens

from griffin_eval import convert

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "width, exact",
    [(64, True), (32, False)],  # sqrt(64) is exact in bfloat16, sqrt(32) is not
)
def test_logits(tmp_path, monkeypatch, width, exact):
    from mlx_lm.utils import load_model

    config = dataclasses.replace(BASE, width=width, lru_width=width)
    write_base(tmp_path / "base", config)
    convert(tmp_path / "base", tmp_path / "g", to="griffin")
    convert(tmp_path / "g", tmp_path / "hf", to="hf")
    model, _ = load_model(tmp_path / "hf")
    ids = tokens(config, 2, 2 * config.visible_keys + 3)
    expected = logits(load_base(tmp_path / "hf"), ids)
    blocks = [norm for x in model.layers for norm in (x.temporal_pre_norm, x.channel_pre_norm)]
    assert {norm.eps for norm in blocks} == {1e-5}  # mlx_lm ignores the config's epsilon
    assert model.model.final_norm.eps == pytest.approx(1e-6)
    as_it_is = relative_error(np.array(model(mx.array(ids))), expected)
    for norm in blocks:
        norm.eps = 1e-6
    with_our_epsilon = relative_error(np.array(model(mx.array(ids))), expected)
    print(f"width {width}: {as_it_is:.1e} as it is, {with_our_epsilon:.1e} with epsilon 1e-6")
    assert with_our_epsilon < (2e-5 if exact else 3e-3)
    assert with_our_epsilon < as_it_is < 3e-3
    if not exact:
        # transformers rounds the embedding scale sqrt(width) to bfloat16.
        monkeypatch.setattr("mlx_lm.models.recurrent_gemma.math", SimpleNamespace(sqrt=_rounded))
        assert relative_error(np.array(model(mx.array(ids))), expected) < 2e-5


def _rounded(width):
    return float(np.sqrt(np.float64(width)).astype(ml_dtypes.bfloat16))

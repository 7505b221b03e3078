"""``peft=`` of ``--model_args``, against lm-eval's own hf model with the unmerged adapter."""

import json
import shutil
import warnings

import pytest
from adapters import write_adapter
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from slow import slow

from griffin_eval.errors import CheckpointError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.lm.results import fingerprint
from griffin_eval.model_arguments import parse_arguments
from griffin_eval.opened import find_checkpoint

PAIRS = [("The unary minus", " operator"), ("x", " yields the negation of its argument.")]


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    """One that unties the output head."""
    folder = tmp_path_factory.mktemp("adapter")
    targets = ["embed_tokens", "linear_x", "q_proj"]
    write_adapter(folder, checkpoint, target_modules=targets, use_rslora=True)
    return folder


def test_a_revision_is_that_of_an_adapter_on_the_hub(checkpoint, adapter):
    given = {"pretrained": str(checkpoint), "revision": "v1"}
    assert find_checkpoint(parse_arguments(given | {"peft": "org/adapter"})) == checkpoint
    for local in ({}, {"peft": str(adapter)}):
        with pytest.raises(CheckpointError, match="revision='v1' only applies to a hub id"):
            find_checkpoint(parse_arguments(given | local))


def answers(lm):
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    return [answer for answer, _ in lm.loglikelihood(requests, disable_tqdm=True)]


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_answers_are_those_of_hf(checkpoint, adapter, framework):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf = HFLM(pretrained=str(checkpoint), peft=str(adapter), dtype="float32", device="cpu")
    expected = answers(hf)
    lm = GriffinLM(pretrained=str(checkpoint), peft=str(adapter), framework=framework)
    assert answers(lm) == pytest.approx(expected, rel=1e-5)
    plain = answers(GriffinLM(pretrained=str(checkpoint), framework="torch"))
    assert plain != pytest.approx(expected, rel=1e-2)


def test_the_adapter_is_recorded_and_part_of_every_key(checkpoint, adapter, tmp_path):
    other = shutil.copytree(adapter, tmp_path / "other")
    path = other / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 6}))
    keys, hashes = set(), set()
    for peft in (None, str(adapter), str(other)):
        lm = GriffinLM(pretrained=str(checkpoint), peft=peft, framework="torch")
        info = lm.get_model_info()
        keys.add(fingerprint(lm.opened))
        hashes.add(lm.opened.weights_sha256)
        if peft is None:
            assert "griffin_adapters" not in info
        else:
            (record,) = info["griffin_adapters"]
            assert record["path"] == peft and len(record["sha256"]) == 64
        json.dumps(info)
    assert len(keys) == len(hashes) == 3

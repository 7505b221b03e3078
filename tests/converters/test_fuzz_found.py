"""Regression tests for failures that the fuzzer found."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_checkpoints import write_source

import griffin_eval
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import parse_json

TOKENIZER = Path(griffin_eval.__file__).parent / "checkpoints" / "bytes_griffin" / "tokenizer.json"


@pytest.mark.parametrize("text", [rb'{"\ud800": 1}', rb'{"a": ["\udc00x"]}'])
def test_half_of_a_surrogate_pair_is_refused(text):
    with pytest.raises(ValueError, match="surrogate"):
        parse_json(text)
    assert parse_json(rb'{"\ud83d\ude00": 1}') == {"😀": 1}


def test_layers_without_number_are_refused(tmp_path):
    write_source(tmp_path / "source")
    config = tmp_path / "source" / "config.json"
    raw = json.loads(config.read_text()) | {"num_hidden_layers": 2**63}
    config.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"num_layers|layers"):
        Checkpoint(tmp_path / "source")


def test_a_tokenizer_that_makes_its_library_panic_is_refused(tmp_path):
    from griffin_eval.text.load import load_tokenizer

    shutil.copy(TOKENIZER, tmp_path)
    file = tmp_path / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["post_processor"]["special_tokens"] = {}  # the template still names them
    file.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)

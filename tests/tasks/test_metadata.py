"""Keys of ``--metadata`` that no task reads."""

import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from griffin_eval import tasks
from griffin_eval.converters.overrides import Overrides
from griffin_eval.model_arguments import CHECKPOINT, FIELDS
from griffin_eval.tasks import metadata
from griffin_eval.tasks.phonebook.books import Shelf

FOLDER = Path(tasks.__file__).parent
MODEL = {"pretrained", "revision", "subfolder", "tokenizer", "visible_keys"}


def test_all_keys_of_all_tasks_are_known():
    read = {field.name for field in dataclasses.fields(Shelf)} - {"task"}
    for file in FOLDER.glob("*/griffin_*.yaml"):
        found = [line for line in file.read_text().splitlines() if line.startswith("custom_data")]
        if not found or file.parent.name == "suites":
            continue
        module, function = found[0].split()[-1].split(".")
        name = f"griffin_eval.tasks.{file.parent.name}.{module}"
        parameters = inspect.signature(getattr(importlib.import_module(name), function)).parameters
        read |= {n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    assert read - MODEL <= metadata.KEYS and metadata.KEYS <= read | MODEL


def test_arguments_of_models_are_no_near_misses(caplog):
    theirs = inspect.signature(HFLM.__init__).parameters.keys()
    ours = FIELDS
    lm_evals = {"max_seq_lengths", "version", "babilong_length"}
    metadata.warn_of_near_misses(dict.fromkeys([*theirs, *ours, *lm_evals]))
    assert not caplog.text


def test_tasks_open_a_checkpoint_with_all_that_the_model_is_told_of_it():
    told = {field.name for field in dataclasses.fields(Overrides)}
    assert told & FIELDS.keys() <= set(CHECKPOINT)


@pytest.mark.parametrize(("given", "meant"), [("lenght", "lengths"), ("sample", "samples")])
def test_a_key_that_is_spelt_wrongly_is_told_once(given, meant, caplog):
    metadata._warn_of.cache_clear()
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata={given: [64]})
    manager.load(["griffin_induction_heads", "griffin_selective_copying"])
    said = f"no task of griffin-eval reads {given!r} of --metadata: is {meant!r} meant?"
    assert caplog.text.count(said) == 1

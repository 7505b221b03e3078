"""A model split over devices: processors in a process of its own stand for these."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import ci, examples, slow
from xla_options import QUICK_FLAGS

from griffin_eval.config import PRESETS
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import param_specs, parameter_count
from griffin_eval.runners.jax_time import check_split
from griffin_eval.sharding.split import parse_mesh, split_over

WORKER = Path(__file__).parent.parent / "support" / "mesh_worker.py"
FAMILIES = ["griffin", "hawk", "mqa"]
UNEVEN = ["two heads on four devices", "odd vocabulary", "complex gates"]
GROUPED = "two heads of keys"
UNTIED = "a head of its own"


def worker(calls: list[list], devices: int = 4, flags: str | None = None) -> list[dict]:
    divided = f"--xla_force_host_platform_device_count={devices}"
    flags = flags or os.environ.get("XLA_FLAGS", "")
    done = subprocess.run(
        [sys.executable, WORKER, json.dumps(calls)],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "XLA_FLAGS": f"{flags} {divided}",
            "PYTHONPATH": os.pathsep.join(map(str, (WORKER.parent, WORKER.parents[2]))),
        },
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@settings(max_examples=examples(20))
@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 16))
def test_the_parts_are_the_whole(name, devices):
    split = split_over(PRESETS[name], devices)
    for spec in param_specs(PRESETS[name]).values():
        parts = [split.part(spec, rank) for rank in range(devices)]
        sizes = [
            math.prod(len(range(*s.indices(n))) for s, n in zip(part, spec.shape, strict=True))
            for part in parts
        ]
        assert set(sizes) == {split.size(spec)}
        covered = set(map(str, parts))
        assert len(covered) * split.size(spec) == spec.size
        assert len(covered) in (1, devices)


@pytest.mark.parametrize(
    ("name", "devices", "whole"),
    [
        ("recurrentgemma-2b", (2, 5, 10), set()),
        ("recurrentgemma-2b", (4, 8), {"heads", "lru", "gate"}),
        ("recurrentgemma-9b", (2, 4, 8, 16), set()),
        ("griffin-14b", (2, 4, 8), set()),
        ("griffin-14b", (16,), {"heads"}),
    ],
)
def test_what_divides_is_split(name, devices, whole):
    for count in devices:
        found = split_over(PRESETS[name], count)
        assert set(found.whole) == whole
        kept = sum(spec.size for spec in found.replicated())
        assert (kept > 0) == bool(whole)
        assert kept < 0.2 * parameter_count(PRESETS[name])


def test_between_training_steps_the_width_is_split_too():
    config = PRESETS["griffin-400m"]
    split = split_over(config, 4)
    for spec in param_specs(config).values():
        axes = split.axes_in_training(spec, 8)
        assert [axis for axis, name in zip(axes, spec.axes, strict=True) if name == "width"] == [
            "data"
        ] * spec.axes.count("width")
        assert len(set(axes) - {None}) == len([axis for axis in axes if axis])  # no axis twice


def test_meshes_are_read_or_refused():
    for text in ("model=2", "data=4,model=2", "data=1"):
        assert parse_mesh(text, "--mesh").keys() == {"data", "model"}
    for text in (
        "",
        "4",
        "rows=2",
        "data=0",
        "data=x",
        "data=2,data=1",
        "data=" + 5000 * "9",
        "data=2,,model=2",
    ):
        with pytest.raises(
            ArgumentError, match="--mesh .*expected sizes of the axes data and model"
        ):
            parse_mesh(text, "--mesh")


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ci("griffin", (1, 4)),
        *[slow(name, (1, 2, 4)) for name in [*FAMILIES, *UNEVEN, UNTIED, GROUPED]],
    ],
)
def test_answers_are_those_of_one_device(name, devices):
    one, *others = worker([["evaluated", name, count] for count in devices])
    for split in others:
        assert split["kernels"] == one["kernels"]
        assert split["greedy"] == one["greedy"]
        assert split["continuations"] == one["continuations"]
        for mine, theirs in zip(split["logprobs"], one["logprobs"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=3e-5)
        assert split["state_bytes"] <= one["state_bytes"]
    assert one["kernels"][0] == ("plain" if name == "complex gates" else "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["griffin", GROUPED])
def test_devices_say_to_each_other_what_the_split_needs(name):
    for found in worker([["counted", name, devices] for devices in (2, 4)]):
        assert found["expected"] > 0
        for step in found["steps"].values():
            assert step["unexpected"] == []
            assert set(step["kinds"]) == {"all-reduce"}
            assert found["expected"] <= len(step["kinds"]) <= found["expected"] + 4


@pytest.mark.parametrize(
    "cases",
    [
        slow([("griffin", 2, 4, {"pieces": 2, "recompute": True})]),
        slow([("griffin", 2, 4, {}), ("griffin", 1, 4, {"pieces": 4})]),
        slow([("hawk", 4, 4, {"recompute": True}), ("mqa", 2, 4, {"recompute": True})]),
    ],
    ids=str,
)
def test_training_over_a_mesh_is_training(cases):
    """Of 20 steps: over a mesh and then another one, and on one device, a mesh, and one device."""
    results = worker([["trained", *case] for case in cases], flags=QUICK_FLAGS)
    for (model, data, devices, _), found in zip(cases, results, strict=True):
        assert (found["data"], found["model"]) == (data, devices // data)
        alone, meshed, moved = (np.array(losses) for losses in found["losses"])
        assert len(alone) == len(meshed) == len(moved) == 4
        np.testing.assert_allclose(meshed, alone, rtol=2e-4, err_msg=model)
        np.testing.assert_allclose(moved, alone, rtol=2e-4, err_msg=model)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "data"), [("griffin", 2), ("two heads on four devices", 1)])
def test_a_trainer_of_flax_models_drives_a_model_on_a_mesh(name, data):
    (found,) = worker([["driven", name, data, 4]])
    assert found["misplaced"] == []
    one, other = found["losses"]
    assert len(one) == 10 and one[-1] < one[0]
    np.testing.assert_allclose(other, one, rtol=2e-4)
    assert found["off"] < 2e-3


@pytest.mark.parametrize(
    ("name", "devices"),
    [ci("griffin", 4), slow("local attention", 2), slow(GROUPED, 2)],
)
def test_devices_read_a_document_together(name, devices):
    """Ends of rows anywhere, also where a window of attention reaches over the end of a part."""
    (found,) = worker([["read_together", name, devices]])
    assert len(found["results"]) == 8
    assert [each for each in found["results"] if not each["off"] < 3e-5] == []
    recurrent, attention = (0, 2) if name == "local attention" else (2, 1)
    # rows, remembered tokens, channels
    convolution, window = "f32[2,3,32]", "f32[2,7,24]" if name == GROUPED else "f32[2,7,8]"
    # The end of a part and what is left of an earlier state; the windows before a part; the state.
    expected = [["all-gather", [f"f32[2,{devices},2,32]"]]] * recurrent
    expected += [["collective-permute", [convolution]]] * recurrent
    expected += [["collective-permute", [window]]] * 2 * attention
    expected += [["all-reduce", [convolution] * recurrent + [window] * 2 * attention]]
    assert found["said"] == sorted(expected) and not found["in_loop"]


def test_documents_that_cannot_be_split_are_refused():
    for preset, tokens, devices, sentence in (
        ("recurrentgemma-2b", 4096, 4, "parts of one length of at least 2048 tokens"),
        ("recurrentgemma-2b", 8193, 4, "a document of 8193 tokens cannot be split over 4 devices"),
        ("hawk-100m", 4, 2, "at least 3 tokens"),
        ("mqa-100m", 8192, 2, "global attention"),
    ):
        with pytest.raises(ArgumentError, match=sentence):
            check_split(PRESETS[preset], tokens, devices)
    check_split(PRESETS["recurrentgemma-2b"], 2048 * 16, 16)
    check_split(PRESETS["hawk-100m"], 6, 2)

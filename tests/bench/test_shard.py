"""``python -m benchmarks.shard``: facts that it reads from a program's text, and the command."""

import json

import pytest
from benchmark import benchmark

from benchmarks.shard.collectives import collectives
from benchmarks.shard.targets import parse_target
from griffin_eval.errors import ArgumentError

# The text is as XLA prints it.
TEXT = """
HloModule jit_step

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %inner = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused
}

%fused (p: f32[8]) -> f32[8] {
  %all-reduce.7 = f32[8]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}

%condition (p: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] compare(%p, %p), direction=LT
}

ENTRY %main (p: bf16[2,4]) -> bf16[2,4] {
  %all-reduce = bf16[2,4]{1,0} all-reduce(%p), replica_groups=[1,2]<=[2], to_apply=%add
  %pair = (f32[3]{0}, s32[3]{0}) all-reduce(%a, %b), to_apply=%add
  %start = (bf16[2,4]{1,0}, bf16[4,4]{1,0}) all-gather-start(%p), dimensions={0}
  %done = bf16[4,4]{1,0} all-gather-done(%start)
  %alone = f32[8]{0} all-reduce(%p), replica_groups=[4,1]<=[4], to_apply=%add
  %first = f32[4]{0} all-gather(%p), replica_groups=[2,2]<=[2,2]T(1,0), channel={chain_id="1"}
  %then = f32[4]{0} all-gather(%p), replica_groups=[2,2]<=[2,2]T(1,0), channel={chain_id="1"}
  %some = f32[5]{0} all-gather(%p), replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions={0}
  %more = f32[6] all-gather(%p), replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}
  %turns = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%body
  ROOT %out = bf16[2,4]{1,0} copy(%all-reduce)
}
"""


def test_collective_operations_are_found_with_their_bytes_and_loops():
    found = set(collectives(TEXT))
    columns = (0, 2), (1, 3)
    assert found == {
        ("all-reduce", ("bf16[2,4]",), 16, False, ((0, 1),)),
        ("all-reduce", ("f32[3]", "s32[3]"), 24, False, ()),
        ("all-gather", ("bf16[4,4]",), 32, False, ()),
        ("all-reduce", ("f32[8]",), 32, True, ((0, 1),)),
        ("all-gather", ("f32[4]",), 16, False, columns),
        ("all-gather", ("f32[5]",), 20, False, columns),
        ("all-gather", ("f32[6]",), 24, False, ((0, 2, 4), (1, 3, 5))),
    }
    assert len(collectives(TEXT)) == len(found)


def test_other_texts_than_targets_are_refused():
    for text in ("", "v5e", "v5e-0", "v5e-1000", "tpu-4", "v5e-4x4"):
        with pytest.raises(ArgumentError, match="--target .*expected v5e or v6e or cpu"):
            parse_target(text)


SMALL = ["--tokens", 32, "--documents", 4, "--pool", 4, "--rows", 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "layers", "whole"),
    [("griffin-100m", 3, []), ("recurrentgemma-2b", 3, ["10 heads"])],
)
def test_a_processor_is_divided(preset, layers, whole):
    done = benchmark(
        "shard",
        *("--preset", preset, "--layers", layers, "--target"),
        *("cpu-4" if whole else "cpu-2", "--json", *SMALL),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["sums"] == (layers if whole else 2 * layers) + 1
    assert set(whole) <= set(found["whole"].values()) and bool(found["whole"]) == bool(whole)
    for step in found["steps"]:
        assert step["unexpected"] == [] and set(step["collectives"]) == {"all-reduce"}
        assert step["kernels"] > 0 and step["weights"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "target", "whole"),
    [("griffin-100m", "cpu-2", []), ("recurrentgemma-2b", "v5e-4", ["10 heads"])],
)
def test_a_process_of_pytorch_runs_alone(preset, target, whole):
    options = "--framework", "torch", "--preset", preset, "--layers", 3, "--target", target
    done = benchmark("shard", *options, "--json", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["sums"] == (3 if whole else 6) + 1 and set(whole) <= set(found["whole"].values())
    for step in found["steps"]:
        assert step["unexpected"] == [] and step["weights"] > 0
        kinds = {kind: operations["count"] for kind, operations in step["collectives"].items()}
        assert kinds.keys() == {"all-reduce", "all-gather"}
        assert found["sums"] <= kinds["all-reduce"] <= found["sums"] + 2
        assert kinds["all-gather"] == 2  # the largest logits, and their tokens
        assert (step["states_that_fit"] is None) == (target == "cpu-2")


@pytest.mark.slow
def test_a_training_step_is_divided():
    """Two replicas of two devices each send only the data that the table of needs lists."""
    options = "--preset", "griffin-100m", "--layers", 3, "--batch", 4, "--length", 16, "--json"
    mesh = "--target", "cpu-4", "--replicas", 2, "--training"
    done = benchmark("shard", *mesh, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    (step,) = found["steps"]
    assert step["unexpected"] == [] and found["replicas"] == 2
    needs = {need["what"]: need for need in found["needs"]}
    gathers = [need["count"] for need in needs.values() if need["operation"] == "all-gather"]
    assert step["collectives"]["all-gather"]["count"] == sum(gathers) > 0
    assert needs["vectors"]["count"] == 2 * 3 + 1


@pytest.mark.slow
def test_chips_of_a_tpu_need_not_be_there():
    """At twice the depth, only the data sent between devices grows."""
    sums = []
    for layers in (3, 6):
        done = benchmark(
            "shard",
            *("--preset", "recurrentgemma-9b", "--layers", layers, "--target"),
            *("v5e-16", "--json", "--tokens", 256, "--documents", 4, "--pool", 4, "--rows", 4),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        assert found["whole"] == {}
        for step in found["steps"]:
            assert step["unexpected"] == []
            assert step["kernels"] == 2 * layers // 3  # the RG-LRUs
            sums.append(step["collectives"]["all-reduce"]["count"])
    assert [sums[2] - sums[0], sums[3] - sums[1]] == [6, 6]


@pytest.mark.slow
def test_bad_input_is_one_sentence():
    for arguments, sentence in (
        (["--preset", "griffin-100"], "unknown preset 'griffin-100'"),
        (["--target", "v5e"], "--target 'v5e': expected"),
        (["--framework", "torch", "--training"], "--framework torch goes with neither"),
        (
            ["--split", "time", "--tokens", "4096"],
            "cannot be split over 16 devices: expected parts",
        ),
    ):
        done = benchmark("shard", *arguments)
        assert done.returncode == 2 and sentence in done.stderr, arguments
        assert len(done.stderr.splitlines()) == 1

"""Checkpoints with foreign names, layers stacked or not, read through a table of names."""

import dataclasses
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import write_tensors

from griffin_eval import convert
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.describe import describe_split
from griffin_eval.converters.naming.tables import HEAD
from griffin_eval.converters.naming.user_table import OPS, read_names
from griffin_eval.converters.output.manifest import MANIFEST_FILE
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs

CONFIG = GriffinConfig(
    vocab_size=11,
    width=8,
    mlp_width=12,
    num_heads=2,
    num_layers=8,  # two groups of three, and two layers
    lru_width=12,
    gate_blocks=2,
    visible_keys=5,
    embedding_scale=False,
    logits_soft_cap=0.0,
)
GIVEN = {"visible_keys": 5, "embedding_scale": False, "logits_soft_cap": 0.0}
WEIGHTS = {
    spec.name: (initial_value(spec, 0) + np.float32(0.01)).astype(np.float32)
    for spec in param_specs(CONFIG).values()
}
NORM, EACH_NORM = "model.final_norm.weight", "model.layers.{layer}.channel_pre_norm.weight"
UP_AND_GATE = [f"model.layers.0.mlp_block.{n}_proj.weight" for n in ("up", "gate")]


def entry(foreign: str, canonical: list[str], op: str | None, stack=None) -> str:
    """Return one [[tensor]] entry of a table."""
    lines = ["[[tensor]]", f"foreign = {json.dumps(foreign)}"]
    lines.append(f"canonical = {json.dumps(canonical if len(canonical) > 1 else canonical[0])}")
    lines += [f"op = {json.dumps(op)}"] if op else []
    lines += [f"stack = {json.dumps(stack)}"] if stack is not None else []
    return "\n".join(lines) + "\n"


def block_of(layer: int) -> tuple[dict[str, np.ndarray], dict[str, tuple]]:
    """Return a block's tensors by foreign name, and a table row for each. All tensors but one hold
    an unchanged parameter; "up/w" stacks the two transposed matrices of the MLP."""
    start = f"model.layers.{layer}."
    names = [name.removeprefix(start) for name in WEIGHTS if name.startswith(start)]
    pair = [f"mlp_block.{name}_proj.weight" for name in ("gate", "up")]
    rows = {name: ([name], None) for name in names if name not in pair}
    tensors = {name: WEIGHTS[start + name] for name in rows}
    tensors["up/w"] = np.array([WEIGHTS[start + name].T for name in pair])
    return tensors, rows | {"up/w": (pair, "split, transpose")}


def foreign_model(stacked: bool) -> tuple[dict[str, np.ndarray], str]:
    """Return the model under foreign names, and the table that reads it."""
    tensors = {"emb": WEIGHTS["model.embed_tokens.weight"], "last/norm": WEIGHTS[NORM]}
    table = entry("emb", ["model.embed_tokens.weight"], None) + entry("last/norm", [NORM], None)
    blocks, rows = zip(*map(block_of, range(CONFIG.num_layers)), strict=True)

    def add(place: str, kinds: dict[str, tuple], layer="{layer}", stack=None) -> str:
        return "".join(
            entry(place + name, [f"model.layers.{layer}.{c}" for c in canonical], op, stack)
            for name, (canonical, op) in kinds.items()
        )

    if not stacked:
        for layer, block in enumerate(blocks):
            tensors |= {f"layer_{layer}/{name}": array for name, array in block.items()}
        return tensors, table + add("layer_{layer}/", rows[0] | rows[2])
    for place, stack in enumerate(([0, 3], "1::3", "2:8:3")):
        for name in rows[place]:
            pair = [blocks[place][name], blocks[place + 3][name]]
            tensors[f"scan/{place}/{name}"] = np.stack(pair)
        table += add(f"scan/{place}/", rows[place], stack=stack)
    for layer in (6, 7):
        tensors |= {f"rest/{layer}/{name}": array for name, array in blocks[layer].items()}
        table += add(f"rest/{layer}/", rows[layer], layer)
    return tensors, table


def is_the_model(checkpoint: Checkpoint) -> None:
    assert checkpoint.dtypes.keys() == WEIGHTS.keys()
    for name in sorted(WEIGHTS):  # an order that differs from the layers'
        found = checkpoint.numpy(name)
        assert found.tobytes() == WEIGHTS[name].tobytes() and found.shape == WEIGHTS[name].shape
        pieces = b"".join(piece.tobytes() for piece in checkpoint.pieces(name))
        assert pieces == WEIGHTS[name].tobytes()
        assert checkpoint.torch(name).numpy().tobytes() == WEIGHTS[name].tobytes()


@pytest.mark.parametrize("container, stacked", [("safetensors", False), ("orbax", True)])
def test_a_model_with_names_of_its_own(tmp_path, container, stacked):
    tensors, table = foreign_model(stacked)
    (tmp_path / "map.toml").write_text(table)
    path = write_tensors(tmp_path / "model", container, tensors)
    checkpoint = Checkpoint(path, Overrides(names=tmp_path / "map.toml", **GIVEN))
    assert checkpoint.config == CONFIG
    assert checkpoint.format.name == f"{container}, names of map.toml"
    is_the_model(checkpoint)
    convert(checkpoint, tmp_path / "out", to="griffin")
    is_the_model(Checkpoint(tmp_path / "out"))


def read(tmp_path: Path, tensors: dict[str, np.ndarray], table: str, **given) -> Checkpoint:
    (tmp_path / "map.toml").write_text(table)
    folder = tmp_path / "model"
    if not folder.exists():
        write_tensors(folder, "safetensors", tensors)
    return Checkpoint(folder, Overrides(names=tmp_path / "map.toml", **(GIVEN | given)))


def refusal(tmp_path: Path, tensors, table: str, error=CheckpointError, **given) -> str:
    with pytest.raises(error) as caught:
        read(tmp_path, tensors, table, **given)
    message = str(caught.value)
    assert "\n" not in message and "map.toml" in message
    return message


def test_what_a_table_ignores_is_listed(tmp_path):
    tensors, table = foreign_model(stacked=False)
    extra = {"opt_state/0/mu": np.ones(3, np.int32), "step": np.ones((), np.float32)}
    ignore = 'ignore = ["opt_state/*", "ste?", "emb"]\n'  # a row names emb, so it is not ignored
    checkpoint = read(tmp_path, tensors | extra, ignore + table)
    assert checkpoint.inspection.left_out == dict.fromkeys(sorted(extra), "ignored by map.toml")
    convert(checkpoint, tmp_path / "out", to="griffin")
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert manifest["source"]["left_out"] == checkpoint.inspection.left_out
    message = refusal(tmp_path, tensors | extra, table)
    assert "2 unexpected ('opt_state/0/mu'; 'step'), which no row of map.toml names" in message


def test_what_is_not_covered_missing_or_left_over_is_named_in_both_namings(tmp_path):
    tensors, table = foreign_model(stacked=False)
    tail = "temporal_block.linear_x.weight"
    both = f"'layer_1/{tail}' (model.layers.1.{tail})"
    tensors[f"layer_1/{tail[:-1]}"] = tensors.pop(f"layer_1/{tail}")
    tensors["layer_0/up/w"] = tensors["layer_0/up/w"][:, :4]
    message = refusal(tmp_path, tensors, table.replace('foreign = "last/norm"', 'foreign = "nrm"'))
    for part in (
        both,
        "'nrm' (model.final_norm.weight)",
        "'last/norm'",
        f"'layer_1/{tail[:-1]}', nearest {both}",
        "1 of another shape ('layer_0/up/w' (model.layers.0.mlp_block.gate_proj.weight and "
        "model.layers.0.mlp_block.up_proj.weight) is (2, 4, 12), expected (2, 8, 12))",
    ):
        assert part in message, message


def test_a_parameter_without_a_row_and_one_with_two(tmp_path):
    tensors, table = foreign_model(stacked=True)
    rows = table.split("[[tensor]]")
    cut = "[[tensor]]".join(row for row in rows if "last/norm" not in row)
    doubled = cut.replace('stack = "1::3"', "stack = [1, 5]", 1)
    message = refusal(tmp_path, tensors, doubled)
    assert "no row of map.toml gives ('model.layers.4." in message
    assert "'model.final_norm.weight')" in message and "'last/norm'" in message
    assert "1 parameters that several rows of map.toml give ('model.layers.5." in message


@pytest.mark.parametrize("stack", ["0:3:3", "0:9:3", [0, 3, 6], [99, 0, 3]])
def test_a_stack_of_another_length(tmp_path, stack):
    tensors, table = foreign_model(stacked=True)
    message = refusal(
        tmp_path, tensors, table.replace("stack = [0, 3]", f"stack = {json.dumps(stack)}")
    )
    length = 1 if stack == "0:3:3" else 3
    assert f"is (2, 8), expected ({length}, 8)" in message


def test_layers_that_the_config_does_not_have(tmp_path):
    tensors, table = foreign_model(stacked=True)
    write_tensors(tmp_path / "model", "safetensors", tensors)
    config = {"model_type": "griffin", **dataclasses.asdict(CONFIG), "num_layers": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path, tensors, table)
    assert re.search(
        r"stacks with layers that the model lacks \('scan/1/\S+' \(model\.layers\.1\.\S+\): 1 of 2",
        message,
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[tensor]", ["expected TOML"]),
        ("", ["expected one [[tensor]] or more"]),
        ("tensors = 3", ["unknown key 'tensors' (did you mean 'tensor'?)"]),
        ("tensor = [1]", ["[[tensor]] 1: is 1, expected a table"]),
        ('ignore = "a"\n' + entry("a", [NORM], None), ["ignore is 'a'"]),
        (entry("a", ["model.final_norm.wight"], None), [f"did you mean {NORM!r}"]),
        (entry("a", [NORM], "transposed"), ["unknown op 'transposed'", *map(repr, OPS)]),
        (entry("a", [NORM], "taps last"), ["'taps last' cannot give"]),
        (entry("a", UP_AND_GATE[:1], "split, transpose"), ["has 2 canonical names, found 1"]),
        (entry("a{layer}", [NORM], None), ["in foreign and canonical"]),
        (entry("a{layer}", [EACH_NORM], None, "::1"), ["{layer} stands in canonical and not in"]),
        *(
            (entry("a", [EACH_NORM], None, stack), ["expected layers such as '2::3' or [2, 5, 8]"])
            for stack in ("::0", "-1::2", "a:b", [], [1, 1], [True], 3)
        ),
        (2 * entry("a", [NORM], None), ["foreign 'a' stands 2 times", f"{NORM!r} stands 2 times"]),
        (
            entry("a", ["nothing"], None) + "kind = 3\n" + entry("b", ["model.x"], "halve"),
            ["1, 'a': unknown key 'kind'", "'nothing'", "2, 'b': no parameter", "op 'halve'"],
        ),
        ("[[tensor]]\nforeign = 3\ncanonical = []", ["foreign is 3", "canonical is []"]),
        (entry("a", [NORM], "cut"), ["two canonical names or more"]),
        (entry("a", UP_AND_GATE, "cut, split"), ["found", "as 'split'"]),
        (entry("a", UP_AND_GATE, "transpose, cut"), ["unknown op 'transpose, cut'"]),
        (entry("a", UP_AND_GATE, "cut, minus one, scale by"), ["says twice", "factor"]),
        (entry("a", UP_AND_GATE, "cut") + "axis = 2\n", ["these have other axes"]),
        (entry("a", UP_AND_GATE, "cut") + "axis = -1\n", ["axis is -1"]),
        (entry("a", UP_AND_GATE, None) + "axis = 1\n", ["axis stands without op 'cut'"]),
        (entry("a", [HEAD, "model.embed_tokens.weight"], "cut"), [f"none is {HEAD}"]),
        *(
            (entry("a", [NORM], "scale by") + factor, ["factor"])
            for factor in ("", "factor = 0", "factor = 'width'", "factor = inf", "factor = true")
        ),
        (entry("a", [NORM], "absent means zeros"), ["foreign stands beside"]),
        (
            '[[tensor]]\ncanonical = "model.embed_tokens.weight"\nop = "absent means zeros"',
            ["model.embed_tokens.weight cannot be absent"],
        ),
        (
            entry("a{layer}", [EACH_NORM], None) + "layers = [1, 2]\nblock = 'both'",
            ["layers is [1, 2]", "block is 'both'"],
        ),
        (
            'differs = 1\ntitle = "a\\nb"\nconfig_file = 0\nconfig = 3\n'
            + entry("a", [NORM], None),
            ["differs is 1", "expected a text of one line", "config_file is 0", "config is 3"],
        ),
        (
            "[config]\nwidht = 3\nwidth = 1.5\nembedding_scale = 1\n" + entry("a", [NORM], None),
            ["no field 'widht' (did you mean 'width'?)", "width = 1.5", "embedding_scale = 1"],
        ),
        *(
            (entry("a", [NORM], None) + "[[check]]\n" + check, parts)
            for check, parts in (
                ("value = 0", ["[[check]] 1: foreign is None"]),
                ("foreign = 'b'", ["expected either value or canonical"]),
                ("foreign = 'b'\nvalue = 'c'", ["value is 'c'"]),
                (f"foreign = 'b'\nvalue = 0x{'f' * 9999}", ["expected TOML, found a number of"]),
                ("foreign = 'a'\nvalue = 1", ["foreign 'a' stands 2 times"]),
                ("foreign = 'b'\ncanonical = 'model.x'", ["no parameter is called 'model.x'"]),
                ("foreign = 'b'\ncanonical = 'lm_head.weight'", ["no row gives it as it is"]),
            )
        ),
    ],
)
def test_tables_that_are_refused(tmp_path, text, parts):
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read_names(tmp_path / "map.toml")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'map.toml'}: ") and "\n" not in message
    for part in parts:
        assert part in message, message


def test_differences_are_accepted_of_a_table_alone(tmp_path):
    with pytest.raises(ArgumentError, match="--accept-differences .* needs a table of names"):
        Checkpoint(tmp_path, Overrides(accept_differences=True))


def test_a_file_called_as_a_table_that_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nemo").write_text(entry("a", ["model.final_norm.weight"], None))
    assert len(read_names("./nemo").rows) == 1 < len(read_names("nemo").rows)
    Path("latin.toml").write_bytes(b"\xff")
    for name, said in (
        (tmp_path / "nothing.toml", "nothing.toml: .*No such file"),
        ("~no_such_user/map.toml", "No such file"),
        ("nemoo", "one of .*nemo.*did you mean 'nemo'"),
        (tmp_path / "latin.toml", "expected TOML"),
    ):
        with pytest.raises(ArgumentError, match=said):
            read_names(name)


def test_a_factor_is_a_number(tmp_path):
    tensors, table = foreign_model(stacked=False)
    row = f'canonical = "{NORM}"\n'
    assert row in table
    tensors["last/norm"] = 4 * tensors["last/norm"]
    scaled = table.replace(row, row + 'op = "scale by"\nfactor = 0.25\n')
    is_the_model(read(tmp_path, tensors, scaled))


def test_what_tensors_cannot_say_is_in_the_config(tmp_path):
    tensors, table = foreign_model(stacked=False)
    config = "[config]\nvisible_keys = 7\nrope_base = 500\nlogits_soft_cap = 1.0\n"
    checkpoint = read(tmp_path, tensors, table + config, visible_keys=None)
    changed = {"visible_keys": 7, "rope_base": 500}
    assert checkpoint.config == dataclasses.replace(CONFIG, **changed)  # the argument sets the cap
    origins = checkpoint.inspection.origins
    assert origins["rope_base"] == "names, map.toml" and origins["logits_soft_cap"] == "given"
    with pytest.raises(CheckpointError, match=r"num_heads \(3\) must divide width \(8\)"):
        read(tmp_path, tensors, table + "[config]\nnum_heads = 3\n")


def test_the_examples_in_the_documentation_are_tables(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    row, tables = entry("a", ["model.embed_tokens.weight"], None), []
    for block in page.split("```toml\n")[1:]:
        text = block.split("```")[0]
        if "model.embed_tokens.weight" not in text.split("[[check]]")[0]:
            text = text.replace("[config]", row + "[config]")
        (tmp_path / "map.toml").write_text(text)
        tables.append(read_names(tmp_path / "map.toml"))
    rows = tables[0].rows
    assert [row.op.name for row in rows] == ["as it is", "transpose", "split, transpose"]
    assert rows[-1].stack == slice(2, None, 3)
    checks, names = tables[1].checks, tables[1]
    assert [check.value for check in checks][1:] == [None] and names.config
    assert names.title and names.differs and not names.config_file
    assert all(f"`{name}`" in page for name in OPS)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_under_a_name_of_its_own(tmp_path, tied, dtype):
    tensors, table = foreign_model(stacked=False)
    tensors["out/kernel"] = tensors["emb"].T.astype(dtype)
    if not tied:
        tensors["out/kernel"] = -tensors["out/kernel"]
    table += entry("out/kernel", ["lm_head.weight"], "transpose")
    if tied and dtype is np.float32:
        checkpoint = read(tmp_path, tensors, table)
        assert (
            "tied" in checkpoint.inspection.notes["lm_head"]
            and "out/kernel" in checkpoint.inspection.left_out
        )
    else:
        checkpoint = read(tmp_path, tensors, table)
        assert not checkpoint.config.tie_embeddings
        assert np.array_equal(checkpoint.numpy("lm_head.weight"), tensors["out/kernel"].T)


def test_checks_of_a_tied_head_and_of_a_scalar(tmp_path):
    tensors, table = foreign_model(stacked=False)
    tensors |= {"again": tensors["emb"].copy(), "log_c": np.array(2.5, np.float32)}
    table += entry("head", [HEAD], None)
    table += f'[[check]]\nforeign = "again"\ncanonical = "{HEAD}"\n'
    checked = table + '[[check]]\nforeign = "log_c"\nvalue = '
    is_the_model(read(tmp_path, tensors, checked + "2.5"))
    assert "'log_c': expected 2 everywhere" in refusal(tmp_path, tensors, checked + "2")


def test_absent_biases_have_a_share_on_each_device(tmp_path):
    tensors, table = foreign_model(stacked=False)
    kind = "temporal_block.linear_y.bias"
    row = entry(f"layer_{{layer}}/{kind}", [f"model.layers.{{layer}}.{kind}"], None)
    assert row in table
    absent = [name for name in WEIGHTS if name.endswith(kind)]
    zeros = [f'[[tensor]]\ncanonical = "{n}"\nop = "absent means zeros"\n' for n in absent]
    kept = {name: array for name, array in tensors.items() if not name.endswith(kind)}
    opened = read(tmp_path, kept, table.replace(row, "".join(zeros)))
    total = sum(array.nbytes for array in WEIGHTS.values())
    assert describe_split(opened.inspection, 2)["bytes"] == total


@pytest.mark.parametrize("factor", ["'sqrt(width)'", str(8**0.5)])
def test_a_head_scaled_as_the_embedding_is_tied(tmp_path, factor):
    tensors, table = foreign_model(stacked=False)
    tensors["head"] = tensors["emb"].copy()
    row = entry("emb", ["model.embed_tokens.weight"], None)
    scaled = row + f'op = "scale by"\nfactor = {factor}\n'
    head = scaled.replace("emb", "head", 1).replace("model.embed_tokens.weight", HEAD)
    assert read(tmp_path, tensors, table.replace(row, scaled + head)).config.tie_embeddings

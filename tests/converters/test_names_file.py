"""Checkpoints with names of a user's own, layers stacked or not, read through a table of names."""

import dataclasses
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from commands import griffin_eval
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from slow import examples, fast, slow

from griffin_eval.config import PRESETS, GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.naming.ops import SAME
from griffin_eval.converters.naming.stacks import fit_stacks
from griffin_eval.converters.naming.tables import HEAD, TEMPLATES, NameRule, write_out
from griffin_eval.converters.naming.user_table import OPS, read_names
from griffin_eval.converters.output.manifest import MANIFEST_FILE
from griffin_eval.converters.overrides import Overrides
from griffin_eval.converters.plan import make_plan
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs
from griffin_eval.runners.load import load_runner

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
# How a trainer of our own invention lays out the parameters of a block: written here in numpy, so
# that what is tested is not what the expectation is made with.
REC, MLP = "temporal_block.", "mlp_block."
SHARED = {
    "norm1": (["temporal_pre_norm.weight"], None, lambda x: x),
    "norm2": (["channel_pre_norm.weight"], "as it is", lambda x: x),
    "down/w": ([MLP + "down_proj.weight"], "transpose", lambda x: np.transpose(x, (1, 0))),
    "down/b": ([MLP + "down_proj.bias"], None, lambda x: x),
    "up/w": (
        [MLP + "gate_proj.weight", MLP + "up_proj.weight"],
        "split, transpose",
        lambda gate, up: np.array([gate.T, up.T]),
    ),
    "up/b": (
        [MLP + "gate_proj.bias", MLP + "up_proj.bias"],
        "split",
        lambda gate, up: np.array([gate, up]).reshape(2, 1, 1, -1),
    ),
}
RECURRENT = SHARED | {
    "conv/kernel": ([REC + "conv_1d.weight"], "transpose", lambda x: np.transpose(x, (2, 1, 0))),
    "conv/b": ([REC + "conv_1d.bias"], None, lambda x: x),
    "lambda": ([REC + "rg_lru.recurrent_param"], None, lambda x: x),
    **{
        f"{gate}/{theirs}": ([f"{REC}rg_lru.{gate}_gate_{ours}"], None, lambda x: x)
        for gate in ("input", "recurrent")
        for theirs, ours in (("w", "weight"), ("b", "bias"))
    },
    **{
        f"{name}/w": ([f"{REC}linear_{name}.weight"], "transpose", lambda x: np.swapaxes(x, 0, 1))
        for name in ("x", "y", "out")
    },
    **{f"{n}/b": ([f"{REC}linear_{n}.bias"], None, lambda x: x) for n in ("x", "y", "out")},
}
ATTENTION = SHARED | {
    **{f"{n}/w": ([f"{REC}{n}_proj.weight"], None, lambda x: x) for n in ("q", "k", "v", "o")},
    "o/b": ([REC + "o_proj.bias"], None, lambda x: x),
}
UP_AND_GATE = [f"model.layers.0.{MLP}{n}_proj.weight" for n in ("up", "gate")]


def entry(foreign: str, canonical: list[str], op: str | None, stack=None) -> str:
    """One [[tensor]] of a table."""
    lines = ["[[tensor]]", f"foreign = {json.dumps(foreign)}"]
    lines.append(f"canonical = {json.dumps(canonical if len(canonical) > 1 else canonical[0])}")
    lines += [f"op = {json.dumps(op)}"] if op else []
    lines += [f"stack = {json.dumps(stack)}"] if stack is not None else []
    return "\n".join(lines) + "\n"


def parts_of(kinds, layer: int):
    for name, (canonical, op, lay_out) in kinds.items():
        names = [f"model.layers.{layer}.{c}" for c in canonical]
        yield name, canonical, op, lay_out(*(WEIGHTS[n] for n in names))


def foreign_model(stacked: bool) -> tuple[dict[str, np.ndarray], str]:
    """The model in foreign names, and the table that reads them."""
    tensors = {
        "emb": WEIGHTS["model.embed_tokens.weight"],
        "last/norm": WEIGHTS["model.final_norm.weight"],
    }
    table = entry("emb", ["model.embed_tokens.weight"], None)
    table += entry("last/norm", ["model.final_norm.weight"], None)
    if not stacked:
        for layer, kind in enumerate(CONFIG.block_types):
            kinds = RECURRENT if kind == "recurrent" else ATTENTION
            for name, _, _, array in parts_of(kinds, layer):
                tensors[f"layer_{layer}/{name}"] = array
        for name, (canonical, op, _) in (RECURRENT | ATTENTION).items():
            names = ["model.layers.{layer}." + c for c in canonical]
            table += entry("layer_{layer}/" + name, names, op)
        return tensors, table
    for place, kinds in enumerate((RECURRENT, RECURRENT, ATTENTION)):
        groups = [dict((n, a) for n, _, _, a in parts_of(kinds, place + 3 * i)) for i in (0, 1)]
        for name, (canonical, op, _) in kinds.items():
            tensors[f"scan/{place}/{name}"] = np.stack([group[name] for group in groups])
            names = ["model.layers.{layer}." + c for c in canonical]
            stack = [[0, 3], "1::3", "2:8:3"][place]
            table += entry(f"scan/{place}/{name}", names, op, stack)
    for layer in (6, 7):
        for name, canonical, op, array in parts_of(RECURRENT, layer):
            tensors[f"rest/{layer}/{name}"] = array
            names = [f"model.layers.{layer}.{c}" for c in canonical]
            table += entry(f"rest/{layer}/{name}", names, op)
    return tensors, table


def write(folder: Path, container: str, tensors: dict[str, np.ndarray]) -> Path:
    """A checkpoint without a config; gives the path to open."""
    folder.mkdir(parents=True)
    if container == "safetensors":
        save_file(
            {n: np.ascontiguousarray(a) for n, a in tensors.items()}, folder / "model.safetensors"
        )
        return folder
    if container == "torch":
        torch.save({n: torch.from_numpy(a.copy()) for n, a in tensors.items()}, folder / "a.pt")
        return folder / "a.pt"
    import orbax.checkpoint as ocp

    tree: dict = {}
    for name, array in tensors.items():
        *path, last = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = array
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / "item", {"params": tree})
    return folder / "item"


def is_the_model(checkpoint: Checkpoint) -> None:
    assert checkpoint.dtypes.keys() == WEIGHTS.keys()
    for name in sorted(WEIGHTS):  # in another order than that of the layers
        found = checkpoint.numpy(name)
        assert found.tobytes() == WEIGHTS[name].tobytes() and found.shape == WEIGHTS[name].shape
        pieces = b"".join(piece.tobytes() for piece in checkpoint.pieces(name))
        assert pieces == WEIGHTS[name].tobytes()
        assert checkpoint.torch(name).numpy().tobytes() == WEIGHTS[name].tobytes()


@pytest.mark.parametrize(
    "container, stacked",
    [
        ("safetensors", False),
        ("torch", True),
        ("orbax", True),
        slow("safetensors", True),
        slow("torch", False),
        slow("orbax", False),
    ],
)
def test_a_model_with_names_of_its_own(tmp_path, container, stacked):
    tensors, table = foreign_model(stacked)
    (tmp_path / "map.toml").write_text(table)
    path = write(tmp_path / "model", container, tensors)
    checkpoint = Checkpoint(path, Overrides(names=tmp_path / "map.toml", **GIVEN))
    assert checkpoint.config == CONFIG
    assert checkpoint.format.name == f"{container}, names of map.toml"
    is_the_model(checkpoint)
    convert_checkpoint(make_plan(checkpoint, FORMATS["griffin"]), tmp_path / "out")
    is_the_model(Checkpoint(tmp_path / "out"))


@pytest.mark.parametrize("framework", fast(["torch"], ["torch", "jax"]))
def test_both_frameworks_run_it(tmp_path, framework):
    tensors, table = foreign_model(stacked=True)
    (tmp_path / "map.toml").write_text(table)
    path = write(tmp_path / "model", "safetensors", tensors)
    checkpoint = Checkpoint(path, Overrides(names=tmp_path / "map.toml", **GIVEN))
    assert load_runner(checkpoint, framework=framework, device="cpu").config == CONFIG


def test_lm_eval_reads_a_table(checkpoint, tmp_path):
    """The model argument ``names=``: the same answers as under the names of transformers."""
    from lm_eval.api.instance import Instance

    from griffin_eval.lm.model import GriffinLM

    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    path = folder / "model.safetensors"
    tensors = {name.replace("model.", "net/"): array for name, array in load_file(path).items()}
    save_file(tensors, path)
    rows = [(name.replace("model.", "net/"), name) for name in TEMPLATES if name != HEAD]
    (tmp_path / "map.toml").write_text("".join(entry(theirs, [n], None) for theirs, n in rows))
    request = Instance("loglikelihood", {}, ("def f(x):", " return x"), 0)
    named = GriffinLM(str(folder), framework="torch", names=str(tmp_path / "map.toml"))
    plain = GriffinLM(str(checkpoint), framework="torch")
    assert named.loglikelihood([request]) == plain.loglikelihood([request])


def read(tmp_path: Path, tensors: dict[str, np.ndarray], table: str, **given) -> Checkpoint:
    (tmp_path / "map.toml").write_text(table)
    folder = tmp_path / "model"
    if not folder.exists():
        write(folder, "safetensors", tensors)
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
    ignore = 'ignore = ["opt_state/*", "ste?", "emb"]\n'  # emb is named by a row
    checkpoint = read(tmp_path, tensors | extra, ignore + table)
    assert checkpoint.inspection.left_out == dict.fromkeys(sorted(extra), "ignored by map.toml")
    convert_checkpoint(make_plan(checkpoint, FORMATS["griffin"]), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert manifest["source"]["left_out"] == checkpoint.inspection.left_out
    message = refusal(tmp_path, tensors | extra, table)
    assert "2 unexpected ('opt_state/0/mu'; 'step'), which no row of map.toml names" in message


def test_what_is_not_covered_missing_or_left_over_is_named_in_both_namings(tmp_path):
    tensors, table = foreign_model(stacked=False)
    tensors["layer_1/x/wight"] = tensors.pop("layer_1/x/w")
    tensors["layer_0/up/w"] = tensors["layer_0/up/w"][:, :4]
    message = refusal(tmp_path, tensors, table.replace('foreign = "last/norm"', 'foreign = "nrm"'))
    for part in (
        "'layer_1/x/w' (model.layers.1.temporal_block.linear_x.weight)",
        "'nrm' (model.final_norm.weight)",
        "'last/norm'",
        "'layer_1/x/wight', nearest 'layer_1/x/w' (model.layers.1.temporal_block.linear_x.weight)",
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
    write(tmp_path / "model", "safetensors", tensors)
    config = {"model_type": "griffin", **dataclasses.asdict(CONFIG), "num_layers": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path, tensors, table)
    assert (
        "30 stacks with layers that the model lacks ('scan/1/norm1' "
        "(model.layers.1.temporal_pre_norm.weight): 1 of 2"
    ) in message
    assert "'rest/6/conv/b'" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[tensor]", ["expected TOML"]),
        ("", ["expected one [[tensor]] or more"]),
        ("tensors = 3", ["unknown key 'tensors' (did you mean 'tensor'?)"]),
        ("tensor = [1]", ["[[tensor]] 1: is 1, expected a table"]),
        ('ignore = "a"\n' + entry("a", ["model.final_norm.weight"], None), ["ignore is 'a'"]),
        (entry("a", ["model.final_norm.wight"], None), ["mean 'model.final_norm.weight'"]),
        (
            entry("a", ["model.layers.3.channel_prenorm.weight"], None),
            ["did you mean 'model.layers.{layer}.channel_pre_norm.weight'"],
        ),
        (
            entry("a", ["model.final_norm.weight"], "transposed"),
            ["unknown op 'transposed'", *map(repr, OPS)],
        ),
        *(
            (entry("a", [name], "taps last"), ["'taps last' cannot give"])
            for name in (
                "model.final_norm.weight",
                "model.layers.0.temporal_block.rg_lru.input_gate_weight",  # has as many axes
            )
        ),
        (
            entry("a", ["model.layers.1.mlp_block.up_proj.weight"], "split, transpose"),
            ["has 2 canonical names, found 1"],
        ),
        (entry("a{layer}", ["model.final_norm.weight"], None), ["in foreign and canonical"]),
        (
            entry("a", ["model.layers.{layer}.channel_pre_norm.weight"], None),
            ["in foreign and canonical"],
        ),
        (
            entry("a{layer}", ["model.layers.{layer}.channel_pre_norm.weight"], None, "::1"),
            ["with stack, {layer} stands in canonical and not in foreign"],
        ),
        *(
            (
                entry("a", ["model.layers.{layer}.channel_pre_norm.weight"], None, stack),
                ["expected layers such as '2::3' or [2, 5, 8]"],
            )
            for stack in ("1", "::0", "-1::2", "a:b", [], [1, 1], [-1], [True], 3)
        ),
        (
            2 * entry("a", ["model.final_norm.weight"], None),
            ["foreign 'a' stands 2 times", "canonical 'model.final_norm.weight' stands 2 times"],
        ),
        (
            entry("a", ["nothing"], None) + "kind = 3\n" + entry("b", ["model.x"], "halve"),
            ["1, 'a': unknown key 'kind'", "'nothing'", "2, 'b': no parameter", "op 'halve'"],
        ),
        ("[[tensor]]\nforeign = 3\ncanonical = []", ["foreign is 3", "canonical is []"]),
        (entry("a", ["model.final_norm.weight"], "cut"), ["two canonical names or more"]),
        (entry("a", UP_AND_GATE, "cut, split"), ["found", "as 'split'"]),
        (entry("a", UP_AND_GATE, "transpose, cut"), ["unknown op 'transpose, cut'"]),
        (entry("a", UP_AND_GATE, "cut, cut"), ["says twice"]),
        (entry("a", UP_AND_GATE, "cut, minus one, scale by"), ["says twice", "factor"]),
        (entry("a", UP_AND_GATE, "cut") + "axis = 2\n", ["these have other axes"]),
        (entry("a", UP_AND_GATE, "cut") + "axis = -1\n", ["axis is -1"]),
        (entry("a", UP_AND_GATE, None) + "axis = 1\n", ["axis stands without op 'cut'"]),
        (
            entry("a", [UP_AND_GATE[0], "model.layers.0.mlp_block.down_proj.weight"], "cut"),
            ["these have other axes"],  # side by side, but not behind each other
        ),
        (entry("a", [HEAD, "model.embed_tokens.weight"], "cut"), [f"none is {HEAD}"]),
        *(
            (entry("a", ["model.final_norm.weight"], "scale by") + factor, ["factor"])
            for factor in ("", "factor = 0", "factor = 'width'", "factor = inf", "factor = true")
        ),
        (entry("a", ["model.final_norm.weight"], "minus one") + "factor = 2", ["factor"]),
        (entry("a", ["model.final_norm.weight"], "absent means zeros"), ["foreign stands beside"]),
        (
            '[[tensor]]\ncanonical = "model.embed_tokens.weight"\nop = "absent means zeros"',
            ["model.embed_tokens.weight cannot be absent"],
        ),
        (
            entry("a{layer}", ["model.layers.{layer}.channel_pre_norm.weight"], None)
            + "layers = [1, 2]\nblock = 'both'",
            ["layers is [1, 2]", "block is 'both'"],
        ),
        (
            entry("a", ["model.final_norm.weight"], None) + "layers = '1::2'\nblock = 'recurrent'",
            ["layers stands without stack", "block is 'recurrent'"],
        ),
        (
            "differs = 1\ntitle = []\nconfig_file = 0\n" + entry("a", ["model.x"], None),
            ["differs is 1", "title is []", "config_file is 0"],
        ),
        (
            "[config]\nwidht = 3\nwidth = 1.5\nnorm_eps = 1\nblock_pattern = [3]\n"
            "embedding_scale = 1\n" + entry("a", ["model.final_norm.weight"], None),
            [
                "no field 'widht' (did you mean 'width'?)",
                "width = 1.5",
                "block_pattern = [3]",
                "embedding_scale = 1",
            ],
        ),
        (
            'title = "a\\nb"\ndiffers = ["c", "d\\u0007"]\n' + entry("a", ["model.x"], None),
            ["title is 'a\\nb', expected a text of one line", "differs is ['c', 'd\\x07']"],
        ),
        ("config = 3\n" + entry("a", ["model.final_norm.weight"], None), ["config is 3"]),
        *(
            (entry("a", ["model.final_norm.weight"], None) + "[[check]]\n" + check, parts)
            for check, parts in (
                ("value = 0", ["[[check]] 1: foreign is None"]),
                ("foreign = 'b'", ["expected either value or canonical"]),
                ("foreign = 'b'\nvalue = 'c'", ["value is 'c'"]),
                (f"foreign = 'b'\nvalue = 1{'0' * 400}", ["value is 1000", "expected a number"]),
                (f"foreign = 'b'\nvalue = 0x{'f' * 9999}", ["expected TOML, found a number of"]),
                ("foreign = 'a'\nvalue = 1", ["foreign 'a' stands 2 times"]),
                ("foreign = 'b'\ncanonical = 'model.x'", ["no parameter is called 'model.x'"]),
                ("foreign = 'b'\ncanonical = 'lm_head.weight'", ["no row gives it as it is"]),
                (
                    "foreign = 'b'\ncanonical = 'model.final_norm.weight'\nop = 'transpose'",
                    ["expected one that lays nothing out"],
                ),
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
    with pytest.raises(ArgumentError, match="--accept-differences .* is of a table of names"):
        Checkpoint(tmp_path, Overrides(accept_differences=True))


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(ArgumentError, match="nothing.toml: .*No such file"):
        read_names(tmp_path / "nothing.toml")
    with pytest.raises(ArgumentError, match="one of .*nemo.*did you mean 'nemo'"):
        read_names("nemoo")
    (tmp_path / "map.toml").write_bytes(b"\xff")
    with pytest.raises(ArgumentError, match="expected TOML"):
        read_names(tmp_path / "map.toml")


def test_a_file_called_as_a_table_that_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nemo").write_text(entry("a", ["model.final_norm.weight"], None))
    assert len(read_names("./nemo").rows) == 1 < len(read_names("nemo").rows)


def test_what_tensors_cannot_say_is_in_the_config(tmp_path):
    tensors, table = foreign_model(stacked=False)
    config = "[config]\nvisible_keys = 7\nrope_base = 500\nlogits_soft_cap = 1.0\n"
    checkpoint = read(tmp_path, tensors, table + config, visible_keys=None)
    changed = {"visible_keys": 7, "rope_base": 500}
    assert checkpoint.config == dataclasses.replace(CONFIG, **changed)  # the cap is given, too
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


@settings(max_examples=examples(5))
@given(data=st.data())
@pytest.mark.parametrize(
    "preset", fast(["griffin-100m", "hawk-3b", "mqa-6b", "recurrentgemma-2b"], PRESETS)
)
def test_stacks_of_any_period_cover_every_preset_and_are_undone(preset, data):
    """Layers stacked as scans over groups leave them, the remainder on its own."""
    config = PRESETS[preset]
    group = data.draw(st.integers(1, 3)) * len(config.block_pattern)
    groups = config.num_layers // group
    text = []
    for name, spec in param_specs(config).items():
        if not name.startswith("model.layers."):
            text.append((name, (name,), None, spec.shape))
            continue
        layer = int(name.split(".")[2])
        if layer >= groups * group:
            text.append((name, (name,), None, spec.shape))
        elif layer < group:
            template = name.replace(f".{layer}.", ".{layer}.", 1)
            stack = slice(layer, None, group)
            text.append((f"s.{name}", (template,), stack, (groups, *spec.shape)))
    rows = [NameRule(foreign, canonical, SAME, stack) for foreign, canonical, stack, _ in text]
    shapes = {foreign: shape for foreign, _, _, shape in text}
    bindings = write_out(fit_stacks(rows, shapes), config)
    assert sorted(s.name for b in bindings for s in b.canonical) == sorted(param_specs(config))
    assert {b.foreign: b.shape for b in bindings} == shapes
    places = {(b.foreign, b.entry) for b in bindings}
    assert len(places) == len(bindings)
    for binding in bindings:  # entry i of a stack is the layer that the slice names
        if binding.entry is not None:
            first = int(binding.foreign.split(".")[3])
            assert f".{first + binding.entry * group}." in binding.canonical[0].name


def test_commands_take_a_table(tmp_path):
    tensors, table = foreign_model(stacked=True)
    (tmp_path / "map.toml").write_text(table)
    path = write(tmp_path / "model", "torch", tensors)
    given = ["--names", str(tmp_path / "map.toml"), "--visible-keys", "5"]
    given += ["--no-embedding-scale", "--logits-soft-cap", "0"]

    def run(*command: str) -> str:
        done = griffin_eval(*command, *given)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    out = str(tmp_path / "out")
    assert "names of map.toml" in run("convert", str(path), out, "--to", "griffin")
    assert f"{len(WEIGHTS)} of {len(WEIGHTS)} parameters are the same" in run(
        "verify", str(path), out
    )
    facts = json.loads(run("inspect", str(path), "--json"))
    assert facts["config"]["num_layers"] == 8 and not facts["problems"]


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

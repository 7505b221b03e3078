"""Conversions between all formats, compared bit for bit and loaded by the formats' libraries."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
import torch
from peers import recurrent_gemma
from safetensors.numpy import load_file, save_file
from slow import slow
from tiny_checkpoints import write_all, write_source
from typer.testing import CliRunner

import griffin_eval
from griffin_eval import verify
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint, Overrides
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.manifest import MANIFEST_FILE
from griffin_eval.converters.plan import make_plan, parse_dtypes
from griffin_eval.converters.verify import Difference, compare
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.scoring import score
from griffin_eval.engine.tree import Scorable
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.runners.load import load_runner


def to(target, source, destination, **options):
    plan_options = {k: options.pop(k) for k in ("dtypes", "vocab_size") if k in options}
    plan = make_plan(Checkpoint(source), FORMATS[target], **plan_options)
    convert_checkpoint(plan, destination, **options)
    return destination


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    """Convert transformers' folder to every format; return the folders by format."""
    root = tmp_path_factory.mktemp("formats")
    return {name: to(name, checkpoint, root / name) for name in FORMATS}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Write a model of two layers in every format; return the folder that holds them."""
    folder = tmp_path_factory.mktemp("tiny")
    write_all(folder)
    return folder


def scores(folder, framework="torch"):
    found = []
    tokens = np.random.default_rng(0).integers(3, 50, 300).tolist()
    score(
        load_runner(folder, framework=framework, device="cpu"),
        [Scorable(tokens, 1)],
        limits=Limits(512, 1),
        softmax_dtype="float32",
        on_result=lambda i, result: found.append(result.logprobs),
    )
    return found[0]


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_every_direction_is_bit_exact(tiny, source, target, tmp_path):
    """Every source gives the same bytes in the target format."""
    there = to(target, tiny / source, tmp_path / "there")
    assert verify(tiny / source, there).same
    if FORMATS[target].container == "safetensors":
        original, again = (f / "model.safetensors" for f in (tiny / target, there))
        assert original.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    "name, framework",
    [(n, "torch") if n in ("hf", "deepmind-flax") else slow(n, "torch") for n in FORMATS]
    + [slow(n, "jax") for n in FORMATS],
)
def test_evaluation_reads_every_format(checkpoint, converted, name, framework):
    np.testing.assert_array_equal(scores(converted[name], framework), scores(checkpoint, framework))


def test_transformers_loads_hf_output(converted, checkpoint, tmp_path):
    from transformers import AutoTokenizer

    model_class = recurrent_gemma()
    back = to("hf", converted["deepmind-flax"], tmp_path / "hf")
    tokens = torch.arange(3, 300)[None]
    with torch.no_grad():
        ours = model_class.from_pretrained(back)(tokens, use_cache=False).logits
        theirs = model_class.from_pretrained(checkpoint)(tokens, use_cache=False).logits
    assert torch.equal(ours, theirs)
    text = "def f(x): return x"
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (back, checkpoint)]
    assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]


def test_deepminds_torch_loads_its_format(converted, equations):
    parity_oracles = pytest.importorskip("parity_oracles")
    folder = converted["deepmind-torch"]
    weights = torch.load(folder / "model.pt", weights_only=True)
    model = parity_oracles.deepmind_torch.Griffin(
        parity_oracles.deepmind_config(Checkpoint(folder).config)
    )
    model.load_state_dict(weights, strict=True)
    tokens = torch.arange(3, 300)[None]
    with torch.no_grad():
        ours, _ = model(tokens, torch.arange(297)[None], return_cache=False)
    np.testing.assert_allclose(ours[0], equations(tokens[0]), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_deepminds_jax_restores_its_format(converted, equations, relaxed_jax):
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    parity_oracles = pytest.importorskip("parity_oracles")
    folder = converted["deepmind-flax"]
    tokens = jnp.arange(3, 300)[None]
    with relaxed_jax():
        params = ocp.PyTreeCheckpointer().restore(folder)
        model = parity_oracles.deepmind_jax.Griffin(
            parity_oracles.deepmind_config(Checkpoint(folder).config)
        )
        ours, _ = model.apply(
            {"params": params},
            tokens,
            jnp.arange(297)[None],
            return_cache=False,
        )
    np.testing.assert_allclose(np.asarray(ours)[0], equations(tokens[0]), atol=1e-4, rtol=1e-4)


def test_manifest_hashes_are_those_of_canonical_bytes(checkpoint, converted):
    manifests = {
        name: json.loads((folder / MANIFEST_FILE).read_text()) for name, folder in converted.items()
    }
    original = Checkpoint(checkpoint)
    expected = {
        name: hashlib.sha256(np.ascontiguousarray(original.numpy(name)).tobytes()).hexdigest()
        for name in original.dtypes
    }
    for name, manifest in manifests.items():
        assert {k: v["sha256"] for k, v in manifest["tensors"].items()} == expected, name
        assert manifest["format"] == name and manifest["source"]["format"] == "hf"


def test_dtype_policy(checkpoint, tmp_path):
    half = Checkpoint(to("hf", checkpoint, tmp_path / "h", dtypes=parse_dtypes("bfloat16")))
    low = parse_dtypes("bfloat16,recurrent_param=float16")
    lower = Checkpoint(to("griffin", checkpoint, tmp_path / "l", dtypes=low))
    for name, dtype in half.dtypes.items():
        is_lambda = name.endswith("recurrent_param")
        assert dtype == ("float32" if is_lambda else "bfloat16")
        assert lower.dtypes[name] == ("float16" if is_lambda else "bfloat16")
    wider = make_plan(lower, FORMATS["griffin"], dtypes=parse_dtypes("float32"))
    assert {write.dtype for write in wider.writes} == {"float32"}
    manifest = json.loads((tmp_path / "h" / MANIFEST_FILE).read_text())
    assert manifest["tensors"]["model.final_norm.weight"]["cast_from"] == "float32"
    difference = compare(Checkpoint(checkpoint), half)
    assert len(difference.tensors) == sum(d == "bfloat16" for d in half.dtypes.values())
    assert 0 < max(d.largest for d in difference.tensors) < 0.02
    for text in ("int8", "x=float31", ""):
        with pytest.raises(ArgumentError, match="unknown dtype"):
            parse_dtypes(text)
    done = invoke(
        "convert", checkpoint, tmp_path / "m", "--to", "hf", "--dtype", "recurent_param=bfloat16"
    )
    assert isinstance(done.exception, ArgumentError) and not (tmp_path / "m").exists()
    said = str(done.exception)
    assert "ends with 'recurent_param' (did you mean 'recurrent_param'?)" in said
    own = parse_dtypes("model.final_norm.weight=bfloat16,q_proj.weight=float16")
    plan = make_plan(Checkpoint(checkpoint), FORMATS["hf"], dtypes=own)
    assert {write.dtype for write in plan.writes} == {"bfloat16", "float16", "float32"}


@pytest.mark.parametrize(
    "rules",
    [
        "weight=float16,final_norm.weight=float32,layers.1.mlp_block.up_proj.weight=bfloat16",
        "layers.1.mlp_block.up_proj.weight=bfloat16,final_norm.weight=float32,weight=float16",
    ],
)
def test_the_longest_dtype_rule_counts_and_fits_whole_names(checkpoint, rules):
    plan = make_plan(Checkpoint(checkpoint), FORMATS["griffin"], dtypes=parse_dtypes(rules))
    expected = {}
    for write in plan.writes:
        (name,) = (spec.name for spec in write.binding.canonical)
        expected[name] = "float16" if name.split(".")[-1] == "weight" else "float32"
    expected["model.final_norm.weight"] = "float32"
    expected["model.layers.1.mlp_block.up_proj.weight"] = "bfloat16"
    assert {write.binding.foreign: write.dtype for write in plan.writes} == expected
    gate = "model.layers.0.temporal_block.rg_lru.input_gate_weight"
    assert expected[gate] == "float32"
    for part in ("gate_weight", "eight", ".weight", "orm.weight"):
        with pytest.raises(ArgumentError, match=f"ends with '{part}'"):
            make_plan(Checkpoint(checkpoint), FORMATS["hf"], dtypes={part: "float16"})


def test_a_dtype_is_stated_once():
    for text in ("bfloat16,bfloat16", "a=float32,bfloat16,a=float16"):
        with pytest.raises(ArgumentError, match="twice: state it once"):
            parse_dtypes(text)


@pytest.mark.parametrize("target", FORMATS)
def test_only_shards_have_a_largest_size(checkpoint, tmp_path, target):
    out = tmp_path / "out"
    done = invoke("convert", checkpoint, out, "--to", target, "--max-shard-size", "500KB")
    if target in ("hf", "griffin"):
        assert done.exit_code == 0 and len(list(out.glob("*.safetensors"))) > 1
        return
    expected = rf"is for formats in shards \(hf, griffin\), and {target} has none"
    with pytest.raises(ArgumentError, match=f"--max-shard-size {expected}"):
        raise done.exception
    with pytest.raises(ArgumentError, match=f"max_shard_size {expected}"):
        griffin_eval.convert(checkpoint, out, to=target, max_shard_size="500KB")
    assert not out.exists()


def test_overflow_is_refused_by_name(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "large")
    weights = load_file(folder / "model.safetensors")
    weights["model.final_norm.weight"][3] = 1e6
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.final_norm.weight: 1 values do not fit"):
        to("hf", folder, tmp_path / "out", dtypes=parse_dtypes("float16"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large"]


def test_vocabulary_rows_are_dropped_only_when_asked(checkpoint, tmp_path):
    whole = Checkpoint(checkpoint)
    name = "model.embed_tokens.weight"
    with pytest.raises(ArgumentError, match="has ids up to 1023: keep 1024 rows at least"):
        to("griffin", checkpoint, tmp_path / "cut", vocab_size=1000)
    small = tmp_path / "small"  # a model too small for this tokenizer
    write_source(small)
    shutil.copy(checkpoint / "tokenizer.json", small)
    assert make_plan(Checkpoint(small), FORMATS["griffin"], vocab_size=7).config.vocab_size == 7
    checkpoint = shutil.copytree(checkpoint, tmp_path / "without a tokenizer")
    (checkpoint / "tokenizer.json").unlink()
    generation = checkpoint / "generation_config.json"
    generation.write_text(json.dumps({"pad_token_id": 1010}))
    with pytest.raises(ArgumentError, match="pad_token_id is 1010 in .*: keep 1011 rows at least"):
        to("griffin", checkpoint, tmp_path / "cut", vocab_size=1000)
    generation.unlink()
    folder = to("griffin", checkpoint, tmp_path / "cut", vocab_size=1000)
    np.testing.assert_array_equal(Checkpoint(folder).numpy(name), whole.numpy(name)[:1000])
    assert json.loads((folder / MANIFEST_FILE).read_text())["vocab_rows_dropped"] == 24
    with pytest.raises(ArgumentError, match="rows can only be dropped"):
        to("griffin", checkpoint, tmp_path / "more", vocab_size=1025)


def test_without_a_config_the_missing_facts_are_asked_for(converted, tmp_path):
    folder = shutil.copytree(converted["deepmind-flax"], tmp_path / "bare")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="visible_keys, embedding_scale, logits_soft_cap"):
        Checkpoint(folder)
    given = Overrides(visible_keys=128, embedding_scale=True, logits_soft_cap=30.0)
    assert verify(Checkpoint(folder, given), converted["hf"]).same


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_commands(checkpoint, tmp_path):
    out = tmp_path / "out"
    planned = invoke("convert", checkpoint, out, "--to", "deepmind-flax", "--dry-run")
    assert planned.exit_code == 0 and not out.exists()
    assert "blocks.0/mlp_block/ffw_up/w" in planned.output and "split, transpose" in planned.output
    done = invoke("convert", checkpoint, out, "--to", "deepmind-flax")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{checkpoint}: hf (safetensors)")
    same = invoke("verify", checkpoint, out)
    assert same.exit_code == 0 and "99 of 99 parameters are the same bit for bit" in same.output
    cast = tmp_path / "cast"
    invoke("convert", out, cast, "--to", "hf", "--dtype", "bfloat16")
    other = invoke("verify", checkpoint, cast)
    assert other.exit_code == 1 and "float32 and bfloat16" in other.output
    assert "which --all lists" in other.output and "which --any-dtype accepts" in other.output
    assert other.output.count("float32 and bfloat16") == 10
    assert invoke("verify", checkpoint, cast, "--any-dtype").exit_code == 0
    assert invoke("verify", checkpoint, cast, "--all").output.count("float32 and bfloat16") > 90
    found = json.loads(invoke("verify", checkpoint, cast, "--json").output)
    assert {each["kind"] for each in found["tensors"]} <= {"rounded", "dtype"}
    assert found["same"] is False and found["identical"] + len(found["tensors"]) == 99
    facts = json.loads(invoke("inspect", out, "--json").output)
    assert facts["format"] == "deepmind-flax" and facts["config"]["visible_keys"] == 128
    assert facts["dtypes"] == {"float32": 99}
    assert "embedder/input_embedding" in invoke("inspect", out, "--tensors").output
    formats = invoke("convert", "--help-formats")
    assert formats.exit_code == 0 and all(name in formats.output for name in FORMATS)


def test_the_sign_of_a_zero_is_a_difference(tmp_path):
    write_source(tmp_path / "one")
    name, file = "model.final_norm.weight", "model.safetensors"
    weights = load_file(tmp_path / "one" / file)
    weights[name][[1, 4]] = 0.0, np.nan
    save_file(weights, tmp_path / "one" / file)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    weights[name][1] = -0.0
    save_file(weights, tmp_path / "other" / file)
    found = compare(Checkpoint(tmp_path / "one"), Checkpoint(tmp_path / "other"))
    assert found.tensors == [Difference(name, "1 value differs", 0.0)]
    assert invoke("verify", tmp_path / "one", tmp_path / "other").exit_code == 1


def test_an_item_is_of_the_first_checkpoint(converted, tmp_path):
    weights = torch.load(converted["deepmind-torch"] / "model.pt", weights_only=True)
    trained = tmp_path / "trained.pt"
    torch.save({"ema": weights, "step": 3}, trained)
    shutil.copy(converted["deepmind-torch"] / "config.json", tmp_path)
    done = invoke("verify", trained, converted["hf"], "--item", "ema")
    assert done.exit_code == 0, done.exception
    other = invoke("verify", converted["hf"], trained, "--item", "ema")
    assert isinstance(other.exception, CheckpointError)


def test_an_output_that_exists_is_left_alone(checkpoint, tmp_path):
    out = to("hf", checkpoint, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(ArgumentError, match="already exists"):
        to("griffin", checkpoint, out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    to("griffin", checkpoint, out, overwrite=True)
    assert Checkpoint(out).format.name == "griffin"


@pytest.mark.slow
def test_an_orbax_folder_is_converted_into_a_folder_within_it(converted, tmp_path, monkeypatch):
    source = shutil.copytree(converted["griffin-orbax"], tmp_path / "source")
    before = Checkpoint(source)
    monkeypatch.chdir(source)
    to("griffin", ".", "hf", progress=lambda nbytes: (source / "log").touch())
    assert verify(before, "hf").same
    to("griffin", ".", "hf", overwrite=True)


@pytest.mark.parametrize("change", ["written", "added"])
def test_what_changes_in_an_orbax_folder_meanwhile_is_noticed(converted, tmp_path, change):
    source = shutil.copytree(converted["griffin-orbax"], tmp_path / "source")
    plan = make_plan(Checkpoint(source), FORMATS["griffin"])
    file = max((source / "d").iterdir())

    def progress(nbytes):
        if change == "added":
            (file.parent / "new").touch()
        else:
            os.utime(file, ns=(0, 0))

    with pytest.raises(CheckpointError, match="d/.* changed while it was read"):
        convert_checkpoint(plan, source / "hf", progress=progress)
    assert not (source / "hf").exists()

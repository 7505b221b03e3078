"""``import griffin_eval`` is quick, lazy and typed; one example uses every public name."""

import importlib
import pkgutil
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from quantised import write_mlx
from slow import fast

import griffin_eval
from griffin_eval.checkpoints import folder
from griffin_eval.converters.checkpoint import Checkpoint

EXAMPLE = """
import griffin_eval
from griffin_eval.checkpoints import folder

griffin_eval.tune_process()  # a program of one's own, not a library

# The checkpoint that is converted: a folder in any format, a .pt file or a hub id.
checkpoint = griffin_eval.open_checkpoint(folder("bytes_griffin"))
assert isinstance(checkpoint.config, griffin_eval.GriffinConfig)
print(checkpoint.config.num_layers, "layers;", griffin_eval.PRESETS["recurrentgemma-2b"].width)

# To the format of DeepMind's Flax code and back: the same bits.
griffin_eval.convert(checkpoint, "flax", to="griffin")
griffin_eval.convert("flax", "back", to="hf")
assert griffin_eval.verify(checkpoint, "back").same

# Log-probabilities of every token, and continuations, in either framework.
totals = {}
for framework in ("torch", "jax"):
    model = griffin_eval.Evaluator("back", framework=framework, dtype="float32")
    [score] = model.score(["The quick brown fox"])
    totals[framework] = score.total
    print(framework, f"{score.total:.3f} nats for {len(score.logprobs)} tokens")
    [continuation] = model.generate(["The quick brown "], max_new_tokens=8)
    print(framework, repr(continuation.text))
assert abs(totals["torch"] - totals["jax"]) < 1e-3

# How long it remembers: numbers, and matplotlib figures by name.
memory = griffin_eval.memory(checkpoint, tokens=300)
print(memory.numbers["memory"][0]["half_life_measured"], list(memory.figures()))

# The model itself, a torch.nn.Module: hidden vectors and logits.
module = griffin_eval.load("back", framework="torch")
print(sum(p.numel() for p in module.parameters()), "parameters")
"""


def run(code, cwd=None):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)


@pytest.mark.slow
def test_the_example(tmp_path):
    done = run(EXAMPLE, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_example_is_short_and_has_every_name():
    assert len(EXAMPLE.strip().splitlines()) <= 36
    public = set(griffin_eval.__all__) - {"Checkpoint", "Comparison", "Continuation", "Score"}
    assert all(f"griffin_eval.{name}" in EXAMPLE for name in public)


def test_import_is_quick_and_brings_nothing_along():
    code = (
        "import sys, time; begin = time.process_time()\n"
        "import griffin_eval, griffin_eval.config\n"
        "griffin_eval.PRESETS, griffin_eval.GriffinConfig, dir(griffin_eval)\n"
        "print(time.process_time() - begin)\n"
        "print({'torch', 'jax', 'numpy', 'transformers', 'lm_eval'} & set(sys.modules))\n"
        "griffin_eval.Evaluator, griffin_eval.convert, griffin_eval.verify\n"
        "print({'torch', 'jax', 'transformers', 'lm_eval'} & set(sys.modules))"
    )
    best, heavy, heavy_later = min(run(code).stdout.splitlines() for _ in range(3))
    assert heavy == heavy_later == "set()"
    assert float(best) < 0.05


def test_no_submodule_takes_the_place_of_a_name():
    names = {name: getattr(griffin_eval, name) for name in griffin_eval.__all__}
    for module in pkgutil.iter_modules(griffin_eval.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"griffin_eval.{module.name}")
            assert module.name not in names
    assert {name: getattr(griffin_eval, name) for name in griffin_eval.__all__} == names
    assert set(griffin_eval.__all__) <= set(dir(griffin_eval))
    with pytest.raises(AttributeError, match="no_such_name"):
        griffin_eval.no_such_name  # noqa: B018


@pytest.fixture(scope="module", params=fast(["torch"], ["torch", "jax"]))
def model(request):
    return griffin_eval.Evaluator(
        folder("bytes_griffin"), framework=request.param, dtype="float32", max_batch_size=2
    )


def test_scores_are_those_of_the_model_itself(model):
    texts = ["a text", "a text that is longer", [5, 6, 7]]
    scores = model.score(texts)
    assert model.framework in ("torch", "jax") and model.config.vocab_size > 7
    module = griffin_eval.load(folder("bytes_griffin"), framework="torch", dtype="float32")
    import torch

    for text, score in zip(texts, scores, strict=True):
        tokens = torch.tensor(score.tokens[None], dtype=torch.int64)
        with torch.inference_mode():
            lengths = torch.tensor([tokens.shape[1]])
            hidden, _ = module.step(tokens, lengths, module.init_state(1))
            logits = module.logits(hidden)[0, :-1].double().log_softmax(-1).numpy()
        expected = logits[np.arange(len(score.tokens) - 1), score.tokens[1:]]
        np.testing.assert_allclose(score.logprobs, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(score.greedy, logits.argmax(-1) == score.tokens[1:])
        assert score.logprobs.dtype == np.float64 and score.total == score.logprobs.sum()
        assert isinstance(text, str) or score.tokens.tolist() == text


def test_details_have_the_text_of_every_token(model):
    text, ids = model.score(["a text", [5, 6, 7]], details=True)
    assert text.texts == list("a text") and text.ranks.min() >= 1
    assert len(ids.texts) == 2 and model.score(["a"])[0].texts is None


def test_generation_is_greedy_unless_asked_otherwise(model):
    [text] = model.generate(["import "], max_new_tokens=6)
    assert isinstance(text.text, str) and text.tokens.dtype == np.int32 and len(text.tokens) <= 6
    prompt = model.score(["import "])[0].tokens.tolist()
    if len(text.tokens):
        [score] = model.score([[*prompt, *text.tokens.tolist()]])
        assert score.greedy[len(prompt) - 1 :].all()
    whole = model.generate("import ", max_new_tokens=6, stop="never said").text
    assert whole == text.text and len(whole) > 2
    stopped = model.generate("import ", max_new_tokens=6, stop=["never said", whole[1]])
    assert stopped.text == whole[: whole.index(whole[1])]
    assert len(stopped.tokens) <= whole.index(whole[1]) + 1
    with pytest.raises(ValueError, match="not empty"):
        model.generate("import ", stop=["", "a"])
    drawn = [
        model.generate([prompt], max_new_tokens=6, temperature=1.0, seed=seed) for seed in (1, 1)
    ]
    assert drawn[0][0].text is None and drawn[0][0].tokens.tolist() == drawn[1][0].tokens.tolist()


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ("one text", "expected a list of texts"),
        ([5, 6], "expected a list of texts"),
        ([[]], "expected a text or token ids"),
        ([[10**6]], "token ids must be from 0 to"),
        ([[5, 10**12]], "token ids must be from 0 to"),
        ([np.array([5, 2**32 + 4])], "token ids must be from 0 to"),
        ([[5, 10**30]], "expected a text or token ids"),
        ([[1.7, 2.9]], "expected a text or token ids"),
        ([[[1], [2, 3]]], "expected a text or token ids"),
        (["good", "a\ud83d"], r"half of a surrogate pair.*at index 1 \(after 'a\\ud83d'\)"),
    ],
)
def test_bad_input_is_one_sentence(model, texts, said):
    with pytest.raises(ValueError, match=said):
        model.score(texts)


def test_dtypes_and_devices_of_libraries_are_names():
    source = folder("bytes_griffin")
    given = [np.float32, np.dtype("float32"), torch.float32, jnp.float32, "float32"]
    for dtype in given:
        for framework in ("torch", "jax"):
            model = griffin_eval.Evaluator(source, framework=framework, dtype=dtype)
            assert model.dtype == "float32"
    for dtype in (torch.bfloat16, jnp.bfloat16, ml_dtypes.bfloat16):
        module = griffin_eval.load(source, framework="torch", dtype=dtype)
        assert next(module.parameters()).dtype == torch.bfloat16
    assert griffin_eval.Evaluator(source, framework="torch", device=torch.device("cpu")).dtype
    for wrong, said in ((np.int64, "unknown dtype 'int64'"), (object(), "dtype must be a dtype")):
        for call in (griffin_eval.Evaluator, griffin_eval.load):
            with pytest.raises(ValueError, match=said):
                call(source, framework="torch", dtype=wrong)
    with pytest.raises(ValueError, match="tokenizer must be a text, found an object dict"):
        griffin_eval.Evaluator(source, framework="torch", tokenizer={})


def test_damaged_weights_are_refused_before_a_result(tmp_path):
    """Every method of Evaluator checks the weights; tests/lm/test_roads.py tests the commands."""
    griffin_eval.convert(folder("bytes_griffin"), tmp_path / "damaged", to="griffin")
    file = tmp_path / "damaged" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    model = griffin_eval.Evaluator(tmp_path / "damaged", framework="torch")
    for call in (model.score, model.generate, lambda texts: model.read(texts[0])):
        with pytest.raises(ValueError, match="has the SHA-256"):
            call(["import os"])
    with pytest.raises(ValueError, match="has the SHA-256"):
        model.layer_states("import os")
    unchecked = griffin_eval.Evaluator(tmp_path / "damaged", framework="torch", check=False)
    assert len(unchecked.score(["import os"])) == 1


@pytest.mark.parametrize("wrong", [-1, 3.5])
def test_a_number_of_new_tokens_is_one(model, wrong):
    with pytest.raises(ValueError, match=f"expected a number of new tokens, not {wrong}"):
        model.generate(["a"], max_new_tokens=wrong)
    with pytest.raises(ValueError, match=f"expected an integer of 0 or more as seed, not {wrong}"):
        model.generate(["a"], seed=wrong)


def test_an_empty_text_has_no_score(model):
    for call in (lambda: model.score(["a", ""]), lambda: model.layer_states("")):
        with pytest.raises(ValueError, match="at least one token, found an empty one"):
            call()


@pytest.mark.parametrize("framework", fast(["torch"], ["torch", "jax"]))
def test_matrices_stay_quantised_if_asked(tmp_path, framework):
    griffin_eval.convert(folder("bytes_griffin"), tmp_path / "hf", to="hf")
    write_mlx(tmp_path / "q", tmp_path / "hf", "float32", 4, 64)
    options = {"framework": framework, "dtype": "float32"}
    quantised, plain = (
        griffin_eval.Evaluator(tmp_path / "q", load=load, **options).score(["a text", "another"])
        for load in ("quantised", None)
    )
    for one, other in zip(quantised, plain, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)
    module = griffin_eval.load(tmp_path / "q", load="quantised", **options)
    weight = module.model.layers[0].mlp_block.up_proj.weight
    weight = weight[...] if framework == "jax" else weight
    assert type(weight).__name__ == "QuantisedMatrix"
    for call in (griffin_eval.load, griffin_eval.Evaluator):
        with pytest.raises(ValueError, match="unknown load 'packed': expected quantised"):
            call(tmp_path / "q", load="packed", **options)
        with pytest.raises(ValueError, match="is not quantised; leave the argument out"):
            call(folder("bytes_griffin"), load="quantised", **options)


def test_destinations_are_those_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    source = folder("bytes_griffin")
    assert griffin_eval.convert(source, "~/out", to="griffin").folder == tmp_path / "out"
    with pytest.raises(ValueError, match="cannot be written to gs://bucket/x"):
        griffin_eval.convert(source, "gs://bucket/x", to="griffin")


def test_errors_name_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        griffin_eval.open_checkpoint("nowhere")
    opened = griffin_eval.open_checkpoint(folder("bytes_griffin"), visible_keys=7)
    assert opened.config.visible_keys == 7 and isinstance(opened, Checkpoint)

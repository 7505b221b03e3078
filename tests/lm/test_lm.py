"""`GriffinLM` against lm-eval's own hf model and against transformers, request by request."""

import json
import logging
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from parity import TOLERANCES
from slow import ci, fast, slow
from transformers import GenerationConfig

from griffin_eval import Evaluator, tasks
from griffin_eval.checkpoints import folder as shipped
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.plan import make_plan
from griffin_eval.crosscheck import logits
from griffin_eval.engine.generation import Prompt, generate
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.neutral import NEUTRAL
from griffin_eval.engine.sampling import GREEDY, Sampling
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError
from griffin_eval.lm.generation_args import read_generation_arguments
from griffin_eval.lm.model import GriffinLM

TEXT = topics["numbers"] + topics["strings"]
PAIRS = [
    ("The unary minus", " operator"),
    ("The unary minus operator ", "yields"),  # the space moves to the continuation
    ("The", " unary operator yields the negation of its numeric argument."),
    ("", "An empty context"),
    ("x", "y"),
    (TEXT[:1500], TEXT[1500:1600]),  # past the window
    (TEXT[:1500], " something else"),
    ("The unary minus", " operator"),
]
SHORT_PAIRS = [pair for pair in PAIRS if len(pair[0]) < 100]


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@cache
def our_tasks():
    """Ours alone, since lm-eval takes seconds to find all of its own."""
    return TaskManager(include_path=str(Path(tasks.__file__).parent), include_defaults=False)


def evaluate(lm, **arguments):
    return simple_evaluate(lm, task_manager=our_tasks(), bootstrap_iters=0, **arguments)


@pytest.fixture(scope="module")
def hf(checkpoint):
    return HFLM(pretrained=str(checkpoint), dtype="float32", device="cpu", max_length=8192)


@pytest.fixture(scope="module", params=["torch", "jax"])
def lm(request, checkpoint):
    return GriffinLM(pretrained=str(checkpoint), framework=request.param, max_batch_size=3)


# For tests of what is done to texts and answers outside of a runner.
torch_quickly = pytest.mark.parametrize("lm", fast(["torch"], ["torch", "jax"]), indirect=True)


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(1.0, abs(expected))


def test_loglikelihood_equals_hf(lm, hf, record_parity):
    requests = instances("loglikelihood", PAIRS)
    for found, expected in zip(
        lm.loglikelihood(requests), hf.loglikelihood(requests, disable_tqdm=True), strict=True
    ):
        error = relative(found[0], expected[0])
        pair = f"{lm.runner.framework} - lm-eval hf"
        record_parity(pair, "log-likelihood", error, TOLERANCES[pair, "log-likelihood"])
        assert found[1] == expected[1]


def merged_pair(tokenizer):
    """Return a context and a continuation that add up to no more tokens than the context has."""
    words = {word for word in TEXT.split() if word.isalpha()}
    pairs = [(word[:i], word[i:]) for word in sorted(words) for i in range(1, len(word))]
    count = {
        text: len(tokenizer.encode(text)) for pair in pairs for text in (pair[0], "".join(pair))
    }
    return next(pair for pair in pairs if count["".join(pair)] <= count[pair[0]])


@torch_quickly
def test_a_merged_continuation_is_scored_after_the_ids_of_its_context(
    lm, hf, reference_logprobs, caplog
):
    context, continuation = merged_pair(lm.tokenizer)
    pairs = [(context, continuation), (context, " and then"), (f"{context}  ", continuation)]
    before = lm.stats.continuations_encoded_alone
    lm.requests.warned.clear()
    requests = instances("loglikelihood", pairs)
    requests[0].task_name, requests[0].doc_id = "some_task", 7
    for _ in range(2):
        found = lm.loglikelihood(requests)
    ids = [lm.tokenizer.bos_token_id, *lm.tokenizer.encode(context)]
    alone = lm.tokenizer.encode(continuation)
    expected = reference_logprobs([*ids, *alone])[0][-len(alone) :].sum()
    assert relative(found[0][0], expected) < 1e-5
    for mine, other in zip(
        found[1:], hf.loglikelihood(requests[1:], disable_tqdm=True), strict=True
    ):
        assert relative(mine[0], other[0]) < 1e-5 and mine[1] == other[1]
    warnings = [r.getMessage() for r in caplog.records if "merges" in r.getMessage()]
    assert len(warnings) == 1
    assert f"document 7 of some_task: the continuation {continuation!r} (choice 0)" in warnings[0]
    assert lm.get_model_info()["griffin_continuations_encoded_alone"] == before + 2
    assert lm.loglikelihood_ablated(
        instances("loglikelihood_ablated", [(context, continuation, "nothing")])
    )[0] == pytest.approx(found[0])
    with pytest.raises(AssertionError):  # hf stops
        hf.loglikelihood(requests[:1], disable_tqdm=True)


def test_a_merged_continuation_can_be_refused(checkpoint):
    lm = GriffinLM(pretrained=str(checkpoint), framework="torch", on_merge="error")
    pair = merged_pair(lm.tokenizer)
    with pytest.raises(ArgumentError, match=f"{pair[1]!r} .choice 0. into the last token"):
        lm.loglikelihood(instances("loglikelihood", [pair]))
    with pytest.raises(ArgumentError, match="unknown on_merge 'hf': expected separate or error"):
        GriffinLM(pretrained=str(checkpoint), framework="torch", on_merge="hf")


@torch_quickly
def test_an_empty_continuation_is_refused(lm, reference_logprobs):
    for pair in [("The", ""), ("", "")]:
        with pytest.raises(ArgumentError, match=r"the continuation '' \(choice 1\) is empty"):
            lm.loglikelihood(instances("loglikelihood", [("The", " unary"), pair]))
    # The text of BOS alone is a token to score, and not the one that it is scored from.
    bos = lm.tokenizer.bos_token_id
    [found] = lm.loglikelihood(instances("loglikelihood", [("", "<bos>")]))
    assert relative(found[0], reference_logprobs([bos, bos])[0].sum()) < 1e-5


def test_generation_equals_hf_at_batch_size_1(lm, hf):
    kwargs = {"until": ["\n", "z"], "max_gen_toks": 12, "do_sample": False}
    contexts = ["The", TEXT[:700], TEXT[100:180]]
    requests = instances("generate_until", [(c, kwargs) for c in contexts])
    assert lm.generate_until(requests) == hf.generate_until(requests, disable_tqdm=True)


@torch_quickly
def test_generation_arguments_are_per_request(lm):
    asked = [("The", {"max_gen_toks": n, "until": u}) for n, u in [(3, []), (9, []), (9, [" "])]]
    short, long, cut = lm.generate_until(instances("generate_until", asked))
    assert long.startswith(short) and len(long) > len(short)
    assert long.startswith(cut) and " " not in cut


@torch_quickly
def test_unsupported_generation_arguments_are_named(lm):
    with pytest.raises(ArgumentError, match="num_beams"):
        lm.generate_until(instances("generate_until", [("The", {"num_beams": 4})]))


CHOSEN = [
    ({"do_sample": True}, Sampling(1.0)),
    ({"do_sample": True, "temperature": 0.0}, GREEDY),
    ({"do_sample": True, "top_p": 0.0, "top_k": None}, Sampling(1.0, top_p=0.0)),
    ({"temperature": 0.7, "top_k": 5}, Sampling(0.7, 5)),
    ({"do_sample": False, "top_p": 0.5}, GREEDY),
]


def test_how_tokens_are_chosen():
    for given, expected in CHOSEN:
        assert read_generation_arguments(given).sampling == expected, given


REFUSED = [
    ({"do_sample": True, "top_p": -0.5}, "top_p from 0 to 1, not -0.5"),
    ({"do_sample": True, "top_p": 2}, "top_p from 0 to 1, not 2"),
    ({"temperature": -1}, "temperature of at least 0, not -1"),
    ({"temperature": "hot"}, "temperature must be a number, found 'hot'"),
    ({"temperature": True}, "temperature must be a number, found True"),
    ({"top_k": 2.5}, "top_k must be a whole number, found 2.5"),
    ({"do_sample": "no"}, "do_sample must be true or false, found 'no'"),
    ({"max_gen_toks": -5}, "max_gen_toks must be a positive integer, found -5"),
    ({"max_gen_toks": 0}, "max_gen_toks must be a positive integer, found 0"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be a positive integer, found 2.5"),
    ({"max_tokens": "many"}, "max_tokens must be a positive integer, found 'many'"),
    ({"max_completion_tokens": True}, "max_completion_tokens must be a positive integer"),
    ({"until": [1]}, "until must be a string or a list of strings, found 1"),
    ({"until": 1.5}, "until must be a string or a list of strings, found 1.5"),
    ({"until": ["a", ["b"]]}, r"found \['b'\]"),
    ({"until": {"a": 1}}, "found {'a': 1}"),
    ({"max_length": 20}, "max_length are not supported"),
    ({"repetition_penalty": True}, "repetition_penalty are not supported"),
    ({"min_p": 0.1, "num_beams": 1}, "arguments min_p are not supported"),
]


def test_values_that_mean_nothing_are_refused():
    for wrong, said in REFUSED:
        with pytest.raises(ArgumentError, match=said):
            read_generation_arguments(wrong)


def test_generation_arguments_at_their_defaults_ask_for_nothing():
    """Those of transformers, whose own list this reads, and of the other programs."""
    nothing = read_generation_arguments({})
    defaults = GenerationConfig().to_dict()
    defaults |= getattr(GenerationConfig, "_get_default_generation_params", dict)()
    # A length of 20 tokens would count the prompt, and a temperature alone samples.
    for name in ("max_length", "temperature", "transformers_version", "_from_model_config"):
        defaults.pop(name, None)
    assert defaults["num_beams"] == defaults["repetition_penalty"] == 1 and len(defaults) > 30
    cases = [*defaults.items()]
    for name, values in NEUTRAL.items():
        cases += [(name, value) for value in (*(values or ("anything",)), None)]
    cases += [(n, None) for n in ("until", "max_gen_toks", "do_sample", "temperature", "top_k")]
    cases += [("until", []), ("until", ["", None]), ("temperature", 0), ("do_sample", 0)]
    for name, value in cases:
        assert read_generation_arguments({name: value}) == nothing, (name, value)
    sampled = read_generation_arguments(defaults | {"do_sample": True}).sampling
    assert sampled == Sampling(1.0, defaults["top_k"] or 0)


def test_rolling_is_one_pass_with_one_bos(lm, reference_logprobs, record_parity):
    documents = [TEXT[:3000], "x", TEXT[5000:5400]]
    found = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(d,) for d in documents]))
    for document, total in zip(documents, found, strict=True):
        ids = [lm.tokenizer.bos_token_id, *lm.tokenizer.encode(document)]
        error = relative(total, reference_logprobs(ids)[0].sum())
        pair = f"{lm.runner.framework} - equations"
        quantity = "rolling log-likelihood"
        record_parity(pair, quantity, error, TOLERANCES[pair, quantity])


def test_max_length_cuts_from_the_left_with_one_warning(checkpoint, reference_logprobs, caplog):
    lm = GriffinLM(pretrained=str(checkpoint), framework="torch", max_length=50)
    with caplog.at_level(logging.WARNING, "griffin_eval"):
        found = lm.loglikelihood(instances("loglikelihood", [(TEXT[:900], " end"), PAIRS[5]]))
    assert len([r for r in caplog.records if "max_length=50" in r.getMessage()]) == 1
    ids = lm.tok_encode(TEXT[:900] + " end")
    count = len(ids) - len(lm.tok_encode(TEXT[:900]))
    expected = reference_logprobs(ids[-51:])[0][-count:].sum()
    assert relative(found[0][0], expected) < 1e-5
    (cut,) = lm.generate_until(instances("generate_until", [(TEXT[:900], {"max_gen_toks": 9})]))
    generate(
        lm.runner,
        [Prompt(lm.tok_encode(TEXT[:900])[-41:], 9)],
        limits=Limits(64, 1),
        eos_ids=frozenset(),
        on_result=lambda _, new: ids.__setitem__(slice(None), new),
    )
    assert cut == lm.tokenizer.decode(ids, skip_special_tokens=True)
    with pytest.raises(ArgumentError, match="max_length=50"):
        lm.loglikelihood(instances("loglikelihood", [("The", TEXT[:900])]))
    with pytest.raises(ArgumentError, match="leaves no room"):
        lm.generate_until(instances("generate_until", [("The", {"max_gen_toks": 50})]))


def test_prefix_token_and_window_change_the_numbers(checkpoint):
    requests = instances("loglikelihood", [("", "An empty context"), (TEXT[:300], " a")])

    def scores(**arguments):
        lm = GriffinLM(pretrained=str(checkpoint), framework="torch", **arguments)
        return [score for score, _ in lm.loglikelihood(requests)]

    usual = scores()
    prefixed, windowed = scores(prefix_token_id=5), scores(window=16)
    # A context of its own takes no prefix token, but rounds with what is read beside it.
    assert relative(prefixed[0], usual[0]) > 1e-3 and relative(prefixed[1], usual[1]) < 1e-5
    assert relative(windowed[1], usual[1]) > 1e-3
    assert windowed == scores(visible_keys=16) == scores(visible_keys=16, window=16)


def test_the_batch_size_changes_no_bit(checkpoint):
    def answers(**arguments):
        lm = GriffinLM(pretrained=str(checkpoint), framework="torch", **arguments)
        assert list(lm.batch_sizes) == ["rows"]  # for results.json
        asked = [("The", {"max_gen_toks": 9}), ("A", {"max_gen_toks": 5})]
        return lm.batch_sizes["rows"], [
            lm.loglikelihood(instances("loglikelihood", SHORT_PAIRS)),
            lm.generate_until(instances("generate_until", asked)),
        ]

    usual = answers()
    for size in (1, "auto:2"):
        assert answers(batch_size=size) == usual
    assert answers(max_batch_size=2)[0] == 2


def test_cuda_that_is_not_there_is_logged(checkpoint, caplog):
    with caplog.at_level(logging.INFO, "griffin_eval"):
        for framework in ("torch", "jax"):
            GriffinLM(pretrained=str(checkpoint), framework=framework, device="cuda:0")
    assert caplog.text.count("no device cuda:0, the default of lm_eval") == 2
    assert caplog.text.count("running on cpu") == 2
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ArgumentError, match=f"there is no device {device} here"):
            GriffinLM(pretrained=str(checkpoint), framework="torch", device=device)
    for framework in ("torch", "jax"):
        with pytest.raises(ArgumentError, match="there is no device cuda:0 here"):
            Evaluator(str(checkpoint), framework=framework, device="cuda:0")


def test_model_arguments_win_over_options_of_lm_eval(checkpoint):
    """lm_eval passes --device and --batch_size, or their defaults, beside --model_args."""
    options = {"device": "cuda:7", "batch_size": 3, "max_batch_size": None}
    text = f"pretrained={checkpoint},framework=torch,device=cpu,batch_size=auto"
    given = dict(pair.split("=") for pair in text.split(","))
    for lm in (
        GriffinLM.create_from_arg_obj(given, options),
        GriffinLM.create_from_arg_string(text, options),
    ):
        assert lm.runner.device == "cpu"


def test_numbers_that_lm_eval_makes_of_digits_are_names(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "run" / "12000")
    run = str(tmp_path / "run")
    assert GriffinLM(pretrained=run, framework="torch", subfolder=12000).runner.dtype == "float32"
    with pytest.raises(CheckpointError, match="revision='7' only applies to a hub id"):
        GriffinLM(pretrained=run, framework="torch", subfolder=12000, revision=7)


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_a_model_leaves_the_generators_of_the_process_alone(checkpoint, framework):
    """lm_eval has seeded them, and importing JAX draws from NumPy's."""
    code = (
        "import random, sys, numpy, torch\n"
        "from griffin_eval.lm.model import GriffinLM\n"
        "import griffin_eval\n"
        "assert 'jax' not in sys.modules\n"
        "def drawn(): return [random.getstate(), numpy.random.get_state()[1:3], torch.rand(3)]\n"
        "def seed(): random.seed(1), numpy.random.seed(2), torch.manual_seed(3)\n"
        "seed(); expected = str(drawn())\n"
        f"for load in (GriffinLM, griffin_eval.Evaluator, griffin_eval.load):\n"
        f"    seed(); load({str(checkpoint)!r}, framework={framework!r})\n"
        "    assert str(drawn()) == expected, load\n"
        f"assert ('jax' in sys.modules) == ({framework!r} == 'jax')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("lm", "dtype"),
    [
        ("torch", "bfloat16"),
        ci("jax", "bfloat16"),
        slow("torch", "float16"),
        slow("jax", "float16"),
    ],
    indirect=["lm"],
)
def test_half_precision_is_close(checkpoint, lm, dtype, record_parity):
    framework = lm.runner.framework
    pairs = PAIRS if framework == "torch" else SHORT_PAIRS  # fewer programs are compiled
    requests = instances("loglikelihood", pairs)
    half = GriffinLM(pretrained=str(checkpoint), framework=framework, dtype=dtype)
    assert half.get_model_info()["model_dtype"] == dtype
    for low, high in zip(half.loglikelihood(requests), lm.loglikelihood(requests), strict=True):
        error = relative(low[0], high[0])
        pair = f"{framework} {dtype} - float32"
        record_parity(pair, "log-likelihood", error, TOLERANCES[pair, "log-likelihood"])


def test_generating_without_the_chat_template_is_mentioned_once(checkpoint, tmp_path, caplog):
    folder = shutil.copytree(checkpoint, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    request = Instance("generate_until", {}, ("hello", {"max_gen_toks": 1}), 0)
    for kind, expected in ((folder, 1), (checkpoint, 0)):
        caplog.clear()
        lm = GriffinLM(str(kind), "torch")
        for _ in range(2):
            lm.generate_until([request], disable_tqdm=True)
        assert caplog.text.count("--apply_chat_template") == expected
    lm = GriffinLM(str(folder), "torch")
    caplog.clear()
    lm.apply_chat_template([{"role": "user", "content": "hello"}])
    lm.generate_until([request], disable_tqdm=True)
    assert "--apply_chat_template" not in caplog.text


def test_results_and_log_record_what_was_run(lm, caplog):
    with caplog.at_level(logging.INFO, "griffin_eval"):
        results = evaluate(lm, tasks=["griffin_pydoc_choice"], limit=2)
    config = results["config"]
    assert config["model_framework"] == lm.runner.framework
    assert config["model_visible_keys"] == 128
    assert config["model_dtype"] == "float32"
    stats = lm.stats
    assert config["griffin_tokens_requested"] == stats.tokens_requested
    assert config["griffin_tokens_computed"] == stats.tokens_computed < stats.tokens_requested
    assert config["griffin_saved_ratio"] == stats.tokens_requested / stats.tokens_computed
    assert config["griffin_states_evicted"] == 0
    assert config["griffin_tokens_per_second"] > 0 and config["griffin_peak_memory_bytes"] > 1e7
    assert (config["griffin_compilations"] > 0) == (lm.runner.framework == "jax")
    assert config["griffin_kernel"] == "kernels.rglru, cpu"
    assert config["griffin_attention_kernel"] == "kernels.attention, cpu"
    assert {"torch", "jax", "flax", "lm_eval"} < set(config["griffin_versions"])
    json.dumps(lm.get_model_info())
    last = [r.getMessage() for r in caplog.records if r.name == "griffin_eval.lm.results"][-1]
    assert f"{lm.stats.tokens_requested} tokens requested" in last
    assert f"{lm.stats.tokens_computed} computed" in last


def test_the_hash_of_weights_follows_them_through_formats(checkpoint, tmp_path):
    def weights(folder, **more):
        more |= {"tokenizer": str(checkpoint), "window": 128}
        lm = GriffinLM(pretrained=str(folder), framework="torch", **more)
        info = lm.get_model_info()
        assert info["griffin_weights_checked"] is more.get("check", True)
        return info["griffin_weights_sha256"]

    opened = Checkpoint(checkpoint)
    names = ["griffin", "deepmind-torch"]
    for name in names:
        convert_checkpoint(make_plan(opened, FORMATS[name]), tmp_path / name)
    kept = weights(checkpoint)
    assert len(kept) == 64 and {weights(tmp_path / name) for name in names} == {kept}
    changed = shutil.copytree(tmp_path / "griffin", tmp_path / "changed")
    file = changed / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)  # the manifest beside it says what was there before
    assert weights(changed, check=False) != kept
    with pytest.raises(CheckpointError, match="has the SHA-256"):
        weights(changed)
    lm = GriffinLM(pretrained=str(changed), framework="torch", tokenizer=str(checkpoint))
    lm.runner.read = None  # no request is computed
    for kind, arguments in (
        ("loglikelihood", ("The", " end")),
        ("loglikelihood_rolling", ("The end",)),
        ("generate_until", ("The", {"max_gen_toks": 2})),
    ):
        with pytest.raises(CheckpointError, match="has the SHA-256"):
            getattr(lm, kind)(instances(kind, [arguments]))


def test_white_space_is_a_context_without_bos(checkpoint):
    lm = GriffinLM(pretrained=str(checkpoint), framework="torch", add_bos_token=False)
    pairs = [(" ", "x"), ("", " x")]
    found = lm.loglikelihood(instances("loglikelihood", pairs))
    assert found[0] == found[1]  # both are scored from the prefix token


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("induction_heads_griffin", 128, "attention sees 128 keys"),
        ("induction_heads_hawk", None, "no attention"),
        ("induction_heads_mqa", None, "global attention"),
    ],
)
def test_a_window_is_recorded_for_models_that_have_one(name, keys, said, caplog):
    with caplog.at_level(logging.INFO, "griffin_eval"):
        lm = GriffinLM(str(shipped(name)), "torch")
    assert f", {said}, " in caplog.text
    assert lm.get_model_info()["model_visible_keys"] == keys


def test_parity_check_is_recorded(checkpoint, caplog):
    with caplog.at_level(logging.INFO, "griffin_eval"):
        lm = GriffinLM(pretrained=str(checkpoint), framework="torch", parity="check")
    assert "parity=check: logits differ by" in caplog.text
    found = lm.get_model_info()["griffin_parity"]
    assert found["past_window"] and found["tokens"] > 128
    assert 0 < found["largest_difference_logits"] < 1e-3
    assert 0 < found["largest_difference_logprobs"] < 1e-3
    assert "griffin_parity" not in GriffinLM(str(checkpoint), "torch").get_model_info()


def test_parity_check_refuses(checkpoint, monkeypatch):
    arguments = {"pretrained": str(checkpoint), "framework": "torch"}
    with pytest.raises(ArgumentError, match="unknown parity 'yes': expected check"):
        GriffinLM(**arguments, parity="yes")
    monkeypatch.setattr(logits, "TOLERANCE", 1e-9)
    with pytest.raises(BadInput, match="parity=check: PyTorch and JAX differ by .* in "):
        GriffinLM(**arguments, parity="check")
    monkeypatch.setattr(logits, "find_spec", lambda name: None if name == "flax" else name)
    with pytest.raises(ArgumentError, match=r"in JAX \(flax not installed\): pip install"):
        GriffinLM(**arguments, parity="check")


@torch_quickly
def test_sampling_follows_the_global_seed(lm):
    request = instances(
        "generate_until", [("The", {"do_sample": True, "temperature": 1.5, "max_gen_toks": 24})]
    )

    def text(seed):
        np.random.seed(seed)
        return lm.generate_until(request)

    assert text(1) == text(1) != text(2)
    first, lm._rank = text(1), 1  # lm_eval seeds all processes of a launcher alike
    try:
        assert text(1) != first
    finally:
        lm._rank = 0


def test_every_eos_of_the_generation_config_ends_a_text(checkpoint, tmp_path):
    lm = GriffinLM(pretrained=str(checkpoint), framework="torch")
    request = instances("generate_until", [("The", {"max_gen_toks": 12})])
    (free,) = lm.generate_until(request)
    ids = lm.tok_encode(free, add_special_tokens=False)
    folder = shutil.copytree(checkpoint, tmp_path / "eos")
    for ends in ([1, ids[4]], [1, ids[7], ids[4]]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        (found,) = GriffinLM(pretrained=str(folder), framework="torch").generate_until(request)
        cut = min(ids.index(end) for end in ends[1:])
        assert found == lm.tokenizer.decode(ids[:cut], skip_special_tokens=True)


def test_the_stock_chat_options(checkpoint, tmp_path):
    """`--apply_chat_template --system_instruction` reach the prompt, which has one BOS."""
    folder = shutil.copytree(checkpoint, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<model>{% endif %}"
    )
    lm = GriffinLM(pretrained=str(folder), framework="torch")
    results = evaluate(
        lm,
        tasks=["griffin_pydoc_choice"],
        limit=1,
        apply_chat_template=True,
        system_instruction="Be brief.",
        log_samples=True,
    )
    (sample,) = results["samples"]["griffin_pydoc_choice"]
    prompt = sample["arguments"][0][0]
    assert prompt.startswith("<bos><system>Be brief.\n<user>") and prompt.endswith("<model>")
    assert lm.tok_encode(prompt).count(lm.tokenizer.bos_token_id) == 1

"""`griffin-eval score`, `token_scores=` and `details`: every token against transformers."""

import csv
import io
import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from safetensors import safe_open
from safetensors.numpy import load_file
from slow import ci, fast, slow
from transformers import AutoTokenizer
from typer.testing import CliRunner

from griffin_eval.analysis import half_lives
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.scoring import score
from griffin_eval.engine.tree import Scorable
from griffin_eval.errors import ArgumentError, BadInput
from griffin_eval.evaluator import Evaluator
from griffin_eval.lm.model import GriffinLM
from griffin_eval.lm.token_scores import TokenScoreFiles
from griffin_eval.runners.load import load_runner
from griffin_eval.text.words import word_spans, words_of_tokens

TEXTS = ["The unary minus operator\r\n\tyields  naïve 東京 results.\n", " starts with a space"]


@pytest.fixture(scope="module")
def expected(equations):
    """Return a function that computes, by the equations in numpy, every token's nats, least and
    largest rank within rounding, and entropy; the first token is left out."""

    def details(tokens) -> tuple[np.ndarray, ...]:
        ids = torch.tensor([list(tokens)])
        logits = torch.from_numpy(equations(tokens)[:-1])
        logprobs = logits.log_softmax(-1)
        mine = logprobs.gather(1, ids[0, 1:, None])
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        ranks = [1 + (logprobs > mine + near).sum(1).numpy() for near in (1e-4, -1e-4)]
        return -mine[:, 0].numpy(), *ranks, entropy.numpy()

    return details


def check(expected, nats, rank, entropy):
    exact, least, most, spread = expected
    np.testing.assert_allclose(nats, exact, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(entropy, spread, rtol=1e-4, atol=1e-4)
    assert (least <= rank).all() and (rank <= most).all()


@pytest.mark.parametrize("runner", fast(["torch"], ["torch", "jax"]), indirect=True)
def test_details_equal_transformers_and_change_no_score(runner, random_tokens, expected):
    sequences = [Scorable(random_tokens(length), start) for length, start in [(150, 1), (40, 39)]]
    sequences += [Scorable([*sequences[0].tokens[:100], token], 100) for token in range(3, 60)]
    found, plain = [{}, {}]
    for results, details in ((found, True), (plain, False)):
        score(
            runner,
            sequences,
            limits=Limits(64, 4),
            softmax_dtype="float32",
            on_result=results.__setitem__,
            details=details,
        )
    for index, sequence in enumerate(sequences):
        mine = found[index]
        whole = [part[sequence.start - 1 :] for part in expected(sequence.tokens)]
        check(whole, -mine.logprobs, mine.ranks, mine.entropies)
        np.testing.assert_allclose(mine.logprobs, plain[index].logprobs, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(mine.greedy, plain[index].greedy)
        assert plain[index].ranks is None and (mine.ranks[mine.greedy] == 1).all()


@given(st.text("ab \n\t", max_size=30), st.data())
def test_every_token_belongs_to_one_word(text, data):
    words = word_spans(text)
    assert [text[start:end] for start, end in words] == (text.split() or [text])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    spans = np.array([*zip(cuts, cuts[1:], strict=False)], np.int64).reshape(-1, 2)
    found = words_of_tokens(words, spans)
    assert len(found) == len(spans) and (np.diff(found) >= 0).all()
    for word, (start, end) in zip(found, spans, strict=True):
        first = len(text[:end]) - len(text[start:end].lstrip())
        if text[start:end].strip():  # the word of its first visible character
            assert words[word][0] <= first < words[word][1]


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["score", *map(str, arguments)], env={"COLUMNS": "140"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def rows(*arguments):
    return list(csv.DictReader(io.StringIO(run(*arguments, "--csv"), newline="")))


def test_rows_in_a_file(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("some words", "utf-8")
    asked = (checkpoint, tmp_path / "text.txt", "--csv", "--words")
    printed = run(*asked)
    assert run(*asked, "--output", tmp_path / "scores.csv") == ""
    assert (tmp_path / "scores.csv").read_text() == printed
    with pytest.raises(ArgumentError, match="--overwrite"):
        run(*asked, "--output", tmp_path / "scores.csv")


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_rows_equal_transformers(framework, checkpoint, expected, tmp_path):
    files = [tmp_path / f"{number}.txt" for number in range(len(TEXTS))]
    for file, text in zip(files, TEXTS, strict=True):
        file.write_bytes(text.encode())
    tokens = rows(checkpoint, *files, "--framework", framework)
    words = rows(checkpoint, *files, "--framework", framework, "--words")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for file, text in zip(files, TEXTS, strict=True):
        mine = [row for row in tokens if row["text"] == str(file)]
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert [int(row["id"]) for row in mine] == encoded["input_ids"]
        spans = [(int(row["start"]), int(row["end"])) for row in mine]
        assert spans == encoded["offset_mapping"]
        assert [row["token"] for row in mine] == [text[start:end] for start, end in spans]
        values = [[float(row[name]) for row in mine] for name in ("nats", "rank", "entropy")]
        check(expected([tokenizer.bos_token_id, *encoded["input_ids"]]), *values)
        for row in mine:
            assert float(row["bits"]) == pytest.approx(float(row["nats"]) / math.log(2), rel=1e-6)
        summed = [row for row in words if row["text"] == str(file)]
        assert [row["characters"] for row in summed] == text.split()
        for row in summed:
            own = [float(token["nats"]) for token in mine if token["word"] == row["word"]]
            assert int(row["tokens"]) == len(own)
            assert float(row["nats"]) == pytest.approx(sum(own), rel=1e-6)


def test_a_table_and_a_text_of_every_line(checkpoint, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text("first line\n\nthird line\n")
    found = rows(checkpoint, file, "--lines")
    assert {row["text"] for row in found} == {f"{file}:1", f"{file}:3"}
    assert "perplexity" in run(checkpoint, file)


def test_a_bos_that_is_spelled_has_no_bytes(checkpoint, tmp_path):
    for name, text in (("plain", "hello"), ("spelled", "<bos>hello")):
        (tmp_path / name).write_text(text)
    table = run(checkpoint, tmp_path / "plain", tmp_path / "spelled")
    one, other = (line.split("│")[2:] for line in table.splitlines() if str(tmp_path)[:9] in line)
    assert one == other


def test_no_state_is_written_if_a_text_cannot_be_scored(checkpoint, tmp_path):
    for name, text in (("one", "hello"), ("two", "<bos>")):
        (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match="two has no token to score"):
        run(checkpoint, tmp_path / "one", tmp_path / "two", "--states", tmp_path / "states")
    assert not (tmp_path / "states").exists()


def test_a_file_whose_name_is_not_utf8(checkpoint, tmp_path):
    file = tmp_path / os.fsdecode(b"b\xffad.txt")
    file.write_text("hello")
    found = rows(checkpoint, file, "--states", tmp_path / "states")
    name = f"{tmp_path}/b\ufffdad.txt"
    assert {row["text"] for row in found} == {name}
    with safe_open(tmp_path / "states" / "0.safetensors", "np") as saved:
        assert saved.metadata()["text"] == name


@pytest.mark.parametrize("framework", ["torch", ci("jax")])
def test_states_follow_the_equations(framework, checkpoint, tmp_path, monkeypatch):
    """Each state from the one before it by equations (1) to (4) of the paper, in float64."""
    opened, files = Checkpoint(checkpoint), [tmp_path / f"{n}.txt" for n in range(len(TEXTS))]
    for file, text in zip(files, TEXTS, strict=True):
        file.write_bytes(text.encode())
    folder = tmp_path / "states"
    run(checkpoint, *files, "--framework", framework, "--states", folder)
    model = Evaluator(checkpoint, framework=framework)
    for index, text in enumerate(TEXTS):
        with safe_open(folder / f"{index}.safetensors", "np") as saved:
            assert saved.metadata() == {
                "text": str(files[index]),
                "checkpoint": str(checkpoint),
                "dtype": "float32",
            }
            found = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
        tokens = found.pop("tokens")
        assert tokens.tolist() == model.score([text])[0].tokens.tolist()
        # Compare with `griffin-eval read`, which saves the state before the last token.
        kept = model.read(tokens.tolist()).tensors
        names = set()
        for layer, kind in enumerate(opened.config.block_types):
            own = {key.rpartition(".")[2]: x for key, x in found.items() if f"s.{layer}." in key}
            names |= {f"layers.{layer}.{name}" for name in own}
            assert all(x.dtype == np.float32 and len(x) == len(tokens) for x in own.values())
            if kind == "recurrent":
                np.testing.assert_allclose(
                    own["h"][-2], kept[f"layers.{layer}.h"], rtol=1e-4, atol=1e-5
                )
                check_recurrence(opened, layer, own)
            else:
                for name in ("k", "v"):
                    last = kept[f"layers.{layer}.{name}"]
                    np.testing.assert_allclose(
                        own[name][:-1][-len(last) :], last, rtol=1e-4, atol=1e-5
                    )
        assert names == set(found)
        # The share of the state that the gates leave, read in chunks of another size.
        monkeypatch.setattr(half_lives, "CHUNK", 7)
        twin = load_runner(checkpoint, framework=framework)
        cuts = [cut for cut in (3, 6, 7, 10) if cut <= len(tokens)]
        given = {"framework": framework, "model": twin.model}
        for layer, shares in half_lives.left(opened, tokens, 3, cuts, **given):
            log_a = found[f"layers.{layer}.log_a"].astype(np.float64)
            expected = [np.exp(log_a[3:cut].sum(0)) for cut in cuts]
            np.testing.assert_allclose(shares.T, expected, rtol=1e-4)
        monkeypatch.undo()
    with pytest.raises(ArgumentError, match="an empty folder"):
        run(checkpoint, *files, "--states", folder)


def check_recurrence(opened: Checkpoint, layer: int, own: dict[str, np.ndarray]) -> None:
    def parameter(name: str) -> np.ndarray:
        prefix = f"model.layers.{layer}.temporal_block.rg_lru."
        return opened.numpy(prefix + name).astype(np.float64)

    x = own["x"].astype(np.float64)
    for name in ("recurrent_gate", "input_gate"):
        weight, bias = parameter(f"{name}_weight"), parameter(f"{name}_bias")
        blocks = np.split(x, len(weight), 1)
        z = [block @ w + b for block, w, b in zip(blocks, weight, bias, strict=True)]
        expected = 1 / (1 + np.exp(-np.concatenate(z, 1)))
        np.testing.assert_allclose(own[name], expected, rtol=1e-4, atol=1e-6)
    log_a = -8 * np.log1p(np.exp(parameter("recurrent_param"))) * own["recurrent_gate"]
    np.testing.assert_allclose(own["log_a"], log_a, rtol=1e-4, atol=1e-7)
    h = np.zeros_like(x[0])
    for t in range(len(x)):
        a = np.exp(log_a[t]) if t else 0.0  # the first token starts a document
        h = a * h + np.sqrt(1 - a**2) * own["input_gate"][t] * x[t]
        np.testing.assert_allclose(own["h"][t], h, rtol=1e-3, atol=1e-5)


def test_bad_input_is_one_sentence(checkpoint, tmp_path):
    for content, more, said in (
        (None, [], "No such file"),
        (b"  \n", [], "has no text"),
        (b"\xff\xfe", [], "is not UTF-8"),
        (b"words", ["--words"], "add --csv"),
        (b"words", ["--output", "scores.csv"], "add --csv"),
    ):
        file = tmp_path / "text.txt"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ArgumentError, match=said):
            run(checkpoint, file, *more)


def test_only_a_file_is_replaced(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("words")
    (tmp_path / "link").symlink_to(text)
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("link", "is a link"),
        ("pipe", "is a device or a pipe"),
        (".", "is a folder"),
        ("text.txt/below", "is no folder: name another path"),
    ):
        with pytest.raises(ArgumentError, match=said):
            run(checkpoint, text, "--csv", "-o", tmp_path / name, "--overwrite")
    with pytest.raises(ArgumentError, match="or --overwrite"):
        run(checkpoint, text, "--csv", "-o", text)


def instances(kind, task, arguments):
    return [
        Instance(kind, {}, args, index, (task, doc, 1))
        for doc, (args, index) in enumerate(arguments)
    ]


@pytest.mark.parametrize("framework", ["torch", ci("jax")])
def test_token_scores_of_every_kind_of_request(framework, checkpoint, expected, tmp_path):
    folder = tmp_path / "scores"
    lm = GriffinLM(pretrained=str(checkpoint), framework=framework, token_scores=str(folder))
    pairs = [((TEXTS[0], " yes"), 0), ((TEXTS[0], " certainly not"), 1)]
    answers = lm.loglikelihood(instances("loglikelihood", "choice", pairs))
    (rolling,) = lm.loglikelihood_rolling(
        instances("loglikelihood_rolling", "whole", [((TEXTS[0],), 0)])
    )
    asked = {"max_gen_toks": 4, "until": []}
    (said,) = lm.generate_until(instances("generate_until", "said", [((TEXTS[0], asked), 0)]))
    lines = {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in folder.iterdir()
    }
    assert set(lines) == {"choice", "whole", "said"}
    assert [(line["doc_id"], line["index"]) for line in lines["choice"]] == [(0, 0), (1, 1)]
    for line, (logprob, _) in zip(lines["choice"], answers, strict=True):
        assert -sum(line["nats"]) == pytest.approx(logprob, rel=1e-6)
    assert -sum(lines["whole"][0]["nats"]) == pytest.approx(float(rolling), rel=1e-6)
    (generated,) = lines["said"]
    assert generated["rank"] == [1] * 4 and generated["task"] == "said"
    assert lm.tokenizer.decode(generated["tokens"], skip_special_tokens=True) == said
    bos = lm.tokenizer.bos_token_id
    for name, before in (("whole", [bos]), ("said", lm.tok_encode(TEXTS[0]))):
        (line,) = lines[name]
        whole = expected([*before, *line["tokens"]])
        own = [part[len(before) - 1 :] for part in whole]
        check(own, line["nats"], line["rank"], line["entropy"])
        assert len(line["texts"]) == len(line["tokens"])
    with pytest.raises(ArgumentError, match="files of an earlier run"):
        GriffinLM(pretrained=str(checkpoint), framework=framework, token_scores=str(folder))


def test_a_folder_of_token_scores_is_made_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="below cannot be written: Not a directory"):
        TokenScoreFiles(str(tmp_path / "file" / "below"), None, 0)


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_token_states_of_every_kind_of_request(framework, checkpoint, tmp_path):
    folder, given = tmp_path / "scores", {"pretrained": str(checkpoint), "framework": framework}
    lm = GriffinLM(**given, token_scores=str(folder), token_states=True)
    lm.loglikelihood(instances("loglikelihood", "choice", [((TEXTS[0], " yes"), 0)]))
    lm.loglikelihood_rolling(instances("loglikelihood_rolling", "whole", [((TEXTS[1],), 0)]))
    asked = {"max_gen_toks": 4, "until": []}
    lm.generate_until(instances("generate_until", "said", [((TEXTS[0], asked), 0)]))
    cleared = [((TEXTS[0], " yes", name), 0) for name in ("nothing", "recurrent")]
    lm.loglikelihood_ablated(instances("loglikelihood", "cleared", cleared))
    model = Evaluator(checkpoint, framework=framework)
    contexts = {
        "choice": lm.tok_encode(TEXTS[0].rstrip()),  # lm-eval's way: space goes with what follows
        "whole": [lm.tokenizer.bos_token_id],
        "said": lm.tok_encode(TEXTS[0]),
    }
    for name, before in contexts.items():
        line = json.loads((folder / f"{name}.jsonl").read_text())
        assert line["states"] == f"{name}.0.0.0.safetensors"
        states = load_file(folder / line["states"])
        assert states["tokens"].tolist() == [*before, *line["tokens"]]
        expected = model.layer_states(states["tokens"].tolist())
        assert set(states) == set(expected)
        assert all(np.array_equal(states[key], expected[key]) for key in states)
    lines = [json.loads(line) for line in (folder / "cleared.jsonl").read_text().splitlines()]
    assert [line["states"] is None for line in lines] == [False, True]
    (tmp_path / "cut").mkdir()  # a run that ended between its two files leaves this
    (folder / "whole.0.0.0.safetensors").rename(tmp_path / "cut" / "whole.0.0.0.safetensors")
    with pytest.raises(ArgumentError, match="files of an earlier run"):
        GriffinLM(**given, token_scores=str(tmp_path / "cut"), token_states=True)
    with pytest.raises(ArgumentError, match="token_states= needs token_scores="):
        GriffinLM(**given, token_states=True)

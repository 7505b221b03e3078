"""Shared prefixes are tokenised once, and the ids equal those of lm-eval's own code."""

from pydoc_data.topics import topics
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from packaging.version import Version
from slow import examples, slow

from griffin_eval.engine.stats import Stats
from griffin_eval.lm.encoding import Encoding, joined
from griffin_eval.lm.model import GriffinLM
from griffin_eval.lm.requests import Requests
from griffin_eval.tasks.long_text import documents
from griffin_eval.text import shared_prefixes
from griffin_eval.text.boundaries import boundaries_of_json
from griffin_eval.text.load import load_tokenizer
from griffin_eval.text.shared_prefixes import encode_all

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")

TEXT = "\n".join(topics.values())[:60_000]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

awkward = st.sampled_from(
    [
        *SPECIAL,
        *(" ", "  ", "   ", "\n", "\n\n", " \n", "\n ", "\t", "\r\n", "\u00a0", "\u3000", "\x1c"),
        *("▁", "a▁", "▁▁b", "don't", "'s", "'", "...", ".\n", "x=1;", "12345", "é", "e\u0301"),
        *("\u0308", "東京", "🙂", "👨‍👩", "\u200b", "\x00", "the", " the", "The unary", "ﬁ", "½"),
    ]
)
texts = st.lists(st.text(max_size=3) | awkward, max_size=8).map("".join)
many = settings(max_examples=examples(15))


def byte_level(folder, pre_tokenizer):
    """Write transformers' tokenizer.json, trained on text that ships with Python."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT[:30_000].splitlines(keepends=True), trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMES)
    made.save_pretrained(folder)


def split(pattern):
    pre = tokenizers.pre_tokenizers
    regex = pre.Split(tokenizers.Regex(pattern), "isolated")
    return pre.Sequence([regex, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2(folder):
    byte_level(folder, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))


def llama(folder):
    byte_level(folder, split(LLAMA))


def unknown_pattern(folder):
    byte_level(folder, split(r"\w+\s?|[^\w]+"))


def piece_model(folder, **changes):
    """Write a tokenizer.model like Gemma's, apart from ``changes`` to sentencepiece's options."""
    gemma = {
        "model_type": "bpe",
        "vocab_size": 900,
        "byte_fallback": True,
        "split_digits": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<mask>", "\n", "\n\n", "▁▁", "▁▁▁▁"],
    }
    for token, piece in enumerate(SPECIAL[:4]):
        gemma |= {f"{piece[1:-1]}_id": token, f"{piece[1:-1]}_piece": piece}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=filter(str.strip, TEXT.splitlines()),
        model_prefix=str(folder / "tokenizer"),
        minloglevel=2,
        **gemma | changes,
    )


def gemma(folder):
    piece_model(folder)


def gemma_json(folder):
    """Write transformers' conversion of Gemma's tokenizer.model: one BPE over the whole text."""
    piece_model(folder)
    transformers.PreTrainedTokenizerFast.from_pretrained(folder, **NAMES).save_pretrained(folder)
    assert not (folder / "tokenizer.json").read_text().count("Prepend")


def gemma_phrases(folder):
    """Write a Gemma-like tokenizer.model whose pieces may contain spaces."""
    piece_model(folder, split_by_whitespace=False)


def unigram(folder):
    piece_model(folder, model_type="unigram")


def dummy_prefix(folder):
    piece_model(folder, add_dummy_prefix=True)


def nfkc(folder):
    piece_model(folder, normalization_rule_name="nfkc")


KINDS = {  # characters at which a text may be cut
    gpt2: " \n",
    llama: " ",
    unknown_pattern: "",
    gemma: " \n",
    # From 5.24 on transformers splits texts at user-defined symbols: here they stay whole.
    gemma_json: " \n" if Version(transformers.__version__) < Version("5.24") else "",
    gemma_phrases: "\n",
    unigram: "",
    dummy_prefix: "",
    nfkc: "",
}


# One tokenizer of each kind: cut at both, cut at spaces, SentencePiece, never cut.
CHOSEN = (gpt2, llama, gemma, unknown_pattern)


@pytest.fixture(
    scope="module",
    params=[kind if kind in CHOSEN else slow(kind) for kind in KINDS],
    ids=lambda kind: kind.__name__,
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp(kind.__name__)
    kind(folder)
    return load_tokenizer(folder)


class Bare(GriffinLM):
    """The text side of the model, without weights; remembers what would be scored."""

    def __init__(self, tokenizer, add_bos, prefix):
        TemplateLM.__init__(self)
        arguments = SimpleNamespace(max_length=None, on_merge="separate")
        opened = {"add_bos": add_bos, "prefix_token_id": prefix, "state": None}
        self.opened = SimpleNamespace(tokenizer=tokenizer, arguments=arguments, **opened)
        self.tokenizer, self._token_scores, self._chunks = tokenizer, None, None
        self.requests, self.stats = Requests(self.opened), Stats()

    def _loglikelihood_tokens(self, requests, *_, **__):
        self.asked = [(pair, list(a), list(b)) for pair, a, b in requests]
        return []


def instances(pairs):
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def test_where_each_kind_may_be_cut(kind, tokenizer):
    assert tokenizer.boundaries == KINDS[kind]


@many
@given(
    start=texts,
    pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=5),
    add_bos=st.booleans(),
    prefix=st.sampled_from([1, 2]),
)
@example(start="", pairs=[("", "<bos>x"), ("<bos>", "x"), (" \n", " x")], add_bos=True, prefix=2)
def test_ids_are_lm_evals(tokenizer, start, pairs, add_bos, prefix):
    pairs = [(start + context, continuation or "x") for context, continuation in pairs]
    pairs += [(context, " and" + continuation) for context, continuation in pairs]
    lm = Bare(tokenizer, add_bos, prefix)
    TemplateLM.loglikelihood(lm, instances(pairs), disable_tqdm=True)
    found = lm.requests.encoding.pairs(pairs)
    assert [(pair, list(a), list(b)) for pair, a, b in found] == lm.asked


@many
@given(start=texts, ends=st.lists(texts, max_size=6))
def test_ids_of_texts_are_those_of_each_alone(tokenizer, start, ends):
    some = [start + end for end in ends]
    found = encode_all(tokenizer, some)
    assert [ids.tolist() for ids in found] == [tokenizer.encode(text) for text in some]
    assert all(ids.dtype == np.int32 for ids in found)


@many
@given(start=texts, ends=st.lists(texts, max_size=4), size=st.integers(1, 12))
def test_pieces_have_the_ids_and_the_places_of_the_whole(tokenizer, start, ends, size):
    some = [start + end for end in ends]
    whole = [documents.Document("", text, *documents._tokens(tokenizer, text)) for text in some]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefixes, "_BATCH", size)
        found = encode_all(tokenizer, some, [7])
        for ids, text, expected in zip(found, some, whole, strict=True):
            assert ids.tolist() == [7, *tokenizer.encode(text)]
            starts, clean = documents._tokens(tokenizer, text)
            assert starts.tolist() == expected.token_starts.tolist()
            assert clean.tolist() == expected.clean.tolist()


def test_texts_that_go_on_share_their_ids(tokenizer):
    encoding = Encoding(tokenizer, True, 2)
    pairs = [("The unary minus", " operator"), ("The unary minus operator", " yields the")]
    found = encoding.pairs(pairs)
    ids = [joined(context, continuation) for _, context, continuation in found]
    for (_, context, continuation), both in zip(found, ids, strict=True):
        assert both.tolist() == [*context, *continuation] and both.dtype == np.int32
        if " " in tokenizer.boundaries:
            assert np.shares_memory(both, context) and np.shares_memory(both, continuation)
    assert np.shares_memory(*ids) == (" " in tokenizer.boundaries)


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer):
        self._tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text):
        self.characters += len(text)
        return self._tokenizer.encode(text)

    def encode_batch(self, some):
        self.characters += sum(map(len, some))
        return self._tokenizer.encode_batch(some)


def test_a_context_is_tokenised_once(tokenizer):
    book = TEXT if tokenizer.boundaries else TEXT[:2000]
    pairs = [
        (f"{book}\nQuestion {i}: what is {TEXT[i * 9 : i * 9 + 20]}?\nAnswer:", answer)
        for i in range(16)
        for answer in (" yes", " no", " neither of them", " both of them")
    ]
    counting = Counting(tokenizer)
    lm = Bare(counting, True, 2)
    lm.loglikelihood(instances(pairs))
    if tokenizer.boundaries:
        assert counting.characters < 1.05 * len(book)
    else:  # every text once, whatever it contains
        contexts = {context for context, _ in pairs}
        whole = {context + continuation for context, continuation in pairs}
        assert counting.characters == sum(map(len, contexts | whole))
    last = lm.asked[-1]
    assert tuple(last[1:]) == TemplateLM._encode_pair(lm, *pairs[-1])


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_look_around_rule_cuts_out(flag):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert boundaries_of_json(tokenizer) == " \n"
    tokenizer.add_tokens([tokenizers.AddedToken("<mask>", **{flag: True})])
    assert boundaries_of_json(tokenizer) == ""


@pytest.mark.parametrize("content", ["New York", "New▁York"])
def test_added_tokens_with_a_space_inside_are_not_cut(content):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens([content])
    assert boundaries_of_json(tokenizer) == "\n"


def test_fields_that_sentencepiece_does_not_know(tmp_path):
    """sentencepiece keeps a number in place of the trainer's settings, and a group of fields."""
    gemma(tmp_path)
    file = tmp_path / "tokenizer.model"
    content = file.read_bytes()
    for extra, boundaries in ((b"\x10\x07", ""), (b"\xab\x01\x08\x07\xac\x01", " \n")):
        file.write_bytes(content + extra)
        assert load_tokenizer(tmp_path).boundaries == boundaries

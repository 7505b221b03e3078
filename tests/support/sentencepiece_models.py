"""Small sentencepiece models, trained on text that ships with Python."""

import pydoc_data.topics

import sentencepiece

TEXT = "\n".join(pydoc_data.topics.topics.values())[:200_000]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
TURNS = ["<start_of_turn>", "<end_of_turn>"]


def train_sentencepiece(folder, **changes):
    """Train a model with Gemma's options (BPE, byte fallback, split digits) and ``changes``."""
    gemma = {
        "model_type": "bpe",
        "vocab_size": 1200,
        "byte_fallback": True,
        "split_digits": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<mask>", *TURNS, "\n", "\n\n", "▁▁", "▁▁▁▁"],
    }
    for token, piece in enumerate(SPECIAL):
        gemma |= {f"{piece[1:-1]}_id": token, f"{piece[1:-1]}_piece": piece}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=filter(str.strip, TEXT.splitlines()),
        model_prefix=str(folder / "tokenizer"),
        minloglevel=2,
        **gemma | changes,
    )
    (folder / "tokenizer.vocab").unlink()
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))

"""Write a tiny RecurrentGemma checkpoint with a byte-level tokenizer into the folder argument."""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

folder = sys.argv[1]

special = ["<pad>", "<eos>", "<bos>", "<unk>"]
alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.post_processor = processors.TemplateProcessing(
    single="<bos> $A", special_tokens=[("<bos>", special.index("<bos>"))]
)
names = {f"{token[1:-1]}_token": token for token in special}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)

torch.manual_seed(0)
config = RecurrentGemmaConfig(
    vocab_size=len(alphabet),
    hidden_size=32,
    lru_width=32,
    intermediate_size=192,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_hidden_layers=3,
    attention_window_size=16,
    pad_token_id=special.index("<pad>"),
    eos_token_id=special.index("<eos>"),
    bos_token_id=special.index("<bos>"),
)
RecurrentGemmaForCausalLM(config).save_pretrained(folder)

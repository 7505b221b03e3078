"""Undamaged checkpoints, tokenizers and tables of names for the fuzzer."""

import dataclasses
import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
from parity import weights
from sentencepiece_models import train_sentencepiece
from tiny_checkpoints import CONFIG, write_all

from griffin_eval.converters.containers.orbax.reader import open_orbax
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.manifest import MANIFEST_FILE

STATE_TOKENS = [1, 2, 3, 4, 5, 6, 7, 8] * 4


def write_seeds(root: Path) -> None:
    """Write a folder for every target of `targets.TARGETS`, under the target's name."""
    made = root / "made"
    write_all(made)
    for name, source in {
        "safetensors": "griffin",
        "sharded": "sharded",
        "torch": "deepmind-torch",
        "ocdbt": "deepmind-flax",
        "config": "hf",
        "own-config": "griffin",
        "manifest": "griffin",
    }.items():
        shutil.copytree(made / source, root / name)
    # Libraries give the expected result here; a manifest would refuse every damaged file first.
    for name in ("safetensors", "sharded", "torch", "config", "own-config"):
        (root / name / MANIFEST_FILE).unlink()
    _write_flax(made / "deepmind-flax", root)
    _write_names(made / "deepmind-torch", root / "names")
    _write_tokenizers(root)
    _write_adapter(made / "source", root / "adapter")
    _write_quantised(made / "source", root)
    _write_states(made / "griffin", root)
    _write_requests(root / "http")
    shutil.rmtree(made)


def _write_states(model: Path, root: Path) -> None:
    """Write a saved state beside its model, and a folder of states."""
    from griffin_eval import Evaluator
    from griffin_eval.states.state_cache import StateCache

    evaluator = Evaluator(model, framework="torch", device="cpu")
    state = evaluator.read(STATE_TOKENS)
    shutil.copytree(model, root / "state" / "model")
    state.save(root / "state" / "book.state")
    origin = state.origin
    cache = StateCache(
        root / "state-cache", 1 << 30, CONFIG, origin.weights_sha256, None, origin.dtype, "torch"
    )
    *_, longest = cache.beginning().longer(np.array(STATE_TOKENS), len(STATE_TOKENS))
    cache.save(longest.key, np.array(STATE_TOKENS), state.tensors)
    scored = longest.tokens - 1
    top = {"top_tokens": np.ones((scored, 1), int), "top_logprobs": np.full((scored, 1), -1.0)}
    logprobs = np.linspace(-9, -2, scored)
    cache.save_scores(longest.scores_key("float32"), {"logprobs": logprobs} | top)
    (root / "state-cache" / "origin.json").write_text(json.dumps(origin.weights_sha256))


def _write_requests(folder: Path) -> None:
    """Write bodies of requests to a server, each named after its route."""
    folder.mkdir()
    ids = [257, 97, 98, 32, 99]
    said = [{"role": "user", "content": "a é"}, {"role": "assistant", "content": "b"}]
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": ["\n", "ab"]}
    bodies = {
        "completions": {"model": "bytes", "prompt": "The é", "max_tokens": 3, "stream": False}
        | sampling
        | {"n": 2, "logprobs": 2, "echo": True, "user": "me", "presence_penalty": 0},
        "completions-ids": {"prompt": [ids, ids[:2]], "max_tokens": 0, "echo": True, "logprobs": 1},
        "completions-stream": {"prompt": "a", "max_tokens": 4, "stream": True, "logprobs": 0}
        | {"stream_options": {"include_usage": True}, "stop": "b"},
        "chat": {"messages": said, "max_completion_tokens": 3, "temperature": 0}
        | {"logprobs": True, "top_logprobs": 2, "stream": True, "tools": []},
        "generate": {"prompt": "a b", "max_tokens": 2} | sampling,
        "tokenize": {"prompt": "a <é>", "add_special_tokens": True},
        "detokenize": {"tokens": ids},
    }
    for name, body in bodies.items():
        (folder / f"{name}.json").write_text(json.dumps(body))


def _write_quantised(base: Path, root: Path) -> None:
    """Write quantised copies of a base for the libraries that are installed."""
    from importlib.util import find_spec

    if find_spec("bitsandbytes") is not None:
        import torch
        from bitsandbytes import functional
        from safetensors.torch import load_file, save_file

        in_4, in_8 = {}, {}
        for name, value in load_file(base / "model.safetensors").items():
            in_4[name] = in_8[name] = value
            if value.ndim == 2 and name.endswith(".weight") and "embed" not in name:
                packed, state = functional.quantize_4bit(
                    value, blocksize=64, compress_statistics="mlp" in name, quant_type="nf4"
                )
                parts = state.as_dict(packed=True)
                in_4[name] = packed
                in_4 |= {f"{name}.{part}": part_value for part, part_value in parts.items()}
                packed, scale, _ = functional.int8_vectorwise_quant(value.half())
                in_8[name], in_8[f"{name.removesuffix('weight')}SCB"] = packed, scale
                form = f"{name.removesuffix('weight')}weight_format"
                in_8[form] = torch.zeros((), dtype=torch.uint8)
        for folder, tensors in ((root / "bitsandbytes-4", in_4), (root / "bitsandbytes-8", in_8)):
            folder.mkdir()
            save_file(tensors, folder / "model.safetensors")
            shutil.copy(base / "config.json", folder)
    if find_spec("gguf") is not None:
        from gguf_files import candle, stored, write_gguf
        from parity import BASE

        config = dataclasses.replace(BASE, vocab_size=11, num_layers=2, width=64, lru_width=64)
        config = dataclasses.replace(config, mlp_width=64, num_heads=1, gate_blocks=1)
        config = dataclasses.replace(config, block_pattern=("recurrent", "local_attention"))
        tensors = candle(weights(config), "Q4_0")
        for name, kind in (
            ("final_norm.weight", "F16"),
            ("layers.0.channel_pre_norm.weight", "BF16"),
        ):
            tensors[f"model.{name}"] = stored(weights(config)[f"model.{name}"], kind)
        (root / "gguf").mkdir()
        write_gguf(root / "gguf" / "model.gguf", tensors)
    if find_spec("mlx") is not None:
        from adapters import write_base
        from parity import BASE
        from quantised import write_mlx

        config = dataclasses.replace(BASE, vocab_size=11, num_layers=2)
        config = dataclasses.replace(config, block_pattern=("recurrent", "local_attention"))
        write_base(base.parent / "wide", config)
        write_mlx(root / "mlx", base.parent / "wide", "bfloat16", 3, 32)


def _write_adapter(base: Path, folder: Path) -> None:
    """Write a base and an adapter of some of its layers."""
    from adapters import write_adapter

    shutil.copytree(base, folder / "base")
    targets = ["linear_x", "q_proj", "down_proj"]
    write_adapter(folder / "adapter", base, target_modules=targets)


def _write_flax(source: Path, root: Path) -> None:
    """Write a msgpack file of Flax, and folders of arrays as older Orbax did."""
    import orbax.checkpoint as ocp
    from flax import serialization

    tree: dict = {}
    with open_orbax(source) as reader:
        for name in reader.tensors:
            *path, last = name.split("/")
            group = tree
            for key in path:
                group = group.setdefault(key, {})
            group[last] = reader.tensors[name].numpy()
    (root / "msgpack").mkdir()
    encoded = serialization.to_bytes({"params": tree, "step": np.int32(7)})
    (root / "msgpack" / "checkpoint").write_bytes(encoded)
    for name, zarr3 in (("zarr", False), ("zarr3", True)):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=zarr3)
        ocp.Checkpointer(handler).save(root / name, tree)
    for name in ("msgpack", "zarr", "zarr3"):
        shutil.copy(source / "config.json", root / name)
    for name in ("zarr", "zarr3"):
        shutil.copy(source / MANIFEST_FILE, root / name)


def _write_names(source: Path, folder: Path) -> None:
    """Write a file with foreign names and a table with every operation and ignored tensors."""
    import torch

    folder.mkdir()
    state = torch.load(source / "model.pt", weights_only=True)
    shutil.copy(source / "config.json", folder)
    by_parameter = {rule.canonical: rule for rule in FORMATS["deepmind-torch"].table}
    tensors, rows = {"step": torch.ones(2), "bias": torch.zeros(3)}, []

    def row(**keys) -> None:
        rows.append("\n[[tensor]]")
        rows.extend(f"{key} = {json.dumps(value)}" for key, value in keys.items())

    def join(foreign: str, ends: tuple[str, ...]) -> None:
        """Concatenate parameters in one tensor."""
        names = [f"model.layers.{{layer}}.temporal_block.{end}" for end in ends]
        theirs = [by_parameter.pop((name,)).foreign for name in names]
        for i in range(CONFIG.num_layers):
            parts = [state.pop(name.replace("{layer}", str(i)), None) for name in theirs]
            if parts[0] is not None:
                tensors[foreign.replace("{layer}", str(i))] = torch.cat(parts)
        row(foreign=foreign, canonical=names, op="cut", axis=0)

    join("xy.{layer}.w", ("linear_x.weight", "linear_y.weight"))
    join("qkv.{layer}", ("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    absent = "model.layers.{layer}.temporal_block.linear_out.bias"
    gone = by_parameter.pop((absent,)).foreign
    state = {k: v for k, v in state.items() if not fnmatch(k, gone.replace("{layer}", "*"))}
    row(canonical=[absent], op="absent means zeros")
    for canonical, rule in by_parameter.items():
        if canonical == ("lm_head.weight",):
            continue
        keys = {"foreign": rule.foreign, "canonical": list(canonical), "op": rule.op.name}
        if rule.foreign.endswith("norm.scale"):
            keys["op"] = "minus one"
        if canonical == ("model.embed_tokens.weight",):
            keys |= {"op": "scale by", "factor": "1/sqrt(width)"}
        row(**keys)
    head = ["ignore = ['step', 'opt_state/*']", "title = 'ours'", "differs = []"]
    check = ["\n[[check]]", "foreign = 'bias'", "value = 0.0"]
    config = ["\n[config]", "visible_keys = 5", "rope_fraction = 0.5"]
    torch.save(state | tensors, folder / "model.pt")
    (folder / "names.toml").write_text("\n".join([*head, *rows, *check, *config]) + "\n")


def _write_tokenizers(root: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    model = root / "tokenizer-model"
    model.mkdir()
    # The smallest vocabulary with every kind of piece.
    train_sentencepiece(model, vocab_size=400, user_defined_symbols=["<mask>", "\n", "▁▁"])
    (model / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([str(weights(CONFIG).keys())] * 9, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bpe.token_to_id("<bos>"))]
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe, **special).save_pretrained(
        root / "tokenizer-json"
    )

"""Write the checkpoints, adapters and texts that the cases read to a new folder (the argument).

It runs once, in the environment BEFORE; both environments get copies of the same files.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file, save_file

SHIPPED = {
    "bytes": "bytes_griffin",
    "heads": "induction_heads_griffin",
    "hawk": "induction_heads_hawk",
    "mqa": "induction_heads_mqa",
}
BOOK = "Judith Hoffman: 8118401194\nIsaac Li: 6247546817\nConnie Mason: 9309456671\n"
WEIGHT = "model.layers.1.temporal_block.linear_x.weight"


def griffin_eval(*arguments) -> str:
    """Run the command of this environment and return what it printed."""
    program = Path(sys.executable).with_name("griffin-eval")
    return subprocess.run(
        [program, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def copied(name: str, source: Path) -> Path:
    """Copy a checkpoint without its manifest and cards, so that it can be changed."""
    folder = Path(shutil.copytree(source, name))
    for extra in ("griffin_manifest.json", "README.md", "README_source.md"):
        (folder / extra).unlink(missing_ok=True)
    return folder


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, **changes) -> None:
    """Replace tensors by arrays, or remove those that are None."""
    path = folder / "model.safetensors"
    weights = load_file(path) | changes
    save_file({name: array for name, array in weights.items() if array is not None}, path)


def write_checkpoints() -> None:
    """Write valid checkpoints: the shipped ones, and copies in other formats."""
    for name, shipped in SHIPPED.items():
        shutil.copytree(griffin_eval("checkpoints", shipped).strip(), name)
    griffin_eval("convert", "bytes", "model", "--to", "hf", "--dtype", "float32")
    griffin_eval("convert", "bytes", "orbax", "--to", "griffin-orbax")
    for step in (100, 200):
        griffin_eval("convert", "heads", f"training/checkpoint-{step}", "--to", "griffin")
    edit_config(copied("llama", Path("model")), model_type="llama")
    plain = copied("plain", Path("model"))  # a copy like those of other programs
    griffin_eval("convert", "plain", "flax-alone", "--to", "deepmind-flax")
    for name in ("config.json", "griffin_manifest.json"):
        Path("flax-alone", name).unlink()
    write_gguf(plain, Path("gguf"))
    write_quantised(plain, Path("quantised"))
    write_foreign(plain, Path("foreign"))
    write_adapter(plain, Path("adapter"))


def write_gguf(source: Path, folder: Path) -> None:
    """Write matrices in Q8_0 and Q4_0 and the other tensors in float32."""
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", "recurrent-gemma")
    kinds = (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0)
    for i, (name, array) in enumerate(load_file(source / "model.safetensors").items()):
        if array.ndim == 2 and array.shape[1] % 32 == 0 and "rg_lru" not in name:
            writer.add_tensor(
                name, gguf.quants.quantize(array, kinds[i % 2]), raw_dtype=kinds[i % 2]
            )
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.copy(source / "config.json", folder)
    shutil.copytree(folder, "gguf-alone")
    Path("gguf-alone/config.json").unlink()


def write_quantised(source: Path, folder: Path) -> None:
    """Write matrices in 8 bits in groups of 64, as MLX does."""
    folder.mkdir()
    tensors = {}
    for name, array in load_file(source / "model.safetensors").items():
        if array.ndim != 2 or array.shape[1] % 64 or "rg_lru" in name:
            tensors[name] = array
            continue
        groups = array.astype(np.float32).reshape(len(array), -1, 64)
        biases = groups.min(2, keepdims=True)
        scales = (groups.max(2, keepdims=True) - biases) / 255
        numbers = np.rint((groups - biases) / np.maximum(scales, 1e-30)).astype(np.uint8)
        module = name.removesuffix(".weight")
        tensors[name] = numbers.reshape(len(array), -1).view(np.uint32)
        tensors[f"{module}.scales"], tensors[f"{module}.biases"] = scales[..., 0], biases[..., 0]
    save_file(tensors, folder / "model.safetensors")
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    edit_config(folder, quantization={"group_size": 64, "bits": 8, "mode": "affine"})


def write_foreign(source: Path, folder: Path) -> None:
    """Write the embedding times 8, transposed maps and norms plus 1 under foreign names."""
    folder.mkdir()
    weights, rows, tensors = load_file(source / "model.safetensors"), {}, {}
    for name, array in weights.items():
        parts = name.removeprefix("model.").split(".")
        foreign = "net/" + "/".join(parts[1:] if parts[0] == "layers" else parts)
        row = {"canonical": name, "op": "as it is"}
        if parts[0] == "layers":
            row["canonical"] = ".".join(["model", "layers", "{layer}", *parts[2:]])
        if name.endswith("embed_tokens.weight"):
            row |= {"op": "scale by", "factor": 0.125}
            array = array * 8
        elif "norm" in name:
            row["op"], array = "minus one", array + 1
        elif array.ndim == 2 and "rg_lru" not in name:
            row["op"], array = "transpose", array.T
        row["foreign"] = foreign.replace("net/" + parts[1], "net/layer_{layer}", 1)
        row["foreign"] = row["foreign"] if parts[0] == "layers" else foreign
        rows[row["foreign"]] = row
        tensors[row["foreign"].replace("{layer}", parts[1])] = np.ascontiguousarray(array)
    save_file(tensors | {"step": np.arange(3)}, folder / "weights.safetensors")
    lines = ['ignore = ["step"]', "[config]", "visible_keys = 256"]
    lines += ["logits_soft_cap = 30.0", "embedding_scale = true"]
    for row in rows.values():
        lines += ["[[tensor]]", *(f"{key} = {json.dumps(value)}" for key, value in row.items())]
    Path("names.toml").write_text("\n".join(lines))
    Path("wrong-names.toml").write_text('[[tensor]]\nforeign = "x"\ncanonical = "model.nothing"\n')


def write_adapter(base: Path, folder: Path) -> None:
    """Write a LoRA adapter of rank 2 as peft saves it."""
    folder.mkdir()
    draw, tensors = np.random.default_rng(0), {}
    for name, array in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(("linear_x", "q_proj", "down_proj")):
            rows, columns = array.shape
            for part, shape in (("lora_A", (2, columns)), ("lora_B", (rows, 2))):
                values = 0.1 * draw.standard_normal(shape).astype(np.float32)
                tensors[f"base_model.model.{module}.{part}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"}
    config |= {"base_model_name_or_path": "base", "bias": "none", "use_rslora": False}
    config |= {"target_modules": ["linear_x", "q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    Path(shutil.copytree(folder, "pissa"), "adapter_config.json").write_text(
        json.dumps(config | {"init_lora_weights": "pissa"})
    )


class Hostile:
    """An object whose pickle calls a function."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def write_damaged() -> None:
    """Write unusable checkpoints, each with one fault."""
    plain, weights = Path("plain"), load_file("plain/model.safetensors")
    changed = weights[WEIGHT].copy()
    changed[3, 5] += 1
    edit_weights(Path(shutil.copytree("model", "tampered")), **{WEIGHT: changed})
    spoilt = weights[WEIGHT].copy()
    spoilt[3, 5] = np.nan
    edit_weights(copied("nan", plain), **{WEIGHT: spoilt})
    edit_weights(
        copied("misshaped", plain),
        **{"model.final_norm.weight": np.zeros(5, np.float32), WEIGHT: None},
        extra=np.zeros(3, np.float32),
    )
    path = copied("truncated", plain) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    path = copied("lying", plain) / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])
    path = copied("unreadable", plain) / "config.json"
    path.write_text(path.read_text()[:40])
    (copied("no-config", plain) / "config.json").unlink()
    for path in copied("no-tokenizer", plain).glob("tokenizer*"):
        path.unlink()
    path = Path(shutil.copytree("orbax", "orbax-cut"), "manifest.ocdbt")
    path.write_bytes(path.read_bytes()[:40])
    Path(shutil.copytree("orbax", "orbax-metadata"), "_METADATA").write_text('{"tree_metadata": 3}')
    torch.save({"x": Hostile()}, "hostile.pt")
    Path("hostile-pickle.pt").write_bytes(pickle.dumps({"x": Hostile()}))
    shutil.copytree("model", "damaged-manifest")
    Path("damaged-manifest/griffin_manifest.json").write_text("{")


def write_texts() -> None:
    """Write texts, prompts and templates."""
    texts = Path("texts")
    texts.mkdir()
    (texts / "code.txt").write_text("import os\nimport sys\n\ndef main():\n    return 'é €'\n")
    (texts / "book.txt").write_text(BOOK)
    (texts / "latin.txt").write_bytes(b"caf\xe9\n")
    (texts / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (texts / "broken.jinja").write_text("{% for m in %}")
    (texts / "queue.jsonl").write_text('{"recipe": "selective_copy", "speed": 3}\n')


if __name__ == "__main__":
    os.makedirs(sys.argv[1])
    os.chdir(sys.argv[1])
    write_texts()
    write_checkpoints()
    write_damaged()

"""Flip a random bit of a checkpoint, read it, and repeat: `make flips COUNT=1000`.

griffin-eval, which checks the manifest, and the library of the format (safetensors, PyTorch, Orbax,
gguf) read each damaged copy. GGUF files have no checksums, and only griffin-eval writes manifests,
so GGUF files are also read without one. The outcomes are:

- refused: an error;
- no effect: the same weights, bit for bit;
- silent: other weights without an error.
"""

import argparse
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

import griffin_eval
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.manifest import MANIFEST_FILE

sys.path.append(str(Path(__file__).parents[1] / "support"))

from gguf_files import candle, write_candle  # noqa: E402
from parity import BASE, weights  # noqa: E402
from tiny_checkpoints import write_griffin  # noqa: E402

# Orbax stores values below 1 kB beside their names, which have checksums.
CONFIG = dataclasses.replace(BASE, vocab_size=512, width=64, mlp_width=128, lru_width=64)
Weights = dict[str, bytes]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides errors that Orbax's threads print
    silent = 0
    print(
        "| format | read by | flips | refused | no effect | silent |\n|---|---|---:|---:|---:|---:|"
    )
    with tempfile.TemporaryDirectory() as folder:
        whole = write_checkpoints(Path(folder))
        for name, (library, read) in PEERS.items():
            readers = {"griffin-eval": with_manifest, library: read}
            if name == "gguf":
                readers["griffin-eval, no manifest"] = without_manifest
            counts = flips(whole / name, readers, options.count, options.seed)
            for reader, count in counts.items():
                figures = " | ".join(str(count[k]) for k in ("refused", "no effect", "silent"))
                print(f"| {name} | {reader} | {options.count} | {figures} |", flush=True)
            silent += counts["griffin-eval"]["silent"]
    return 1 if silent else 0


def write_checkpoints(folder: Path) -> Path:
    """Write the same weights in every format of `PEERS`, each with its manifest."""
    write_griffin(folder / "plain", CONFIG)
    for name in PEERS:
        if name in FORMATS:
            convert(folder / "plain", folder / name, name)
    (folder / "gguf").mkdir()
    write_candle(folder / "gguf" / "model.gguf", candle(weights(CONFIG), "Q8_0"))
    shutil.copy(folder / "plain" / "config.json", folder / "gguf")
    convert(folder / "gguf", folder / "dequantised", "griffin")
    for file in ("config.json", MANIFEST_FILE):
        shutil.copy(folder / "dequantised" / file, folder / "gguf")
    return folder


def convert(source: Path, out: Path, target: str) -> None:
    griffin_eval.convert(source, out, to=target).close()


def flips(
    whole: Path, readers: dict[str, Callable[[Path], Weights]], count: int, seed: int
) -> dict[str, Counter[str]]:
    """Flip bits and return the number of each outcome by reader."""
    draw, counts = np.random.default_rng(seed), {reader: Counter() for reader in readers}
    right = {reader: read(whole) for reader, read in readers.items()}
    files = [p.relative_to(whole) for p in sorted(whole.rglob("*")) if p.is_file()]
    files = [p for p in files if p.name not in (MANIFEST_FILE, "config.json")]
    sizes = np.array([(whole / p).stat().st_size for p in files])
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(whole, copy)
            path = copy / files[draw.choice(len(files), p=sizes / sizes.sum())]
            content = bytearray(path.read_bytes())
            content[draw.integers(len(content))] ^= 1 << draw.integers(8)
            path.write_bytes(content)
            for reader, read in readers.items():
                try:
                    found = read(copy)
                except Exception:  # any error of a library counts as a refusal
                    counts[reader]["refused"] += 1
                else:
                    counts[reader]["no effect" if found == right[reader] else "silent"] += 1
    return counts


def with_manifest(folder: Path) -> Weights:
    """Convert the folder and return the weights that the conversion writes."""
    from safetensors.numpy import load_file

    out = folder.parent / "out"
    try:
        convert(folder, out, "griffin")
        return {k: v.tobytes() for k, v in load_file(out / "model.safetensors").items()}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def without_manifest(folder: Path) -> Weights:
    """Convert the folder without its manifest and return the weights."""
    manifest, aside = folder / MANIFEST_FILE, folder.parent / "aside"
    manifest.rename(aside)
    try:
        return with_manifest(folder)
    finally:
        aside.rename(manifest)


def by_safetensors(folder: Path) -> Weights:
    from safetensors.numpy import load_file

    return {k: v.tobytes() for k, v in load_file(folder / "model.safetensors").items()}


def by_torch(folder: Path) -> Weights:
    import torch

    loaded = torch.load(next(folder.glob("*.pt")), weights_only=True)
    return {k: v.numpy().tobytes() for k, v in loaded.items()}


def by_orbax(folder: Path) -> Weights:
    import jax
    import orbax.checkpoint as ocp

    tree = ocp.PyTreeCheckpointer().restore(folder.absolute())
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def by_gguf(folder: Path) -> Weights:
    import gguf

    tensors = gguf.GGUFReader(folder / "model.gguf").tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).tobytes() for t in tensors}


PEERS = {
    "griffin": ("safetensors", by_safetensors),
    "deepmind-torch": ("PyTorch", by_torch),
    "griffin-orbax": ("Orbax", by_orbax),
    "gguf": ("gguf", by_gguf),
}


if __name__ == "__main__":
    sys.exit(main())

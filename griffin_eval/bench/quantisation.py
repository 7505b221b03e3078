"""What it costs to quantise one group of parameters alone, on the checkpoints that ship.

Each group is quantised as ``convert --quantize`` would store it, also where that leaves it alone:
what is no matrix in runs of `COLUMNS` elements. The model then runs in float32 in PyTorch, and its
next tokens are compared with those of the whole model: `DIVERGENCE` in nats, and the bits that a
target takes more. The byte model reads Python's manual, which it was not trained on; the others
answer questions of induction heads that are longer than those they were trained on.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from griffin_eval.checkpoints import folder
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.codecs.encode import ENCODINGS
from griffin_eval.converters.codecs.encoding import Encoding, bands, is_matrix
from griffin_eval.crosscheck.logits import divergence, log_softmax
from griffin_eval.layout import ParamSpec, param_specs
from griffin_eval.model_torch.griffin import Griffin
from griffin_eval.model_torch.loading import load

COLUMNS = 64  # elements of a run: whole groups and blocks
CHUNK = 1024  # tokens that the model reads at a time
ROWS, LENGTH = 16, 1024  # of the induction heads


class Document(NamedTuple):
    """What a model reads, and the targets that are asked for.

    Attributes:
        tokens: int64 [B, T].
        targets: int64 [B, T].
        asked: bool [B, T].
        unit: what a target is.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    asked: torch.Tensor
    unit: str


Group = tuple[str, Callable[[ParamSpec, Encoding], bool]]


def _ends(*ends: str) -> Callable[[ParamSpec, Encoding], bool]:
    return lambda spec, _: spec.name.endswith(ends)


GROUPS: tuple[Group, ...] = (
    ("embedding, output head", lambda spec, _: "vocab" in spec.axes),
    (
        "linear maps of attention",
        _ends(*(f"{name}_proj.weight" for name in ("q", "k", "v", "o"))),
    ),
    (
        "linear maps of recurrent blocks",
        _ends(*(f"linear_{name}.weight" for name in ("x", "y", "out"))),
    ),
    (
        "linear maps of MLPs",
        _ends(*(f"{name}_proj.weight" for name in ("gate", "up", "down"))),
    ),
    ("RG-LRU: gate matrices", _ends("gate_weight")),
    ("RG-LRU: gate biases", _ends("gate_bias")),
    ("RG-LRU: Λ", _ends("recurrent_param")),
    ("convolution: taps", _ends("conv_1d.weight")),
    ("norms", _ends("norm.weight")),
    ("other biases", lambda spec, _: spec.name.endswith(".bias")),
    ("what --quantize takes", lambda spec, encoding: encoding.takes(spec)),
    ("everything", lambda spec, encoding: True),
)


def measure(name: str, tokens: int) -> Iterator[dict[str, Any]]:
    """What each group costs, in each encoding.

    Args:
        name: of a checkpoint that ships.
        tokens: of the text that a language model reads.

    Yields:
        ``checkpoint``, ``group``, ``parameters``, ``encoding``, ``unit``, the mean and largest
        divergence ``kl`` and ``largest_kl`` in nats, and ``bits`` and ``more_bits`` of a target. A
        group that the model does not have is left out.
    """
    checkpoint = Checkpoint(folder(name))
    specs = param_specs(checkpoint.config)
    document = _document(checkpoint, name, tokens)
    model = load(checkpoint, torch.float32).eval()
    weights = dict(model.named_parameters())
    whole = _logits(model, document)
    bits = _bits(whole, document)
    for encoding in ENCODINGS.values():
        stored = {
            spec.name: torch.from_numpy(quantised(checkpoint.numpy(spec.name), spec, encoding))
            for spec in specs.values()
        }
        for group, belongs in GROUPS:
            chosen = [spec for spec in specs.values() if belongs(spec, encoding)]
            if not chosen:
                continue
            kept = {spec.name: weights[spec.name].data for spec in chosen}
            for spec in chosen:
                weights[spec.name].data = stored[spec.name]
            found = _logits(model, document)
            for key, value in kept.items():
                weights[key].data = value
            kl = divergence(whole, found)
            yield {
                "checkpoint": name,
                "group": group,
                "parameters": sum(spec.size for spec in chosen),
                "encoding": encoding.name,
                "unit": document.unit,
                "kl": float(kl.mean()),
                "largest_kl": float(kl.max()),
                "bits": bits,
                "more_bits": _bits(found, document) - bits,
            }


def quantised(array: np.ndarray, spec: ParamSpec, encoding: Encoding) -> np.ndarray:
    """A parameter as it is read back from an encoding, in float32.

    Args:
        array: the parameter, of one of the dtypes that are quantised.
        spec: its own.
        encoding: that it is stored in, also if that leaves it alone.
    """
    rows = array
    if not is_matrix(spec) or array.shape[1] % COLUMNS:
        flat = np.ascontiguousarray(array).reshape(-1)
        padding = np.repeat(flat[-1:], -flat.size % COLUMNS)
        rows = np.concatenate([flat, padding]).reshape(-1, COLUMNS)
    parts = [encoding.encode(band).values for band in bands([rows], 1)]
    values = np.concatenate(parts).astype(np.float32)
    return values.reshape(-1)[: array.size].reshape(array.shape)


def print_results(console: Console, rows: list[dict[str, Any]]) -> None:
    """Prints a table for each checkpoint."""
    for name in dict.fromkeys(row["checkpoint"] for row in rows):
        own = [row for row in rows if row["checkpoint"] == name]
        unit, bits = own[0]["unit"], own[0]["bits"]
        table = Table(title=f"{name}: {bits:.4f} bits per {unit}")
        for heading in ("quantised alone", "parameters"):
            table.add_column(heading, justify="left" if heading[0] == "q" else "right")
        for encoding in ENCODINGS:
            table.add_column(f"{encoding}: KL", justify="right")
            table.add_column("bits", justify="right")
        for group in dict.fromkeys(row["group"] for row in own):
            found = {row["encoding"]: row for row in own if row["group"] == group}
            counts = {f"{row['parameters']:,}" for row in found.values()}
            cells = []
            for encoding in ENCODINGS:
                row = found.get(encoding)
                cells += ["", ""] if row is None else [f"{row['kl']:.2g}", _signed(row)]
            table.add_row(group, " or ".join(sorted(counts)), *cells)
        console.print(table)
    console.print("KL in nats, the mean of all targets; bits: what a target takes more.")


def _signed(row: dict[str, Any]) -> str:
    return f"{row['more_bits']:+.2g}"


def _document(checkpoint: Checkpoint, name: str, tokens: int) -> Document:
    if name.startswith("induction_heads"):
        from griffin_eval.training.recipes import induction_heads

        rows = [induction_heads(np.random.default_rng(row), LENGTH) for row in range(ROWS)]
        read, targets, asked = (
            torch.from_numpy(np.stack([getattr(row, key) for row in rows]))
            for key in ("tokens", "targets", "asked")
        )
        return Document(read.long(), targets.long(), asked, "answer")
    from pydoc_data.topics import topics

    from griffin_eval.text.load import load_tokenizer
    from griffin_eval.text.tokenizer import default_add_bos, encode_with_bos

    text = "\n\n".join(topics[topic] for topic in sorted(topics))
    tokenizer = load_tokenizer(checkpoint.folder)
    add_bos = default_add_bos(tokenizer, checkpoint.config)
    ids = torch.tensor([encode_with_bos(tokenizer, text[: 2 * tokens], add_bos)[: tokens + 1]])
    return Document(ids[:, :-1], ids[:, 1:], torch.ones_like(ids[:, 1:]).bool(), "byte")


@torch.inference_mode()
def _logits(model: Griffin, document: Document) -> np.ndarray:
    """The logits of the targets that are asked for, float32 [N, V], row by row in time."""
    rows, length = document.tokens.shape
    state, found = model.init_state(rows, length), []
    for tokens, asked in zip(
        document.tokens.split(CHUNK, 1), document.asked.split(CHUNK, 1), strict=True
    ):
        hidden, state = model.step(tokens, torch.full((rows,), tokens.shape[1]), state)
        found.append(model.logits(hidden[asked]))
    return torch.cat(found).numpy()


def _bits(logits: np.ndarray, document: Document) -> float:
    """The bits of a target, in the mean."""
    chunks = zip(document.targets.split(CHUNK, 1), document.asked.split(CHUNK, 1), strict=True)
    targets = torch.cat([targets[asked] for targets, asked in chunks]).numpy()
    taken = log_softmax(logits)[np.arange(len(targets)), targets]
    return float(-taken.mean() / np.log(2))

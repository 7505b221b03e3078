"""The state after a text as a file, from which any process can continue in either framework."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import griffin_eval
from griffin_eval.config import ADDED, GriffinConfig
from griffin_eval.converters.files import existing_kind, writing
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.json_files import write_whole
from griffin_eval.messages import brief, is_sha256

LAYOUT = 2  # version of the file's layout
_KEY = "griffin_eval_state"  # key of the file's metadata
_MAX_BYTES = 1 << 34  # larger files would hold keys of many million tokens


class Origin(NamedTuple):
    """Everything that a state depends on."""

    layout: int  # version of the file's layout
    weights_sha256: str
    config: dict[str, Any]  # config of the model, with overrides, as JSON
    tokenizer: str | None  # digest of the tokenizer's files; None for a text of token ids
    dtype: str  # dtype of the model
    bos: bool  # whether the text began with BOS
    tokens: int  # number of tokens of the text
    last_token: int  # id of its last token, which the state does not include yet
    tokens_sha256: str  # hash of the ids as little-endian int32
    text: str  # name of the text
    template: str | None  # `template_name` of the chat template around the text
    written_by: str  # version and framework, for information


class SavedState(NamedTuple):
    """The state of a model before the last token of a text.

    Attributes:
        tensors: Tensors by name, in float32 (float64 for a float64 model), which holds every
            narrower dtype exactly. After N = ``origin.tokens - 1`` tokens: for recurrent layers
            ``layers.I.h`` [L] and ``layers.I.conv`` [K, L]; for attention ``layers.I.k`` and
            ``layers.I.v`` [C, J] of the last C <= N tokens, oldest first.
    """

    origin: Origin
    tensors: dict[str, np.ndarray]

    @property
    def read(self) -> int:
        """Number of tokens in the state."""
        return self.origin.tokens - 1

    @property
    def sha256(self) -> str:
        """Hash of origin and tensors."""
        return hash_of(json.dumps(self.origin, sort_keys=True), self.tensors)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file atomically. Failures raise BadInput."""
        metadata = self.origin._asdict() | {"state_sha256": self.sha256}
        save_whole(Path(path), self.tensors, {_KEY: json.dumps(metadata)})


def hash_of(text: str, tensors: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of a text, and of tensors with their names."""
    whole = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype.name} {tensor.shape}\n".encode())
        whole.update(tensor.tobytes())
    return whole.hexdigest()


def check_replaceable(path: Path) -> None:
    """Refuse a path that cannot be written, or is anything but an earlier saved state."""
    found = existing_kind(path)
    if found == "a file":
        if _KEY in _metadata(path):
            return
        found = "a file that is no saved state"
    if found is None:
        return
    raise ArgumentError(
        f"{path} is not replaced: expected a new file or an earlier saved state, found {found}; "
        "name another file"
    )


def _metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty if it cannot be read as one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def save_whole(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically. Failures raise BadInput."""
    from safetensors.numpy import save

    content = save(tensors, metadata)
    with writing(path):
        write_whole(path, content)


def read_whole(path: Path, what: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file, or raise CheckpointError. ``what``
    is the expected content, for the message."""
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load

    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, too many: expected {what}")
        tensors = load(path.read_bytes())
        with safe_open(path, "np") as file:
            return tensors, file.metadata() or {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, KeyError, ValueError) as error:  # also dtypes that numpy lacks
        raise CheckpointError(
            f"{path} is no safetensors file ({brief(str(error))}): expected {what}"
        ) from None


def origin_of(
    config: GriffinConfig,
    weights_sha256: str,
    tokenizer: str | None,
    dtype: str,
    tokens: np.ndarray,
    *,
    bos: bool,
    text: str,
    framework: str,
    template: str | None = None,
) -> Origin:
    """Return the origin of a new state after int32 [N] token ids."""
    return Origin(
        LAYOUT,
        weights_sha256,
        config_of(config),
        tokenizer,
        dtype,
        bos,
        len(tokens),
        int(tokens[-1]),
        hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest(),
        text,
        template,
        f"griffin-eval {griffin_eval.__version__}, {framework}",
    )


def config_of(config: GriffinConfig) -> dict[str, Any]:
    """Return a config in the types of JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def tensors_of(layers: Sequence[Mapping[str, np.ndarray]], read: int) -> dict[str, np.ndarray]:
    """Return the tensors of a `SavedState` after ``read`` tokens from the states of the twins'
    layers, without a batch axis."""
    tensors: dict[str, np.ndarray] = {}
    for index, layer in enumerate(layers):
        for name, leaf in layer.items():
            if name in ("k", "v"):  # rows of tokens; leave out empty ones
                leaf = leaf[len(leaf) - min(read, len(leaf)) :]
            tensors[f"layers.{index}.{name}"] = leaf
    return tensors


def read_state(path: str | Path) -> SavedState:
    """Return a state that `SavedState.save` wrote, or raise CheckpointError."""
    path = Path(path)
    tensors, metadata = read_whole(path, "a state that griffin-eval read --save has written")
    if _KEY not in metadata:
        raise CheckpointError(
            f"{path} is no saved state: expected a file that griffin-eval read --save has written"
        )
    try:
        found = json.loads(metadata[_KEY])
        recorded, layout = found.pop("state_sha256"), found["layout"]
        state = SavedState(_checked(Origin(**found)), tensors) if layout == LAYOUT else None
        whole = state is not None and state.sha256 == recorded
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its metadata are not those of a saved state ({brief(str(error))})"
        ) from None
    if state is None:
        raise CheckpointError(
            f"{path} has layout {brief(layout)}, and this version reads {LAYOUT}: read the text "
            "again with griffin-eval read"
        )
    if not whole:
        raise CheckpointError(f"{path} is damaged: its hash does not match; read the text again")
    return state


def _checked(origin: Origin) -> Origin:
    """Return an origin from an untrusted file, or raise ValueError for wrong types and ranges."""
    types = {
        (str,): ("weights_sha256", "dtype", "tokens_sha256", "text", "written_by"),
        (str, type(None)): ("tokenizer", "template"),
        (int,): ("layout", "tokens", "last_token"),
        (bool,): ("bos",),
        (dict,): ("config",),
    }
    for kinds, names in types.items():
        for name in names:
            if type(value := getattr(origin, name)) not in kinds:
                raise ValueError(f"{name} is {brief(value)}")
    if not 2 <= origin.tokens < 1 << 31 or not 0 <= origin.last_token < 1 << 31:
        raise ValueError(f"{origin.tokens} tokens, and {origin.last_token} as the last one")
    for name in ("weights_sha256", "tokens_sha256"):
        if not is_sha256(getattr(origin, name)):
            raise ValueError(f"{name} is {brief(getattr(origin, name))}")
    return origin


def check_origin(
    path: str | Path,
    state: SavedState,
    config: GriffinConfig,
    tokenizer: str | None,
    dtype: str,
) -> None:
    """Check that a state belongs to this model, except for its weights, or raise ArgumentError with
    the differences. The tokenizer is not compared if either is None."""
    origin, mine = state.origin, config_of(config)
    defaults = json.loads(json.dumps({name: getattr(GriffinConfig, name) for name in ADDED}))
    theirs = defaults | origin.config
    differing = []
    for name in sorted({*mine, *theirs}):
        if (saved := theirs.get(name)) != (here := mine.get(name)):
            shown = name if name in mine else brief(name)
            differing.append(f"{shown} ({brief(saved)}, here {here!r})")
    if origin.dtype != dtype:
        differing.append(f"dtype ({brief(origin.dtype)[1:-1]}, here {dtype})")
    if None not in (origin.tokenizer, tokenizer) and origin.tokenizer != tokenizer:
        differing.append("the tokenizer")
    if differing:
        raise ArgumentError(
            f"state={path} was read by another model: it differs in {', '.join(differing)}; read "
            "the text again with griffin-eval read"
        )
    if not fits(state, config, dtype):
        raise ArgumentError(f"state={path} does not have the tensors of this model's layers")


def check_weights(path: str | Path, state: SavedState, weights_sha256: str) -> None:
    """Check that a state belongs to these weights, or raise ArgumentError."""
    if state.origin.weights_sha256 != weights_sha256:
        raise ArgumentError(
            f"state={path} was read with other weights ({state.origin.weights_sha256[:12]}…, here "
            f"{weights_sha256[:12]}…): read the text again with griffin-eval read"
        )


def fits(state: SavedState, config: GriffinConfig, dtype: str) -> bool:
    """Return whether a state has the tensors of a model, and a last token of its vocabulary."""
    wide = "float64" if dtype == "float64" else "float32"
    found = {name: (one.shape, one.dtype.name) for name, one in state.tensors.items()}
    expected = {name: (one, wide) for name, one in shapes_of(config, state.read).items()}
    return found == expected and state.origin.last_token < config.vocab_size


def shapes_of(config: GriffinConfig, read: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a state after ``read`` tokens."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index, kind in enumerate(config.block_types):
        if kind == "recurrent":
            shapes[f"layers.{index}.h"] = (config.lru_width,)
            shapes[f"layers.{index}.conv"] = (config.conv_width - 1, config.lru_width)
        else:
            keys = min(read, config.visible_keys - 1) if kind == "local_attention" else read
            shapes[f"layers.{index}.k"] = shapes[f"layers.{index}.v"] = (keys, config.kv_width)
    return shapes

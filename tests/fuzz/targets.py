"""Targets of the fuzzer: the files to damage, and the checks of each damaged checkpoint.

A case is a byte that chooses a file of the target's seed, followed by the file's content.
"""

import asyncio
import contextlib
import functools
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mutations import OUTSIDE
from tiny_checkpoints import CONFIG, holds_the_original
from typer.main import get_command

from griffin_eval.cli.main import app
from griffin_eval.converters.containers.orbax.reader import open_orbax
from griffin_eval.converters.containers.safetensors.reader import open_safetensors
from griffin_eval.converters.containers.torch_pt.reader import open_torch
from griffin_eval.errors import BadInput

_COMMAND = get_command(app)


class Target(NamedTuple):
    """A kind of file to damage.

    Attributes:
        damaged: Patterns of the seed's files to damage.
        run: Function that inspects, converts or loads a folder. It raises BadInput for a refusal,
            and AssertionError if the result is wrong.
    """

    damaged: tuple[str, ...]
    run: Callable[[Path, Path], None]


def command(*arguments: str | Path) -> bool:
    """Return whether a command succeeds. Its output must be Unicode; its errors are raised."""
    with io.TextIOWrapper(io.BytesIO(), "utf-8") as out, contextlib.redirect_stdout(out):
        return not _COMMAND.main([str(a) for a in arguments], standalone_mode=False)


def convert(source: Path, out: Path, *options: str | Path) -> None:
    """Convert a checkpoint; inspect it if refused, and otherwise in one case of ten."""
    try:
        assert command("convert", source, out, "--to", "griffin", *options)
    except BadInput as error:
        with contextlib.suppress(BadInput):  # inspect may refuse it, too
            command("inspect", source, *options)
        raise error
    if random.random() < 0.1:  # printing takes as long as the conversion
        assert command("inspect", source, *options), "converted, though an inspection objects"


def same_as_safetensors(source: Path, out: Path) -> None:
    from safetensors import safe_open

    convert(source, out)
    with open_safetensors(source) as folder:
        for file in folder.files():
            with safe_open(file, "np") as theirs:
                for name in theirs.keys():  # noqa: SIM118  (it is no dict)
                    expect_bits(folder.tensors[name].numpy(), theirs.get_tensor(name))


def same_as_torch(source: Path, out: Path, *options: str | Path) -> None:
    import torch

    convert(source, out, *options)
    (path,) = source.glob("*.pt")
    try:
        loaded = torch.load(path, weights_only=True)
    except Exception:  # torch may refuse a zip field that we ignore
        return
    for root in ("model_state_dict", "state_dict", "params"):
        if not any(isinstance(value, torch.Tensor) for value in loaded.values()):
            loaded = loaded.get(root, loaded)
    with open_torch(path) as file:
        for name in file.tensors:
            tensor = loaded
            for key in [name] if name in loaded else name.split("."):
                tensor = tensor[key if isinstance(tensor, dict) else int(key)]
            expect_bits(file.tensors[name].numpy(), tensor.contiguous().numpy())


def same_as_flax(source: Path, out: Path) -> None:
    from flax import serialization, traverse_util

    convert(source, out)
    try:
        tree = serialization.msgpack_restore((source / "checkpoint").read_bytes())
    except (ValueError, TypeError):  # flax may refuse a leaf that we leave out
        return
    values = {"/".join(map(str, k)): v for k, v in traverse_util.flatten_dict(tree).items()}
    with open_orbax(source) as folder:
        for name in folder.tensors:
            value = values[f"{folder.root}/{name}" if folder.root else name]
            expect_bits(folder.tensors[name].numpy(), np.asarray(value))


def as_its_manifest_says(source: Path, out: Path) -> None:
    convert(source, out)
    assert holds_the_original(out, config=False), "other weights than its manifest states"


def with_names(source: Path, out: Path) -> None:
    same_as_torch(source, out, "--names", source / "names.toml")


def with_adapter(source: Path, out: Path) -> None:
    """Merge an adapter, and compare with the product of its factors read by safetensors."""
    from safetensors import safe_open

    assert command(
        *("convert", source / "base", out, "--to", "griffin"),
        *("--adapter", source / "adapter"),
    )
    config = json.loads((source / "adapter" / "adapter_config.json").read_text())
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        return
    alpha = 8 if config.get("lora_alpha") is None else config["lora_alpha"]
    with (
        safe_open(source / "adapter" / "adapter_model.safetensors", "np") as adapter,
        safe_open(source / "base" / "model.safetensors", "np") as base,
        safe_open(out / "model.safetensors", "np") as merged,
    ):
        for name in base.keys():  # noqa: SIM118  (it is no dict)
            expected = base.get_tensor(name).astype(np.float64)
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in adapter.keys():  # noqa: SIM118
                a = adapter.get_tensor(f"{module}.lora_A.weight").astype(np.float64)
                b = adapter.get_tensor(f"{module}.lora_B.weight").astype(np.float64)
                rank = len(a) ** 0.5 if config.get("use_rslora") else len(a)
                with np.errstate(all="ignore"):
                    expected += alpha / rank * (b @ a)
                    limit = 1e-5 * (1 + np.abs(alpha) * (np.abs(b) @ np.abs(a)))
                    wrong = np.abs(merged.get_tensor(name) - expected) > limit
                assert not wrong.any(), f"{name} is not W + s B A"
            else:
                expect_bits(merged.get_tensor(name), base.get_tensor(name))


def same_as_bitsandbytes(source: Path, out: Path) -> None:
    """Dequantise and compare with bitsandbytes, whose code does not validate its input."""
    import torch
    from bitsandbytes import functional
    from safetensors.torch import load_file

    convert(source, out)
    stored, ours = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    for name, found in ours.items():
        packed = stored[name]
        parts = {k[len(name) + 1 :]: v for k, v in stored.items() if k.startswith(f"{name}.")}
        scale = stored.get(f"{name.removesuffix('weight')}SCB")
        if parts:
            state = functional.QuantState.from_dict(parts, torch.device("cpu"))
            packed = functional.dequantize_4bit(packed, state)
        elif scale is not None:
            packed = functional.int8_vectorwise_dequant(packed, scale)
        expect_same_numbers(found, packed)


def same_as_mlx(source: Path, out: Path) -> None:
    """Dequantise and compare with MLX's formula in exact arithmetic, rounded twice."""
    from safetensors.torch import load_file

    convert(source, out)
    stored, ours = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    settings = config.get("quantization") or config["quantization_config"]
    for name, found in ours.items():
        module, expected = name.removesuffix(".weight"), stored[name]
        if f"{module}.scales" in stored:
            scales, biases = (stored[f"{module}.{part}"] for part in ("scales", "biases"))
            bits = np.unpackbits(expected.numpy().view(np.uint8), bitorder="little")
            powers = 1 << np.arange(settings["bits"])
            numbers = bits.reshape(-1, settings["bits"]) @ powers
            groups = numbers.reshape(*scales.shape, -1)
            products = (scales[..., None].double() * torch_of(groups)).to(scales.dtype)
            expected = (products.double() + biases[..., None].double()).to(scales.dtype)
        expect_same_numbers(found, expected.reshape(found.shape))


def same_as_gguf(source: Path, out: Path) -> None:
    """Dequantise and compare with the gguf library, whose reader does not validate its input."""
    import gguf

    (path,) = source.glob("*.gguf")
    convert(path, out, "--visible-keys", "8", "--embedding-scale", "--logits-soft-cap", "30")
    plain = {"F16": np.float16, "F64": np.float64, "BF16": np.float32}
    with open_safetensors(out) as ours, np.errstate(all="ignore"):
        for tensor in gguf.GGUFReader(path).tensors:
            found, kind = ours.tensors[tensor.name].numpy(), tensor.tensor_type
            expected = tensor.data
            if kind.name not in ("F16", "F32", "F64"):
                expected = gguf.quants.dequantize(expected, kind)
            found = found.astype(np.float32) if kind.name == "BF16" else found
            assert found.dtype == plain.get(kind.name, np.float32), (found.dtype, kind)
            expected = expected.reshape(tuple(map(int, reversed(tensor.shape))))
            same = (found == expected) | (np.isnan(found) & np.isnan(expected))
            assert found.shape == expected.shape and same.all(), "other values than the library's"


def torch_of(array: np.ndarray):
    import torch

    return torch.from_numpy(array)


def expect_same_numbers(ours, theirs) -> None:
    """Assert equal dtypes, shapes and values; all NaNs count as equal."""
    import torch

    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (ours.dtype, theirs.dtype)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    assert torch.all(same), "other values than the library reads"


def load_tokenizer(source: Path, out: Path) -> None:
    """Load a tokenizer and use it."""
    from griffin_eval.text.load import load_tokenizer
    from griffin_eval.text.tokenizer import PROBE

    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode(PROBE)
    assert len(tokenizer.spans(PROBE)) == len(ids)
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(tokenizer.boundaries, str)


def go_on_from_state(source: Path, out: Path) -> None:
    """Score a text after a saved state whose hashes all match."""
    from griffin_eval.engine.scoring import NotFinite
    from griffin_eval.states.saved_state import check_origin, check_weights, read_state

    model, weights_sha256 = evaluator(source / "model")
    path, (runner,) = source / "book.state", model._model.runners
    saved = read_state(path)
    check_origin(path, saved, model.config, None, runner.dtype)
    check_weights(path, saved, weights_sha256)
    runner.start_from(saved)
    with contextlib.suppress(NotFinite):  # the file may hold any values
        model.score([[saved.origin.last_token, 3, 4]])


@functools.cache
def evaluator(folder: Path) -> Any:
    from griffin_eval import Evaluator

    model = Evaluator(folder, framework="torch", device="cpu")
    return model, model._model.weights_sha256


def take_from_state_cache(source: Path, out: Path) -> None:
    """Look up a state and scores in a folder; they must be the right ones or absent."""
    from seeds import STATE_TOKENS

    from griffin_eval.states.saved_state import SavedState
    from griffin_eval.states.state_cache import StateCache

    wrong = BadInput("what was kept was not taken")
    (file,), (scores_file,) = source.glob("*.state"), source.glob("*.scores")
    origin = json.loads((source / "origin.json").read_text())
    cache = StateCache(source, 1 << 30, CONFIG, origin, None, "float32", "torch")
    state = cache.load(file.name, np.array(STATE_TOKENS))
    scores = cache.load_scores(scores_file.name, len(STATE_TOKENS))
    if state is None or scores is None:
        raise wrong
    assert isinstance(state, SavedState) and file.name in cache
    assert np.array_equal(scores["logprobs"], np.linspace(-9, -2, len(STATE_TOKENS) - 1))


def ask_server(source: Path, out: Path) -> None:
    """Send the damaged body to a server in this process; raise BadInput if it refuses."""
    path = max(source.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    name = path.stem.partition("-")[0]
    address = f"/v1/{name}" if name == "completions" else f"/{name}"
    address = "/v1/chat/completions" if name == "chat" else address
    status, content = server().ask(address, path.read_bytes())
    if status == 200:
        events = content.split(b"\n\n") if content.startswith(b"data: ") else [content]
        answers = [json.loads(e.removeprefix(b"data: ")) for e in events if e.endswith(b"}")]
        assert answers and not any("error" in answer for answer in answers), content[:500]
        return
    error = json.loads(content)["error"]
    assert 400 <= status < 500 and error["code"] == status and error["type"], content[:500]
    raise BadInput(error["message"])


class ServerHere:
    """A server of the smallest shipped model, without a socket."""

    def __init__(self) -> None:
        from griffin_eval.checkpoints import folder
        from griffin_eval.model_arguments import parse_arguments
        from griffin_eval.opened import open_model
        from griffin_eval.server.app import make_app
        from griffin_eval.server.model import ServedModel, ServerOptions

        options = ServerOptions(name="bytes", chat_template="plain", max_tokens=48, queue=8)
        arguments = {"pretrained": folder("bytes_griffin"), "framework": "torch"}
        arguments |= {"device": "cpu", "state_budget": "50MB"}
        model = ServedModel(open_model(parse_arguments(arguments)), options)
        model.scheduler.start()
        self._app, self._loop = make_app(model), asyncio.new_event_loop()

    def ask(self, address: str, body: bytes) -> tuple[int, bytes]:
        """Return the status and content of the answer."""
        return self._loop.run_until_complete(self._post(address, body))

    async def _post(self, address: str, body: bytes) -> tuple[int, bytes]:
        import httpx

        transport = httpx.ASGITransport(self._app)  # raises errors that the server does not catch
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"Content-Type": "application/json"}
            answer = await client.post(address, content=body, headers=headers)
        return answer.status_code, answer.content


server = functools.cache(ServerHere)


def expect_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (ours.dtype, theirs.dtype)
    assert ours.tobytes() == theirs.tobytes(), "other values than the library reads"


TARGETS = {
    "safetensors": Target(("*.safetensors",), same_as_safetensors),
    "sharded": Target(("*.json", "*-00003-*"), same_as_safetensors),
    "torch": Target(("*.pt",), same_as_torch),
    "msgpack": Target(("checkpoint",), same_as_flax),
    "ocdbt": Target(("manifest.ocdbt", "d/*", "_*"), as_its_manifest_says),
    "zarr": Target(("*/.zarray", "_*", "*/0", "*/0.0"), as_its_manifest_says),
    "zarr3": Target(("*/zarr.json", "_*", "*/c/0", "*/c/0/0"), as_its_manifest_says),
    "config": Target(("config.json",), same_as_safetensors),
    "own-config": Target(("config.json",), same_as_safetensors),
    "manifest": Target(("griffin_manifest.json",), as_its_manifest_says),
    "names": Target(("names.toml",), with_names),
    "bitsandbytes-4": Target(("model.safetensors",), same_as_bitsandbytes),
    "bitsandbytes-8": Target(("model.safetensors",), same_as_bitsandbytes),
    "gguf": Target(("*.gguf",), same_as_gguf),
    "mlx": Target(("*.json", "*.safetensors"), same_as_mlx),
    "adapter": Target(("adapter/*.json", "adapter/*.safetensors"), with_adapter),
    "state": Target(("book.state",), go_on_from_state),
    "state-cache": Target(("*.state", "*.scores"), take_from_state_cache),
    "http": Target(("*.json",), ask_server),
    "tokenizer-json": Target(("*.json",), load_tokenizer),
    "tokenizer-model": Target(("tokenizer.model", "*.json"), load_tokenizer),
}


class Box:
    """A folder in which cases of one target run one after the other.

    Args:
        name: Name of the target.
        seed: Folder with the undamaged files.
        root: Empty folder for the checkpoint, and for a model beside it that no case may read.
    """

    def __init__(self, name: str, seed: Path, root: Path):
        self.target, self._seed = TARGETS[name], seed
        self.source, self._out = root / "source", root / "out"
        shutil.copytree(seed, self.source)
        self.files = sorted(
            path.relative_to(seed)
            for pattern in self.target.damaged
            for path in seed.glob(pattern)
            if path.is_file()
        )
        assert self.files
        self._canary = self.source.parent / OUTSIDE / "model.safetensors"
        self._canary.parent.mkdir()
        shutil.copy(next(p for p in seed.rglob("*") if p.is_file()), self._canary)
        os.utime(self._canary, (0, self._canary.stat().st_mtime))
        self._there = set(os.listdir(root))
        self._root = root
        self._opened: list[str] = []
        sys.addaudithook(self._watch)

    def file(self, case: bytes) -> Path:
        """Return the file that a case damages."""
        return self.files[case[0] % len(self.files)]

    def seeds(self) -> list[bytes]:
        """Return the cases that damage nothing."""
        return [bytes([i]) + (self._seed / file).read_bytes() for i, file in enumerate(self.files)]

    def run(self, case: bytes) -> None:
        """Run a case.

        Raises:
            AssertionError: The case read a file outside, left files behind, was refused in more
                than one line, or gave a wrong result.
            Exception: Any other error, which is a bug.
        """
        file = self.file(case)
        random.seed(case)  # reruns draw the same numbers
        self._opened.clear()
        (self.source / file).write_bytes(case[1:])
        try:
            self.target.run(self.source, self._out)
        except BadInput as error:
            message = str(error)
            assert message and "\n" not in message and len(message) < 10_000, message[:500]
            message.encode()  # fails for text that a terminal cannot show
            assert not self._out.exists(), "refused, but left its output"
        finally:
            left = set(os.listdir(self._root)) - self._there - {"out"}
            shutil.rmtree(self._out, ignore_errors=True)
            shutil.copyfile(self._seed / file, self.source / file)
        assert not left, f"left {left} beside its output"
        assert not self._opened, f"opened {self._opened[0]}"
        # Native code is covered, too: reading a file sets its access time.
        assert self._canary.stat().st_atime == 0, "read a file outside the checkpoint"

    def _watch(self, event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.fsdecode(arguments[0])
            if OUTSIDE in path or path == "/etc/passwd":
                self._opened.append(path)

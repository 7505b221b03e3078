"""--overwrite never replaces files that the conversion reads."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from slow import slow
from tiny_checkpoints import CONFIG, write_all
from typer.testing import CliRunner

from griffin_eval.cli.main import app
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import param_specs


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    write_all(folder)
    return folder


def _file(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    """Write a file with its config beside it."""
    folder = shutil.copytree(formats / "deepmind-torch", root / "folder")
    return folder / "model.pt", folder / "model.pt", []


def _step(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    """Write a training step whose config is in the folder of the run."""
    step = shutil.copytree(formats / "griffin", root / "run" / "100")
    (step / "config.json").rename(root / "run" / "config.json")
    return step, step, []


def _run(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    """Write a run, whose last step is read."""
    step = shutil.copytree(formats / "griffin-orbax", root / "run" / "100")
    shutil.copy(step / "config.json", root / "run")
    return root / "run", step, []


def _adapter(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    folder = root / "lora"
    folder.mkdir()
    module = "base_model.model.model.layers.0.mlp_block.up_proj"
    factors = {
        f"{module}.lora_A.weight": np.ones((1, CONFIG.width), "float32"),
        f"{module}.lora_B.weight": np.ones((CONFIG.mlp_width, 1), "float32"),
    }
    save_file(factors, folder / "adapter_model.safetensors")
    raw = {"peft_type": "LORA", "r": 1, "target_modules": r".*layers\.0\..*up_proj"}
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    return formats / "source", folder, ["--adapter", str(folder)]


def _tokenizer(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    """Write a model with its tokenizer in the parent folder, as Google publishes it."""
    source = shutil.copytree(formats / "griffin", root / "model")
    (root / "tokenizer.json").write_text("{}")
    return source, root / "tokenizer.json", []


def _names(formats: Path, root: Path) -> tuple[Path, Path, list[str]]:
    table = root / "tables" / "names.toml"
    table.parent.mkdir()
    (table.parent / "config.json").write_text("{}")  # makes the folder replaceable
    rows = [f"foreign = {name!r}\ncanonical = {name!r}\n" for name in param_specs(CONFIG)]
    table.write_text("".join(f"[[tensor]]\n{row}" for row in rows))
    return formats / "griffin", table.parent, ["--names", str(table)]


@pytest.mark.parametrize("case", [_file, _step, _run, _adapter, _tokenizer, _names])
def test_what_is_read_is_not_overwritten(case: Callable[..., tuple], formats, tmp_path):
    source, destination, options = case(formats, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = ["convert", source, destination, "--to", "griffin", "--overwrite", *options]
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert isinstance(done.exception, ArgumentError), done.output
    assert "is not overwritten, since that would remove" in str(done.exception)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("to", ["hf", "deepmind-torch"])
def test_only_checkpoints_are_overwritten(to, formats, tmp_path):
    (tmp_path / "notes.md").write_text("years")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "old.pt").write_bytes((formats / "deepmind-torch" / "model.pt").read_bytes())

    def convert(name: str) -> BaseException | None:
        arguments = ["convert", formats / "source", tmp_path / name, "--to", to, "--overwrite"]
        return CliRunner().invoke(app, [str(a) for a in arguments]).exception

    for name in ("notes.md", "pipe"):
        assert "since it is no checkpoint's file: name another" in str(convert(name))
    assert (tmp_path / "notes.md").read_text() == "years" and (tmp_path / "pipe").is_fifo()
    assert convert("old.pt") is None and (tmp_path / "old.pt").is_dir()


def _overwrite(formats: Path, destination: Path) -> BaseException | None:
    arguments = ["convert", formats / "source", destination, "--to", "griffin", "--overwrite"]
    return CliRunner().invoke(app, [str(a) for a in arguments]).exception


BESIDE = {  # files beside a checkpoint's files -> names in the refusal
    "thesis/chapter1.tex": "thesis/",
    "train.py": "train.py",
    "firmware.bin": "firmware.bin",
    ".git/config": ".git/",
    "a.pt b.pt": "a.pt; b.pt",
    "a.safetensors b.gguf": "a.safetensors; b.gguf",
    "100/_METADATA step_200/_METADATA": "100/; step_200/",
    "model.safetensors.index.json/mine": "model.safetensors.index.json/",
    "d/notes.txt": "d/notes.txt",
    "a.b/.zarray a.b/0.0 a.b/mine": "a.b/mine",
    "additional_chat_templates/a.jinja additional_chat_templates/a.txt": (
        "additional_chat_templates/a.txt"
    ),
    ".cache/huggingface/x.lock .cache/mine": ".cache/mine",
    "empty/": "empty/",
    "runs/Jan1/events.out.tfevents.1": "runs/",
}


@pytest.mark.parametrize("mark", [slow("config.json"), "model.safetensors", slow("old.pt")])
def test_nothing_but_a_checkpoint_is_removed(mark, formats, tmp_path):
    for number, (beside, expected) in enumerate(BESIDE.items()):
        folder = tmp_path / str(number)
        for name in (mark, *beside.split()):
            path = folder / name
            (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_text("years")
        before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
        said = str(_overwrite(formats, folder))
        after = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
        assert after == before, beside
        several = mark == "old.pt" and expected in ("a.pt; b.pt", "a.safetensors; b.gguf")
        expected += "; old.pt" * several
        assert (
            f"would remove what is not part of a checkpoint: {expected}; move it away" in said
            or (mark == "config.json" and "it is no checkpoint's folder: name another" in said)
        ), (beside, said)


SEVERAL = {  # files of several checkpoints, or of one beside something else -> refused names
    "model.safetensors ema.pt": "ema.pt",
    "model.safetensors other.safetensors": "other.safetensors",
    "pytorch_model.bin model-q4k.gguf": "model-q4k.gguf",
    "model.safetensors flax/_METADATA flax/notes.md": "flax/",
    "_METADATA best/_METADATA": "best/",
    "2b/_METADATA 9b/_METADATA tokenizer.model": "2b/; 9b/",
    "2b.pt 2b/_METADATA": "2b.pt; 2b/",
    "state/_METADATA state/notes.md": "state/notes.md",
}


def test_a_folder_of_several_checkpoints_is_not_replaced(formats, tmp_path):
    for number, (files, expected) in enumerate(SEVERAL.items()):
        folder = tmp_path / str(number)
        for name in files.split():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("years")
        said = str(_overwrite(formats, folder))
        assert f"would remove what is not part of a checkpoint: {expected}; move" in said, said
        assert all((folder / name).read_text() == "years" for name in files.split())


def test_a_folder_of_settings_alone_is_not_replaced(formats, tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert "since it is no checkpoint's folder" in str(_overwrite(formats, folder))
    assert (folder / "config.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["hf", "griffin", "griffin-orbax", "deepmind-flax", "sharded"])
def test_every_format_that_is_written_is_replaced(name, formats, tmp_path):
    folder = shutil.copytree(formats / name, tmp_path / "old")
    for page in ("LICENSE", "README_source.md", ".gitattributes", "USE_POLICY.md"):
        (folder / page).write_text("text")
    (folder / ".cache" / "huggingface" / "download").mkdir(parents=True)
    assert _overwrite(formats, folder) is None
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "config.json"}
    assert not (folder / "LICENSE").exists()


def _names_of_transformers(folder: Path) -> None:
    folder.mkdir()
    names = "config generation_config tokenizer tokenizer_config trainer_state added_tokens"
    names = [f"{name}.json" for name in (*names.split(), "special_tokens_map", "vocab")]
    names += ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "merges.txt"]
    names += ["optimizer.pt", "rng_state_1.pth", "training_args.bin", "tokenizer.model"]
    names += ["README.md", "chat_template.jinja", "random_states_0.pkl"]
    for name in names:
        (folder / name).write_bytes(b"")


def _orbax_step(folder: Path) -> None:
    import jax
    import orbax.checkpoint as ocp

    tree = {"a": {"b": np.ones((4, 4), np.float32)}}
    items = {
        "params": ocp.args.StandardSave(tree),
        "meta": ocp.args.JsonSave({"a": 1}),
        "rng": ocp.args.JaxRandomKeySave(jax.random.key(0)),
    }
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["x"])
    with ocp.CheckpointManager(folder.parent, options=options) as manager:
        manager.save(int(folder.name), args=ocp.args.Composite(**items), metrics={"x": 1.0})
        manager.wait_until_finished()


def _orbax_zarr(folder: Path) -> None:
    import orbax.checkpoint as ocp

    tree = {"a": {"b": np.ones((4, 4), np.float32)}, "c": np.float32(1)}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(folder, tree)


def _orbax_text(folder: Path) -> None:
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(folder, {"a": np.ones(3, np.float32), "b": "text", "c": 3})


def _torch(folder: Path) -> None:
    import torch

    folder.mkdir()
    torch.save({"a": torch.ones(2)}, folder / "2b-it.pt")
    (folder / "tokenizer.model").write_bytes(b"")


def _torch_shards(folder: Path) -> None:
    folder.mkdir()
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "vocab.json"):
        (folder / name).write_bytes(b"")


WRITERS = (_names_of_transformers, _orbax_step, _orbax_zarr, _orbax_text, _torch, _torch_shards)


@pytest.mark.parametrize("write", WRITERS)
def test_what_other_libraries_write_is_replaced(write, formats, tmp_path):
    folder = tmp_path / "run" / "100"
    folder.parent.mkdir()
    write(folder)
    assert _overwrite(formats, folder) is None
    assert (folder / "model.safetensors").is_file()


def test_a_run_of_steps_is_not_replaced(formats, tmp_path):
    """A run holds many checkpoints and other files of the training."""
    run = tmp_path / "run"
    run.mkdir()
    _orbax_step(run / "100")
    _orbax_zarr(run / "200")
    assert "what is not part of a checkpoint: 100/; 200/; move" in str(_overwrite(formats, run))
    assert (run / "100" / "params" / "_METADATA").is_file()


def test_a_file_that_is_no_checkpoint_is_not_replaced_for_its_name(formats, tmp_path):
    for name in ("notes.pt", "notes.safetensors", "notes.ckpt"):
        (tmp_path / name).write_text("years of notes")
        assert "since it is no checkpoint's file" in str(_overwrite(formats, tmp_path / name))
        assert (tmp_path / name).read_text() == "years of notes"
    for source in ("hf/model.safetensors", "deepmind-torch/model.pt"):
        file = shutil.copy(formats / source, tmp_path)
        assert _overwrite(formats, Path(file)) is None and Path(file).is_dir()

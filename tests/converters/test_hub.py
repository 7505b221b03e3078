"""Model lookup, downloads and uploads, with the hub's own client and a hub on this machine."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import commands
import huggingface_hub
import pytest
from hub_server import Fault, Hub
from slow import ci, slow
from typer.testing import CliRunner

import griffin_eval.converters.source.hub
from griffin_eval import convert, verify
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint, Overrides
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.plan import make_plan
from griffin_eval.converters.source.companions import tokenizer_folder
from griffin_eval.converters.source.hub import choose
from griffin_eval.converters.source.resolve import resolve, resolve_adapter
from griffin_eval.errors import BadInput, CheckpointError, MissingExtraError

# Without that list, missing files are noticed when the checkpoint is opened.
lists_files = pytest.mark.skipif(
    not hasattr(huggingface_hub, "get_cached_repo_tree"),
    reason="this client of the hub keeps no list of a repository's files",
)

BIN = Path(sys.executable).parent
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}


# Folders and hub ids.


@pytest.fixture
def asked(monkeypatch):
    """Replace the hub's download; return the list of its calls."""
    calls = []

    def download(*arguments):
        calls.append(arguments)
        return Path("downloaded")

    monkeypatch.setattr(griffin_eval.converters.source.hub, "download", download)
    return calls


def refusal(*arguments, **more) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_local_folders(asked, tmp_path, monkeypatch):
    (tmp_path / "models" / "two" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve("models/two") == Path("models/two")  # a folder takes precedence over a hub id
    assert resolve("models", subfolder="two/deep") == Path("models/two/deep")
    assert resolve("~/models") == tmp_path / "models"
    assert "has no subfolder 'three'" in refusal("models", subfolder="three")
    for outside in ("..", "two/../..", "/tmp", "two\\deep"):
        assert "must be a path within" in refusal("models", subfolder=outside)
        assert "must be a path within" in refusal("org/name", subfolder=outside)
    message = refusal("models/two", revision="main")
    assert "revision='main' only applies to a hub id" in message
    (tmp_path / "models" / "config.json").write_text("{}")
    message = refusal("models/config.json")
    assert message.startswith("models/config.json is no checkpoint: expected a folder that holds")
    assert "a file whose name ends with .pt, .pth, .bin, .ckpt, .gguf" in message
    (tmp_path / "models" / "model.safetensors").write_text("")
    message = refusal("models/config.json")
    assert message == "models/config.json is a file: expected the folder that holds it, models"
    (tmp_path / "models" / "2b.pt").write_text("")
    assert resolve("models/2b.pt") == Path("models/2b.pt")
    assert "revision='main' only applies to a hub id" in refusal("models/2b.pt", revision="main")
    assert "models/2b.pt is a file, which has no subfolder" in refusal(
        "models/2b.pt", subfolder="x"
    )
    assert not asked


@pytest.mark.parametrize(
    "path",
    ["", "./x", "../x", "/x", "x", "x/y/z", "x/", "~/x", "~no_such_user/x", "a\0b", "x/.y", "ü/y"],
)
def test_paths_never_go_to_the_hub(asked, path):
    assert "no such folder" in refusal(path)
    assert not asked


def test_hub_ids_do(asked):
    assert resolve("google/recurrentgemma-2b", revision="v1", subfolder="a") == Path("downloaded")
    assert asked == [("google/recurrentgemma-2b", "v1", "a")]


def test_the_tokenizer_is_beside_the_weights_or_above_them(tmp_path):
    folder = tmp_path / "2b"
    folder.mkdir()
    assert tokenizer_folder(folder) == folder
    (tmp_path / "tokenizer.model").write_text("")
    assert tokenizer_folder(folder) == tmp_path
    (folder / "tokenizer.json").write_text("")
    assert tokenizer_folder(folder) == folder


# Choice of a repository's files that form a checkpoint.

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
HF = ["config.json", "model.safetensors.index.json", *SHARDS, "tokenizer.json", "tokenizer.model"]
ITEM = ["_METADATA", "checkpoint", "manifest.ocdbt", "d/0a", "ocdbt.process_0/manifest.ocdbt"]
CLUTTER = [".gitattributes", "2b.gguf", "figures/a.json", "examples/notes.txt"]


def below(folder: str, names: list[str]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


@pytest.mark.parametrize(
    ("files", "within", "folder", "wanted"),
    [
        (HF, "", "", HF),
        ([*HF, "2b.pt", "pytorch_model.bin", *below("2b", ITEM)], "", "", HF),
        ([*HF, "additional_chat_templates/tools.jinja"], "", "",
         [*HF, "additional_chat_templates/tools.jinja"]),
        (["model.safetensors", "other.safetensors"], "", "", ["model.safetensors"]),
        (["2b.safetensors", "optimizer.pt"], "", "", ["2b.safetensors"]),
        (["2b.pt", "tokenizer.model"], "", "", ["2b.pt", "tokenizer.model"]),
        (["2b.pt", "README.md"], "", "", ["2b.pt", "README.md"]),
        (["2b.pt", *below("2b", ITEM)], "", "", ["2b.pt"]),
        (["pytorch_model.bin", "config.json"], "", "", ["pytorch_model.bin", "config.json"]),
        ([*ITEM, "config.json"], "", "", [*ITEM, "config.json", *CLUTTER]),
        (
            [*below("2b", ITEM), "tokenizer.model", "config.json"],
            *("", "2b", [*below("2b", ITEM), "tokenizer.model"]),
        ),
        ([*below("a", ITEM), *below("b", HF)], "a", "a", below("a", ITEM)),
        ([*below("a", ITEM), *below("b", HF), "tokenizer.model"], "b", "b",
         [*below("b", HF), "tokenizer.model"]),
        ([*HF, *below("9b", ["9b.pt"])], "9b", "9b",
         ["9b/9b.pt", "tokenizer.json", "tokenizer.model"]),
        (below("100/default", ITEM), "", "100/default", below("100/default", ITEM)),
        ([*below("100/default", ITEM), *below("200/default", ITEM)], "200", "200/default",
         below("200/default", ITEM)),
        ([*below("100", ITEM), "config.json", "run.json"], "", "100",
         [*below("100", ITEM), "config.json"]),
        ([*below("a/9/default", ITEM), "config.json", "a/config.json"], "", "a/9/default",
         [*below("a/9/default", ITEM), "a/config.json"]),
        (["tokenizer.json"], "", "", ["2b.gguf", "tokenizer.json"]),  # files ignored elsewhere
        (["q/2b.gguf", "q/tokenizer.json"], "q", "q", ["q/2b.gguf", "q/tokenizer.json"]),
    ],
)  # fmt: skip
def test_one_format_is_chosen(files, within, folder, wanted):
    found = choose([*reversed(files), *CLUTTER], within, "org/name")
    assert (found[0], sorted(found[1])) == (folder, sorted(wanted))


@pytest.mark.parametrize(
    ("files", "within", "said"),
    [
        (["figures/x"], "figures", "expected safetensors, a .pt file, an Orbax folder or a GGUF"),
        (["a.gguf"], "", "expected one .gguf file, found 2b.gguf; a.gguf; download the one"),
        ([*below("2b", ITEM), *below("9b", ITEM)], "", "choose one: subfolder=2b; subfolder=9b"),
        ([*below("2b", ITEM), *below("hf", HF)], "", "choose one: subfolder=2b; subfolder=hf"),
        ([*below("1/a", ITEM), *below("1/b", ITEM)], "1", "subfolder=1/a; subfolder=1/b"),
        (HF, "2b", "org/name has no subfolder '2b': expected one of examples; figures"),
        (["2b.pt", "9b.pt"], "", "expected one .pt file, found 2b.pt; 9b.pt"),
        (SHARDS, "", "download the index too"),
        (["a.safetensors", "b.safetensors"], "", "found only a.safetensors; b.safetensors"),
    ],
)
def test_what_is_no_one_checkpoint(files, within, said):
    with pytest.raises(CheckpointError) as caught:
        choose([*files, *CLUTTER], within, "org/name")
    assert said in str(caught.value)
    assert str(caught.value).startswith("org/name") and "\n" not in str(caught.value)


# Downloads.


@pytest.fixture(scope="module")
def models(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """Write the model as transformers does, and in Google's two published layouts."""
    folders = {"hf": checkpoint}
    for name in ("deepmind-flax", "deepmind-torch"):
        folders[name] = root = tmp_path_factory.mktemp(name)
        written = root / "2b"
        convert(checkpoint, written, to=name)
        for path in written.iterdir():
            if path.name in TOKENIZER:
                path.rename(root / path.name)
            elif path.name == "model.pt":
                path.rename(root / "2b.pt")
            elif path.suffix == ".json":
                path.unlink()
    (folders["deepmind-torch"] / "2b").rmdir()
    return folders


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def user(hub, tmp_path, monkeypatch, caplog):
    # Tests do not wait between two attempts.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return User(hub, tmp_path / "home", caplog)


class User:
    """A user with a separate cache, in this process or in processes that it starts."""

    def __init__(self, hub: Hub, home: Path, caplog: pytest.LogCaptureFixture):
        self.url, self.home, self._caplog = hub.url, home, caplog
        self.said = ""
        self.environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
        }

    @contextlib.contextmanager
    def client(self, url: str | None = None, offline: bool = False):
        """Configure the hub's client in this process as its environment variables would."""
        url, constants = url or self.url, huggingface_hub.constants
        settings = {
            "ENDPOINT": url,
            "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(self.home / "hub"),
            "HF_TOKEN_PATH": str(self.home / "token"),
            "HF_HUB_OFFLINE": offline,
            "HF_HUB_DISABLE_XET": True,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                assert hasattr(constants, name), name
                patch.setattr(constants, name, value)
            yield patch

    def run(self, *arguments: object, **client) -> subprocess.CompletedProcess[str]:
        """Run ``griffin-eval`` with the hub's client, in this process."""
        with self.client(**client):
            return commands.griffin_eval(*arguments)

    def resolve(self, *requests: dict[str, str], by=resolve, **client) -> list[str]:
        """Return the path or the error of each model; keep printed and logged text in `said`."""
        self._caplog.clear()
        lines, printed = [], io.StringIO()
        with self.client(**client), contextlib.redirect_stderr(printed):
            for request in requests:
                options = dict(request)
                try:
                    lines.append(str(by(options.pop("id"), **options)))
                except BadInput as error:
                    lines.append(f"refused: {error}")
        self.said = "\n".join([printed.getvalue(), *self._caplog.messages]).strip()
        return lines


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


# Fields that DeepMind's formats do not store.
SAID = Overrides(visible_keys=128, embedding_scale=True, logits_soft_cap=30.0)


def test_downloads_what_is_needed_once(hub, user, models):
    mixed = {**contents(models["deepmind-torch"]), **contents(models["hf"])}
    mixed |= {"docs/README.md": b"#", "onnx/model.onnx": b"x", "original/config.json": b"{}"}
    commit = hub.push("org/mixed", mixed)
    hub.push("org/flax", models["deepmind-flax"])
    hub.push("org/torch", {**contents(models["deepmind-torch"]), "docs/README.md": b"#"})
    names = ("org/mixed", "org/flax", "org/torch")
    originals = (models["hf"], models["deepmind-flax"], models["deepmind-torch"])
    first = []
    for name, original in zip(names, originals, strict=True):
        first += user.resolve({"id": name})
        assert hub.downloads() == sorted(contents(original))
        assert not user.said  # no progress bars in a pipe
    assert contents(Path(first[0])) == contents(originals[0])
    assert contents(Path(first[1])) == contents(originals[1] / "2b")
    assert contents(Path(first[2])) == contents(originals[2])
    formats = [Checkpoint(where, SAID).format.name for where in first]
    assert formats == ["hf", "deepmind-flax", "deepmind-torch"]
    assert user.resolve(*({"id": name} for name in names)) == first
    assert hub.downloads() == []
    assert Path(first[0]).name == commit
    # With a commit id only the listing is requested; without a network, nothing.
    assert user.resolve({"id": names[0], "revision": commit}) == first[:1]
    assert hub.downloads() == []
    assert user.resolve(*({"id": name} for name in names), offline=True) == first
    assert hub.log == [] and not user.said
    hub.faults["models", names[0]] = Fault(500)
    assert user.resolve({"id": names[0]}) == first[:1]
    assert "org/mixed is read from the cache: the hub refused, HfHubHTTPError" in user.said


def test_revisions(hub, user):
    one = hub.push("org/name", {"a.safetensors": b"1", "config.json": b"{}"}, "v1", "refs/pr/1")
    two = hub.push("org/name", {"b.safetensors": b"2", "config.json": b"{}"}, "main", "dev")
    asked = [{"revision": r} for r in ("v1", "refs/pr/1", one, "main", "dev", two)]
    asked = [{"id": "org/name", **request} for request in [*asked, {}]]
    found = user.resolve(*asked)
    assert [Path(path).name for path in found] == [one] * 3 + [two] * 4
    assert contents(Path(found[0])) == {"a.safetensors": b"1", "config.json": b"{}"}
    assert contents(Path(found[3])) == {"b.safetensors": b"2", "config.json": b"{}"}
    assert user.resolve(*asked, offline=True) == found
    three = hub.push("org/name", {"c.safetensors": b"3"})
    (found,) = user.resolve({"id": "org/name"})
    assert Path(found).name == three


def test_a_branch_that_moves_meanwhile(hub, user):
    """All files come from the commit that was listed, even if the branch moves."""
    listed = hub.push("org/name", {"a.safetensors": b"1", "config.json": b"1"})
    hub.listed = lambda: hub.push("org/name", {"b.safetensors": b"2", "config.json": b"2"})
    (found,) = user.resolve({"id": "org/name"})
    assert Path(found).name == listed
    assert contents(Path(found)) == {"a.safetensors": b"1", "config.json": b"1"}


def test_names_that_are_patterns(hub, user):
    hub.push("org/name", {"[2b]/model.safetensors": b"1", "2/model.safetensors": b"2"})
    (found,) = user.resolve({"id": "org/name", "subfolder": "[2b]/"})
    assert contents(Path(found)) == {"model.safetensors": b"1"}
    assert hub.downloads() == ["[2b]/model.safetensors"]


@lists_files
def test_a_cache_that_lacks_a_part(hub, user):
    files = {name: name.encode() for name in HF}
    hub.push("org/name", files)
    (found,) = user.resolve({"id": "org/name"})
    (Path(found) / SHARDS[1]).unlink()
    (message,) = user.resolve({"id": "org/name"}, offline=True)
    assert message == (
        "refused: org/name is incomplete in the hub's cache, and the hub cannot be reached: 1 of 6 "
        f"files are missing ({SHARDS[1]}); download it again with a network"
    )
    assert user.resolve({"id": "org/name"}) == [found]
    assert contents(Path(found)) == files


@lists_files
def test_broken_connections(hub, user):
    data = os.urandom(100_000)
    hub.push("org/name", {"model.safetensors": data, "config.json": b"{}"})
    hub.cuts["model.safetensors"] = 1000
    (message,) = user.resolve({"id": "org/name"})
    assert message.startswith("refused: org/name could not be downloaded: ")
    assert "run the command again" in message
    (message,) = user.resolve({"id": "org/name"}, offline=True)
    assert "is incomplete in the hub's cache" in message
    hub.cuts["model.safetensors"] = 1
    (found,) = user.resolve({"id": "org/name"})
    assert contents(Path(found)) == {"model.safetensors": data, "config.json": b"{}"}


def test_refusals(hub, user):
    hub.push("org/gated", {"model.safetensors": b"1"})
    for code in (401, 403):
        hub.faults["org/gated", "model.safetensors"] = Fault(code, "GatedRepo")
        (message,) = user.resolve({"id": "org/gated"})
        assert message == (
            "refused: org/gated could not be downloaded: access to it has to be granted: ask for "
            "it on its page, then run 'hf auth login'"
        )
    hub.push("org/vanished", {"model.safetensors": b"1"})
    hub.faults["org/vanished", "model.safetensors"] = Fault(404, "EntryNotFound")
    hub.push("org/broken", {"model.safetensors": b"1"})
    hub.faults["org/broken", "model.safetensors"] = Fault(500)
    for name, status in (("down", 500), ("busy", 429), ("denied", 403), ("page", 200)):
        hub.faults["models", f"org/{name}"] = Fault(status)
    hub.push("org/name", {"model.safetensors": b"1"})
    expected = {
        "org/nothing": "there is no such model, here or on the hub, or it is private",
        "org/vanished": "RemoteEntryNotFoundError: 404 Client Error.",
        "org/broken": "500",
        "org/down": "the hub refused, HfHubHTTPError: Server error '500 Internal Server Error'",
        "org/busy": "429 Too Many Requests",
        "org/denied": "403 Forbidden",
        "org/page": "the hub cannot be reached (JSONDecodeError",
        "org/a--b": "it is no hub id (HFValidationError",
        "org/" + "x" * 100: "it is no hub id (HFValidationError",
    }
    found = user.resolve(*({"id": name} for name in expected), {"id": "org/name", "revision": "v2"})
    for name, message, said in zip(expected, found, expected.values(), strict=False):
        assert message.startswith(f"refused: {name} could not be downloaded: "), message
        assert said in message
    assert found[-1] == (
        "refused: org/name at revision 'v2' could not be downloaded: the model has no such branch, "
        "tag or commit"
    )
    for client in ({"url": "http://127.0.0.1:9"}, {"offline": True}):
        (message,) = user.resolve({"id": "org/name"}, **client)
        assert "it is not in the hub's cache, and the hub cannot be reached (" in message


# Command lines.


@pytest.mark.ci
def test_inspect(hub, user, models):
    hub.push("org/hf", models["hf"])
    command = [BIN / "griffin-eval", "inspect", "org/hf", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=user.environment)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    facts = json.loads(done.stdout)
    assert facts["format"] == "hf" and set(facts["tokenizer"]) == TOKENIZER
    done = user.run("inspect", "org/nothing")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        "griffin-eval: org/nothing could not be downloaded: there is no such model, here or on the "
        "hub, or it is private: run 'hf auth login'\n"
    )


def test_convert(hub, user, models, tmp_path):
    """The repository has weights in a folder, a tokenizer at its root, and no config."""
    hub.push("org/flax", models["deepmind-flax"], "v1")
    hub.push("org/flax", {"README.md": b"not here"})
    done = user.run(
        *("convert", "org/flax", tmp_path / "out", "--to", "hf"),
        *("--revision", "v1", "--subfolder", "2b", "--visible-keys", "128"),
        *("--embedding-scale", "--logits-soft-cap", "30"),
    )
    assert done.returncode == 0, done.stderr
    for name in TOKENIZER:
        assert (tmp_path / "out" / name).read_bytes() == (models["hf"] / name).read_bytes()
    a, b = Checkpoint(tmp_path / "out"), Checkpoint(models["hf"])
    assert all((a.numpy(name) == b.numpy(name)).all() for name in b.dtypes)
    assert a.config == b.config


# Adapters.


def test_an_adapter_is_downloaded_with_nothing_beside_it(hub, user, tmp_path):
    files = {"adapter_config.json": b'{"base_model_name_or_path": "google/x", "peft_type": "LORA"}'}
    files |= {"adapter_model.safetensors": b"tensors", "optimizer.pt": b"large"}
    hub.push("org/adapter", files)
    hub.push("org/adapter", files | {"adapter_model.safetensors": b"others"}, "v1")

    def resolve_both(name, **client):
        requests = ({"id": name, "revision": revision} for revision in (None, "v1"))
        return user.resolve(*requests, by=resolve_adapter, **client)

    main, tagged = resolve_both("org/adapter")
    assert hub.downloads() == ["adapter_config.json", *["adapter_model.safetensors"] * 2]
    assert contents(Path(main)) == {n: files[n] for n in files if n.startswith("adapter")}
    assert (Path(tagged) / "adapter_model.safetensors").read_bytes() == b"others"
    assert resolve_both("org/adapter", offline=True) == [main, tagged]
    for said in resolve_both("org/nothing"):
        assert said.startswith("refused: org/nothing could not be downloaded: there is no such")
    done = user.run("convert", "org/adapter", tmp_path / "x", "--to", "hf")
    assert done.returncode == 2 and "holds only an adapter: give the base" in done.stderr
    assert "'google/x'" in done.stderr


# Uploads.


def push(user, *commands):
    """Run each command with its token; return the texts that they print."""
    said = []
    for token, arguments in commands:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("HF_TOKEN", raising=False)
            if token is not None:
                patch.setenv("HF_TOKEN", token)
            done = user.run(*arguments)
        assert done.returncode in (0, 2), done.stderr
        said.append(done.stdout + done.stderr)
    return said


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # raised by the hub's client
def test_an_output_is_pushed(hub, user, checkpoint, tmp_path, monkeypatch):
    hub.users["hf_good"] = {
        "name": "me",
        "orgs": [{"name": "ours"}],
        "auth": {"accessToken": {"role": "write"}},
    }
    hub.users["hf_read"] = hub.users["hf_good"] | {"auth": {"accessToken": {"role": "read"}}}
    hub.push("me/old", {"README.md": b"#"})
    hub.faults["me/locked", ""] = Fault(403)
    hub.faults["me/half", "commit"] = Fault(403)
    out = [tmp_path / str(i) for i in range(9)]

    def asked(i, repository, token="hf_good", to="hf"):
        words = ["convert", checkpoint, out[i], "--to", to, "--push-to-hub", repository]
        return token, list(map(str, words))

    said = push(
        user,
        asked(0, "me/new"),
        asked(1, "ours/new"),
        asked(2, "me/new"),
        asked(3, "them/new"),
        asked(4, "me/x", token=None),
        asked(4, "me/x", token="hf_bad"),
        asked(4, "me/x", token="hf_read"),
        asked(4, "x"),
        asked(4, "me/x", to="griffin"),
        asked(5, "me/locked"),
        asked(6, "me/half"),
    )
    assert f"pushed to {hub.url}/me/new\n" in said[0] and f"{hub.url}/ours/new" in said[1]
    for i, repository in enumerate(("me/new", "ours/new")):
        asked_for = hub.made[repository]  # older clients send another key
        assert asked_for.get("visibility") == "private" or asked_for.get("private") is True
        _, files = hub.find(repository, "main")
        assert files.keys() - {".gitattributes"} == contents(out[i]).keys()
        assert all(files[name] == data for name, data in contents(out[i]).items())
    assert "README.md" in contents(out[0])
    (there,) = user.resolve({"id": "me/new"})
    assert verify(there, checkpoint).same
    expected = [
        (2, "me/new holds 7 files already"),
        (3, "whoever is logged in may write to me; ours: name a repository there"),
        (4, "nobody is logged in: run 'hf auth login'"),
        (5, "the token is not valid"),
        (6, "the token may only read"),
        (7, "expected organisation/name"),
        (8, "--push-to-hub is for --to hf"),
        (9, "me/locked could not be pushed to: the hub refuses to write there"),
        (10, f"{out[6]} is whole, and this goes on with it: hf upload me/half {out[6]} --private"),
    ]
    for i, sentence in expected:
        refused = [line for line in said[i].splitlines() if line.startswith("griffin-eval: ")]
        assert len(refused) == 1 and sentence in refused[0], said[i]
    for i in (2, 3, 4):
        assert not out[i].exists()
    for i in (5, 6):
        assert verify(out[i], checkpoint).same
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    offline = user.run(*asked(7, "me/x")[1], offline=True)
    assert offline.returncode == 2 and "me/x cannot be pushed to: " in offline.stderr
    assert "Traceback" not in offline.stderr and not out[7].exists()


# Kaggle.


@pytest.fixture
def kaggle(models, tmp_path, monkeypatch):
    """Fill kagglehub's cache with the models that Google publishes there."""
    pytest.importorskip("kagglehub")
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path / "kagglehub"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # a port without a server
    cache = tmp_path / "kagglehub" / "models" / "google" / "recurrentgemma"
    for framework, published in (("flax", "deepmind-flax"), ("pyTorch", "deepmind-torch")):
        folder = cache / framework / "2b" / "1"
        shutil.copytree(models[published], folder)
        (folder.parent / "1.complete").touch()
    return cache


@pytest.mark.parametrize("framework", [ci("flax"), slow("pyTorch")])
def test_models_of_kaggle(kaggle, checkpoint, tmp_path, framework):
    """Models are found by name and version or by path, with the tokenizer beside the weights."""
    name, known = (
        f"kaggle:google/recurrentgemma/{framework}/2b/1",
        Overrides(visible_keys=128, embedding_scale=True, logits_soft_cap=30.0),
    )
    original = Checkpoint(checkpoint)
    for place in (name, str(kaggle / framework / "2b" / "1")):
        opened = Checkpoint(resolve(place), known)
        assert verify(opened, original).same
        assert TOKENIZER <= make_plan(opened, FORMATS["hf"]).companions.keys()
        opened.close()
    options = ["--visible-keys", "128", "--embedding-scale", "--logits-soft-cap", "30"]
    for command in (["inspect", name], ["convert", name, str(tmp_path / "out"), "--to", "hf"]):
        done = CliRunner().invoke(app, [*command, *options])
        assert done.exit_code == 0, done.output
    assert TOKENIZER <= {path.name for path in (tmp_path / "out").iterdir()}


def test_what_kaggle_does_not_have(kaggle, monkeypatch):
    for name in ("kaggle:google/recurrentgemma", "kaggle:../a/b/c", "kaggle:a/b/c/d/x", "kaggle:"):
        assert f"{name!r} names no model of Kaggle" in refusal(name)
    name = "kaggle:google/recurrentgemma/flax/2b"
    assert f"write the version behind the name, {name}/3" in refusal(name, revision="3")
    assert "has no subfolder 'x'" in refusal(f"{name}/1", subfolder="x")
    said = refusal(name)  # the latest version needs a request
    assert said.startswith(f"{name} could not be downloaded: ") and "without a network" in said

    def refuse(handle):
        error = OSError("said\nby the client")
        error.response = SimpleNamespace(status_code=status)
        raise error

    monkeypatch.setattr("kagglehub.model_download", refuse)
    expected = {403: "accept its licence", 404: "has no such model", 500: "OSError: said; with"}
    for status in expected:
        assert expected[status] in refusal(f"{name}/2")
    monkeypatch.setitem(sys.modules, "kagglehub", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'griffin-eval\[kaggle\]'"):
        resolve(f"{name}/1")

"""The distributions hold the repository's files at their import paths, and no others."""

import platform
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
DATA = "griffin_eval/checkpoints/"  # trained weights, with their cards and tokenizers
SOURCES = [
    "kernels/attention/cpu.c",
    "kernels/cpu/floats.h",
    "kernels/cpu/runtime.c",
    "kernels/cpu/runtime.h",
    "kernels/cpu/xla.c",
    "kernels/linear/cpu.c",
    "kernels/rglru/cpu.c",
]
PACKAGE_OF = {folder: name.replace(".", "/") for name, folder in SETUPTOOLS["package-dir"].items()}


def tree() -> list[str]:
    """Return the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Build a source distribution and a wheel from it; return their folder."""
    source = tmp_path_factory.mktemp("source")
    for name in tree():  # a copy, since setuptools would add stale files of ./build
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", str(source)]
    run = subprocess.run(build, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return source / "dist"


@pytest.mark.slow
def test_wheel_holds_the_tree(dist):
    (path,) = dist.glob("*.whl")
    wheel = zipfile.ZipFile(path)
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {"griffin_eval_plugin.pth", "griffin_eval/kernels/_cpu.so"}
    for name in tree():
        folder, _, rest = name.partition("/")
        packed = name.endswith((".py", ".toml", ".yaml", ".j2", "/py.typed")) or name.startswith(
            DATA
        )
        if folder in PACKAGE_OF and packed:
            expected.add(f"{PACKAGE_OF[folder]}/{rest}")
    assert sorted(inside) == sorted(expected)
    assert wheel.read("griffin_eval_plugin.pth").count(b"\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")
def test_one_wheel_serves_every_python_and_old_systems(dist):
    """The wheel of this machine's compiler needs glibc 2.17 (2012) at most."""
    pytest.importorskip("auditwheel")
    (path,) = dist.glob("*.whl")
    assert path.name.split("-")[2:4] == ["py3", "none"]
    if platform.machine() != "x86_64":
        pytest.skip("the oldest glibc is another on other processors")
    show = [sys.executable, "-m", "auditwheel", "show", str(path)]
    run = subprocess.run(show, capture_output=True, text=True, check=True)
    assert '"manylinux_2_17_x86_64"' in run.stdout


def test_every_file_of_a_package_folder_is_code_a_table_a_task_or_a_template():
    """Another kind of file would need an entry in package-data and in this test."""
    assert [
        name
        for name in tree()
        if name.partition("/")[0] in PACKAGE_OF
        and not name.endswith((".py", ".toml", ".yaml", ".j2", ".md", "/py.typed"))
        and not name.startswith(DATA)
    ] == SOURCES


@pytest.mark.slow
def test_source_distribution_holds_what_a_build_needs(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "setup.py", "LICENSE", "README.md", *SOURCES}
    assert needed <= names


def test_constraints_pin_every_requirement():
    """`make` must install the same versions everywhere, since other builds of torch take GBs."""
    import importlib.metadata

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    wanted = {
        canonicalize_name(Requirement(line).name)
        for line in importlib.metadata.requires("griffin-eval") or []
        if "tpu" not in line
    }
    assert wanted - pinned == {"griffin-eval"}

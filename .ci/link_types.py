"""Link the source folders into build/types as the import root sees them, for the type checker.

basedpyright follows links to files but not to folders, so the folders are recreated.
"""

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TYPES = ROOT / "build" / "types"

setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
shutil.rmtree(TYPES, ignore_errors=True)
beside = {"benchmarks": "benchmarks", "experiments": "experiments"}
for package, folder in (setuptools["package-dir"] | beside).items():
    shutil.copytree(
        ROOT / folder,
        TYPES / package.replace(".", "/"),
        ignore=shutil.ignore_patterns("__pycache__"),
        copy_function=os.symlink,
        dirs_exist_ok=True,
    )

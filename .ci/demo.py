"""Run the quick start of a README as a reader types it, and show what each command prints.

    python .ci/demo.py README FOLDER

The lines of the section's shell blocks run one after the other in FOLDER, which is emptied first,
without a network. The first command that fails ends the demo with its exit code.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def commands(readme: str) -> list[str]:
    """Return the lines of the shell blocks of the section "Quick start"."""
    _, _, section = readme.partition("\n## Quick start\n")
    section = section.partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of the commands: this environment's programs first, and no network."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    return os.environ | offline | {"PATH": path}


def main(readme: Path, folder: Path) -> int:
    lines = commands(readme.read_text(encoding="utf-8"))
    if not lines:
        print(f"{readme} has no shell block in a section 'Quick start'", file=sys.stderr)
        return 2
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    variables = environment(folder.resolve())
    for line in lines:
        print(f"$ {line}", flush=True)
        code = subprocess.run(["bash", "-c", line], cwd=folder, env=variables).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

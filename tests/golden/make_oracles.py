"""Record the answers of the public implementations to the questions of the parity tests.

JAX_PLATFORMS=cpu PYTHONPATH=tests/support .venv/bin/python -P tests/golden/make_oracles.py

Writes `oracles.json`, the questions and the versions of the libraries, and `oracles.npz`, the
answers in float32.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from recorded_oracles import ANSWERS, QUESTIONS, RECORDING, Question, ask_library

TESTS = [f"tests/model/test_parity_{kind}.py" for kind in ("logits", "gradients")]
LIBRARIES = ("transformers", "recurrentgemma", "torch", "jax", "flax", "numpy")


def collect_questions() -> list[Question]:
    """Run the tests and return their questions; tests without an answer fail in this run."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "2", "-m", "not gpu", *TESTS]
        subprocess.run(command, env=os.environ | {RECORDING: file.name}, check=False)
        lines = sorted(set(Path(file.name).read_text().splitlines()))
    return [Question(*json.loads(line)) for line in lines]


def main() -> None:
    questions = collect_questions()
    answers = {
        f"{question.key()}/{name}": np.asarray(value, np.float32)
        for question in questions
        for name, value in ask_library(question).items()
    }
    np.savez_compressed(ANSWERS, **answers)
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    lines = ",\n".join(json.dumps(question) for question in questions)
    QUESTIONS.write_text(f'{{"versions": {json.dumps(versions)},\n"questions": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()

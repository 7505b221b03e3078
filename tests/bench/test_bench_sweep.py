"""`griffin-eval bench sweep` on copies of the smallest checkpoint."""

import re

import pytest
from programs import griffin_eval

from griffin_eval.checkpoints import folder

pytestmark = pytest.mark.slow


def test_a_sweep_is_measured_beside_a_command(tmp_path):
    sizes = ("--tasks", "griffin_induction_heads", "--limit", 2, "--checkpoints", 2, "--rounds", 1)
    model = folder("induction_heads_griffin")
    done = griffin_eval("bench", "sweep", model, *sizes, "-o", tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    picture = tmp_path / "figures" / "sweep_timing.png"
    assert done.stdout.endswith(f"{picture}\n") and picture.stat().st_size > 10_000
    said = " ".join(done.stdout.split())
    command, model, sweep = (
        float(re.search(rf"{name} │ (\S+) │", said)[1])
        for name in ("one command", "model's time for one checkpoint", "sweep")
    )
    assert 0 < model < command < 2 * sweep
    found = re.search(r"sweep: (\S+) s; .* for 1 more: (\S+) s, (\S+) of it: (held|exceeded)", said)
    took, most, ratio = map(float, found.groups()[:3])
    assert took == sweep and most == pytest.approx(command + 1.1 * model, rel=0.02)
    assert ratio == pytest.approx(took / most, rel=0.02)
    assert (found[4] == "held") == (took <= most) or took == pytest.approx(most, rel=0.02)


def test_what_cannot_be_measured_is_said(tmp_path):
    done = griffin_eval("bench", "sweep", tmp_path / "none")
    assert done.returncode == 2 and "is no folder" in done.stderr
    done = griffin_eval("bench", "sweep", tmp_path, "--limit", "20,none")
    assert done.returncode == 2 and "expected numbers of documents" in done.stderr
    done = griffin_eval("bench", "sweep", tmp_path, "--checkpoints", 2)
    assert done.returncode == 1 and "a measurement failed: " in done.stderr
    assert "Traceback" not in done.stderr

"""`experiments.training_records`: records of runs, their figures, and model cards."""

import json
import math
import re

import numpy as np
import pytest
from programs import griffin_eval

from experiments.training_records.__main__ import training_records
from experiments.training_records.card import write_card
from experiments.training_records.records import read_records
from experiments.training_records.text_runs import (
    best_of_each_size,
    bits,
    config_of,
    exponent,
    training_flops,
)
from griffin_eval.layout import param_specs
from griffin_eval.training.options import read_options
from griffin_eval.training.trainer import train_model


@pytest.mark.slow
def test_finished_runs_of_a_queue_are_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    records = tmp_path / "docs" / "runs.jsonl"
    records.write_text(json.dumps(copying("copy/hawk-0", "hawk", 200)) + "\n")
    run = {"recipe": "selective_copy", "model": "griffin", "output": "copy/griffin-0"}
    run |= {"length": 8, "rows": 4, "width": 16, "steps": 2, "schedule": "constant"}
    queue = tmp_path / "queue.jsonl"
    queue.write_text(json.dumps(run) + "\n" + json.dumps(run | {"output": "copy/later"}) + "\n")
    order = read_options(run)
    last = train_model(order.run, order.output, save_every=1)
    training_records([queue])
    printed = capsys.readouterr().out
    assert "step 2 (finished), length 8" in printed and "copy/later: not begun" in printed
    made, kept = read_records(records)
    assert made["name"] == "copy/griffin-0" and made["last"] == last
    assert "selective_copy" in made["command"] and kept["name"] == "copy/hawk-0"
    assert made["curves"]["step"] == [1, 2] and len(made["curves"]["in_view"]) == 2
    assert (tmp_path / "docs" / "figures" / "selective_copying_training.png").is_file()
    queue.write_text(json.dumps(run | {"steps": 3}) + "\n")
    training_records([queue])
    assert "step 2 (of 3)" in capsys.readouterr().out


def copying(name: str, model: str, steps: int) -> dict:
    tests = list(range(100, steps + 1, 100))
    rising = [1 - 50 / step for step in tests]
    curves = {"step": tests, "accuracy": rising, "in_view": rising, "out_of_view": rising}
    last = {"step": steps, "accuracy": rising[-1]}
    return {"name": name, "settings": {"model": model}, "curves": curves, "last": last}


def text(name: str, model: str, losses, **sizes) -> dict:
    recipe = {"name": "text", "width": 32, "window": 256, "length": 512} | sizes
    last = {"test_loss": float(np.mean(losses)), "by_row": list(losses), "tokens": 2000 * 512}
    return {"name": name, "settings": {"model": model, "recipe": recipe}, "last": last}


def test_texts_are_compared_part_by_part():
    parts = np.random.default_rng(0).normal(1.4, 0.3, 40)
    one = text("window/griffin-128", "griffin", parts)
    other = text("window/griffin-32", "griffin", parts + 0.01)
    assert bits(one).value == pytest.approx(parts.mean() / np.log(2))
    assert bits(one).low < bits(one).value < bits(one).high
    difference = bits(other, one)
    assert difference.low == pytest.approx(0.01 / np.log(2)) == pytest.approx(difference.high)


def test_the_exponent_of_losses_by_flops():
    runs = [text(f"scale/hawk-{width}-003", "hawk", [0], width=width) for width in (32, 64)]
    small, large = map(training_flops, runs)
    weights = sum(
        math.prod(spec.shape)
        for spec in param_specs(config_of(runs[1])).values()
        if len(spec.shape) > 1 and not re.search("conv|bias", spec.name)
    )
    assert large == pytest.approx(6 * weights * 2000 * 512, rel=1e-6)
    for run, flops in zip(runs, (small, large), strict=True):
        run["last"]["test_loss"] = 5 * flops**-0.07
    assert exponent(runs) == pytest.approx(-0.07)
    worse = text("scale/hawk-64-012", "hawk", [9], width=64)
    assert best_of_each_size([worse, *runs[::-1]], "hawk") == runs


@pytest.mark.slow
def test_a_card_holds_the_run_and_its_scores(tmp_path):
    from huggingface_hub import ModelCard

    run, checkpoint, results = (tmp_path / name for name in ("run", "small_griffin", "results"))
    training = ("train", "induction_heads", "--model", "griffin", "--steps", 1, "--length", 8)
    assert griffin_eval(*training, "-o", run).returncode == 0
    assert griffin_eval("convert", run, checkpoint, "--to", "griffin").returncode == 0
    metadata = {"lengths": [8, 16], "samples": 2, "window": 4}
    done = griffin_eval(
        *("run", "--model", "griffin", "--model_args", f"pretrained={checkpoint}"),
        *("--tasks", "griffin_induction_heads", "--metadata", json.dumps(metadata)),
        *("--output_path", results),
    )
    assert done.returncode == 0, done.stderr
    write_card(run, checkpoint, [results], "The only run.")
    card = ModelCard.load(checkpoint / "README.md")
    assert [r.metric_type for r in card.data.eval_results] == ["accuracy@8", "accuracy@16"]
    assert {json.dumps(r.dataset_args) for r in card.data.eval_results} == {json.dumps(metadata)}
    assert "seed 0, 1 steps" in card.text

"""A report repeats lm_eval's results: every number, every figure, every difference."""

import csv
import json
import math
import os
import re
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.evaluator import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from scipy import stats
from slow import examples
from typer.testing import CliRunner

import griffin_eval.tasks
from griffin_eval import intervals
from griffin_eval.cli.main import app
from griffin_eval.drawing import COLORS, Files, finish
from griffin_eval.errors import BadInput
from griffin_eval.lm.model import GriffinLM
from griffin_eval.report import curves
from griffin_eval.report.curves import Marks, curve_figure, draw_controls, draw_over_steps
from griffin_eval.report.heatmaps import draw_heatmaps
from griffin_eval.report.labels import bounded, short_number
from griffin_eval.report.page import draw_all
from griffin_eval.report.paired import differences
from griffin_eval.report.results import make_labels, read, step_of, step_of_revision
from griffin_eval.report.samples import ReportError, read_samples
from griffin_eval.report.tables import run_table
from griffin_eval.report.verdicts import holm, verdicts

TASKS = ["griffin_phonebook", "griffin_pydoc_choice"]
# Right answers of two runs, with the second better by nearly 1.
DISTANT = [0] * 15 + [1], [1] * 16
BOOKS = {"entries": [5, 10, 20], "samples": 3, "queries": 2}


def evaluate(folder: Path, checkpoint: Path, **arguments) -> Path:
    """Write to a folder what lm_eval --output_path --log_samples writes there."""
    lm = GriffinLM(str(checkpoint), device="cpu", batch_size=16, **arguments)
    manager = TaskManager(
        include_path=str(Path(griffin_eval.tasks.__file__).parent),
        include_defaults=False,  # 14,000 files, which take eight seconds
        metadata=BOOKS,
    )
    tracker = EvaluationTracker(output_path=str(folder))
    # lm_eval starts pip and compilers to describe the environment, and no report reads that.
    with mock.patch("lm_eval.evaluator.add_env_info"):
        results = simple_evaluate(
            lm, tasks=TASKS, limit=12, task_manager=manager, bootstrap_iters=100, log_samples=True
        )
    # lm_eval's command line adds these; simple_evaluate cannot read them from a model object.
    results["config"] |= {"model": "griffin", "model_args": {"pretrained": str(checkpoint)}}
    results["config"]["model_args"] |= arguments
    samples = results.pop("samples")
    tracker.save_results_aggregated(results, samples)
    for task, of_task in samples.items():
        tracker.save_results_samples(task, of_task)
    return folder


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """Write two runs in two dtypes; return their folders."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        evaluate(folder / dtype, checkpoint, framework="torch", dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ]


def report(*arguments):
    found = CliRunner().invoke(app, ["report", *map(str, arguments)])
    if found.exception and not isinstance(found.exception, SystemExit | BadInput):
        raise found.exception
    return found


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    output = tmp_path_factory.mktemp("report") / "out"
    done = report(*runs, "--output", output, "--train-length", 20)
    assert done.exit_code == 0, done.exception
    return output


def rows_of(file: Path) -> list[dict[str, str]]:
    with open(file, newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def result_file(folder: Path) -> Path:
    (file,) = folder.rglob("results_*.json")
    return file


def test_every_number_of_lm_eval_is_in_the_csv_file(runs, written):
    rows = rows_of(written / "results.csv")
    for folder, dtype in zip(runs, ("float32", "bfloat16"), strict=True):
        file = result_file(folder)
        found = {
            (r["task"], r["quantity"], r["x"]): r for r in rows if r["file"] == str(file.resolve())
        }
        expected = json.loads(file.read_text())["results"]
        seen = 0
        for task, metrics in expected.items():
            for key, value in metrics.items():
                name = key.removesuffix(",none")
                if value == "N/A" or "," not in key:
                    continue
                if name.endswith(("_stderr", "_low", "_high")):
                    continue
                quantity, _, x = name.partition("@")
                row = found[task, quantity, str(float(x)) if x.isdigit() else x]
                assert row["value"] == str(value) and row["dtype"] == dtype
                if f"{name}_low,none" in metrics:
                    bounds = [metrics[f"{name}_{bound},none"] for bound in ("low", "high")]
                    few = int(row["documents"]) < 3
                    assert [row["low"], row["high"]] == [
                        "" if few or b == "N/A" else str(b) for b in bounds
                    ]
                seen += 1
        assert seen == len(found) >= 7


def test_the_page_needs_no_network_and_holds_figures_and_numbers(runs, written):
    page = (written / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert page.count("<script>") == 1 and "@import" not in page
    assert page.count("<svg") == len(list((written / "figures").glob("*.svg"))) >= 1
    for run in read(runs):
        for point in run.points:
            assert escape(bounded(point.value, point.low, point.high)) in page
    assert "Paired comparison" in page and "tokens requested" in page
    for file in (written / "figures").glob("*.png"):
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.with_suffix(".svg").is_file()


def test_lines_and_bands_are_the_points(runs):
    both = read(runs)
    points = [[p for p in r.points if p.quantity == "exact_match" and p.x] for r in both]
    figure = curve_figure(both, points, "griffin_phonebook", "exact_match", Marks(128, None))
    (axes,) = figure.axes
    lines = [line for line in axes.get_lines() if line.get_label() in ("float32", "bfloat16")]
    assert [line.get_label() for line in lines] == [run.label for run in both]
    assert [line.get_color() for line in lines] == list(COLORS[:2])
    for line, own in zip(lines, points, strict=True):
        assert [tuple(xy) for xy in line.get_xydata()] == sorted((p.x, p.value) for p in own)
    for band, own in zip(axes.collections, points, strict=True):
        corners = {tuple(xy) for xy in band.get_paths()[0].vertices}
        assert {(p.x, p.low) for p in own} | {(p.x, p.high) for p in own} <= corners
    assert axes.get_xlabel() == "length of the phonebook, entries"
    assert axes.get_ylabel() == "exact match"


def drawn(paths, tmp_path, monkeypatch, labels=()):
    """Return the figures of a report of these files over x and by case, by file name."""
    figures = {}

    def keep(figure, folder, name, title, note):
        assert title and "_" not in title
        finish(figure, figure.axes, folder)
        figure.canvas.draw()
        figures[name] = figure

    monkeypatch.setattr(curves, "save_chart", keep)
    draw_all(read(paths, labels), Files(tmp_path / "figures"), 256)
    return figures


def window(keys):
    return {"model": "griffin", "model_args": {"pretrained": "p"}, "model_visible_keys": keys}


def test_every_point_stands_in_the_row_of_its_case(tmp_path, monkeypatch):
    cases = {f"exact_match@{case},none": value for case, value in (("inside", 0.9), ("whole", 0.2))}
    others = {"acc,none": 0.5}
    paths = [
        write_run(tmp_path / name, results={"griffin_phonebook": result}, config=window(128))
        for name, result in (("a", others), ("b", cases), ("c", others), ("d", cases))
    ]
    figure = drawn(paths, tmp_path, monkeypatch, "abcd")["griffin_phonebook_exact_match_by_case"]
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["inside", "whole"] and list(axes.get_yticks()) == [0, 1]
    bottom, top = axes.get_ylim()
    assert (bottom, top) == (1.5, -0.5)
    points = [line.get_xydata()[0] for line in axes.get_lines() if line.get_marker() != "None"]
    assert len(points) == 4
    for x, y in points:
        assert names[round(y)] == ("inside" if x == 0.9 else "whole") and abs(y - round(y)) < 0.5
    (legend,) = figure.legends  # outside of the axes, where its marks are no points
    assert axes.get_legend() is None
    assert [text.get_text() for text in legend.get_texts()] == ["b", "d"]


def test_an_axis_has_its_values_as_ticks(tmp_path, monkeypatch):
    for task, quantity, xs, scale in (
        ("griffin_phonebook", "exact_match_by_depth", (10, 30, 50, 70, 90), "linear"),
        ("griffin_induction_heads", "accuracy", (32, 64), "log"),
        ("griffin_passkey", "accuracy", (512, 1024), "log"),
        ("griffin_induction_heads", "accuracy", (64, 256, 4096), "log"),
        ("griffin_phonebook", "exact_match", (0, 4, 64), "linear"),
    ):
        results = {task: {f"{quantity}@{x},none": 0.5 for x in xs}}
        path = write_run(tmp_path / "run", results=results, config=window(128))
        (axes,) = drawn([path], tmp_path, monkeypatch)[f"{task}_{quantity}"].axes
        assert axes.get_xscale() == scale
        assert list(axes.get_xticks()) == list(xs)
        low, high = axes.get_xlim()
        assert low < xs[0] and xs[-1] < high


def test_numbers_of_an_axis_are_short():
    values = {1 << 21: "2M", 2048: "2k", 2049: "2049", 1: "1", 0.5: "1/2", 1 / 64: "1/64"}
    values |= {0.25: "1/4", 0.3: "0.3", 0.75: "0.75", 0: "0", "case": "case"}
    assert {x: short_number(x) for x in values} == values


def test_a_window_is_marked_for_models_that_have_one(tmp_path, monkeypatch):
    for windows, said in (
        ((128, 128), "window "),
        ((128, None), "griffin's window "),
        ((None, None), None),
        ((128, 64), None),
    ):
        results = {"griffin_induction_heads": {f"accuracy@{x},none": 0.5 for x in (64, 256)}}
        paths = [
            write_run(tmp_path / name, results=results, config=window(keys))
            for name, keys in zip("ab", windows, strict=True)
        ]
        figure = drawn(paths, tmp_path, monkeypatch, ("griffin", "hawk"))
        (axes,) = figure["griffin_induction_heads_accuracy"].axes
        marks = [text.get_text() for text in axes.texts if "window" in text.get_text()]
        assert marks == ([] if said is None else [said])
        rows = run_table(read(paths, "ab")).rows
        assert [row[6] for row in rows] == ["" if keys is None else str(keys) for keys in windows]


def test_a_device_that_nobody_recorded_is_left_empty(tmp_path):
    config = {"model": "hf", "model_args": {"pretrained": "p"}, "device": "cuda:0"}
    path = write_run(tmp_path, results={"a": {"acc,none": 0.5}}, config=config)
    assert run_table(read([path])).rows[0][5] == ""


def test_differences_are_those_of_the_samples(runs):
    found = {(d.task, d.metric): d for d in differences(read(runs))}
    samples = [
        list(map(json.loads, next(folder.rglob("samples_*pydoc*")).read_text().splitlines()))
        for folder in runs
    ]
    base, other = ({s["doc_hash"]: s["acc"] for s in one} for one in samples)
    changes = [other[key] - base[key] for key in base]
    d = found["griffin_pydoc_choice", "acc"]
    assert (d.run, d.baseline, d.items) == ("bfloat16", "float32", len(base))
    assert math.isclose(d.mean, sum(changes) / len(changes))
    assert (d.gained, d.lost) == (changes.count(1), changes.count(-1))
    assert d.largest == max(map(abs, changes))


# From here on: files as lm_eval writes them, with numbers made up.

FIELDS = ("doc_id", "prompt_hash", "target_hash", "filter", "resps", "filtered_resps", "arguments")
FIELDS += ("target",)


def write_run(folder, name="a", results=None, samples=None, config=None, **content):
    """Write a file of results and its samples; return the path of the results.

    A sample is the value of the metric m, or values by metric and other fields of the sample.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = {"t": {"acc,none": 0.5, "acc_stderr,none": 0.1}} if results is None else results
    file = folder / f"results_{name}.json"
    whole = {
        "results": results,
        "configs": {task: {"metadata": {}} for task in results},
        "higher_is_better": {task: {} for task in results},
        "n-samples": {task: {"effective": 4} for task in results},
        "config": {"model": "griffin", "model_args": {"pretrained": f"{folder.name}/{name}"}}
        | (config or {}),
    }
    file.write_text(json.dumps(whole | content))
    for task, of_task in (samples or {}).items():
        lines = (
            {"doc_id": i, "prompt_hash": "p", "target_hash": "t", "filter": "none"}
            | {"doc_hash": name, "metrics": [key for key in m if key not in FIELDS], **m}
            for i, m in enumerate(m if isinstance(m, dict) else {"m": m} for m in of_task)
        )
        (folder / f"samples_{task}_{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return file


def test_a_target_that_is_no_index_is_shown(tmp_path):
    arguments = {f"gen_args_{i}": {"arg_0": "A prompt", "arg_1": " yes"} for i in range(2)}
    samples = [{"acc": acc, "target": "²", "arguments": arguments} for acc in (0, 1)]
    old, new = (write_run(tmp_path / str(i), samples={"t": [samples[i]]}) for i in range(2))
    out = tmp_path / "out"
    assert report(new, old, "-o", out).exit_code == 0
    assert "²" in (out / "report.html").read_text()


def test_flips_are_counted_and_tested(tmp_path):
    base = write_run(tmp_path, "a", samples={"t": [1, 1, 1, 0, 0, 0, 0, 1]})
    other = write_run(tmp_path, "b", samples={"t": [1, 0, 0, 1, 1, 1, 1, 1]})
    (d,) = differences(read([base, other], ["a", "b"]))
    assert (d.gained, d.lost, d.items) == (4, 2, 8)
    assert math.isclose(d.p, 0.6875)  # 2 Σ_{k<=2} C(6, k) / 2^6
    assert math.isclose(d.mean, 2 / 8)


def test_a_difference_of_shares_is_at_most_one(tmp_path):
    """The bootstrap's interval may reach beyond, as it does here."""
    ours, theirs = ([[float(v), 1.0, str(i // 2)] for i, v in enumerate(x)] for x in DISTANT)
    base = write_run(tmp_path, "a", samples={"t": theirs})
    other = write_run(tmp_path, "b", samples={"t": ours})
    (d,) = differences(read([base, other], ["a", "b"]))
    clusters = [i // 2 for i in range(len(ours))]
    whole = intervals.ratio(np.subtract(*DISTANT), [1] * len(ours), clusters)
    assert whole.low < -1 == d.low <= d.mean <= d.high == whole.high


def test_points_have_a_count_only_if_samples_tell_it(tmp_path):
    results = {"t": {"acc,none": 0.5, "acc@8,none": 0.5, "acc@16,none": 0.5}}
    samples = [{"acc": 1, "acc@8": 1}, {"acc": 0, "acc@8": 0}, {"acc": 0, "acc@16": 1}]
    files = write_run(tmp_path, "a", results), write_run(tmp_path, "b", results, {"t": samples})
    without, logged = ([point.documents for point in run.points] for run in read(files, ["a", "b"]))
    assert without == [4, None, None] and logged == [3, 2, 1]


def test_items_of_a_cluster_are_taken_together(tmp_path):
    ours, theirs = (
        [[float(value), 2.0, f"book {i // 2}"] for i, value in enumerate(values)]
        for values in ((1, 2, 3, 5, 8, 13), (1, 1, 1, 1, 1, 1))
    )
    base = write_run(tmp_path, "a", samples={"t": theirs})
    other = write_run(tmp_path, "b", samples={"t": ours})
    (d,) = differences(read([base, other], ["a", "b"]))
    expected = intervals.ratio([0, 1, 2, 4, 7, 12], [2] * 6, [0, 0, 1, 1, 2, 2])
    assert (d.mean, d.low, d.high) == expected[:3] and d.gained is None
    assert d.largest == 6


def test_a_capacity_is_not_compared_item_by_item(tmp_path):
    """Samples of a capacity hold a length, which is no weight and may depend on the tokenizer."""
    base, other = (
        write_run(tmp_path, name, samples={"t": [{"m": 1, "capacity": [1.0, n, "20 0"]}]})
        for name, n in (("a", 20), ("b", 30))
    )
    assert [(d.metric, d.items) for d in differences(read([base, other], ["a", "b"]))] == [("m", 1)]


def test_metrics_without_intervals_get_those_of_lm_evals_standard_error(tmp_path):
    (run,) = read([write_run(tmp_path)])
    (point,) = run.points
    wilson = intervals.wilson(0.5, 4, 4)  # 4 items vary less than its standard error says
    assert (point.low, point.high) == wilson and 0 < point.low < 0.5 < point.high < 1


def test_runs_are_told_apart_by_what_differs(tmp_path):
    file = tmp_path / "results_x.json"
    base = {"model": "griffin", "model_args": {"pretrained": "a/m", "framework": "jax"}}
    hf = {"model": "hf", "model_args": "pretrained=a/m,dtype=float32"}
    assert make_labels([base, hf], [file] * 2) == ["griffin jax", "hf float32"]
    steps = [base | {"model_args": {"pretrained": f"runs/{n}"}} for n in (100, 200)]
    assert make_labels(steps, [file] * 2) == ["step 100", "step 200"]
    both = steps + [base | {"model_args": {"pretrained": f"more/{n}"}} for n in (100, 200)]
    assert make_labels(both, [file] * 4) == ["runs/100", "runs/200", "more/100", "more/200"]
    assert make_labels([base], [file]) == ["m"]
    same = make_labels([base, base], [file, tmp_path / "results_y.json"])
    assert same == ["m (results_x)", "m (results_y)"]


def test_evaluations_of_one_model_are_one_run(tmp_path):
    """Other tasks join a run, a repeated task replaces the older one, other limits stay apart."""
    config = {"model_args": {"pretrained": "m"}, "griffin_weights_sha256": "w"}
    asked = [
        ("2026-01-01T10-00-00.5", "t", 0.4, config, 4),
        ("2026-01-02T10-00-00.5", "u", 0.5, config, 4),
        ("2026-01-03T10-00-00.5", "t", 0.6, config, 4),
        ("2026-01-04T10-00-00.5", "t", 0.7, config | {"limit": 2.0}, 2),
        ("2026-01-05T10-00-00.5", "t", 0.8, config | {"griffin_weights_sha256": "v"}, 4),
    ]
    for date, task, value, own, count in reversed(asked):
        sizes = {task: {"effective": count}}
        results = {task: {"acc,none": value, "acc_stderr,none": 0.1}}
        write_run(tmp_path, date, results, config=own, **{"n-samples": sizes})
    one, few, other = runs = read([tmp_path])
    values = [{point.task: point.value for point in run.points} for run in runs]
    assert values == [{"t": 0.6, "u": 0.5}, {"t": 0.7}, {"t": 0.8}]
    assert one.hidden == ["t"] and not few.hidden and not other.hidden
    assert few.points[0].low is None  # two items have no interval
    assert "limit 2" in few.label and len({run.label for run in runs}) == 3
    done = report(tmp_path, "-o", tmp_path / "out")
    assert "models: 3" in done.output
    page = (tmp_path / "out" / "report.html").read_text()
    assert "8 items of 2 tasks" in page and "asked again, the latest shown: t" in page


def test_arguments_that_change_no_answer_make_no_other_model(tmp_path):
    """lm_eval writes them into the metadata of every task as well."""
    for day, more in enumerate(({}, {"pretrained": "m/"}, {"state_budget": "1GB"}), 1):
        own = {"pretrained": "m"} | more
        metadata = {"t": {"metadata": own}}
        write_run(tmp_path, f"2026-01-0{day}T10", config={"model_args": own}, configs=metadata)
    (run,) = read([tmp_path])
    assert run.hidden == ["t"] and run.pretrained == "m"


def test_steps_of_a_training_are_recognised():
    assert step_of("runs/griffin/step_12000") == 12000
    assert step_of("runs/12000/") == 12000
    assert step_of("runs/12000/default") == 12000
    assert step_of("runs/2024/checkpoint-500") == 500
    assert step_of("google/recurrentgemma-2b") is None
    assert step_of_revision("step1000-tokens4B") == 1000
    assert step_of_revision("stage2/iter_0500") == 500
    assert step_of_revision("12000") == 12000
    assert step_of_revision("main") is None
    for path in ("/runs/2024/model", "/data/1/state/model", "2024/step_", "default", "", "/"):
        assert step_of(path) is None
    assert step_of_revision("2024/main") is None
    assert step_of("9" * 5000) is None and step_of_revision("step" + "9" * 5000) is None


def test_checkpoints_of_a_training_become_curves_over_the_step(tmp_path):
    files = [
        write_run(
            tmp_path,
            str(step),
            {"t": {"acc@8,none": step / 1000, "acc@16,none": step / 2000}},
            config={"model_args": {"pretrained": f"run/step_{step}"}},
        )
        for step in (200, 100, 300)
    ]
    runs = read(files)
    (chart,) = draw_over_steps(runs, Files(tmp_path / "figures"))
    assert chart.title == "t: accuracy during training"
    done = report(*files, "--output", tmp_path / "out")
    assert done.exit_code == 0
    assert (tmp_path / "out" / "figures" / "t_acc_over_steps.png").is_file()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "accuracy at x 8 goes from 0.1 at step 100 to 0.3 at step 300" in page


def test_controls_and_depths_share_figures(tmp_path):
    controls = ("nats_difference", "reset_window", "no_recurrent", "no_attention")
    results = {
        "griffin_extrapolation": {f"{c}@{n},none": 0.1 * n for c in controls for n in (2, 4)},
        "griffin_passkey": {
            f"accuracy_depth_{d}@{n},none": d / 100 for d in (0, 50, 100) for n in (512, 1024)
        },
    }
    runs = read([write_run(tmp_path, results=results)])
    (chart,) = draw_controls(runs, Files(tmp_path / "f"))
    assert chart.name == "griffin_extrapolation_controls"
    (chart,) = draw_heatmaps(runs, Files(tmp_path / "f"))
    assert chart.name == "griffin_passkey_accuracy_by_depth"


def test_published_scores_stand_beside_measured_ones(tmp_path):
    file = write_run(tmp_path, results={"piqa": {"acc_norm,none": 0.7712, "acc,none": 0.5}})
    report(file, "--output", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "77.1" in page and "RecurrentGemma 2B" in page and "78.5" in page


def sentence(done) -> str:
    assert isinstance(done.exception, BadInput), done.output
    text = str(done.exception)
    assert text and "\n" not in text
    return text


def test_files_that_are_no_results_are_refused_and_nothing_is_written(tmp_path):
    for content, says in (
        (b"", "not a whole JSON file"),
        (b'{"results": {"t"', "not a whole JSON file"),
        (b"\xff\xfe", "not a whole JSON file"),
        (b"[1, 2]", "expected results of lm_eval"),
        (b'{"results": {}}', "none of its configs"),
    ):
        file = tmp_path / "results_x.json"
        file.write_bytes(content)
        found = sentence(report(file, "--output", tmp_path / "out"))
        assert says in found and str(file) in found
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"results": {"t": 5}}, "expected an object as results.t, found 5"),
        ({"results": {"t": {"acc,none": 10**400}}}, "an integer of 401 digits"),
        ({"configs": {"t": None}}, "expected an object as configs.t, found None"),
        ({"configs": {"t": {"metadata": [1]}}}, "expected an object or null as configs.t.metadata"),
        ({"n-samples": {"t": 5}}, "expected an object as n-samples.t"),
        ({"n-samples": {"t": {"effective": "5"}}}, "as n-samples.t.effective"),
        ({"higher_is_better": {"t": [1]}}, "as higher_is_better.t"),
        ({"config": {"model": "m", "model_args": [1]}}, "as config.model_args"),
        ({"config": {"model": "m", "limit": "5"}}, "as config.limit, found '5'"),
    ],
)
def test_results_of_another_form_are_refused(tmp_path, change, says):
    file = write_run(tmp_path, results={"t": {"acc,none": 0.5}})
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    found = sentence(report(file, "--output", tmp_path / "out"))
    assert says in found and str(file) in found


def test_a_bound_without_the_other_is_shown_alone(tmp_path):
    file = write_run(tmp_path, results={"t": {"acc,none": 0.5, "acc_low,none": 0.1}})
    assert [point.high for point in read([file])[0].points] == [None]


def test_names_that_are_not_utf8_are_replaced(tmp_path):
    file = write_run(tmp_path / os.fsdecode(b"a\xff"), results={"t": {"acc,none": 0.5}})
    done = report(file, "-o", tmp_path / "out", "--title", os.fsdecode(b"b\xff"))
    assert done.exit_code == 0, done.output
    assert "<title>b?</title>" in (tmp_path / "out" / "report.html").read_text()
    assert "/a?/" in (tmp_path / "out" / "results.csv").read_text()


def test_other_refusals(tmp_path):
    file = write_run(tmp_path / "in", samples={"t": [1, 0]})
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert "no results_" in sentence(report(tmp_path / "empty", "-o", out))
    assert "no such file" in sentence(report(tmp_path / "nothing", "-o", out))
    assert "2 labels for 1 models" in sentence(report(file, "-o", out, "--labels", "a,b"))
    assert "is a file" in sentence(report(file, "-o", file))
    assert report(file, "-o", out).exit_code == 0
    assert "--overwrite" in sentence(report(file, "-o", out))
    assert report(file, "-o", out, "--overwrite").exit_code == 0


def test_samples_that_are_cut_off_are_refused(tmp_path):
    file = write_run(tmp_path / "a", samples={"t": [1, 0]})
    cut = write_run(tmp_path / "b", samples={"t": [1, 0]})
    with (cut.parent / "samples_t_a.jsonl").open("a") as handle:
        handle.write('\n{"doc_hash": "2", "pro')
    with pytest.raises(ReportError, match="line 3.*cut off"):
        differences(read([file, cut]))


def test_samples_hold_what_ends_a_line_elsewhere(tmp_path):
    """lm_eval writes these line separators unescaped."""
    file = write_run(tmp_path, samples={"t": [1]})
    samples = tmp_path / "samples_t_a.jsonl"
    sample = json.loads(samples.read_text()) | {"resps": "a\u2028b\u2029c\x85d"}
    samples.write_text(json.dumps(sample, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [*read_samples(read([file])[0].samples["t"])["none"].values()] == [sample]


def test_a_file_cut_off_within_a_character_is_refused(tmp_path):
    file = write_run(tmp_path, samples={"t": [1]})
    samples = tmp_path / "samples_t_a.jsonl"
    samples.write_bytes(samples.read_bytes() + '\n{"doc": "ü'.encode()[:-1])
    with pytest.raises(ReportError, match="line 2.*cut off"):
        read_samples(read([file])[0].samples["t"])


def test_runs_without_a_common_item_are_not_compared_but_reported(tmp_path):
    old, new = pair(tmp_path, {"t": [1, 0]}, {"t": [{"prompt_hash": "q", "m": 1}]})
    done = report(old, new, "-o", tmp_path / "out", "--labels", "A,B")
    assert done.exit_code == 0, done.exception
    assert "no item in common: t: B and A." in (tmp_path / "out" / "report.html").read_text()
    against = ["--against", old, "-o", tmp_path / "judged"]
    assert "no item in common" in sentence(report(new, *against))


def test_texts_of_other_sizes_are_other_items(tmp_path):
    """Two tokenizers may cut a document at the same number of tokens but at other bytes."""
    old = [{"loss@8": [9.0, 8, f"d{i}"], "m": [12.0, 40 - i, f"d{i}"]} for i in range(9)]
    new = [{"loss@8": [5.0, 8, f"d{i}"], "m": [9.0, 40, f"d{i}"]} for i in range(9)]
    other, run = read(pair(tmp_path, {"t": old}, {"t": new}), ["old", "new"])
    assert {(d.metric, d.items) for d in differences([other, run])} == {("loss@8", 1), ("m", 1)}
    (one,) = verdicts(run, other)
    assert one.items == 1 and one.verdict == "no difference"


# One run judged by another


def pair(tmp_path, old, new, higher=True, metrics=("m",)):
    """Write two runs from their samples by task."""
    better = {task: dict.fromkeys(metrics, higher) for task in old}
    results = {task: {"m,none": 0.5} for task in old}
    return [
        write_run(tmp_path / name, results=results, samples=samples, higher_is_better=better)
        for name, samples in (("old", old), ("new", new))
    ]


@settings(max_examples=examples(30))
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_step_by_step(p):
    """Corrected p-values below a level are those that Holm's procedure rejects at that level."""
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
            if p[index] * (len(p) - rank) >= level:
                break
            rejected.add(index)
        assert {i for i, corrected in enumerate(holm(p)) if corrected < level} == rejected


@pytest.mark.parametrize("higher", [True, False])
def test_verdicts_of_numbers_are_students(tmp_path, higher):
    noise = np.random.default_rng(0)
    old = {task: noise.normal(size=40).tolist() for task in ("same", "up", "down")}
    shifts = {"same": 0.0, "up": 1.0, "down": -1.0}
    new = {t: (np.array(v) + shifts[t] + noise.normal(0, 0.3, 40)).tolist() for t, v in old.items()}
    other, run = read(pair(tmp_path, old, new, higher), ["old", "new"])
    found = {one.task: one for one in verdicts(run, other)}
    expected = {task: stats.ttest_rel(new[task], old[task]).pvalue for task in old}
    corrected = dict(zip(expected, holm(list(expected.values())), strict=True))
    for task, one in found.items():
        assert one.p == pytest.approx(corrected[task], rel=1e-6)
        assert one.mean == pytest.approx(np.mean(new[task]) - np.mean(old[task]))
    named = [found[task].verdict for task in ("same", "up", "down")]
    assert named == ["no difference", *(["better", "worse"] if higher else ["worse", "better"])]


def test_right_and_wrong_need_as_many_flips_as_mcnemars_test(tmp_path):
    other, run = read(pair(tmp_path, {"t": [1] * 100}, {"t": [1] * 100}), ["old", "new"])
    (one,) = verdicts(run, other)
    assert one.verdict == "no difference" and one.detectable == 0.06  # 2 / 2^6 < 0.05
    for flips, verdict in ((5, "no difference"), (6, "worse")):
        new = [0] * flips + [1] * (100 - flips)
        other, run = read(pair(tmp_path / str(flips), {"t": [1] * 100}, {"t": new}), ["old", "new"])
        (one,) = verdicts(run, other)
        assert one.verdict == verdict
        assert one.p == pytest.approx(stats.binomtest(0, flips).pvalue)


def test_a_run_too_small_for_any_verdict_could_have_seen_none(tmp_path):
    """With five items, even a change of all of them is within chance."""
    old, new = pair(tmp_path, {"t": [1] * 5}, {"t": [0] * 5})
    done = report(new, "--against", old, "-o", tmp_path / "out", "--detect", "1")
    assert done.exit_code == 1 and "smallest detectable change: none" in done.output
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<td>none</td>" in page and "1 task too small to detect any" in page


def test_a_regression_and_a_run_too_small_fail(tmp_path):
    old, same = pair(tmp_path, {"t": [1, 0] * 50}, {"t": [1, 0] * 50})
    _, worse = pair(tmp_path / "worse", {"t": [1]}, {"t": [0, 0] * 50})
    out = tmp_path / "out"
    judge = ["--against", old, "-o", out, "--overwrite"]
    done = report(same, *judge)
    assert done.exit_code == 0 and "t: no difference" in done.output
    done = report(worse, *judge)
    assert done.exit_code == 1 and "t: worse" in done.output
    assert "Verdicts" in (out / "report.html").read_text()
    (row,) = rows_of(out / "verdicts.csv")
    assert row["verdict"] == "worse" and float(row["mean"]) == -0.5
    assert report(same, *judge, "--detect", "0.1").exit_code == 0
    done = report(same, *judge, "--detect", "0.02")
    assert done.exit_code == 1 and "too few items" in done.output


def test_log_likelihoods_count_the_other_way_round(tmp_path):
    """lm_eval stores the log-likelihood of an item, and a larger one is better."""
    for metric, name, sample, change in (
        ("word_perplexity", "ln(word_perplexity)", lambda ll: [ll, 4], -0.5),
        ("byte_perplexity", "ln(byte_perplexity)", lambda ll: [ll, 4], -0.5),
        ("bits_per_byte", "bits_per_byte", lambda ll: [ll, 4], -0.5 / math.log(2)),
        ("perplexity", "ln(perplexity)", lambda ll: ll, -2.0),
        ("bits_per_byte@8", "bits_per_byte@8", lambda ll: [-ll, 4, "book"], -0.5),
    ):
        old, new = ([{metric: sample(-90.0 + 2 * up + i)} for i in range(9)] for up in (0, 1))
        other, run = read(pair(tmp_path, {"t": old}, {"t": new}, False, [metric]), ["old", "new"])
        (one,), (d,) = verdicts(run, other), differences([other, run])
        assert one.mean == pytest.approx(change) == d.mean
        assert d.metric == name and one.metric == name.partition("@")[0]
        assert one.verdict == ("no difference" if metric == "bits_per_byte@8" else "better")


def test_an_item_with_several_filters_is_one(tmp_path):
    """Five of eight answers change, which is within chance; both filters find them."""

    def samples(right):
        names = ("strict-match", "flexible-extract")
        return [{"doc_id": i, "filter": f, "m": int(i < right)} for f in names for i in range(8)]

    other, run = read(pair(tmp_path, {"t": samples(0)}, {"t": samples(5)}), ["old", "new"])
    (one,) = verdicts(run, other)
    assert (one.metric, one.items, one.verdict) == ("m (strict-match)", 8, "no difference")
    assert one.p == 2 / 2**5
    found = {d.metric: (d.items, d.gained, d.p) for d in differences([other, run])}
    assert found == dict.fromkeys(("m (strict-match)", "m (flexible-extract)"), (8, 5, one.p))


@pytest.mark.parametrize("change", [1.0, 0.1])
@pytest.mark.parametrize(("clusters", "verdict"), [(2, "no difference"), (6, "better")])
def test_clusters_that_all_moved_alike_have_the_sign_test(tmp_path, clusters, verdict, change):
    """Student's test would be certain of any two clusters without variance."""
    books = [f"book {i}" for i in range(clusters) for _ in range(3)]
    old, new = ([{"m": [m, 1, book]} for book in books] for m in (0.0, change))
    other, run = read(pair(tmp_path, {"t": old}, {"t": new}), ["old", "new"])
    (one,) = verdicts(run, other)
    assert one.p == 2 / 2**clusters and one.verdict == verdict
    assert math.isinf(one.detectable) == (verdict == "no difference")


@pytest.mark.parametrize(
    ("names", "quantity"),
    [
        (("exact_match", "exact_match@20", "exact_match@inside_window"), "exact_match"),
        (("accuracy@64", "accuracy@inside_window", "accuracy_by_distance@32"), "accuracy"),
    ],
)
def test_a_question_counts_once_however_many_points_it_has(tmp_path, names, quantity):
    """Every point has bounds, as in curve tasks; five of six answers change, within chance."""
    metrics = [name + bound for name in names for bound in ("", "_low", "_high")]
    old, new = (
        [dict.fromkeys(metrics, [float(i < right), 1, f"64 {i}"]) for i in range(6)]
        for right in (0, 5)
    )
    other, run = read(pair(tmp_path, {"t": old}, {"t": new}, metrics=metrics), ["old", "new"])
    (one,) = verdicts(run, other)
    assert (one.metric, one.items) == (quantity, 6)
    assert one.p == 2 / 2**5 and one.verdict == "no difference"


def test_what_cannot_be_judged_is_refused(tmp_path):
    old, new = pair(tmp_path, {"t": [1, 0]}, {"t": [1, 0]})
    out = tmp_path / "out"
    bare = write_run(tmp_path / "bare", results={"t": {"m,none": 0.5}})
    unknown = write_run(tmp_path / "unknown", samples={"t": [1, 0]})
    assert "no samples of t" in sentence(report(bare, "--against", old, "-o", out))
    assert "more is better" in sentence(report(new, "--against", unknown, "-o", out))
    assert "found 3 of them" in sentence(report(new, bare, "--against", old, "-o", out))
    assert "--against" in sentence(report(new, "-o", out, "--detect", "0.1"))
    assert not out.exists()


# Models whose answers must be equal


def answers_of(logprob, greedy, text, rolling):
    """Return samples with one request of each kind."""
    score = [str(logprob), str(greedy)]
    choice = {"gen_args_0": {"arg_0": "A prompt", "arg_1": " yes"}}
    return {
        "choice": [{"acc": 1, "resps": [[score]], "filtered_resps": [score], "arguments": choice}],
        "text": [
            {
                "acc": int(text == "right"),
                "resps": [[text]],
                "filtered_resps": [text],
                "target": "right",
                "arguments": {"gen_args_0": {"arg_0": "The end of a prompt", "arg_1": {}}},
            }
        ],
        "rolling": [
            {"m": 1, "resps": [[str(rolling)]], "arguments": {"gen_args_0": {"arg_0": ""}}}
        ],
    }


def test_answers_must_be_those_of_hf(tmp_path):
    for changed, tolerance, code, said in (
        ({}, 0.0, 0, "differ by at most 0 nats"),
        ({"logprob": -100.0005}, 1e-5, 0, "0.0005 nats (5e-06 relative"),
        ({"logprob": -100.005}, 1e-5, 1, "0.005 nats (5e-05 relative"),
        ({"logprob": "nan"}, 1.0, 1, "inf nats"),
        ({"greedy": True}, 1e-5, 1, "1 greedy flags differ"),
        ({"text": "right"}, 1e-5, 1, "1 of 1 generated texts differ"),
        (
            {"rolling": -51},
            1e-5,
            0,
            "1 rolling log-likelihoods, not judged, differ by at most 0.02",
        ),
    ):
        plain = {"logprob": -100.0, "greedy": False, "text": "wrong", "rolling": -50}
        results = {task: {"acc,none": 1.0} for task in ("choice", "text", "rolling")}
        for model, own in (("hf", plain), ("griffin", plain | changed)):
            config = {"model": model, "model_args": {"pretrained": "m"}, "batch_size": 8}
            write_run(tmp_path / model, "a", results, answers_of(**own), config)
        out = tmp_path / "out"
        asked = ["--expect-equal", "hf", "--tolerance", tolerance, "--overwrite"]
        done = report(tmp_path / "griffin", tmp_path / "hf", "-o", out, *asked)
        assert done.exit_code == code, done.output
        verdict = "not equal" if code else "equal"
        assert f"{verdict}: griffin and hf: 1 log-likelihoods" in done.output
        assert said in done.output and "hf also scores BOS after BOS" in done.output
        hinted = "nan" in changed.values() or {"text", "greedy"} & changed.keys()
        assert ("padding changes the state" in done.output) == bool(hinted)
        page = (out / "report.html").read_text()
        assert "Are the answers equal?" in page and said in unescape(page)
        flipped = "Changed answers: text, acc, hf and griffin (1)"
        assert (flipped in page) == ("text" in changed)
        assert ("The end of a prompt" in page) == ("text" in changed)


def test_pairs_of_classes_are_no_scores(tmp_path):
    """lm_eval's F1 and Matthews' correlation keep the right class and the predicted one."""
    samples = [
        [{"f1": [i % 3, i % 3 if right else 1], "acc": float(right)} for i in range(30)]
        for right in (True, False)
    ]
    higher = {"t": {"f1": True, "acc": True}}
    results = {"t": {"f1,none": 0.2, "acc,none": 0.5}}
    old, new = (
        write_run(tmp_path / name, "a", results, {"t": each}, higher_is_better=higher)
        for name, each in zip(("old", "new"), samples, strict=True)
    )
    out = tmp_path / "out"
    done = report(new, "--against", old, "-o", out)
    assert done.exit_code == 1 and "t: worse (acc -1" in done.output
    assert [row["metric"] for row in rows_of(out / "paired.csv")] == ["acc"]
    f1 = [row for row in rows_of(out / "results.csv") if row["quantity"] == "f1"]
    assert all(not row["low"] and not row["high"] for row in f1) and f1


def test_lengths_of_ruler_are_points_of_a_curve(tmp_path):
    """A sample of RULER is -1 at all lengths but that of its prompt."""
    runs = []
    for name, right in (("old", 1.0), ("new", 0.0)):
        samples = [{"4096": -1, "8192": 1.0, "16384": -1}] * 10
        samples += [{"4096": -1, "8192": -1, "16384": right}] * 10
        results = {"t": {"4096,none": -1, "8192,none": 1.0, "16384,none": right}}
        higher = {"t": dict.fromkeys(("4096", "8192", "16384"), True)}
        runs.append(
            write_run(tmp_path / name, "a", results, {"t": samples}, higher_is_better=higher)
        )
    out = tmp_path / "out"
    done = report(runs[1], "--against", runs[0], "-o", out)
    assert done.exit_code == 1 and "t: worse (score -0.5" in done.output, done.output
    changes = {row["metric"]: float(row["mean"]) for row in rows_of(out / "paired.csv")}
    assert changes == {"score@8192": 0.0, "score@16384": -1.0}
    assert {row["x"] for row in rows_of(out / "results.csv")} == {"8192.0", "16384.0"}


@pytest.mark.parametrize("lacking", ["an item", "a response", "a task"])
def test_models_are_not_equal_if_one_lacks(tmp_path, lacking):
    whole = answers_of(-1.0, False, "right", -5)["choice"] * 2
    parts = {
        "an item": {"t": whole[:1]},
        "a response": {"t": [whole[0], whole[1] | {"resps": []}]},
        "a task": {"t": whole},
    }
    more = {"u": whole} if lacking == "a task" else {}
    for model, samples in (("hf", {"t": whole} | more), ("griffin", parts[lacking])):
        config = {"model": model, "model_args": {"pretrained": "m"}}
        results = {task: {"acc,none": 1.0} for task in samples}
        write_run(tmp_path / model, "a", results, samples, config)
    out = tmp_path / "out"
    done = report(tmp_path / "griffin", tmp_path / "hf", "-o", out, "--expect-equal", "hf")
    said = {
        "an item": "griffin lacks 1 items of t in hf",
        "a response": "1 items of t have another number of responses",
        "a task": "griffin lacks u, which hf has",
    }
    assert done.exit_code == 1 and said[lacking] in done.output, done.output


def test_what_cannot_be_equal_is_refused(tmp_path):
    one, other = pair(tmp_path, {"t": [1]}, {"t": [1]})
    out = ("-o", tmp_path / "out")
    found = sentence(report(one, other, *out, "--expect-equal", "hf"))
    assert "no model is called hf" in found and "old" in found
    found = sentence(report(one, other, *out, "--labels", "A,B", "--expect-equal", "A"))
    assert "nothing to compare with A" in found
    assert "--tolerance" in sentence(report(one, *out, "--tolerance", "-1"))


def test_figures_and_tables_for_a_paper(tmp_path):
    metrics = {f"accuracy@{x},none": x / 100 for x in (16, 64)}
    metrics |= {f"accuracy@{x}_low,none": x / 200 for x in (16, 64)}
    metrics |= {f"accuracy@{x}_high,none": 2.0 for x in (16, 64)}  # is cut to the metric's range
    file = write_run(tmp_path, "a", {"griffin_passkey": metrics, "lone|task": {"acc,none": 0.5}})
    out = tmp_path / "out"
    done = report(file, "-o", out, "--format", "pdf", "--width", 3.3, "--no-figure-titles")
    assert done.exit_code == 0, done.output
    (figure,) = (out / "figures").iterdir()
    assert figure.name == "griffin_passkey_accuracy.pdf"
    assert figure.read_bytes().startswith(b"%PDF")
    text = (out / "results.md").read_text()
    assert "### Passkey: accuracy by " in text and "### lone\\|task" in text
    assert "| length 64 tokens | 0.64 [0.32, 1.00] |" in text
    assert "expected some of png, svg, pdf" in sentence(report(file, "-o", out, "--format", "gif"))


EVIL = "--><script>alert('x')</script><img src=x onerror=y>[/red]$\\frac${{ 7 * 7 }}/../../../out"


def test_names_from_results_are_text_on_the_page_and_lead_nowhere(runs, tmp_path):
    """Hostile names of models, tasks, metrics and arguments add no element to the template's."""
    hostile = []
    for number, run in enumerate(runs):
        content = result_file(run).read_text()
        content = content.replace("griffin_phonebook", json.dumps(EVIL)[1:-1])
        parsed = json.loads(content)
        parsed["config"]["model"] = EVIL
        parsed["config"]["model_args"]["pretrained"] = f"javascript:{number}{EVIL}"
        (tmp_path / str(number)).mkdir()
        hostile.append(tmp_path / str(number) / result_file(run).name)
        hostile[-1].write_text(json.dumps(parsed))
    output = tmp_path / "in" / "in" / "report"
    done = report(*hostile, "--output", output)
    assert done.exit_code == 0, done.exception
    page = (output / "report.html").read_text()
    found: list[str] = []

    class Elements(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.append(tag)
            assert not [name for name, value in attrs if name.startswith("on")]
            links = [value for name, value in attrs if name in ("href", "xlink:href", "src")]
            assert all(link.startswith("#") for link in links)

    Elements().feed(page)
    assert "svg" in found and found.count("script") == 1  # the template's own
    assert not set(found) & {"img", "a", "iframe", "object", "base", "link"}
    assert EVIL in unescape(page)
    outside = [path for path in tmp_path.rglob("*") if not path.is_relative_to(output)]
    assert set(outside) == {
        *hostile,
        *(path.parent for path in hostile),
        output.parent,
        output.parent.parent,
    }

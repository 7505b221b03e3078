"""The first answers of a report, and their display in a browser."""

from pathlib import Path

from griffin_eval.drawing import Files
from griffin_eval.report.answers import answers
from griffin_eval.report.charts import Chart
from griffin_eval.report.paired import Difference
from griffin_eval.report.results import Point, Run
from griffin_eval.report.verdicts import Verdict


def run(label, points=(), **config):
    config = {"griffin_weights_sha256": "w", "model_dtype": "float32"} | config
    return Run(Path(label), label, config, list(points), {}, {"griffin_phonebook": {}}, {})


def curve(task, quantity, values, low=None, high=None):
    return [
        Point(task, quantity, float(x), y, low and y + low, high and y + high, 9)
        for x, y in values.items()
    ]


def found(runs, charts=(), compared=(), judged=(), folder=None, train_length=None):
    told = answers(runs, charts, compared, judged, Files(folder or Path("unused")), train_length)
    return {answer.question: answer for answer in told}


def test_how_far_it_remembers_is_up_to_the_first_length_below_half():
    book = {4: 1.0, 8: 0.7, 16: 0.4, 32: 0.6}
    chart = Chart("griffin_phonebook_exact_match", "", "<svg/>")
    one = run("A", curve("griffin_phonebook", "exact_match", book, -0.1, 0.1))
    answer = found([one], [chart])["How far does it remember?"]
    assert answer.chart == chart
    assert "up to 8 entries (70% (95% interval 60% to 80%)), at 16 entries 40%" in answer.sentence
    length = Point("griffin_phonebook", "effective_length", None, 4.0, 4.0, 8.0, 10)
    answer = found([one._replace(points=[*one.points, length])])["How far does it remember?"]
    assert (
        "effective length 4 entries (at least 85% of the score at the shortest); "
        in answer.sentence
    )
    none = run("B", curve("griffin_phonebook", "exact_match", {4: 0.2, 8: 0.1}))
    whole = run("C", curve("griffin_phonebook", "exact_match", {4: 0.9, 8: 0.8}))
    sentence = found([one, none, whole])["How far does it remember?"].sentence
    assert "A: more than half are right up to 8 entries (" in sentence
    assert "B: at 4 entries 20% are right, the shortest length that was asked" in sentence
    assert "C: more than half are right up to 8 entries (80%), the longest" in sentence


def test_extrapolation_is_told_from_chance():
    question = "Does it extrapolate?"
    values = {1: 0.0, 8: 0.3}
    for low, high, verdict in (
        (-0.1, 0.1, "it loses (0.3 nats per token, 95% interval 0.2 to 0.4"),
        (-0.4, 0.4, "neither gains nor loses significantly"),
        (None, None, "it loses (0.3 nats per token)"),
    ):
        own = curve("griffin_extrapolation", "nats_difference", values, low, high)
        assert verdict in found([run("A", own)])[question].sentence
    gains = curve("griffin_extrapolation", "nats_difference", {8: -0.3}, -0.1, 0.1)
    assert "8 times the context of its training it gains" in found([run("A", gains)])[question][1]
    heads = run("A", curve("griffin_induction_heads", "accuracy", {64: 1.0, 256: 0.9, 1024: 0.2}))
    sentence = found([heads], train_length=300)[question].sentence
    assert "90% of the answers are right at 256 tokens" in sentence and "20% at 1024" in sentence
    assert question not in found([heads])


def test_frameworks_and_changes(tmp_path):
    torch, jax = run("torch", model_framework="torch"), run("jax", model_framework="jax")
    same = Difference("t", "acc", "jax", "torch", 40, 0.0, -0.01, 0.01, 1.0, 1, 1, 1.0)
    answer = found([torch, jax], compared=[same], folder=tmp_path)["Do the frameworks agree?"]
    assert "2 of 40 right or wrong answers differ" in answer.sentence and answer.chart
    assert "<title>t: acc: 0.000 [-0.010, 0.010]</title>" in answer.chart.svg
    other = run("jax", model_framework="jax", griffin_weights_sha256="other")
    assert not found([torch, other], compared=[same])
    judged = [
        Verdict("a", "acc", 9, -0.2, 0.01, 0.1, "worse"),
        Verdict("b", "acc", 9, 0.01, 1.0, 0.3, "no difference"),
        Verdict("c", "acc", 9, 0.0, 1.0, float("inf"), "no difference"),
    ]
    answer = found([torch], judged=judged, folder=tmp_path)["What changed against the other run?"]
    assert (
        "1 task worse: a (acc -0.2); no tasks better; 2 tasks without a significant change"
        in answer.sentence
    )


def test_an_answer_with_several_metrics_differs_once(tmp_path):
    """Points of a phonebook, acc and acc_norm of a choice, and two lengths of another task."""
    torch, jax = run("torch", model_framework="torch"), run("jax", model_framework="jax")
    compared = [
        Difference(task, metric, "jax", "torch", items, 0.0, None, None, 1.0, flips, 0, 1.0)
        for task, metric, items, flips in (
            ("book", "exact_match", 4, 1),
            ("book", "exact_match@20", 4, 1),
            ("book", "exact_match_by_depth@10", 4, 1),
            ("choice", "acc", 10, 1),
            ("choice", "acc_norm", 10, 3),
            ("heads", "accuracy@64", 6, 0),
            ("heads", "accuracy@128", 6, 1),
            ("heads", "accuracy@inside_window", 6, 1),
        )
    ]
    answer = found([torch, jax], compared=compared, folder=tmp_path)["Do the frameworks agree?"]
    assert "5 of 26 right or wrong answers differ" in answer.sentence


def test_nothing_asked_is_nothing_said():
    assert not found([run("A", [Point("arc_easy", "acc", None, 0.5, 0.4, 0.6, 9)])])

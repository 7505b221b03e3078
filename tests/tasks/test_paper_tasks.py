"""`griffin_paper`: the real tasks of lm_eval on a few rows of each data set's format."""

from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import datasets
import lm_eval.tasks
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

import griffin_eval.tasks
from griffin_eval.report.tables import published_scores

THEIRS = Path(lm_eval.tasks.__file__).parent
PUBLISHED = published_scores()
BENCHMARKS = PUBLISHED["benchmarks"]
FOLDERS = ["mmlu/continuation", "hellaswag", "piqa", "winogrande", "arc"]

ROWS = {
    "cais/mmlu": [
        {"question": f"Question {i}?", "choices": ["one", "two", "a longer one", "x"], "answer": 2}
        for i in range(6)
    ],
    "Rowan/hellaswag": [
        {
            "activity_label": "Running",
            "ctx_a": "A man runs.",
            "ctx_b": "he",
            "endings": ["stops.", "flies away with a very long tail.", "eats.", "sits."],
            "label": "1",
        }
    ],
    "baber/piqa": [{"goal": "Open a jar", "sol1": "Turn the lid", "sol2": "Eat it", "label": 0}],
    "allenai/winogrande": [
        {
            "sentence": "Ann thanked Bea because _ had helped her.",
            "option1": "Ann",
            "option2": "Bea",
            "answer": "2",
        }
    ],
    "allenai/ai2_arc": [
        {
            "question": "What is wet?",
            "choices": {"text": ["fire", "water that falls", "sand"], "label": ["A", "B", "C"]},
            "answerKey": "B",
        }
    ],
}


class Longest(LM):
    """A model that prefers long answers, per character, and keeps its requests."""

    def __init__(self):
        super().__init__()
        self.asked = {}

    def loglikelihood(self, requests):
        for request in requests:
            self.asked.setdefault(request.task_name, []).append(request.args)
        # The total is lowest for the longest answer; only per character is it the best.
        return [(-(len(c.strip()) ** 0.5), False) for _, c in (r.args for r in requests)]

    generate_until = loglikelihood_rolling = None


@pytest.fixture(scope="module")
def run():
    def load(path, name=None, **_):
        rows = ROWS[path]
        splits = ("train", "validation", "test", "dev")
        return datasets.DatasetDict({s: datasets.Dataset.from_list(rows) for s in splits})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.load_dataset", load)
        ours = str(Path(griffin_eval.tasks.__file__).parent)
        tasks = TaskManager(
            include_path=[*(str(THEIRS / folder) for folder in FOLDERS), ours],
            include_defaults=False,
        )
        model = Longest()
        results = simple_evaluate(
            model, tasks=["griffin_paper"], task_manager=tasks, bootstrap_iters=0
        )
    assert results is not None
    return results, model.asked


def leaves(results, name):
    return results["group_subtasks"].get(name, [name])


@pytest.mark.ci
def test_every_column_of_the_table_has_its_metric_and_shots(run):
    results, _ = run
    tasks = {benchmark["task"] for benchmark in BENCHMARKS.values()}
    assert set(results["group_subtasks"]["griffin_paper"]) == tasks
    for benchmark in BENCHMARKS.values():
        assert f"{benchmark['metric']},none" in results["results"][benchmark["task"]]
        subjects = leaves(results, benchmark["task"])
        assert {results["n-shot"][task] for task in subjects} == {benchmark["shots"]}
        assert {results["configs"][task]["num_fewshot"] for task in subjects} == {
            benchmark["shots"]
        }
    assert len(leaves(results, "griffin_paper_mmlu")) == 57


@pytest.mark.ci
def test_accuracy_is_normalised_by_characters(run):
    results, _ = run
    for name in ("MMLU", "HellaSwag", "PIQA", "ARC-E", "ARC-C"):
        benchmark = BENCHMARKS[name]
        # Every answer of the rows is the longest, which this model likes per character only.
        assert results["results"][benchmark["task"]]["acc_norm,none"] == 1, name
        subject = leaves(results, benchmark["task"])[0]
        assert results["results"][subject]["acc,none"] == 0, name


@pytest.mark.ci
def test_mmlu_asks_for_the_texts_of_the_answers_after_five_examples(run):
    _, asked = run
    context, answer = asked["mmlu_anatomy_continuation"][2]
    assert answer == " a longer one"
    assert context.count("Answer: a longer one") == 5


@pytest.mark.ci
def test_winogrande_scores_what_follows_the_blank(run):
    _, asked = run
    assert asked["winogrande"] == [
        ("Ann thanked Bea because Ann", " had helped her."),
        ("Ann thanked Bea because Bea", " had helped her."),
    ]


def test_published_scores_are_of_these_benchmarks():
    for row in PUBLISHED["published"]:
        assert row["source"] in PUBLISHED["sources"] and set(row["scores"]) <= set(BENCHMARKS)
        assert all(0 < score < 100 for score in row["scores"].values())

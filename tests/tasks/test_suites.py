"""`griffin_long`: lm_eval's own long-context tasks on a few rows of each data set's format."""

from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import datasets
import lm_eval.tasks
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

import griffin_eval
import griffin_eval.tasks
from griffin_eval.errors import ArgumentError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.tasks.suites.babilong import LENGTHS, at_length

THEIRS = Path(lm_eval.tasks.__file__).parent
FOLDERS = ["ruler", "babilong", "longbench2", "infinitebench", "fda", "swde", "squad_completion"]
CHECKPOINT = Path(griffin_eval.__file__).parent / "checkpoints" / "bytes_griffin"
BOOK = "The cat sat on the mat. " * 40

RECALL = [{"doc_id": "1", "text": BOOK + "The mat is", "value": "on the floor", "key": "mat"}] * 3
INFINITE = [
    {
        "id": i,
        "context": BOOK,
        "input": "What is the pass key? f(3)",
        "answer": ["12345"],
        "options": ["12345", "2", "3", "4"],
    }
    for i in range(3)
]
ROWS = {
    "RMT-team/babilong-1k-samples": [
        {"input": BOOK, "question": "Where is the cat?", "target": "mat"}
    ]
    * 3,
    "recursal/longbench-v2": [
        {
            "context": BOOK + f"Number {i}.",
            "question": "Who sat?",
            "choices": ["cat", "dog", "mat", "sat"],
            "answer": "A",
        }
        for i in range(3)
    ],
    "xinrongzhang2022/InfiniteBench": INFINITE,
    "hazyresearch/based-fda": RECALL,
    "hazyresearch/based-swde-v2": RECALL,
    "hazyresearch/based-squad": RECALL,
}
asked: list[tuple[str, str | None]] = []


def load(path, name=None, split=None, **_):
    asked.append((path, name))
    rows = datasets.Dataset.from_list(ROWS[path])
    if split is not None:
        return rows
    names = ("train", "validation", "test") if "Infinite" not in path else infinite_splits()
    return datasets.DatasetDict({name: rows for name in names})


def infinite_splits():
    files = (THEIRS / "infinitebench").glob("infinitebench_*.yaml")
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line.partition(": ")[2] for line in lines if line.startswith("test_split: ")]


def ruler_rows(max_seq_lengths, **_):
    """Documents as RULER's tasks generate them: theirs need the network for words and essays."""
    rows = [
        {
            "input": BOOK * (length // 512) + "What is the number?",
            "outputs": ["7"],
            "gen_prefix": "The number is",
            "max_length": length,
        }
        for length in max_seq_lengths
        for _ in range(2)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


@pytest.fixture(scope="module")
def tasks():
    ours = str(Path(griffin_eval.tasks.__file__).parent)
    metadata = {"max_seq_lengths": [4096, 8192], "babilong_length": "8k"}
    with pytest.MonkeyPatch.context() as patch:
        download = ConfigurableTask.download

        def draw(self, *arguments, **named):
            if (self.config.task or "").startswith(("niah", "ruler")):
                self.dataset = ruler_rows(**self.config.metadata)
            else:
                download(self, *arguments, **named)

        patch.setattr("datasets.load_dataset", load)
        patch.setattr(ConfigurableTask, "download", draw)
        yield TaskManager(
            include_path=[*(str(THEIRS / folder) for folder in FOLDERS), ours],
            include_defaults=False,
            metadata=metadata,
        )


def members(name, tasks):
    """All tasks below a group."""
    found = tasks.load([name])
    return set(found["tasks"])


@pytest.mark.slow
def test_the_group_has_every_suite(tasks):
    asked.clear()
    found = members("griffin_long", tasks)
    expected = {"niah_single_1", "ruler_qa_hotpot", "babilong_qa5", "longbench2_code", "fda"}
    assert expected < found
    assert {"swde", "squad_completion", "infinitebench_passkey"} < found
    assert len([name for name in found if name.startswith("babilong")]) == 5
    assert len([name for name in found if name.startswith(("niah", "ruler"))]) == 13
    # BABILong and RULER each at a length of their own.
    assert ("RMT-team/babilong-1k-samples", "8k") in asked


@pytest.mark.slow
def test_the_suites_run(tasks, caplog):
    model = GriffinLM(str(CHECKPOINT), "torch", dtype="float32", device="cpu")
    names = ["griffin_babilong", "longbench2_single", "griffin_recall"]
    names += ["infinitebench_passkey", "niah_single_1"]
    with caplog.at_level("INFO"):
        results = simple_evaluate(
            model, tasks=names, task_manager=tasks, limit=1, bootstrap_iters=0, log_samples=True
        )
    assert results is not None
    found = results["results"]
    assert 0 <= found["griffin_babilong"]["acc,none"] <= 1
    assert 0 <= found["longbench2_single"]["acc,none"] <= 1
    assert 0 <= found["griffin_recall"]["contains,none"] <= 1
    assert found["niah_single_1"]["4096,none"] in (0.0, 1.0)
    costs = [r.getMessage() for r in caplog.records if "tokens to read" in r.getMessage()]
    # Four choices of each of seven questions about one book.
    assert len(BOOK) < int(costs[1].split()[1].replace(",", "")) < 1.5 * len(BOOK)


def test_a_length_that_the_data_do_not_have():
    assert "128k" in LENGTHS
    with pytest.raises(ArgumentError, match=r"babilong_length='9k': expected one of 0k, 1k"):
        at_length(babilong_length="9k")

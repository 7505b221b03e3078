"""`griffin_long`: lm_eval's own long-context tasks on a few rows of each data set's format."""

import json
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
        "options": [] if i else ["12345", "2", "3", "4"],
    }
    for i in range(3)
]
BABILONG = [{"input": BOOK, "question": "Where is the cat?", "target": "mat"}] * 3
LONGBENCH = [
    {
        "context": BOOK + f"Number {i}.",
        "question": "Who sat?",
        "choices": ["cat", "dog", "mat", "sat"],
        "answer": "A",
    }
    for i in range(3)
]
LONGBENCH_SUBSETS = """academic_multi academic_single agent_history_qa code_repo_qa detective
dialogue_history_qa event_ordering financial_multi financial_single government_multi
government_single graph_reasoning legal_multi legal_single literary manyshot_learning multinews
new_language_translation table_qa user_guide_qa""".split()
# The splits of the hub's data set; lm_eval asks for some of them by other names.
INFINITE_SPLITS = """passkey kv_retrieval number_string code_run code_debug math_find math_calc
longdialogue_qa_eng longbook_qa_eng longbook_sum_eng longbook_choice_eng longbook_qa_chn""".split()
QUESTIONS = [f"qa{number}" for number in range(1, 6)]


def write_dataset(folder, rows, splits, configs=("default",)):
    """Write a data set that `datasets.load_dataset` can read like one from the hub."""
    folder.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    lines = ["---", "configs:"]
    for config in configs:
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            (folder / f"{split}.jsonl").write_text(text)
            lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write small data sets of the real ones' form to a folder, under the real ones' names."""
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "RMT-team/babilong-1k-samples", BABILONG, QUESTIONS, ("4k", "8k"))
    write_dataset(folder / "recursal/longbench-v2", LONGBENCH, ["train"], LONGBENCH_SUBSETS)
    write_dataset(folder / "xinrongzhang2022/InfiniteBench", INFINITE, INFINITE_SPLITS)
    for name in ("fda", "swde-v2", "squad"):
        write_dataset(folder / f"hazyresearch/based-{name}", RECALL, ["validation"])
    return folder


def ruler_rows(max_seq_lengths, **_):
    """Return documents in RULER's form. RULER's own need the network for words and essays."""
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
def tasks(data):
    ours = str(Path(griffin_eval.tasks.__file__).parent)
    metadata = {"max_seq_lengths": [4096, 8192], "babilong_length": "8k"}
    with pytest.MonkeyPatch.context() as patch:
        download = ConfigurableTask.download

        def draw(self, *arguments, **named):
            if (self.config.task or "").startswith(("niah", "ruler")):
                self.dataset = ruler_rows(**self.config.metadata)
            else:
                download(self, *arguments, **named)

        patch.chdir(data)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", data / "cache")
        patch.setattr(ConfigurableTask, "download", draw)
        yield TaskManager(
            include_path=[*(str(THEIRS / folder) for folder in FOLDERS), ours],
            include_defaults=False,
            metadata=metadata,
        )


@pytest.mark.slow
def test_the_group_has_every_suite(tasks):
    found = tasks.load(["griffin_long"])["tasks"]
    names = set(found)
    expected = {"niah_single_1", "ruler_qa_hotpot", "babilong_qa5", "longbench2_code", "fda"}
    assert expected < names
    assert {"swde", "squad_completion", "infinitebench_passkey"} < names
    assert len([name for name in names if name.startswith("babilong")]) == 5
    assert len([name for name in names if name.startswith(("niah", "ruler"))]) == 13
    # BABILong and RULER have different lengths.
    assert found["babilong_qa1"].dataset["qa1"].info.config_name == "8k"
    # Every task has its documents, by whatever name it asks for their split.
    infinite = [name for name in names if name.startswith("infinitebench")]
    assert len(infinite) == 11
    assert {len(list(found[name].eval_docs)) for name in infinite} == {3}


@pytest.mark.slow
def test_the_suites_run(tasks, caplog):
    model = GriffinLM(str(CHECKPOINT), "torch", dtype="float32", device="cpu")
    names = ["griffin_babilong", "longbench2_single", "griffin_recall"]
    names += ["griffin_infinitebench", "niah_single_1"]
    with caplog.at_level("INFO"):
        results = simple_evaluate(
            model, tasks=names, task_manager=tasks, limit=1, bootstrap_iters=0, log_samples=True
        )
    assert results is not None
    found = results["results"]
    assert 0 <= found["griffin_babilong"]["acc,none"] <= 1
    assert 0 <= found["longbench2_single"]["acc,none"] <= 1
    assert 0 <= found["griffin_recall"]["contains,none"] <= 1
    assert found["infinitebench_code_debug"]["score,none"] == 0.0
    assert found["niah_single_1"]["4096,none"] in (0.0, 1.0)
    costs = [r.getMessage() for r in caplog.records if "tokens to read" in r.getMessage()]
    # The book is read once for seven questions with four choices each.
    assert len(BOOK) < int(costs[1].split()[1].replace(",", "")) < 1.5 * len(BOOK)


def test_a_length_that_the_data_do_not_have():
    assert "128k" in LENGTHS
    with pytest.raises(ArgumentError, match=r"babilong_length='9k': expected one of 0k, 1k"):
        at_length(babilong_length="9k")

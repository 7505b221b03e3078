"""Code of tasks runs only when the task runs."""

from lm_eval.tasks import TaskManager
from tiny_checkpoints import write_source

from griffin_eval.converters.checkpoint import Checkpoint

TASK = """
task: planted
dataset_path: json
dataset_kwargs: {data_files: FOLDER/rows.json, cache_dir: FOLDER/cache}
test_split: train
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["a", "b"]
doc_to_target: !function planted.target
"""


def test_a_task_runs_its_code_and_a_checkpoint_has_no_tasks(tmp_path):
    folder, ran = tmp_path / "model", tmp_path / "ran"
    write_source(folder)
    (folder / "planted.yaml").write_text(TASK.replace("FOLDER", str(folder)))
    (folder / "planted.py").write_text(
        f"import os; os.mkdir({str(ran)!r})\ntarget = lambda row: 0\n"
    )
    (folder / "rows.json").write_text('{"text": "x"}\n')
    assert Checkpoint(folder).format.name == "hf"
    assert "planted" not in TaskManager(include_defaults=False).all_tasks
    assert not ran.exists()
    named = TaskManager(include_path=str(folder), include_defaults=False)
    assert named.all_tasks == ["planted"] and not ran.exists()  # listing a task does not run it
    named.load(["planted"])
    assert ran.exists()

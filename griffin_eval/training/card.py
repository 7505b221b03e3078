"""Writes the model card of a trained checkpoint:

    python -m griffin_eval.training.card RUN CHECKPOINT RESULTS...

RUN is the folder of a training, CHECKPOINT what it was converted to, RESULTS what lm_eval wrote
about CHECKPOINT. The card's scores are in Hugging Face's model-index, with the tasks' metadata.
"""

import json
import platform
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.layout import parameter_count
from griffin_eval.report.results import Run, read
from griffin_eval.training.trainer import METRICS_FILE, RUN_FILE, read_metrics

QUANTITIES = ("accuracy", "token_accuracy", "exact_match", "bits_per_byte")
ADDED = ("version", "config_source", "dataset_sha256", "chance")  # by lm_eval and the tasks
DATA = {
    "selective_copy": "Generated: data symbols among noise (section 6.2 of the paper).",
    "induction_heads": "Generated: random symbols with a trigger (section 6.2 of the paper).",
    "bytes": (
        "Seven of ten sequences are generated phonebooks, the others parts of the standard library "
        f"of Python {platform.python_version()}, one token a byte (SHA-256 of the text: {{text}})."
    ),
}
LINEAGE = {
    "griffin": "recurrent, recurrent and local attention blocks in turn",
    "hawk": "recurrent blocks alone",
    "mqa": "global multi-query attention alone, with RoPE",
}


def write_card(run: Path, checkpoint: Path, results: list[Path]) -> Path:
    """Writes ``README.md`` into the folder of a checkpoint; gives its path.

    Args:
        run: folder of the training.
        checkpoint: folder it was converted to.
        results: files or folders of lm_eval's results on it.
    """
    name, asked = checkpoint.name, json.loads((run / RUN_FILE).read_text())
    recipe, last = asked["recipe"], read_metrics(run / METRICS_FILE)[-1]
    opened = Checkpoint(checkpoint)
    config = opened.config
    measured = [score for found in read(results, []) for score in _scores(found)]
    data = ModelCardData(
        license="apache-2.0",
        library_name="griffin-eval",
        tags=["griffin", asked["model"], recipe["name"]],
        model_name=name,
        eval_results=measured,
    )
    window = f", window {config.visible_keys}" if "local_attention" in config.block_types else ""
    retrain = (
        f"griffin-eval train {recipe['name']} --model {asked['model']} --seed {asked['seed']} "
        f"--steps {recipe['steps']} --length {recipe['length']} "
        f"--learning-rate {recipe['learning_rate']} --output run"
    )
    lines = [
        f"# {name}",
        "",
        f"{asked['model'].capitalize()}, {LINEAGE[asked['model']]}: {config.num_layers} blocks of "
        f"width {config.width}, {parameter_count(config):,} parameters{window}, vocabulary "
        f"{config.vocab_size}, in {opened.dtype}. A small model for tests and demonstrations of "
        "one task; it is good for nothing else.",
        "",
        f"- Recipe `{recipe['name']}`, seed {asked['seed']}, {last['step']:,} steps, "
        f"{last['tokens']:,} tokens, sequences of up to {recipe['length']} tokens; "
        f"{last['seconds'] / 60:.0f} minutes.",
        f"- Data: {DATA[recipe['name']].format(text=recipe.get('text'))}",
        f"- Held out in training: loss {last['test_loss']:.4g} nats, accuracy "
        f"{last['accuracy']:.1%}.",
        "- To train it again:",
        "",
        f"      {retrain}",
        f"      griffin-eval convert run {name} --to griffin --dtype {opened.dtype}",
        "",
        "Measured with `lm_eval --model griffin`, dtype=float32, `--metadata "
        f"'{json.dumps(measured[0].dataset_args)}'`, on this checkpoint:",
        "",
        "| task | metric | value |",
        "|---|---|---:|",
        *(f"| {m.dataset_type} | {m.metric_type} | {m.metric_value:.4f} |" for m in measured),
        "",
    ]
    opened.close()
    path = checkpoint / "README.md"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)).save(path)
    return path


def _scores(run: Run) -> list[EvalResult]:
    found = []
    for point in run.points:
        if point.quantity not in QUANTITIES or not isinstance(point.value, float):
            continue
        x = f"{point.x:g}" if isinstance(point.x, float) else point.x
        metric = point.quantity if x is None else f"{point.quantity}@{x}"
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=point.task,
                dataset_name=point.task,
                dataset_args=_given(run, point.task),
                metric_type=metric,
                metric_value=point.value,
            )
        )
    return found


def _given(run: Run, task: str) -> dict[str, Any]:
    """What ``--metadata`` said of a task: all but the model's arguments and what others add."""
    return {
        key: value
        for key, value in run.metadata[task].items()
        if key not in run.arguments and key not in ADDED
    }


if __name__ == "__main__":
    print(write_card(Path(sys.argv[1]), Path(sys.argv[2]), [Path(p) for p in sys.argv[3:]]))

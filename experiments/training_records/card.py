"""The command ``python -m experiments.training_records.card``."""

import json
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from experiments import MODEL_NAMES
from griffin_eval.cli.ending import run_command
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.layout import parameter_count
from griffin_eval.report.results import Run, read
from griffin_eval.training.options import command
from griffin_eval.training.run_folder import METRICS_FILE, RUN_FILE, read_metrics

QUANTITIES = ("accuracy", "token_accuracy", "exact_match", "bits_per_byte")
# Metadata that lm_eval and the tasks add to the user's.
ADDED = ("version", "config_source", "dataset_sha256", "chance")
DATA = {
    "selective_copy": "Generated: data symbols among noise (section 6.2 of the paper).",
    "induction_heads": "Generated: random symbols with a trigger (section 6.2 of the paper).",
    "bytes": (
        "Seven of ten sequences are generated phonebooks, the others parts of the standard library "
        f"of Python {platform.python_version()}, one token a byte (SHA-256 of the text: {{text}})."
    ),
    "phonebook": "Generated: phonebooks of one entry or more, one token a byte.",
    "phonebook_lookup": (
        "Generated: phonebooks of one entry or more, at first with few names in all books, and "
        "some with numbers of one or two digits, one token a byte."
    ),
    "text": (
        f"Parts of the standard library of Python {platform.python_version()}, one token a byte "
        "(SHA-256 of the text: {text})."
    ),
}
LEVELS = (0.5, 0.9, 0.95, 0.99)  # accuracies whose first steps a card names
LINEAGE = {
    "griffin": "recurrent, recurrent and local attention blocks in turn",
    "hawk": "recurrent blocks alone",
    "mqa": "global multi-query attention alone, with RoPE",
    "local_mqa": "local multi-query attention alone, with RoPE",
}


def write_card(
    run: Annotated[Path, typer.Argument(help="Folder of the training run.")],
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the converted checkpoint.")],
    results: Annotated[
        list[Path], typer.Argument(help="Files or folders of lm_eval's results on CHECKPOINT.")
    ],
    chosen: Annotated[str, typer.Option(help="Sentence on why this run was chosen.")],
    until: Annotated[float | None, typer.Option(help="Accuracy that ended the run.")] = None,
) -> None:
    """Write README.md, the model card with a model-index of scores, into CHECKPOINT."""
    name, settings = checkpoint.name, json.loads((run / RUN_FILE).read_text())
    recipe, model, seed = settings["recipe"], settings["model"], settings["seed"]
    metrics = read_metrics(run / METRICS_FILE)
    last = metrics[-1]
    opened = Checkpoint(checkpoint)
    config = opened.config
    measured = [score for each in read(results) for score in _scores(each)]
    data = ModelCardData(
        license="apache-2.0",
        library_name="griffin-eval",
        tags=["griffin", model, recipe["name"]],
        model_name=name,
        eval_results=measured,
    )
    window = f", window {config.visible_keys}" if "local_attention" in config.block_types else ""
    retrain = f"{command(settings, last['step'], until)} --output run"
    lines = [
        f"# {name}",
        "",
        f"{MODEL_NAMES[model]}, {LINEAGE[model]}: {config.num_layers} blocks of "
        f"width {config.width}, {parameter_count(config):,} parameters{window}, vocabulary "
        f"{config.vocab_size}, in {opened.dtype}. A small model for tests and demonstrations of "
        "one task; it is good for nothing else.",
        "",
        f"- Recipe `{recipe['name']}`, seed {seed}, {last['step']:,} steps, "
        f"{last['tokens']:,} tokens, sequences of up to {recipe['length']} tokens; "
        f"{last['seconds'] / 60:.0f} minutes.",
        f"- Data: {DATA[recipe['name']].format(text=recipe.get('text'))}",
        f"- Held out in training: loss {last['test_loss']:.4g} nats, accuracy "
        f"{last['accuracy']:.1%}; {_curve(metrics)}.",
        f"- {chosen}",
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
    typer.echo(str(path))


def _curve(metrics: list[dict[str, Any]]) -> str:
    """Return a sentence on the steps at which the held-out accuracy first reached the levels."""
    first = {
        level: next((one["step"] for one in metrics if one["accuracy"] >= level), None)
        for level in LEVELS
    }
    reached = [f"{level:.0%} at step {step:,}" for level, step in first.items() if step is not None]
    return f"first {', '.join(reached)}" if reached else f"never {min(LEVELS):.0%}"


def _scores(run: Run) -> list[EvalResult]:
    """Return the numbers of `QUANTITIES` as entries of a model-index."""
    scores = []
    for point in run.points:
        if point.quantity not in QUANTITIES or not isinstance(point.value, float):
            continue
        x = f"{point.x:g}" if isinstance(point.x, float) else point.x
        # ``--metadata`` of the task, without the arguments of the model and additions.
        metadata = run.metadata[point.task].items()
        arguments = {k: v for k, v in metadata if k not in run.arguments and k not in ADDED}
        scores.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=point.task,
                dataset_name=point.task,
                dataset_args=arguments,
                metric_type=point.quantity if x is None else f"{point.quantity}@{x}",
                metric_value=point.value,
            )
        )
    return scores


if __name__ == "__main__":
    run_command(lambda: typer.run(write_card))

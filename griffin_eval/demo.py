"""``make demo``: one checkpoint, both frameworks and hf, through the stock lm_eval command.

transformers writes a small RecurrentGemma with seeded random weights; `lm_eval` evaluates it with
``--model griffin`` in PyTorch and in JAX and with ``--model hf``; one table shows that they agree,
request by request. Random weights answer at chance: the demo is about agreement.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

SCORED = ("griffin_pydoc_choice", "griffin_phonebook")
ROLLING = ("griffin_pydoc_rolling",)
TASKS = SCORED + ROLLING
VOCABULARY = 1024
TOLERANCE = 1e-4  # of a log-likelihood, relative above 1 nat and absolute below


class Column(NamedTuple):
    """One column of the table: a model of the stock command, and the runs that fill it."""

    title: str
    model: str
    runs: tuple[tuple[tuple[str, ...], str], ...]  # tasks, model_args


COLUMNS = (
    Column("griffin torch", "griffin", ((TASKS, "framework=torch"),)),
    Column("griffin jax", "griffin", ((TASKS, "framework=jax"),)),
    # hf stops at 2048 tokens unless told otherwise, and counts P(BOS | BOS) in rolling
    # log-likelihoods unless its tokenizer adds no BOS.
    Column(
        "hf",
        "hf",
        (
            (SCORED, "dtype=float32,max_length=8192"),
            (ROLLING, "dtype=float32,max_length=8192,add_bos_token=False"),
        ),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Evaluate one checkpoint three ways and compare.")
    parser.add_argument("--limit", type=int, default=8, help="documents per task")
    parser.add_argument("--keep", type=Path, help="keep the checkpoint and the results here")
    arguments = parser.parse_args()
    console = Console(width=max(Console().width, 120))  # no column of the table is cut
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        checkpoint = folder / "checkpoint"
        console.print(f"writing a RecurrentGemma checkpoint with transformers to {checkpoint}")
        write_checkpoint(checkpoint)
        results = [run(console, column, checkpoint, folder, arguments.limit) for column in COLUMNS]
    table, agree = compare(results)
    console.print(table)
    console.print("All three agree." if agree else "They do NOT agree.")
    return 0 if agree else 1


def write_checkpoint(folder: Path) -> None:
    """A RecurrentGemma of transformers' own class with a byte-level BPE tokenizer, both seeded."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        RecurrentGemmaConfig,
        RecurrentGemmaForCausalLM,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=6 * 128,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_hidden_layers=5,
        attention_window_size=128,
    )
    model = RecurrentGemmaForCausalLM(config)
    with torch.no_grad():  # as initialised most branches are near zero, which would hide errors
        for name, p in model.named_parameters():
            scale = 0.1 if "norm" in name or name.endswith("bias") else p.shape[-1] ** -0.5
            if name.endswith("recurrent_param"):
                p.normal_(-4.0, 0.5)
            else:
                p.normal_(0.0, scale)
    model.save_pretrained(folder)

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bpe.token_to_id("<bos>"))]
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe, **special).save_pretrained(folder)


def run(
    console: Console, column: Column, checkpoint: Path, folder: Path, limit: int
) -> dict[str, Any]:
    """Runs the stock command; gives for every task its metrics and the answers to its requests."""
    found: dict[str, Any] = {}
    for tasks, arguments in column.runs:
        output = folder / f"{column.title.replace(' ', '-')}-{len(found)}"
        command = ["lm_eval", "--model", column.model]
        command += ["--model_args", f"pretrained={checkpoint},{arguments}"]
        command += ["--tasks", ",".join(tasks), "--batch_size", "1", "--device", "cpu"]
        command += ["--limit", str(limit), "--log_samples", "--output_path", str(output)]
        console.print("$ " + shlex.join(command), soft_wrap=True, highlight=False)
        program = str(Path(sys.executable).with_name(command[0]))
        with console.status("running"):
            done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}\nlm_eval failed: exit code {done.returncode}")
        metrics = json.loads(next(output.rglob("results_*.json")).read_text())["results"]
        for task in tasks:
            samples = next(output.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()
            answers = [a for line in samples for a in _answers(json.loads(line)["resps"])]
            values = {
                name.removesuffix(",none"): value
                for name, value in metrics[task].items()
                if isinstance(value, float) and "stderr" not in name
            }
            found[task] = (values, answers)
    return found


def _answers(responses: list[Any]) -> list[tuple[float | None, str]]:
    """Of every request of a document: its log-likelihood, if it has one, and the rest as text."""
    answers = []
    for (response,) in responses:
        if isinstance(response, list):
            answers.append((float(response[0]), f"greedy {response[1]}"))
        else:
            try:
                answers.append((float(response), ""))
            except ValueError:
                answers.append((None, response))
    return answers


def compare(results: list[dict[str, Any]]) -> tuple[Table, bool]:
    """The table of metrics, and whether all agree.

    Its last two columns compare the requests of a task one by one: how many greedy flags or texts
    are the same in all three, and the largest difference of a log-likelihood (relative to it, or
    absolute below 1 nat).
    """
    table = Table(title="one checkpoint, three ways")
    for heading in ("task", "metric"):
        table.add_column(heading, no_wrap=True)
    for heading in (*(c.title for c in COLUMNS), "same answers", "largest difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    agree = True
    for task in TASKS:
        answers = [found[task][1] for found in results]
        differences, same = [], 0
        for request in zip(*answers, strict=True):
            same += len({text for _, text in request}) == 1
            numbers = [number for number, _ in request if number is not None]
            if numbers:
                differences.append((max(numbers) - min(numbers)) / max(1, abs(numbers[-1])))
        largest = max(differences, default=0.0)
        agree = agree and same == len(answers[0]) and largest <= TOLERANCE
        texts = any(text for _, text in answers[0])
        verdict = [
            f"{same}/{len(answers[0])}" if texts else "",
            f"{largest:.0e}" if differences else "",
        ]
        for row, metric in enumerate(results[0][task][0]):
            values = [found[task][0][metric] for found in results]
            agree = agree and max(values) - min(values) <= TOLERANCE
            cells = [f"{value:.4f}" for value in values]
            table.add_row("" if row else task, metric, *cells, *([] if row else verdict))
    return table, agree


if __name__ == "__main__":
    sys.exit(main())

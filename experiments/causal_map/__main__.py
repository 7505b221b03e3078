"""The command ``python -m experiments.causal_map``."""

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from benchmarks.commands import AsJson, Figures
from griffin_eval.cli.ending import run_command
from griffin_eval.cli.options import check_figures_folder, progress_on_terminal
from griffin_eval.errors import ArgumentError

if TYPE_CHECKING:
    from experiments.causal_map.pairs import Questions
    from griffin_eval.opened import OpenModel

Task = Literal["phonebook", "passkey", "induction_heads", "selective_copying"]


def causal_map(
    checkpoints: Annotated[
        list[str],
        typer.Argument(help="Folders, .pt files or hub ids; each is a row of the figure."),
    ],
    task: Annotated[Task, typer.Option(help="Task that the pairs of documents come from.")] = (
        "phonebook"
    ),
    pairs: Annotated[int, typer.Option(help="Number of pairs of documents.", min=1)] = 32,
    length: Annotated[
        int | None,
        typer.Option(help="Entries of a phonebook, or tokens of a document of other tasks.", min=4),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file with your own document, in place of a task.")
    ] = None,
    fact: Annotated[str, typer.Option(help="Words of --text that are the fact.")] = "",
    instead: Annotated[
        str, typer.Option(help="Words that replace the fact, with as many tokens.")
    ] = "",
    question: Annotated[str, typer.Option(help="Words after --text that the fact answers.")] = "",
    groups: Annotated[
        bool, typer.Option("--groups", help="Patch halves of the depth instead of single layers.")
    ] = False,
    control: Annotated[
        bool,
        typer.Option("--control", help="Measure a second map with the answers of other pairs."),
    ] = False,
    output: Figures = None,
    as_json: AsJson = False,
) -> None:
    """Map where checkpoints keep a fact, by layer and distance.

    The two documents of a pair differ in one fact. At each distance from the fact, parts of the
    state of one document are put into the other: 1 means that the answer follows the part, 0 that
    it does not. First the command checks that every model answers the question at all.
    """
    from experiments.causal_map.findings import check_answers, find
    from experiments.causal_map.tables import report_of
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.opened import open_model

    check_figures_folder(output)
    if control and (text is not None or pairs == 1):
        raise ArgumentError("--control takes the answers of other pairs: expected two or more")
    subjects = []
    for name in checkpoints:
        arguments = {"framework": "torch", "data_parallel_size": 1}
        model = open_model(parse_arguments(arguments | {"pretrained": name}), reads_texts=False)
        model.confirm_weights()
        if text is None:
            questions = _draw(model, task, pairs, length)
        else:
            questions = _own_question(model, text, fact, instead, question)
        subjects.append((name, model, questions))
    accuracies = [check_answers(name, model.runner, asked) for name, model, asked in subjects]
    maps = []
    for (name, model, questions), accuracy in zip(subjects, accuracies, strict=True):
        with progress_on_terminal() as bar:
            row = bar.add_task(name, total=len(questions.pairs) * (1 + control))
            advance = functools.partial(bar.advance, row)
            facts = find(model.checkpoint, model.runner, questions, groups, control, advance)
        maps.append({"checkpoint": name, "accuracy": accuracy} | facts)
    if as_json:
        typer.echo(json.dumps(maps, indent=1, allow_nan=False))
    else:
        for each in maps:
            report_of(each).show(False)
    if output is not None:
        from experiments.causal_map.figure import draw

        typer.echo(str(draw(maps, output)), err=as_json)


def _own_question(
    model: "OpenModel", path: Path, fact: str, instead: str, question: str
) -> "Questions":
    from experiments.causal_map.pairs import Questions, own_pair
    from griffin_eval.cli.score import read_texts

    if not (fact and instead and question):
        raise ArgumentError("--text needs --fact, --instead and --question: add what is missing")
    ((_, content),) = read_texts([path], False)
    return Questions(
        str(path), [own_pair(model.tokenizer, model.add_bos, content, fact, instead, question)]
    )


def _draw(model: "OpenModel", task: Task, count: int, length: int | None) -> "Questions":
    from experiments.causal_map import pairs
    from griffin_eval.converters.source.companions import tokenizer_folder

    if task in pairs.SYMBOL_TASKS:
        if model.checkpoint.config.vocab_size != 16:
            raise ArgumentError(
                f"--task {task} is for models of the paper's 16 symbols, and this one has "
                f"a vocabulary of {model.checkpoint.config.vocab_size}: use phonebook or passkey"
            )
        return pairs.SYMBOL_TASKS[task](count, length)
    text = model.tokenizer, model.add_bos, count, length
    if task == "phonebook":
        return pairs.phonebook(*text)
    return pairs.passkeys(*text, tokenizer_folder(model.checkpoint.folder))


if __name__ == "__main__":
    run_command(lambda: typer.run(causal_map))

"""The base class and the checks of selective copying and induction heads as lm_eval tasks."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance

from griffin_eval.arguments import integer_problems, is_integer
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import CurveTask
from griffin_eval.tasks.symbols import sequences


class SymbolTask(CurveTask):
    """A task whose documents are sequences, each its own cluster.

    Each answer of a sequence is one request: the log-likelihood of a symbol after everything before
    it. An answer is right if its symbol is the likeliest token, as in greedy decoding.
    """

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> list[Instance]:
        unused = ("apply_chat_template", "chat_template")  # symbols are no text for a chat
        kwargs = {key: value for key, value in kwargs.items() if key not in unused}
        tokens, answers = doc["tokens"], doc["answers"]
        first = len(tokens) - len(answers) + 1
        return [
            Instance("loglikelihood", doc, (tokens[: first + i], answer), idx=i, **kwargs)
            for i, answer in enumerate(answers)
        ]


def documents(
    task: str,
    draw: Callable[[Any, int], sequences.Example],
    lengths: Sequence[int],
    samples: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Return rows of a dataset; lengths vary fastest, so that the first few rows have all.

    Args:
        draw: Function that draws one sequence from a generator and a length.
        samples: Number of sequences of each length. More samples leave the first ones unchanged.
    """
    rows = []
    for sample in range(samples):
        for length in lengths:
            example = draw(sequences.generator(task, seed, length, sample), length)
            rows.append(
                {
                    "tokens": sequences.text(example.tokens),
                    "answers": sequences.text(example.answers),
                    "length": length,
                    "sample": sample,
                    "seed": seed,
                }
            )
    return rows


def check(task: str, pretrained: Any, lengths: Any, min_length: int, **numbers: Any) -> list[int]:
    """Check the metadata and return the lengths as a list without repetitions.

    Args:
        pretrained: Argument of the model, or None.
        lengths: An integer or several.
        min_length: Smallest possible length; ignored if it is no integer.
        numbers: Further values by name: integers of at least 1, for the seed of at least 0.

    Raises:
        ArgumentError: A value is invalid (the message names all of them), or the model's tokenizer,
            if its file is on this machine, has another vocabulary.
    """
    minima = {"lengths": min_length} if is_integer(min_length) else {}
    if problems := integer_problems(minima, **numbers, lengths=lengths):
        raise ArgumentError(f"{task}: {'; '.join(problems)}")
    file = Path(str(pretrained)) / "tokenizer.json"
    if pretrained and file.is_file() and not _reads_symbols(file):
        raise ArgumentError(
            f"{task} is for models whose tokens are the {sequences.VOCABULARY} symbols "
            f"{sequences.ALPHABET}, ids in this order; {file} is another tokenizer"
        )
    return list(dict.fromkeys(lengths if isinstance(lengths, (list, tuple)) else [lengths]))


def _reads_symbols(file: Path) -> bool:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    ids = list(range(sequences.VOCABULARY))
    return tokenizer.encode(sequences.ALPHABET, add_special_tokens=False).ids == ids

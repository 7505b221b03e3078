"""What selective copying and induction heads share as tasks of lm_eval."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance

from griffin_eval.arguments import integer_problems, is_integer
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import CurveTask
from griffin_eval.tasks.symbols import sequences


class SymbolTask(CurveTask):
    """A task whose documents are sequences, each a cluster of its own.

    Each answer of a sequence is one request: the log-likelihood of a symbol after everything before
    it. It counts as right if it is the likeliest of all tokens, so that greedy decoding gives it.
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
    """Rows of a dataset. The lengths take turns, so that the first few rows have all.

    Args:
        draw: function that draws one sequence from a generator and a length.
        samples: sequences of each length. A larger number leaves the first ones as they are.
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


def check(task: str, pretrained: Any, lengths: Any, least: int, **numbers: Any) -> list[int]:
    """Checks the metadata; gives the lengths as a list without repetitions.

    Args:
        pretrained: argument of the model; None without one.
        lengths: an integer or several.
        least: smallest length that is possible; ignored if it is no integer itself.
        numbers: further values by name, each an integer of at least 1, the seed of at least 0.

    Raises:
        ArgumentError: names everything that cannot be used; or the model's tokenizer, if its files
            are on this machine and its vocabulary is another one.
    """
    minima = {"lengths": least} if is_integer(least) else {}
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

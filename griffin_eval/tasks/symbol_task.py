"""What selective copying and induction heads have in common as tasks of lm_eval."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance

from griffin_eval.errors import ArgumentError
from griffin_eval.tasks import symbols
from griffin_eval.tasks.curves import CurveTask
from griffin_eval.tasks.metadata import is_integer


class SymbolTask(CurveTask):
    """One document is one sequence, a cluster of its own; each answer is one request: the
    log-likelihood of a symbol after all that comes before it. It is right if it is the likeliest
    of all tokens, which is what greedy decoding would say."""

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> list[Instance]:
        unused = ("apply_chat_template", "chat_template")  # the prompt is no text to be wrapped
        kwargs = {key: value for key, value in kwargs.items() if key not in unused}
        tokens, answers = doc["tokens"], doc["answers"]
        first = len(tokens) - len(answers) + 1
        return [
            Instance("loglikelihood", doc, (tokens[: first + i], answer), idx=i, **kwargs)
            for i, answer in enumerate(answers)
        ]


def documents(
    task: str,
    draw: Callable[[Any, int], symbols.Example],
    lengths: Sequence[int],
    samples: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Rows of a data set. The lengths take turns: the first few rows have them all.

    Args:
        task: its name.
        draw: a sequence of random numbers and a length.
        lengths: of the sequences.
        samples: sequences of each length. More of them leave the others as they are.
        seed: of all that is drawn.
    """
    rows = []
    for sample in range(samples):
        for length in lengths:
            example = draw(symbols.generator(task, seed, length, sample), length)
            rows.append(
                {
                    "tokens": symbols.text(example.tokens),
                    "answers": symbols.text(example.answers),
                    "length": length,
                    "sample": sample,
                    "seed": seed,
                }
            )
    return rows


def check(task: str, pretrained: Any, lengths: Any, least: int, **numbers: Any) -> list[int]:
    """The lengths as a list without repetitions, if all of the metadata can be.

    Args:
        task: its name.
        pretrained: the model's argument, if it has one.
        lengths: an integer or several.
        least: what they are at least, if that is an integer.
        numbers: by name; integers of at least 1, the seed of at least 0.

    Raises:
        ArgumentError: naming all that cannot be; or the model's tokenizer, if its files are here
            and it is one of another vocabulary, in which these sequences would mean nothing.
    """
    minima = {name: 0 if name == "seed" else 1 for name in numbers}
    problems = [
        f"{name} must be an integer of at least {minima[name]}, found {value!r}"
        for name, value in numbers.items()
        if not is_integer(value) or value < minima[name]
    ]
    several = list(lengths) if isinstance(lengths, (list, tuple)) else [lengths]
    least = least if is_integer(least) else 1
    if not several or any(not is_integer(n) or n < least for n in several):
        problems.append(f"lengths must be integers of at least {least}, found {lengths!r}")
    if problems:
        raise ArgumentError(f"{task}: {'; '.join(problems)}")
    file = Path(str(pretrained)) / "tokenizer.json"
    if pretrained and file.is_file() and not _reads_symbols(file):
        raise ArgumentError(
            f"{task} is for models whose tokens are the {symbols.VOCABULARY} symbols "
            f"{symbols.ALPHABET}, ids in this order; {file} is another tokenizer"
        )
    return list(dict.fromkeys(several))


def _reads_symbols(file: Path) -> bool:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    ids = list(range(symbols.VOCABULARY))
    return tokenizer.encode(symbols.ALPHABET, add_special_tokens=False).ids == ids

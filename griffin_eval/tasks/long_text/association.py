"""A person in a long text, asked for in other words than those of the text.

Needles and questions are as in NoLiMa (Modarressi et al., "Long-context evaluation beyond literal
matching", ICML 2025), in words of this module: a needle and the question about it share no word
but the small ones, so that no search for equal words finds it.

    Read the following text. A question about one of the people in it comes at the end.
    <text>
    Marisol lives next door to the Eiffel Tower.
    <text>
    Question: Which person has been to France? Answer with the name alone.
    Answer:

Several needles of one kind stand in each text, so that one has to know which of the people is
meant. The first name on the first line of the answer counts.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from griffin_eval.arguments import check_integers
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import as_split
from griffin_eval.tasks.long_text.needles import (
    DEPTHS,
    LENGTHS,
    SAMPLES,
    NeedleTask,
    Placement,
    placements,
)
from griffin_eval.tasks.metadata import tokenizer_of

TASK = "griffin_association"
DESCRIPTION = "Read the following text. A question about one of the people in it comes at the end."
NEEDLES = 4


class Kind(NamedTuple):
    """Facts of one kind.

    Attributes:
        needle: Sentence with a name and what the text says of it.
        question: Question about what follows from it.
        facts: Pairs of a fact that the text states and the fact that follows.
    """

    needle: str
    question: str
    facts: tuple[tuple[str, str], ...]


KINDS = (
    Kind(
        "{name} lives next door to {said}.",
        "Which person has been to {asked}?",
        (
            ("the Eiffel Tower", "France"),
            ("the Colosseum", "Italy"),
            ("the Brandenburg Gate", "Germany"),
            ("the Alhambra", "Spain"),
            ("the Acropolis", "Greece"),
            ("the Taj Mahal", "India"),
            ("Machu Picchu", "Peru"),
            ("the Kremlin", "Russia"),
            ("the Great Sphinx of Giza", "Egypt"),
            ("Angkor Wat", "Cambodia"),
            ("the Christ the Redeemer statue", "Brazil"),
            ("the Little Mermaid sculpture", "Denmark"),
        ),
    ),
    Kind(
        "{name} spends every working day {said}.",
        "Which person earns a living as a {asked}?",
        (
            ("pulling out wisdom teeth", "dentist"),
            ("kneading dough before dawn", "baker"),
            ("landing passenger jets", "pilot"),
            ("pleading for suspects in court", "lawyer"),
            ("carrying letters from door to door", "postman"),
            ("cutting and dyeing hair", "barber"),
            ("milking cows", "farmer"),
            ("mending leaky pipes", "plumber"),
            ("chiselling marble statues", "sculptor"),
            ("arresting burglars", "policeman"),
            ("lending out novels in a reading room", "librarian"),
            ("grinding lenses for spectacles", "optician"),
        ),
    ),
    Kind(
        "{name} shares a small flat with {said}.",
        "Which person keeps a {asked} as a pet?",
        (
            ("a dachshund", "dog"),
            ("a Siamese", "cat"),
            ("a cockatoo", "bird"),
            ("a guppy", "fish"),
            ("a tarantula", "spider"),
            ("a gecko", "lizard"),
            ("a Clydesdale", "horse"),
            ("a cobra", "snake"),
            ("a hamster", "rodent"),
            ("a praying mantis", "insect"),
        ),
    ),
)
NAMES = """
Anselm Barnaby Casimir Dagmar Eleanora Fergus Giselle Henrietta Ingrid Jocasta Kenji Leopold Marisol
Nadezhda Ottoline Priya Quentin Rosalind Saoirse Tobias Ulrika Valentina Winifred Xiomara Yolanda
Zainab Aurelio Bronwyn Clementine Desmond Esperanza Florian Gwendolyn Hamish Isolde Lucinda
""".split()


class Association(NeedleTask):
    """The task of lm_eval."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        rows = self.dataset["test"]
        lengths = sorted(set(rows["length"]))
        guess = 1 / rows[0]["needles"]
        self.state_chance({f"accuracy@{length}": guess for length in lengths})

    def is_correct(self, generated: str, answer: str) -> bool:
        return is_correct(generated, answer)


def is_correct(generated: str, answer: str) -> bool:
    """Return whether the first name on the first line of a generated text is the answer."""
    name = re.search(rf"\b({'|'.join(NAMES)})\b", generated.strip().split("\n", 1)[0])
    return name is not None and name[0] == answer


def dataset(
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[int] = DEPTHS,
    samples: int = SAMPLES,
    needles: int = NEEDLES,
    document: Any = None,
    max_tokens: int | None = None,
    seed: int = 0,
    **model: Any,
) -> dict[str, Any]:
    """Return the split of the task.

    Args:
        lengths, depths, samples, document, max_tokens, seed: See
            `griffin_eval.tasks.long_text.needles.placements`.
        needles: Number of people in the text, of whom one is asked for; the seed draws the
            positions of the others.
        model: Argument of `griffin_eval.tasks.metadata.tokenizer_of`.

    Raises:
        ArgumentError: A value that cannot be used, or no document that is long enough.
    """
    check_integers(TASK, needles=needles)
    most = min(len(kind.facts) for kind in KINDS)
    if needles > most:
        raise ArgumentError(f"{TASK}: there are {most} facts of each kind, found needles={needles}")
    kind = KINDS[0]
    filled = [kind.needle.format(name=NAMES[0], said=said) for said, _ in kind.facts[:needles]]
    around = [DESCRIPTION, *filled, _question(kind, kind.facts[0][1])]
    places = placements(
        TASK, around, lengths, depths, samples, document, max_tokens, seed, tokenizer_of(**model)
    )
    return as_split([_row(place, needles) for place in places])


def _row(place: Placement, needles: int) -> dict[str, Any]:
    kind = KINDS[int(place.rng.random() * len(KINDS))]
    facts = sorted(kind.facts, key=lambda _: place.rng.random())[:needles]
    text = place.text()
    free = [name for name in NAMES if not re.search(rf"\b{name}\b", text)]
    if len(free) < needles:
        raise ArgumentError(
            f"{TASK}: {place.source.name} holds all but {len(free)} of the names that needles are "
            "about; name another document"
        )
    names = sorted(free, key=lambda _: place.rng.random())[:needles]
    lines = []
    for index, (name, (said, _)) in enumerate(zip(names, facts, strict=True)):
        share = place.depth / 100 if index == 0 else place.rng.random()
        lines.append((share, kind.needle.format(name=name, said=said)))
    prompt = place.prompt(DESCRIPTION, lines, _question(kind, facts[0][1]))
    return place.row() | {"prompt": prompt, "answer": names[0], "needles": needles}


def _question(kind: Kind, fact: str) -> str:
    return f"Question: {kind.question.format(asked=fact)} Answer with the name alone.\nAnswer:"

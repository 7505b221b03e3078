"""The phonebook: a name is asked for, its number stands somewhere in the prompt.

As published (Jelassi et al., "Repeat After Me", 2024; also in the Griffin paper), a prompt is

    First Last: 9876543210      the book, one entry a line
    ...
                                an empty line
    First Last: 8765432109      two entries of the same book, as examples
    First Last: 7654321098
                                an empty line
    First Last:                 the name asked for, another entry; no space after the colon

and what is generated greedily up to the first newline, stripped, has to be the number exactly.

What is different here: everything follows from a seed; no name and no number occurs twice in a
book, so that every question has one answer (the published generator draws with repetition); and
several names may be asked of one book, in prompts that are equal up to the last name.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.task import ConfigurableTask

from griffin_eval.errors import ArgumentError

ENTRIES = (20, 50, 100, 200)  # the last is longer than RecurrentGemma's window of 2048 tokens
EXAMPLES = 2
NUMBERS = range(6_000_000_000, 10_000_000_000)  # ten digits, the first from 6 to 9


class Phonebook(ConfigurableTask):
    """The task of lm_eval, with the accuracy over all (``exact_match``) and over the books of each
    length (``exact_match_20``, …), which is "N/A" where ``--limit`` left none of that length."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config={key: value for key, value in config.items() if key != "class"})
        rows = self.dataset["test"]
        self._dataset_sha256 = rows[0]["dataset_sha256"]
        self._lengths = sorted(set(rows["entries"]))
        for length in self._lengths:
            self._aggregation_list[f"exact_match_{length}"] = mean_of_scored
            self._higher_is_better[f"exact_match_{length}"] = True

    def process_results(self, doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        if "bypass" in self._metric_fn_list:  # --predict_only
            return super().process_results(doc, results)
        correct = float(is_correct(results[0], doc["answer"]))
        # Every key in every document: lm_eval gathers from all ranks the keys that rank 0 has.
        return {"exact_match": correct} | {
            f"exact_match_{length}": correct if length == doc["entries"] else None
            for length in self._lengths
        }

    def build_all_requests(self, **arguments: Any) -> None:
        """As in lm_eval, which does not notice that requests it has cached (``--cache_requests``)
        were made with other metadata, and would score them against the numbers of this book."""
        super().build_all_requests(**arguments)
        for instance in self.instances:
            if instance.doc["dataset_sha256"] != self._dataset_sha256:
                raise ArgumentError(
                    f"lm_eval's cache holds requests of another {self.config.task}, with other "
                    "entries, samples, queries or seed; use --cache_requests refresh"
                )


def is_correct(generated: str, answer: str) -> bool:
    """Whether the first line of what was generated is the answer, spaces around it aside."""
    return generated.split("\n", 1)[0].strip() == answer


def mean_of_scored(scores: Sequence[float | None]) -> float | str:
    """The mean of the scores that are there; "N/A", as lm_eval writes it, if there are none."""
    scored = [score for score in scores if score is not None]
    return sum(scored) / len(scored) if scored else "N/A"


def dataset(
    entries: int | Sequence[int] = ENTRIES,
    samples: int = 25,
    seed: int = 0,
    queries: int = 1,
    **_: Any,
) -> dict[str, Any]:
    """`documents` as the split ``test``. lm_eval passes what ``--metadata '{"entries": [10, 20]}'``
    says, and the arguments of the model too: one with a name from above counts as well."""
    import datasets

    return {"test": datasets.Dataset.from_list(documents(entries, samples, seed, queries))}


def documents(
    entries: int | Sequence[int] = ENTRIES, samples: int = 25, seed: int = 0, queries: int = 1
) -> list[dict[str, Any]]:
    """The questions as plain data. The lengths take turns: the first few documents have them all.

    Args:
        entries: entries of a book, or a list of such lengths.
        samples: books of each length.
        seed: of all that is drawn. A book depends on the seed, its length and its index alone:
            more samples or lengths leave the others as they are.
        queries: names asked of each book. With more than one the documents are not independent,
            and the standard error that lm_eval reports is too small.

    Returns:
        A dictionary per question: ``prompt``, ``answer`` (ten digits), ``name``, ``entries``,
        ``position`` (of the answer in the book, from 0), ``book`` (index among the books of its
        length), ``query``, ``seed``, and ``dataset_sha256``, a hash of all the questions.

    Raises:
        ArgumentError: a value that is no integer, or that no book can have.
    """
    lengths = _checked_lengths(entries, samples, seed, queries)
    rows = []
    for book in range(samples):
        asked = {length: list(_questions(seed, length, book, queries)) for length in lengths}
        for query in range(queries):
            for length in lengths:
                where = {"entries": length, "book": book, "query": query, "seed": seed}
                rows.append(where | asked[length][query])
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    return [row | {"dataset_sha256": digest} for row in rows]


def _questions(seed: int, length: int, book: int, queries: int) -> Iterator[dict[str, Any]]:
    # Of Python's generator only random() gives the same numbers in every version: no sample().
    rng = random.Random(f"griffin_phonebook {seed} {length} {book}")
    people = _draw(rng, len(FIRST_NAMES) * len(LAST_NAMES), length)
    names = [
        f"{FIRST_NAMES[person // len(LAST_NAMES)]} {LAST_NAMES[person % len(LAST_NAMES)]}"
        for person in people
    ]
    numbers = [str(NUMBERS[number]) for number in _draw(rng, len(NUMBERS), length)]
    lines = [f"{name}: {number}" for name, number in zip(names, numbers, strict=True)]
    drawn = _draw(rng, length, EXAMPLES + queries)
    examples = [lines[position] for position in drawn[:EXAMPLES]]
    shared = "\n".join([*lines, "", *examples, "", ""])
    for position in drawn[EXAMPLES:]:
        name, number = names[position], numbers[position]
        yield {"prompt": f"{shared}{name}:", "answer": number, "name": name, "position": position}


def _draw(rng: random.Random, population: int, count: int) -> list[int]:
    """Distinct numbers below ``population``: a shuffle that stops after ``count`` and stores only
    what it has moved."""
    moved: dict[int, int] = {}
    drawn = []
    for here in range(count):
        there = here + int(rng.random() * (population - here))
        drawn.append(moved.get(there, there))
        moved[there] = moved.get(here, here)
    return drawn


def _checked_lengths(entries: Any, samples: Any, seed: Any, queries: Any) -> list[int]:
    lengths = list(entries) if isinstance(entries, (list, tuple)) else [entries]
    most = len(FIRST_NAMES) * len(LAST_NAMES)
    problems = [
        f"{name} must be an integer of at least {least}, found {value!r}"
        for name, value, least in (("samples", samples, 1), ("queries", queries, 1))
        if not _is_integer(value) or value < least
    ]
    if not _is_integer(seed):
        problems.append(f"seed must be an integer, found {seed!r}")
    if not problems:
        least = EXAMPLES + queries
        wrong = [n for n in lengths if not _is_integer(n) or not least <= n <= most]
        if wrong or not lengths:
            problems.append(
                f"entries must be integers from {least} (two examples and the names asked for) to "
                f"{most}, found {entries!r}"
            )
    if problems:
        raise ArgumentError(f"griffin_phonebook: {'; '.join(problems)}")
    return list(dict.fromkeys(lengths))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Common first and last names of the English-speaking world.
FIRST_NAMES = """
Aaron Abigail Adam Adrian Agnes Aidan Alan Albert Alexander Alfred Alice Alicia Allison Amanda
Amelia Amy Andrea Andrew Angela Anita Ann Anna Anthony April Arthur Ashley Audrey Austin Barbara
Beatrice Benjamin Bernard Beth Betty Beverly Blake Bonnie Bradley Brandon Brenda Brian Bridget Bruce
Caleb Calvin Cameron Carl Carla Carlos Carmen Carol Caroline Catherine Cecilia Chad Charles
Charlotte Chelsea Cheryl Chloe Christina Christopher Claire Clara Clarence Claudia Clifford Cody
Colin Connie Connor Corey Craig Crystal Curtis Cynthia Daisy Dale Daniel Danielle Darlene Darren
David Dawn Dean Deborah Dennis Derek Diana Diane Dolores Dominic Donald Donna Dorothy Douglas Duncan
Dylan Earl Edgar Edith Edward Edwin Eileen Elaine Eleanor Elena Elizabeth Ella Ellen Emily Emma Eric
Erica Erin Ernest Esther Ethan Eugene Eva Evan Evelyn Felix Fiona Florence Frances Frank Franklin
Frederick Gabriel Gail Gary Gavin George Gerald Gilbert Gina Glenn Gloria Gordon Grace Graham Grant
Gregory Guy Hannah Harold Harriet Harry Harvey Hazel Heather Hector Heidi Helen Henry Herbert Holly
Howard Hugh Hugo Ian Ida Irene Iris Isaac Isabel Ivan Ivy Jack Jacob Jacqueline James Jamie Jane
Janet Janice Jared Jasmine Jason Jean Jeffrey Jennifer Jeremy Jerome Jesse Jessica Jill Joan Joanna
Joel John Jonathan Jordan Joseph Joshua Joyce Juan Judith Julia Julian June Justin Karen Karl Kate
Kathleen Keith Kelly Kenneth Kevin Kimberly Kristen Kyle Larry Laura Lauren Lawrence Leah Leo
Leonard Leslie Lewis Liam Lillian Linda Lisa Logan Lois Loretta Louis Lucas Lucy Luis Luke Lydia
Lynn Mabel Madeline Malcolm Marcus Margaret Maria Marie Marilyn Marion Marjorie Mark Martha Martin
Marvin Mary Mason Matthew Maureen Maurice Max Megan Melanie Melissa Melvin Michael Michelle Mildred
Miles Miriam Molly Monica Morgan Nancy Naomi Natalie Nathan Neil Nicholas Nicole Nina Noah Nora
Norman Oliver Olivia Oscar Owen Pamela Patricia Patrick Paul Paula Pauline Penelope Peter Philip
Phyllis Rachel Ralph Randall Raymond Rebecca Regina Renee Rhonda Richard Rita Robert Robin Rodney
Roger Roland Ronald Rosa Rose Ross Roy Ruby Russell Ruth Ryan Sabrina Sally Samantha Samuel Sandra
Sara Scott Sean Sebastian Sharon Sheila Shirley Sidney Simon Sonia Sophia Spencer Stacy Stanley
Stella Stephanie Stephen Stewart Stuart Susan Sylvia Tamara Tanya Teresa Terry Theodore Thomas
Timothy Tina Todd Tracy Travis Trevor Tyler Valerie Vanessa Vera Vernon Veronica Victor Victoria
Vincent Viola Violet Virginia Walter Wanda Warren Wayne Wendy Wesley William Yvonne Zachary Zoe
""".split()

LAST_NAMES = """
Abbott Adams Alexander Allen Alvarez Anderson Andrews Armstrong Arnold Atkinson Austin Bailey Baker
Baldwin Ball Banks Barber Barker Barnes Barrett Barton Bates Beck Bell Bennett Benson Berry Bishop
Black Blair Bowen Bowman Boyd Bradley Brady Brewer Briggs Brooks Brown Bryant Buchanan Burgess Burke
Burns Burton Bush Butler Byrne Cameron Campbell Cannon Carlson Carpenter Carr Carroll Carter
Castillo Castro Chambers Chandler Chang Chapman Chavez Chen Clark Clarke Cohen Cole Coleman Collins
Cook Cooper Cox Craig Crawford Cross Cruz Cunningham Curtis Dalton Daniels Davidson Davies Davis
Dawson Day Dean Delgado Diaz Dixon Douglas Doyle Duncan Dunn Edwards Elliott Ellis Evans Farrell
Ferguson Fernandez Fields Fisher Fleming Fletcher Flores Flynn Ford Foster Fowler Fox Francis
Franklin Fraser Freeman Fuller Garcia Gardner Garrett Gibbs Gibson Gilbert Gill Glover Gomez
Gonzalez Goodman Gordon Graham Grant Graves Gray Green Greene Griffin Griffith Gross Gupta Guzman
Hale Hall Hamilton Hansen Hanson Hardy Harmon Harper Harris Harrison Hart Harvey Hawkins Hayes
Henderson Henry Hernandez Herrera Hicks Higgins Hill Hodges Hoffman Holland Holmes Holt Hopkins
Horton Howard Howell Hudson Hughes Hunt Hunter Hussain Hutchinson Ingram Jackson Jacobs James
Jenkins Jennings Jensen Jimenez Johnson Johnston Jones Jordan Joseph Kaur Keller Kelley Kelly
Kennedy Khan Kim King Klein Knight Lambert Lane Larson Lawrence Lawson Lee Leonard Lewis Li Lindsey
Little Lloyd Logan Long Lopez Lowe Lucas Lynch Lyons MacDonald Mack Maldonado Mann Manning Marsh
Marshall Martin Martinez Mason Matthews Maxwell May McCarthy McCormick McCoy McDonald McGee McKenzie
McKinney Medina Mendoza Meyer Miles Miller Mills Mitchell Moore Morales Moran Moreno Morgan Morris
Morrison Morton Moss Mueller Mullins Murphy Murray Myers Nash Nelson Newman Newton Nguyen Nichols
Norris Norton Obrien Oconnor Oliver Olson Ortega Ortiz Osborne Owens Page Palmer Park Parker Parsons
Patel Patterson Payne Pearson Peck Perez Perkins Perry Peters Peterson Phillips Pierce Poole Porter
Potter Powell Powers Pratt Price Quinn Ramirez Ramos Ramsey Randall Ray Reed Reese Reeves Reid Reyes
Reynolds Rhodes Rice Richards Richardson Riley Rivera Robbins Roberts Robertson Robinson Rodgers
Rodriguez Rogers Rojas Romero Rose Ross Rowe Ruiz Russell Ryan Salazar Sanchez Sanders Santiago
Santos Saunders Schmidt Schneider Schultz Schwartz Scott Shah Sharma Sharp Shaw Shelton Sherman
Silva Simmons Simon Simpson Sims Singh Smith Snyder Soto Spencer Stanley Steele Stephens Stevens
Stevenson Stewart Stone Strickland Sullivan Summers Sutton Swanson Taylor Terry Thomas Thompson
Thornton Torres Townsend Tran Tucker Turner Tyler Underwood Valdez Vargas Vasquez Vaughn Vega Wade
Wagner Walker Wallace Walsh Walters Walton Wang Ward Warner Warren Washington Watkins Watson Watts
Weaver Webb Weber Webster Welch Wells West Wheeler White Wilkins Williams Williamson Willis Wilson
Wolfe Wong Wood Woods Wright Wu Yang Yates Young Zhang Zimmerman
""".split()

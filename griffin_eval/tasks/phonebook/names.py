"""Names of the people in phonebooks.

`griffin_phonebook` draws evenly from the two lists below. The published generator draws from the
names of a census by their frequency.
"""

import bisect
import functools
import random
from typing import NamedTuple


class Frequencies(NamedTuple):
    """Names and their frequencies.

    Attributes:
        names: Names, the most common first.
        cumulative: Percent of all people with this name or an earlier one.
    """

    names: list[str]
    cumulative: list[float]

    def draw(self, rng: random.Random) -> str:
        """Draw one of the names of 90% of all people, in proportion to its share."""
        return self.names[bisect.bisect_right(self.cumulative, rng.random() * 90)]


@functools.cache
def census() -> dict[str, Frequencies]:
    """Return the names of the United States census of 1990 by ``male``, ``female`` and ``last``.

    They come from the Python package `names`, which the published generator calls.
    """
    import names

    frequencies = {}
    for title, file in names.FILES.items():
        with open(file, encoding="ascii") as lines:
            words = [line.split() for line in lines]
        each = [name.capitalize() for name, *_ in words]
        shares = [float(w[2]) for w in words]
        frequencies[title.removeprefix("first:")] = Frequencies(each, shares)
    return frequencies


def person(index: int) -> str:
    """Return the full name with this index among the `PEOPLE` combinations of the lists below."""
    first, last = divmod(index, len(LAST_NAMES))
    return f"{FIRST_NAMES[first]} {LAST_NAMES[last]}"


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


PEOPLE = len(FIRST_NAMES) * len(LAST_NAMES)

"""Fixtures of the tests in this folder."""

from fixtures_lm_eval import no_description_of_the_machine

__all__ = ["no_description_of_the_machine"]

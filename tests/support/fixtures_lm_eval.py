"""A fixture, imported by conftest.py files, that speeds up lm_eval runs in a test process."""

import sys

import pytest


@pytest.fixture(scope="package", autouse=True)
def no_description_of_the_machine():
    """Replace `add_env_info`, which starts pip and other programs and takes three CPU seconds.

    Commands that tests start as processes still describe the machine.
    """

    def describe(results) -> None:
        results["pretty_env_info"] = "not collected in this test"

    with pytest.MonkeyPatch.context() as patch:
        if "lm_eval.evaluator" in sys.modules:  # imported by some test files
            patch.setattr(sys.modules["lm_eval.evaluator"], "add_env_info", describe)
        if "griffin_eval.lm.sweep" in sys.modules:
            patch.setattr(sys.modules["griffin_eval.lm.sweep"], "add_env_info", describe)
        yield

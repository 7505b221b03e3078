"""The package's command in this process, for tests that need no separate process."""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from griffin_eval.cli.main import main


def griffin_eval(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``griffin-eval`` in this process; return its exit code and output.

    It goes through `main`, so that bad input is a sentence on stderr and an exit code, as in a
    process. Log records and the output of other languages' libraries are not part of it.
    """
    command = ["griffin-eval", *map(str, arguments)]
    out, error = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        with (
            mock.patch.object(sys, "argv", command),
            mock.patch("atexit.register"),
            mock.patch.dict(os.environ),  # commands set variables
        ):
            try:
                main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return subprocess.CompletedProcess(command, code, out.getvalue(), error.getvalue())

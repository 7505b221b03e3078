"""The ``griffin-eval`` command as ``python -m griffin_eval``."""

from griffin_eval.cli.main import main

if __name__ == "__main__":
    main()

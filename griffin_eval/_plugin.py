"""Adds the model `griffin` and this package's tasks to the stock `lm_eval` command.

Releases of lm_eval up to 0.4.13 do not load plugins. Therefore an import finder adds to lm_eval's
modules after they are loaded. Every Python process of the environment runs `start` (by
griffin_eval_plugin.pth), so nothing is imported before lm_eval is.

lm_eval's command line also gets this package's log, and one sentence instead of a traceback for
errors that the user can fix. Neither changes where lm_eval is used as a library.
"""

import os
import sys

OPT_OUT = "GRIFFIN_EVAL_NO_PLUGIN"
MODEL = "griffin"
TARGET = "griffin_eval.lm.model:GriffinLM"
TASKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tasks")


def start() -> None:
    """Run `install` unless GRIFFIN_EVAL_NO_PLUGIN is set. Every interpreter calls this."""
    if not os.environ.get(OPT_OUT):
        install()


def install() -> None:
    """Add the model and the tasks to lm_eval, now or when it is imported. Idempotent."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    for name in _HOOKS:
        if name in sys.modules:
            _run_hook(sys.modules[name])


class _Finder:
    """Import finder that adds a hook to the execution of the module that other finders find."""

    _busy: set[str] = set()  # prevents a loop with another finder that asks all others

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in _HOOKS or name in cls._busy:
            return None
        cls._busy.add(name)
        try:
            specs = (
                finder.find_spec(name, path, target)
                for finder in sys.meta_path
                if finder is not cls and hasattr(finder, "find_spec")
            )
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            cls._busy.discard(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _run_hook(module)

            spec.loader.exec_module = exec_module
        return spec


def _run_hook(module) -> None:
    """Run the hook of a module. A failure only warns, so that lm_eval stays usable."""
    try:
        _HOOKS[module.__name__](module)
    except Exception as error:
        import warnings

        warnings.warn(
            f"griffin-eval could not add itself to {module.__name__}: {error!r}. "
            f"Set {OPT_OUT}=1 to silence this.",
            RuntimeWarning,
            stacklevel=2,
        )


def _add_model(_models) -> None:
    from lm_eval.api import registry

    if hasattr(registry, "load_plugins"):
        return  # this release of lm_eval reads the entry point in our metadata
    if MODEL not in registry.model_registry:
        registry.model_registry.register(MODEL, target=TARGET)


def _add_tasks(manager) -> None:
    import functools
    import inspect

    if hasattr(manager.TaskManager, "griffin_tasks"):
        return
    original = manager.TaskManager.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments["include_path"] or []
        if call.arguments["include_defaults"]:  # first, so that the user's can replace ours
            given = list(given) if isinstance(given, (list, tuple)) else [given]
            call.arguments["include_path"] = [TASKS, *given]
        original(*call.args, **call.kwargs)

    manager.TaskManager.__init__ = __init__
    manager.TaskManager.griffin_tasks = TASKS
    _leave_out_misleading()


def _join_command_line(cli) -> None:
    import functools

    if hasattr(cli.HarnessCLI, "griffin_joined"):
        return
    original = cli.HarnessCLI.execute

    @functools.wraps(original)
    def execute(cli, arguments):
        _behave_like_lm_eval()
        if _is_for_us(arguments):  # before PyTorch is imported
            from griffin_eval.process import tune_process

            tune_process()
            _refuse_missing(arguments)
        return original(cli, arguments)

    cli.HarnessCLI.execute = execute
    cli.HarnessCLI.griffin_joined = True


def _is_for_us(arguments) -> bool:
    """Return whether parsed arguments of lm_eval, or their config file, name this model."""
    import contextlib
    import re

    config = getattr(arguments, "config", None)
    if config:
        with (
            contextlib.suppress(OSError, UnicodeDecodeError),
            open(config, encoding="utf-8") as file,
        ):
            return re.search(f"^model: *[\"']?{MODEL}\\b", file.read(), re.MULTILINE) is not None
    return getattr(arguments, "model", None) == MODEL


def _refuse_missing(arguments) -> None:
    """Refuse a checkpoint that does not exist before lm_eval loads its tasks, which is slow."""
    from griffin_eval.converters.source.resolve import refuse_missing

    given = getattr(arguments, "model_args", None)
    if isinstance(given, dict) and isinstance(given.get("pretrained"), str):
        refuse_missing(given["pretrained"])


def _misleads(message: str) -> bool:
    """Return whether a message does not apply to this package's tasks, or names temporary files."""
    about_metadata = message.startswith("griffin_") and "Custom kwargs can be passed" in message
    return about_metadata or ("Saving per-task samples" in message and ".griffin-eval-" in message)


def _behave_like_lm_eval() -> None:
    """Log to lm_eval's handlers at its level, and install `one_sentence` as excepthook."""
    import logging

    from griffin_eval.errors import one_sentence

    theirs, ours = logging.getLogger("lm_eval"), logging.getLogger("griffin_eval")
    if not ours.handlers:
        ours.handlers = theirs.handlers
        ours.propagate = False
        first = os.environ.get("RANK", "0") in ("", "0")  # only the first process logs
        ours.setLevel(theirs.level if first else logging.ERROR)
    sys.excepthook = one_sentence


def _leave_out_misleading() -> None:
    """Drop messages of lm_eval for which `_misleads` is true."""
    import logging

    for name in ("lm_eval.api.task", "lm_eval.loggers.evaluation_tracker"):
        logging.getLogger(name).addFilter(lambda record: not _misleads(record.getMessage()))


def _look_for_git(utils) -> None:
    """Keep lm_eval from calling git outside of a repository, where git prints an error."""
    original = utils.get_git_commit_hash

    def get_git_commit_hash():
        folder = os.getcwd()
        while "GIT_DIR" not in os.environ and not os.path.exists(os.path.join(folder, ".git")):
            folder, below = os.path.dirname(folder), folder
            if folder == below:
                return None
        return original()

    utils.get_git_commit_hash = get_git_commit_hash


_HOOKS = {
    "lm_eval.loggers.utils": _look_for_git,
    "lm_eval.models": _add_model,
    "lm_eval.tasks.manager": _add_tasks,
    "lm_eval._cli": _join_command_line,
}

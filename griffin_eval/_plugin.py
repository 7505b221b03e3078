"""Makes the stock `lm_eval` command know the model `griffin` and this package's tasks.

Releases of lm_eval up to 0.4.13 look for no plugins. Its modules are therefore met as they are
imported: a finder lets them load as always and then adds to them. Every Python process of the
environment runs `start` (by griffin_eval_plugin.pth), so nothing is imported before lm_eval is.

lm_eval's command line also gets this package's log, and one sentence instead of a traceback where
the user can mend an error. Where lm_eval is used as a library, neither is touched.
"""

import os
import sys

OPT_OUT = "GRIFFIN_EVAL_NO_PLUGIN"
MODEL = "griffin"
TARGET = "griffin_eval.lm.model:GriffinLM"
TASKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tasks")


def start() -> None:
    """What every interpreter runs at start-up: `install`, unless GRIFFIN_EVAL_NO_PLUGIN is set."""
    if not os.environ.get(OPT_OUT):
        install()


def install() -> None:
    """Adds the model and the tasks to lm_eval, now if it is loaded, else when it is. Idempotent."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    for name in _HOOKS:
        if name in sys.modules:
            _run_hook(sys.modules[name])


class _Finder:
    """Finds what the other finders find, with the hook added to the module's execution."""

    _busy: set[str] = set()  # a second finder that asks all others, as this one does, must not loop

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
    """Adds to a module. A failure only warns: lm_eval stays usable, whatever it becomes."""
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
        return  # this lm_eval reads the entry point in our metadata by itself
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
        if call.arguments["include_defaults"]:  # ours come first: the user's own may replace them
            given = list(given) if isinstance(given, (list, tuple)) else [given]
            call.arguments["include_path"] = [TASKS, *given]
        original(*call.args, **call.kwargs)

    manager.TaskManager.__init__ = __init__
    manager.TaskManager.griffin_tasks = TASKS


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
    """Whether parsed arguments of lm_eval run this package's model, here or in a config file."""
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
    """Refuse a checkpoint that does not exist before lm_eval reads its tasks, which takes long."""
    from griffin_eval.converters.source.resolve import refuse_missing

    given = getattr(arguments, "model_args", None)
    if isinstance(given, dict) and isinstance(given.get("pretrained"), str):
        refuse_missing(given["pretrained"])


def _misleads(message: str) -> bool:
    """Whether a message asks for what our tasks do not need, or names files that will move."""
    about_metadata = message.startswith("griffin_") and "Custom kwargs can be passed" in message
    return about_metadata or ("Saving per-task samples" in message and ".griffin-eval-" in message)


def _behave_like_lm_eval() -> None:
    """Logs where lm_eval logs, at its level; ends with one sentence where the user erred."""
    import logging

    from griffin_eval.errors import one_sentence

    theirs, ours = logging.getLogger("lm_eval"), logging.getLogger("griffin_eval")
    if not ours.handlers:
        ours.handlers = theirs.handlers
        ours.propagate = False
        first = os.environ.get("RANK", "0") in ("", "0")  # of several processes the first one logs
        ours.setLevel(theirs.level if first else logging.ERROR)
    sys.excepthook = one_sentence
    for name in ("lm_eval.api.task", "lm_eval.loggers.evaluation_tracker"):
        logging.getLogger(name).addFilter(lambda record: not _misleads(record.getMessage()))


def _look_for_git(utils) -> None:
    """Keep lm_eval from asking git about a folder outside of any repository, which git reports."""
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

"""Run by Python in every process that tests start: they share lm-eval's index of its own tasks.

Each start of lm-eval reads 14,000 YAML files, which takes eight seconds. Here the first process
leaves the index in a folder of this run; folders that a command names are read as ever.
"""

import os
import sys

MODULE = "lm_eval.tasks._index"


class Finder:
    """Finds that module as the other finders do, and changes it once it is there."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != MODULE:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                share(module)

            spec.loader.exec_module = exec_module
        return spec


def share(index) -> None:
    import pickle
    import tempfile
    from pathlib import Path

    build, own = index.TaskIndex.build, Path(index.__file__).parent
    kept = Path(os.environ["LM_EVAL_INDEX"])

    def shared(paths, **options):
        paths = list(paths)
        if paths[:1] != [own] or options:
            return build(paths, **options)
        if kept.exists():
            found = pickle.loads(kept.read_bytes())
        else:
            found = build([own])
            with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
                file.write(pickle.dumps(found))
            os.replace(file.name, kept)  # whole, whoever reads it meanwhile
        for name, entry in build(paths[1:]).items():
            if name in found:
                before = found[name].yaml_path
                index.log.warning(f"Task '{name}' from {entry.yaml_path} overrides {before}")
            found[name] = entry
        return found

    index.TaskIndex.build = staticmethod(shared)


if "LM_EVAL_INDEX" in os.environ:
    sys.meta_path.insert(0, Finder)

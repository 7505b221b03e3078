"""Start-up code of every process that tests start: it shares lm-eval's index of its own tasks.

Each start of lm-eval reads 14,000 YAML files, which takes eight seconds. Here the first process
saves the index in a folder of the test run. Folders that a command names are read as usual.
"""

import os
import sys


def share(index) -> None:
    """Patch `lm_eval.tasks._index` after its import."""
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
            os.replace(file.name, kept)  # atomic for concurrent readers
        for name, entry in build(paths[1:]).items():
            if name in found:
                before = found[name].yaml_path
                index.log.warning(f"Task '{name}' from {entry.yaml_path} overrides {before}")
            found[name] = entry
        return found

    index.TaskIndex.build = staticmethod(shared)


# A start-up file has loaded the plugin, whose hooks run when modules of lm-eval are imported.
plugin = sys.modules.get("griffin_eval._plugin")
if plugin is not None and "LM_EVAL_INDEX" in os.environ:
    plugin._HOOKS["lm_eval.tasks._index"] = share

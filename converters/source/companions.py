"""The files of a model beside its weights: the tokenizer and the settings of generation."""

from pathlib import Path

from griffin_eval.json_files import absolute_path, list_folder

# Files that a tokenizer and generation need, in any format.
COMPANIONS = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
TEMPLATES = "additional_chat_templates"  # a folder of chat templates that have names
TOKENIZERS = COMPANIONS[:2]  # either will do


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder of a checkpoint's tokenizer: its own, or its parent, as Google publishes
    them."""
    for place in (folder, absolute_path(folder).parent):
        if any((place / name).is_file() for name in TOKENIZERS):
            return place
    return folder


def companions(folder: Path) -> dict[str, Path]:
    """Return the companions in a folder, each by its path within it."""
    paths = [folder / name for name in COMPANIONS]
    if (templates := folder / TEMPLATES).is_dir():
        paths += [templates / name for name in list_folder(templates, "*.jinja")]
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}

"""Conversion of ``tokenizer.model`` to ``tokenizer.json``."""

import json
import logging
import shutil
import tempfile
from pathlib import Path

from griffin_eval.errors import MissingExtraError
from griffin_eval.json_files import read_json
from griffin_eval.messages import first_line
from griffin_eval.text.load import load_tokenizer
from griffin_eval.text.tokenizer import (
    CONFIG_FILE,
    GEMMA_NAMES,
    JSON_FILE,
    MODEL_FILE,
    PROBE,
)

logger = logging.getLogger(__name__)

# All kinds of white space, alone and in runs, at the start and at the end of a text.
_SPACES = (
    "  \u3000x\u00a0y \u200bz\ta\t\tb    c\n\n\n\n d  \r\n\x0b e\u2028\ufeff f\u00ad \ufffd "
    "\U0001f468\u200d\U0001f469\x00 "
)


def write_json(folder: Path) -> None:
    """Add the ``tokenizer.json`` that transformers needs to a folder with a ``tokenizer.model``.

    It is added only if AutoTokenizer then gives sentencepiece's ids for a long text and for cases
    in which tokenizers usually differ; otherwise a warning says why not. The tokenizer's class in
    ``tokenizer_config.json`` is replaced by one that reads ``tokenizer.json`` unchanged: by the
    model's type alone, AutoTokenizer would rebuild it with Gemma's normalisation.
    """
    try:
        made = _make_json(folder / MODEL_FILE)
    except MissingExtraError as error:
        reason = str(error)
    except Exception as error:  # transformers and tokenizers raise many kinds of errors
        reason = first_line(error) or type(error).__name__
    else:
        if made is not None:
            for name, content in made.items():
                (folder / name).write_bytes(content)
            return
        reason = "the one that transformers makes of it gives other ids"
    logger.warning("%s goes without a %s: %s", MODEL_FILE, JSON_FILE, reason)


def _make_json(file: Path) -> dict[str, bytes] | None:
    """Return the contents of tokenizer.json and tokenizer_config.json; None if the ids differ."""
    import pydoc_data.topics

    try:
        from tokenizers import processors
        from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast
    except ImportError:
        raise MissingExtraError("transformers", "torch") from None
    right = load_tokenizer(file)
    config = file.parent / CONFIG_FILE
    settings = read_json(config) if config.is_file() else {}
    settings |= {key: value for key in GEMMA_NAMES if (value := getattr(right, key)) is not None}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copyfile(file, folder / MODEL_FILE)
        made = PreTrainedTokenizerFast.from_pretrained(folder).backend_tokenizer
        if right.adds_bos:
            bos, bos_id = right.bos_token, right.bos_token_id
            made.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
            )
        (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        made.save(str(folder / JSON_FILE))
        auto = AutoTokenizer.from_pretrained(folder, config=PretrainedConfig())
        for text in (PROBE, _SPACES, *pydoc_data.topics.topics.values()):
            if auto.encode(text, add_special_tokens=False) != right.encode(text):
                return None
        return {name: (folder / name).read_bytes() for name in (CONFIG_FILE, JSON_FILE)}

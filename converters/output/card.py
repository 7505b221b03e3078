"""The model card of a converted checkpoint, which states the source of its weights."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffin_eval
from griffin_eval.converters.codecs.decode import quantised
from griffin_eval.converters.containers.orbax.remote import url_of
from griffin_eval.converters.files import write_file
from griffin_eval.converters.output.manifest import MANIFEST_FILE, combined_sha256
from griffin_eval.json_files import read_file
from griffin_eval.layout import parameter_count
from griffin_eval.messages import printable

if TYPE_CHECKING:
    from griffin_eval.converters.plan import Plan

CARD_FILE, SOURCE_CARD_FILE = "README.md", "README_source.md"
_TEXT = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- recurrent_gemma
- griffin
---

# {name}

A Griffin model of {parameters:,} parameters, for transformers' `RecurrentGemmaForCausalLM`.

| | |
|---|---|
| made from | `{source}` ({format}, {layout}) |
| made by | griffin-eval {version}{command} |
| changes | {changes} |
| dtypes | {dtypes} |
| SHA-256 | `{sha256}`, of names, dtypes and hashes of all parameters |

`{manifest}` has the hash of each parameter, with which `griffin-eval verify FOLDER` compares it.

{card}

## Licence

A conversion changes no licence: that of the source holds. Weights that come from Google's
RecurrentGemma are under the Gemma Terms of Use. Who passes them on has to pass on these terms, say
what was changed, and add this notice: *Gemma is provided under and subject to the Gemma Terms of
Use found at [ai.google.dev/gemma/terms](https://ai.google.dev/gemma/terms)*.
"""
_POINTER = f"The card of the source is [{SOURCE_CARD_FILE}]({SOURCE_CARD_FILE})."
_NOTHING = "The source had no card: what the model has read and what it is for is not said here."


def write_card(
    folder: Path, plan: "Plan", records: dict[str, dict[str, Any]], name: str, command: str | None
) -> None:
    """Write ``README.md``, and the card of the source, if it has one, as ``README_source.md``."""
    source = plan.source
    found = [p for n in (SOURCE_CARD_FILE, CARD_FILE) if (p := source.folder / n).is_file()]
    if found:  # the first: a card of this package points to the one that it was made from
        write_file(folder / SOURCE_CARD_FILE, read_file(found[0]))
    cast = sorted(
        {f"{r['cast_from']} to {r['dtype']}" for r in records.values() if "cast_from" in r}
    )
    schemes = {each.scheme for each in quantised(source.container).values()}
    changes = [f"dequantised from {scheme}" for scheme in sorted(schemes)]
    changes += [f"cast from {kinds}" for kinds in cast]
    changes += [f"adapter `{_code(str(a.folder))}`, times {a.weight:g}" for a in source.adapters]
    if plan.config.vocab_size != source.config.vocab_size:
        changes.append(f"the first {plan.config.vocab_size} rows of the vocabulary alone")
    dtypes = Counter(record["dtype"] for record in records.values())
    hashes = {name: (record["dtype"], record["sha256"]) for name, record in records.items()}
    text = _TEXT.format(
        name=_code(name),
        parameters=parameter_count(plan.config),
        source=_code(url_of(source.path) or str(source.path)),
        format=_code(source.format.name),
        layout=_code(source.inspection.layout),
        version=griffin_eval.__version__,
        command="" if command is None else f", `{_code(command)}`",
        changes=", ".join(changes) or "names and layout alone",
        dtypes=", ".join(f"{count} parameters in {dtype}" for dtype, count in dtypes.items()),
        sha256=combined_sha256(hashes).hexdigest(),
        manifest=MANIFEST_FILE,
        card=_POINTER if found else _NOTHING,
    )
    write_file(folder / CARD_FILE, text)


def _code(text: str) -> str:
    """Return the text without characters that end code or a table's cell or control a terminal."""
    return printable(text).replace("`", "'").replace("|", "/").replace("\n", " ")

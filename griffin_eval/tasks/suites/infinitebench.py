"""The documents of InfiniteBench (arXiv:2402.13718) for lm_eval's tasks.

lm_eval 0.4.13 describes the columns in a form that datasets cannot read, and asks for splits ending
in ``_en`` where the data set has ``_eng``, so that none of its tasks loads
(EleutherAI/lm-evaluation-harness issue 3895).
"""

from typing import Any


def documents(**others: Any) -> dict[str, Any]:
    """Return all splits, English ones under both names; lm_eval's arguments are ignored."""
    from datasets import Features, List, Value, load_dataset

    text = Value("string")
    columns = {"id": Value("int64"), "context": text, "input": text}
    columns |= {"answer": List(text), "options": List(text)}
    found = load_dataset("xinrongzhang2022/InfiniteBench", features=Features(columns))
    splits: dict[str, Any] = {str(name): rows for name, rows in found.items()}
    english = [name for name in splits if name.endswith("_eng")]
    return splits | {name.removesuffix("g"): splits[name] for name in english}

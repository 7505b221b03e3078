"""The facts of an inspected checkpoint as plain data."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from griffin_eval.converters.codecs.decode import quantised
from griffin_eval.converters.inspection import Inspection
from griffin_eval.converters.naming.parameters import parameters_of
from griffin_eval.converters.output.manifest import added, checksums, mismatch, recorded
from griffin_eval.converters.source.companions import tokenizer_folder
from griffin_eval.converters.tensors import ITEM_BYTES
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import param_specs, parameter_count
from griffin_eval.sharding.split import split_over


def describe(inspection: Inspection) -> dict[str, Any]:
    """Return the facts that ``griffin-eval inspect`` prints, ready for JSON.

    ``dtypes`` counts parameters by the dtype in which they are stored or to which they are
    dequantised. ``quantised`` has ``schemes`` (parameters, elements, and bits per element with
    scales, by scheme) and ``left_alone`` (names of other parameters), or is None. For an unknown
    field, both ``config`` and ``config_from`` have None.
    """
    holds: dict[str, list[str]] = {}
    for binding in inspection.bindings:
        holds.setdefault(binding.foreign, []).extend(spec.name for spec in binding.canonical)
    tensors = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "parameters": holds.get(name, []),
        }
        for name, tensor in inspection.container.tensors.items()
    ]
    config, origins = {}, {}
    if inspection.config is not None:
        for name, value in dataclasses.asdict(inspection.config).items():
            unknown = name in inspection.unknown
            config[name] = None if unknown else value
            origins[name] = None if unknown else inspection.origins[name]
    stored = {p: tensor["dtype"] for tensor in tensors for p in tensor["parameters"]}
    low = [p for p, t in stored.items() if p.endswith("recurrent_param") and t.endswith("float16")]
    question = inspection.missing_fields_message
    warnings = [] if question is None else [question]
    if low:
        kinds = " and ".join(sorted({stored[name] for name in low}))
        warnings.append(
            f"{len(low)} recurrent_param are stored as {kinds}, in which decays close to 1 are "
            "rounded away: convert from float32 if there is such a checkpoint"
        )
    try:
        known = ", ".join(checksums(inspection))
        contradictions = _contradictions(inspection, stored)
    except CheckpointError as error:
        known, contradictions = "", [str(error)]
    return {
        "format": inspection.format and inspection.format.name,
        "layout": inspection.layout,
        "parameters": inspection.config and parameter_count(inspection.config),
        "parameters_without_embedding": inspection.config
        and parameter_count(inspection.config, embedding=False),
        "dtypes": dict(Counter(stored.values() or (t["dtype"] for t in tensors))),
        "quantised": _quantised(inspection, holds),
        "tokenizer": sorted(p.name for p in tokenizer_folder(inspection.folder).glob("tokenizer*")),
        "checksums": known or "none",
        "left_out": inspection.left_out,
        "notes": dict(inspection.notes),
        "config": config,
        "config_from": origins,
        "tensors": tensors,
        "warnings": warnings,
        "problems": [*inspection.problems, *contradictions[:1]],  # a conversion names one, too
    }


def _contradictions(inspection: Inspection, dtypes: Mapping[str, str]) -> list[str]:
    """Return a sentence for each parameter that the manifest lacks or gives another dtype."""
    entries = recorded(inspection)
    others = [
        mismatch(inspection.folder, name, dtype, entries[name]["sha256"], entries[name])
        for name, dtype in dtypes.items()
        if name in entries
    ]
    return added(inspection, entries) + [sentence for sentence in others if sentence is not None]


def _quantised(inspection: Inspection, holds: Mapping[str, Sequence[str]]) -> dict | None:
    """Return how quantised parameters are stored, and the names of the other parameters, without
    layer numbers."""
    parameters = quantised(inspection.container)
    if not parameters:
        return None
    schemes: dict[str, dict[str, Any]] = {}
    for name, facts in parameters.items():
        size = math.prod(inspection.container.tensors[name].shape)
        found = schemes.setdefault(facts.scheme, {"parameters": 0, "elements": 0, "bits": 0.0})
        found["parameters"] += 1
        found["elements"] += size
        found["bits"] += facts.bits * size
    for found in schemes.values():
        found["bits"] = round(found["bits"] / max(1, found["elements"]), 3)
    alone = [name for name in holds if name not in parameters]
    kinds = dict.fromkeys(re.sub(r"\.[0-9]+\.", ".*.", name) for name in alone)
    return {"schemes": schemes, "left_alone": list(kinds)}


def describe_split(inspection: Inspection, devices: int) -> dict[str, Any]:
    """Return how the parameters would be split over ``devices`` devices, ready for JSON.

    Bytes are those of the stored dtypes. ``whole`` are parameters that do not divide, and lie whole
    on every device; ``whole_bytes`` is their part of ``bytes_a_device``.
    """
    assert inspection.config is not None
    specs, split = param_specs(inspection.config), split_over(inspection.config, devices)
    parameters = parameters_of(inspection.container.tensors, inspection.bindings)
    widths = {name: ITEM_BYTES[each.tensor.dtype] for name, each in parameters.items()}
    return {
        "devices": devices,
        "parameters_a_device": sum(map(split.size, specs.values())),
        "bytes_a_device": sum(split.size(s) * widths[n] for n, s in specs.items()),
        "bytes": sum(s.size * widths[n] for n, s in specs.items()),
        "whole": sorted(set(split.whole.values())),
        "whole_bytes": sum(spec.size * widths[spec.name] for spec in split.replicated()),
    }

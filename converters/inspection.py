"""Identifies a checkpoint, and collects all its faults, before a tensor is read."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.adapters.adapter import refuse_lone_adapter
from griffin_eval.converters.codecs.decode import decoded
from griffin_eval.converters.configs.from_shapes import (
    UNSEEN,
    ask_for,
    complete_fields,
    fields_from_shapes,
)
from griffin_eval.converters.configs.huggingface import (
    CONFIG_FILE,
    stated_fields,
    to_griffin_config,
)
from griffin_eval.converters.configs.own import MODEL_TYPE, read_own_config
from griffin_eval.converters.containers.container import Container, natural_key
from griffin_eval.converters.containers.orbax.find import step_number
from griffin_eval.converters.containers.registry import CONTAINERS, open_container
from griffin_eval.converters.formats import FORMATS, Format, formats_of
from griffin_eval.converters.mismatches import mismatches, stored_head
from griffin_eval.converters.naming.parameters import failed_checks
from griffin_eval.converters.naming.tables import (
    EMBEDDING,
    Binding,
    NameRule,
    Names,
    canonical_shapes,
    fit_stacks,
    foreign_name,
    matches,
    place_stacks,
    write_out,
)
from griffin_eval.converters.naming.trainers import recognised
from griffin_eval.converters.naming.user_table import read_names
from griffin_eval.converters.naming.wrapped import unwrapped
from griffin_eval.converters.overrides import NO_OVERRIDES, Overrides
from griffin_eval.errors import BadInput, CheckpointError
from griffin_eval.json_files import absolute_path, list_folder, read_json
from griffin_eval.messages import listed

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class Inspection:
    """Everything known of a checkpoint from its headers, and an output head that was compared.

    Attributes:
        folder: Folder of its config and tokenizer: the path, the folder of a file, or of a
            training's step the folder of the run.
        layout: Layout of the container, for people.
        format: One of `griffin_eval.converters.formats`, or the user's own; None if no naming is
            recognised.
        config: Architecture; None if it cannot be known.
        origins: Source of the value of each field of the config.
        unknown: Fields of the config that nothing states; their values in ``config`` mean nothing.
        missing_fields_message: Sentence that asks for ``unknown``.
        bindings: Parameters that each tensor of the container holds.
        left_out: Tensors of the container that are no parameters, each with the reason.
        notes: Further facts that a conversion should record.
        problems: Sentences; with any of them the checkpoint cannot be used.
    """

    path: Path
    folder: Path
    container: Container
    layout: str = ""
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    format: Format | None = None
    config: GriffinConfig | None = None
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unknown: Sequence[str] = ()
    missing_fields_message: str | None = None
    bindings: Sequence[Binding] = ()
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problems: Sequence[str] = ()


def inspect(path: Path, overrides: Overrides = NO_OVERRIDES) -> Inspection:
    """Inspect a checkpoint. The caller closes the container.

    Raises:
        CheckpointError: nothing there, or nothing that can be opened.
        ArgumentError: an override that cannot be.
    """
    overrides.check()
    names = None if overrides.names is None else read_names(overrides.names)
    refuse_lone_adapter(path)
    kind, container = open_container(path, overrides.item)
    result = Inspection(path=path, folder=_folder_of(path), container=container)
    result.layout, result.left_out = container.layout, container.left_out
    try:
        _examine(result, kind, names, overrides)
    except BadInput as error:  # the files are at fault: the overrides were checked
        result.problems = [str(error)]
    except BaseException:
        container.close()
        raise
    return result


def _examine(result: Inspection, kind: str, names: Names | None, overrides: Overrides) -> None:
    """Determine the naming, config and problems of an opened container."""
    if names is None and kind != "gguf":
        result.container = _unwrapped(result, kind)
    reads_config = names is None or names.config_file
    container = decoded(result.container, result.folder, reads_config=reads_config)
    result.container = container
    result.layout = container.layout
    table, ignored = _find_naming(result, kind, names)
    result.left_out = {**result.left_out, **ignored}
    result.config, result.origins = config, _ = _find_config(result, table, names, overrides)
    result.bindings = write_out(table, config)
    tensors = {name: t for name, t in container.tensors.items() if name not in ignored}
    stored = stored_head(tensors, table, result.bindings) if config.tie_embeddings else None
    if stored is not None and stored[1]:
        del tensors[head := stored[0]]
        result.notes = {"lm_head": f"{head!r} equals the embedding, and is tied to it"}
        result.left_out = {**result.left_out, head: "equal to the embedding, and tied to it"}
    elif stored is not None:  # whatever the files say
        result.config = config = dataclasses.replace(config, tie_embeddings=False)
        result.origins = {**result.origins, "tie_embeddings": "the output head"}
        result.bindings = write_out(table, config)
    problems, fits_config = mismatches(
        tensors, table, result.bindings, config, names, container.left_out
    )
    if problems:
        named = "" if names is None else f" as {names.path} names them"
        belong = _has_config(result) and not fits_config
        advice = "; check that config.json and weights belong together" if belong else ""
        result.problems = [
            f"{result.path} does not hold the parameters of its config{named}: "
            f"{'; '.join(problems)}{advice}"
        ]
    if names is not None:
        _check_names(result, config, names, overrides.accept_differences)


def _unwrapped(result: Inspection, kind: str) -> Container:
    """Return the container with the names that the model had before something wrapped it."""
    raw = read_json(result.folder / CONFIG_FILE) if _has_config(result) else {}
    key = "tie_embeddings" if raw.get("model_type") == MODEL_TYPE else "tie_word_embeddings"
    return unwrapped(
        result.container,
        kind,
        [format.table for format in formats_of(kind)],
        tied=raw.get(key, True) is True,
        path=result.path,
        has_items=CONTAINERS[kind].has_items,
    )


def _folder_of(path: Path) -> Path:
    """Return the folder of the config and tokenizer: for a training step, that may be its run's."""
    folder = path if path.is_dir() else path.parent
    if (folder / CONFIG_FILE).is_file():
        return folder
    for place in (absolute_path(folder), folder.resolve()):  # a link may lead to a step
        for step in (place, place.parent):  # the folder may be an item in a step
            if step_number(step) is not None and (step.parent / CONFIG_FILE).is_file():
                return step.parent
    return folder


def _check_names(
    result: Inspection, config: GriffinConfig, names: Names, accept_differences: bool
) -> None:
    """Apply a names table's checks of tensors, and note what its trainer computes differently."""
    if not result.problems:
        failed = failed_checks(result.container, result.bindings, config, names)
        result.problems = [f"{result.path}: {clause}" for clause in failed]
    if names.differs:
        differs = "; ".join(names.differs)
        result.notes = {**result.notes, "differs": differs}
        if accept_differences:
            logger.warning("%s gives other results than its trainer does: %s", result.path, differs)
        else:
            result.problems = [
                *result.problems,
                f"{result.path} is of a trainer that computes what this model does not "
                f"({differs}): its weights are read all the same with --accept-differences "
                "(accept_differences=True), and give other results than there",
            ]


def _find_naming(
    result: Inspection, kind: str, names: Names | None
) -> tuple[Sequence[NameRule], Mapping[str, str]]:
    """Find the naming that a user's table states, or that the embedding's name tells.

    Returns:
        Its table, with the layers of the stacks that the container has, and the tensors that a
        user's table leaves out, each with the reason.

    Raises:
        CheckpointError: none is known, or layers are stacked in an order that is not certain.
    """
    tensors = result.container.tensors
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if names is not None:
        title = f"{kind}, names of {names.path.name}"
        result.format = Format(title, kind, names.rows, "", "names of a user's own")
        checked = {name for _, name, _ in matches([check.rule for check in names.checks], tensors)}
        unmapped = set(tensors) - checked - {n for _, n, _ in matches(names.rows, tensors)}
        ignored = names.ignored(sorted(unmapped, key=natural_key))
        ignored |= dict.fromkeys(sorted(checked, key=natural_key), f"checked by {names.path.name}")
        return fit_stacks(names.rows, shapes), ignored
    formats = formats_of(kind)
    embeddings = {foreign_name(f.table, EMBEDDING): f for f in reversed(formats)}
    candidates = [format for name, format in embeddings.items() if name in tensors]
    if not candidates and (whose := recognised(tensors)):
        raise CheckpointError(f"{result.path}: {whose}")
    if CONTAINERS[kind].needs_config:  # the config identifies the model, and says what to expect
        candidates = formats
    if not candidates:
        raise CheckpointError(
            f"{result.path} holds no tensor named {' or '.join(embeddings)}, one of which every "
            f"known naming has; it holds {listed(tensors)}: if these are of such a model, say "
            "which is which in a table of names (--names, names=)"
        )
    table, uncertain = place_stacks(candidates[0].table, shapes)
    if uncertain:
        raise CheckpointError(
            f"{result.path}: {len(uncertain)} tensors hold several layers each, along a first "
            f"axis, but do not say which ({listed(uncertain, repr)}): say it in a table of "
            "names (--names, names=), with stack = '0::3' or a list of layers"
        )
    result.format = candidates[0]
    if table is not candidates[0].table:
        result.layout += ", layers stacked"
    return fit_stacks(table, shapes), {}


def _find_config(
    result: Inspection, table: Sequence[NameRule], names: Names | None, overrides: Overrides
) -> tuple[GriffinConfig, Mapping[str, str]]:
    """Return the config that a config.json states, else the one that shapes and the user state, and
    the sources of its fields; CheckpointError if there is none, or it contradicts itself."""
    assert result.format is not None
    stated = {} if names is None else names.config
    user_fields = {**stated, **overrides.fields}
    from_table = {}
    if names is not None:
        fields = stated.keys() - overrides.fields.keys()
        from_table = dict.fromkeys(fields, f"names, {names.path.name}")
    needs_file = CONTAINERS[result.format.container].needs_config and names is None
    if needs_file or (_has_config(result) and (names is None or names.config_file)):
        config, origins = _read_config(result, result.format, user_fields)
        if overrides.preset is not None:
            logger.warning(
                "preset=%s has no effect beside %s", overrides.preset, result.folder / CONFIG_FILE
            )
        return config, origins | from_table
    path = str(result.path)
    tensors = result.container.tensors
    shapes = canonical_shapes(table, {name: tensor.shape for name, tensor in tensors.items()})
    from_shapes = fields_from_shapes(shapes, path)
    fields, origins = complete_fields(from_shapes, user_fields, overrides.preset, path)
    result.unknown = [name for name in UNSEEN if name not in fields]
    if result.unknown:
        result.missing_fields_message = ask_for(result.unknown, from_shapes, path)
    # No shape depends on these fields, so everything else can be checked without them.
    nothing = {"visible_keys": 1, "embedding_scale": False, "logits_soft_cap": 0.0}
    return GriffinConfig(**{**nothing, **fields}), origins | from_table


def _read_config(
    result: Inspection, format: Format, user_fields: Mapping[str, Any]
) -> tuple[GriffinConfig, dict[str, str]]:
    """Read a config.json, and put the fields that the user states in the place of its own."""
    path = result.folder / CONFIG_FILE
    if CONFIG_FILE not in list_folder(result.folder):
        raise CheckpointError(
            f"{result.folder} holds no checkpoint: expected {CONFIG_FILE} beside its "
            f"{CONTAINERS[format.container].noun}, found none; name a folder that has both"
        )
    raw = read_json(path)
    if raw.get("model_type") == MODEL_TYPE:
        config, stated, absent = read_own_config(raw, str(path)), set(raw), "default"
        if format is FORMATS["hf"]:  # the same but for its config
            result.format = FORMATS["griffin"]
    else:
        config, stated = to_griffin_config(raw, source=str(path)), stated_fields(raw)
        absent = "transformers' default"
    origins = {
        field.name: CONFIG_FILE if field.name in stated else absent
        for field in dataclasses.fields(GriffinConfig)
    }
    for name, value in user_fields.items():
        if value != (stated_value := getattr(config, name)):
            logger.warning("%s is %s, not %s as in %s", name, value, stated_value, path)
        origins[name] = "given"
    return dataclasses.replace(config, **user_fields), origins


def _has_config(result: Inspection) -> bool:
    return (result.folder / CONFIG_FILE).is_file()

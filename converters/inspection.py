"""Finds out what a checkpoint is, and everything that is wrong with it, before a tensor is read."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from griffin_eval.converters.formats import FORMATS, READ_ONLY, Format
from griffin_eval.converters.mismatches import compare, has_own_head
from griffin_eval.converters.naming.checks import failed_checks
from griffin_eval.converters.naming.ops import Shape
from griffin_eval.converters.naming.stacks import fit_stacks, place_stacks
from griffin_eval.converters.naming.tables import (
    EMBEDDING,
    Binding,
    NameRule,
    Names,
    canonical_shapes,
    foreign_name,
    matches,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything known of a checkpoint from its headers, and an output head that was compared.

    Attributes:
        path: the path as given.
        folder: the folder of its config and tokenizer: the path, the folder of a file, or of a
            training's step the folder of the run.
        container: the opened folder or file.
        layout: the layout of the container, for people.
        format: its format, one of those of `griffin_eval.converters.formats` or the user's own;
            None if no naming is recognised.
        config: the architecture; None if it cannot be known.
        origins: by field of the config, the source of its value.
        unknown: fields of the config that nothing states; their values in ``config`` mean nothing.
        missing_fields_message: the sentence that asks for ``unknown``; None if nothing is.
        bindings: the parameters that each tensor of the container holds.
        left_out: tensors of the container that are no parameters, each with the reason.
        notes: further facts that a conversion should record.
        problems: sentences; with any of them the checkpoint cannot be used.
    """

    path: Path
    folder: Path
    container: Container
    layout: str
    left_out: dict[str, str]
    format: Format | None = None
    config: GriffinConfig | None = None
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unknown: Sequence[str] = ()
    missing_fields_message: str | None = None
    bindings: Sequence[Binding] = ()
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problems: Sequence[str] = ()


def inspect(path: Path, overrides: Overrides = NO_OVERRIDES) -> Inspection:
    """Inspects a checkpoint. The caller closes the container.

    Raises:
        CheckpointError: nothing there, or nothing that can be opened.
        ArgumentError: an override that cannot be.
    """
    overrides.check()
    names = None if overrides.names is None else read_names(overrides.names)
    refuse_lone_adapter(path)
    kind, container = open_container(path, overrides.item)
    known = Inspection(
        path=path,
        folder=_folder_of(path),
        container=container,
        layout=container.layout,
        left_out=dict(container.left_out),
    )
    try:
        if names is None and kind != "gguf":
            container = _unwrapped(known, kind)
        container = decoded(container, known.folder)
        known = dataclasses.replace(known, container=container, layout=container.layout)
        naming = find_naming(known, kind, names)
        known = dataclasses.replace(
            known,
            format=naming.format,
            layout=known.layout + naming.layout,
            left_out={**known.left_out, **naming.ignored},
        )
        stated = find_config(known, naming, names, overrides)
        bindings = write_out(naming.table, stated.config)
        if stated.config.tie_embeddings and has_own_head(
            container, naming.table, bindings, naming.ignored
        ):
            stated = _untied(stated)
            bindings = write_out(naming.table, stated.config)
        known = dataclasses.replace(
            known,
            format=stated.format,
            config=stated.config,
            origins=stated.origins,
            unknown=stated.unknown,
            missing_fields_message=stated.missing_fields_message,
            bindings=bindings,
        )
        known = _compared(known, naming, bindings, stated.config, names)
        return known if names is None else _checked(known, names, overrides.accept_differences)
    except BadInput as error:  # of the files: the overrides were checked
        return dataclasses.replace(known, problems=[str(error)])
    except BaseException:
        container.close()
        raise


def _unwrapped(known: Inspection, kind: str) -> Container:
    """The container, with the names that the model had before something wrapped it."""
    formats = (*FORMATS.values(), *READ_ONLY.values())
    raw = read_json(known.folder / CONFIG_FILE) if _has_config(known) else {}
    key = "tie_embeddings" if raw.get("model_type") == MODEL_TYPE else "tie_word_embeddings"
    return unwrapped(
        known.container,
        kind,
        [f.table for f in formats if f.container == kind],
        tied=raw.get(key, True) is True,
        path=known.path,
        has_items=CONTAINERS[kind].has_items,
    )


def _untied(stated: "StatedConfig") -> "StatedConfig":
    """The config of a model whose output head is not the embedding, whatever its files say."""
    config = dataclasses.replace(stated.config, tie_embeddings=False)
    return stated._replace(
        config=config, origins={**stated.origins, "tie_embeddings": "the output head"}
    )


def _folder_of(path: Path) -> Path:
    """The folder of config and tokenizer: of a training's step, the folder of its run."""
    folder = path if path.is_dir() else path.parent
    run = absolute_path(folder).parent
    is_step = path.is_dir() and step_number(path) is not None
    if is_step and not (folder / CONFIG_FILE).is_file() and (run / CONFIG_FILE).is_file():
        return run
    return folder


def _compared(
    known: Inspection,
    naming: "Naming",
    bindings: Sequence[Binding],
    config: GriffinConfig,
    names: Names | None,
) -> Inspection:
    """The inspection with the outcome of `compare`."""
    container, ignored = known.container, naming.ignored
    comparison = compare(container, naming.table, bindings, config, names, ignored)
    problems = []
    if comparison.problems:
        named = "" if names is None else f" as {names.path} names them"
        advice = "; check that config.json and weights belong together"
        advice *= _has_config(known) and not comparison.fits_config
        problems.append(
            f"{known.path} does not hold the parameters of its config{named}: "
            f"{'; '.join(comparison.problems)}{advice}"
        )
    return dataclasses.replace(
        known,
        left_out=known.left_out | comparison.left_out,
        notes=comparison.notes,
        problems=problems,
    )


def _checked(known: Inspection, names: Names, accept_differences: bool) -> Inspection:
    """The inspection with what a table of names says beside names: tensors that are checked, and
    what its trainer computes otherwise."""
    notes, problems = dict(known.notes), list(known.problems)
    if not problems and known.config is not None:
        failed = failed_checks(known.container, known.bindings, known.config, names)
        problems += [f"{known.path}: {clause}" for clause in failed]
    if names.differs:
        notes["differs"] = differs = "; ".join(names.differs)
        if accept_differences:
            logger.warning("%s gives other results than its trainer does: %s", known.path, differs)
        else:
            problems.append(
                f"{known.path} is of a trainer that computes what this model does not ({differs}): "
                "its weights are read all the same with --accept-differences "
                "(accept_differences=True), and give other results than there"
            )
    return dataclasses.replace(known, notes=notes, problems=problems)


class Naming(NamedTuple):
    """The names of a container's tensors.

    Attributes:
        format: the format with that naming.
        table: its table, with the layers of the stacks that the container has.
        layout: addition to the layout of the container, for people.
        ignored: tensors that a user's table leaves out, each with the reason.
    """

    format: Format
    table: Sequence[NameRule]
    layout: str = ""
    ignored: Mapping[str, str] = {}


def find_naming(known: Inspection, kind: str, names: Names | None) -> Naming:
    """The naming that a user's table states, or that the embedding's name tells.

    Raises:
        CheckpointError: no known naming, or layers stacked in an order that is not certain.
    """
    tensors, shapes = known.container.tensors, _shapes(known.container)
    if names is not None:
        format = Format(
            f"{kind}, names of {names.path.name}", kind, names.rows, "", "names of a user's own"
        )
        checks = [check.rule for check in names.checks]
        checked = {name for _, name, _ in matches(checks, tensors)}
        unmapped = set(tensors) - checked - {n for _, n, _ in matches(names.rows, tensors)}
        ignored = names.ignored(sorted(unmapped, key=natural_key))
        ignored |= dict.fromkeys(sorted(checked, key=natural_key), f"checked by {names.path.name}")
        return Naming(format, fit_stacks(names.rows, shapes), ignored=ignored)
    known_formats = (*FORMATS.values(), *READ_ONLY.values())
    formats = [format for format in known_formats if format.container == kind]
    embeddings = {foreign_name(f.table, EMBEDDING): f for f in reversed(formats)}
    candidates = [format for name, format in embeddings.items() if name in tensors]
    if not candidates and (whose := recognised(tensors)):
        raise CheckpointError(f"{known.path}: {whose}")
    if CONTAINERS[kind].needs_config:  # which is told apart by it, and says what should be there
        candidates = formats
    if not candidates:
        raise CheckpointError(
            f"{known.path} holds no tensor named {' or '.join(embeddings)}, one of which every "
            f"known naming has; it holds {listed(tensors)}: if these are of such a model, say "
            "which is which in a table of names (--names, names=)"
        )
    table, uncertain = place_stacks(candidates[0].table, shapes)
    if uncertain:
        raise CheckpointError(
            f"{known.path}: {len(uncertain)} tensors hold several layers each, along a first "
            f"axis, but do not say which ({listed(uncertain, repr)}): say it in a table of "
            "names (--names, names=), with stack = '0::3' or a list of layers"
        )
    layout = "" if table is candidates[0].table else ", layers stacked"
    return Naming(candidates[0], fit_stacks(table, shapes), layout)


class StatedConfig(NamedTuple):
    """A config, and the sources of its fields; see `Inspection`."""

    format: Format
    config: GriffinConfig
    origins: Mapping[str, str]
    unknown: Sequence[str] = ()
    missing_fields_message: str | None = None


def find_config(
    known: Inspection, naming: Naming, names: Names | None, overrides: Overrides
) -> StatedConfig:
    """The config that a config.json states, else the one that shapes and the user state.

    Raises:
        CheckpointError: there is none, or it contradicts itself.
    """
    needs_file = CONTAINERS[naming.format.container].needs_config and names is None
    table = {} if names is None else names.config
    given = {**table, **overrides.fields}
    from_table = {
        field: f"names, {names.path.name}"
        for field in table
        if names is not None and field not in overrides.fields
    }
    if needs_file or (_has_config(known) and (names is None or names.config_file)):
        stated = _read_config(known, naming.format, given)
        return stated._replace(origins={**stated.origins, **from_table})
    path = str(known.path)
    shapes = canonical_shapes(naming.table, _shapes(known.container))
    from_shapes = fields_from_shapes(shapes, path)
    fields, origins = complete_fields(from_shapes, given, overrides.preset, path)
    unknown = [name for name in UNSEEN if name not in fields]
    # No shape depends on these, so that everything else can be checked without them.
    nothing = {"visible_keys": 1, "embedding_scale": False, "logits_soft_cap": 0.0}
    return StatedConfig(
        naming.format,
        GriffinConfig(**{**nothing, **fields}),
        origins | from_table,
        unknown,
        ask_for(unknown, from_shapes, path) if unknown else None,
    )


def _read_config(known: Inspection, format: Format, given: Mapping[str, Any]) -> StatedConfig:
    """The config of a config.json, and the fields that the user states instead."""
    path = known.folder / CONFIG_FILE
    if CONFIG_FILE not in list_folder(known.folder):
        raise CheckpointError(
            f"{known.folder} holds no checkpoint: expected {CONFIG_FILE} beside its "
            f"{CONTAINERS[format.container].noun}, found none; name a folder that has both"
        )
    raw = read_json(path)
    if raw.get("model_type") == MODEL_TYPE:
        config, stated, absent = read_own_config(raw, str(path)), set(raw), "default"
        if format is FORMATS["hf"]:  # the same but for its config
            format = FORMATS["griffin"]
    else:
        config, stated = to_griffin_config(raw, source=str(path)), stated_fields(raw)
        absent = "transformers' default"
    origins = {
        field.name: CONFIG_FILE if field.name in stated else absent
        for field in dataclasses.fields(GriffinConfig)
    }
    for name, value in given.items():
        if value != (stated_value := getattr(config, name)):
            logger.warning("%s is %s, not %s as in %s", name, value, stated_value, path)
        origins[name] = "given"
    return StatedConfig(format, dataclasses.replace(config, **given), origins)


def _has_config(known: Inspection) -> bool:
    return (known.folder / CONFIG_FILE).is_file()


def _shapes(container: Container) -> dict[str, Shape]:
    return {name: tensor.shape for name, tensor in container.tensors.items()}

"""Finds out what a checkpoint is, and everything that is wrong with it, before a tensor is read."""

import dataclasses
import difflib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from griffin_eval.config import PRESETS, GriffinConfig
from griffin_eval.converters.formats import FORMATS, Format
from griffin_eval.converters.huggingface_config import stated_fields, to_griffin_config
from griffin_eval.converters.infer import UNSEEN, ask_for, complete_fields, fields_from_shapes
from griffin_eval.converters.manifest import CHUNK_BYTES
from griffin_eval.converters.names_file import Names, read_names
from griffin_eval.converters.naming import (
    EMBEDDING,
    HEAD,
    SAME,
    Binding,
    Op,
    Row,
    canonical_shapes,
    fit_stacks,
    matches,
    place_stacks,
    write_out,
)
from griffin_eval.converters.resolve import listed, read_json
from griffin_eval.converters.safetensors_folder import SafetensorsFolder, natural_key
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError
from griffin_eval.hints import nearest
from griffin_eval.layout import param_specs

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
MODEL_TYPE = "griffin"  # of a config.json that holds the fields of GriffinConfig themselves
FLOATS = ("bfloat16", "float16", "float32", "float64")
_ADDED = ("complex_gates",)  # older files lack these fields, and mean their defaults
_SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class Tensor(Protocol):
    """What a container says of a tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class Container(Protocol):
    """A folder or file of named arrays, opened for reading."""

    @property
    def tensors(self) -> Mapping[str, Any]: ...  # of Tensor

    def numpy(self, name: str) -> "np.ndarray":
        """One tensor, mapped from its file where that is possible."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Sliced(Container, Protocol):
    """A container whose tensors are not mapped, but can be read in part."""

    def numpy_slice(self, name: str, start: int, stop: int) -> "np.ndarray":
        """Entries of the first axis of a tensor."""
        ...


class NothingThere(CheckpointError):
    """A place without anything that looks like a checkpoint."""


class Overrides(NamedTuple):
    """What a user may say of a checkpoint that its files do not.

    Attributes:
        preset: name of a preset that supplies what neither a config nor shapes say.
        item: which item of an Orbax checkpoint, or of a ``.pt`` file, holds the parameters.
        visible_keys, embedding_scale, logits_soft_cap: fields of the config.
        names: file that says how the tensors are named (`griffin_eval.converters.names_file`).
    """

    preset: str | None = None
    item: str | None = None
    visible_keys: int | None = None
    embedding_scale: bool | None = None
    logits_soft_cap: float | None = None
    names: str | Path | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config that are set."""
        names = ("visible_keys", "embedding_scale", "logits_soft_cap")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check(self) -> None:
        """Refuses values that no checkpoint can have.

        Raises:
            ArgumentError: naming them.
        """
        if self.preset is not None and self.preset not in PRESETS:
            raise ArgumentError(
                f"unknown preset {self.preset!r}: expected one of {', '.join(PRESETS)}"
                f"{nearest(self.preset, PRESETS)}"
            )
        dataclasses.replace(PRESETS["recurrentgemma-2b"], **self.fields)


NO_OVERRIDES = Overrides()


class Survey:
    """What lies at a path, known from headers alone, but for an output head that is compared.

    Attributes:
        path: as given.
        folder: the path, or the folder of a file: where config and tokenizer are.
        container: the opened folder or file.
        layout: how it is laid out, for people.
        format: which of `griffin_eval.converters.formats.FORMATS` it is in, or the user's own;
            None if no naming is recognised.
        config: the architecture; None if it cannot be known.
        origins: by field of the config, where its value is from.
        unknown: fields of the config that nothing says; ``config`` has a value without meaning.
        bindings: which tensor of the container holds which parameters.
        left_out: tensors of the container that are no parameters, and why.
        notes: what else a conversion should record.
        problems: sentences; with any of them the checkpoint cannot be used.
        question: the sentence that asks for ``unknown``; None if nothing is.

    Args:
        path: folder, or file of a ``.pt``.
        overrides: what the files do not say, or say wrongly.

    Raises:
        CheckpointError: nothing there, or nothing that can be opened.
        ArgumentError: an override that cannot be.
    """

    def __init__(self, path: Path, overrides: Overrides = NO_OVERRIDES):
        overrides.check()
        names = None if overrides.names is None else read_names(overrides.names)
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        self.container, self._kind, self.layout = open_container(path, overrides.item)
        self.left_out: dict[str, str] = dict(getattr(self.container, "left_out", {}))
        self.notes: dict[str, Any] = {}
        self.problems: list[str] = []
        self._ignored: dict[str, str] = {}
        self.format: Format | None = None
        self.config: GriffinConfig | None = None
        self.origins: dict[str, str] = {}
        self.unknown: list[str] = []
        self.question: str | None = None
        self.bindings: list[Binding] = []
        try:
            self.format, table = self._naming(names)
            self.config = self._find_config(table, names, overrides)
            self.bindings = write_out(table, self.config)
            named = "" if names is None else f" as {names.path} names them"
            if wrong := self._mismatches(table, names):
                self.problems.append(
                    f"{path} does not hold the parameters of its config{named}: {'; '.join(wrong)}"
                    + "; check that config.json and weights belong together" * self._has_config
                )
        except BadInput as error:  # of the files: the overrides were checked
            self.problems.append(str(error))
        except BaseException:
            self.container.close()
            raise

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.container.tensors.items()}

    def _naming(self, names: Names | None) -> tuple[Format, Sequence[Row]]:
        """How the container names its tensors: as the user says, or told by the embedding."""
        if names is not None:
            label = f"{self._kind}, names of {names.path.name}"
            unmapped = set(self.container.tensors)
            unmapped -= {name for _, name, _ in matches(names.rows, self.container.tensors)}
            self._ignored = names.ignored(sorted(unmapped, key=natural_key))
            self.left_out |= self._ignored
            fitted = fit_stacks(names.rows, self._shapes)
            return Format(label, self._kind, names.rows, "", "names of a user's own"), fitted
        formats = [f for f in FORMATS.values() if f.container == self._kind]
        embeddings = {_foreign(f.table, EMBEDDING): f for f in reversed(formats)}
        found = [f for name, f in embeddings.items() if name in self.container.tensors]
        if self._kind == "safetensors":
            found = formats
        if not found:
            raise CheckpointError(
                f"{self.path} holds no tensor named {' or '.join(embeddings)}, one of which every "
                f"known naming has; it holds {listed(self.container.tensors)}: if these are of "
                "such a model, say which is which in a table of names (--names, names=)"
            )
        table, uncertain = place_stacks(found[0].table, self._shapes)
        if uncertain:
            raise CheckpointError(
                f"{self.path}: {len(uncertain)} tensors hold several layers each, along a first "
                f"axis, but do not say which ({listed(uncertain, repr)}): say it in a table of "
                "names (--names, names=), with stack = '0::3' or a list of layers"
            )
        if table is not found[0].table:
            self.layout += ", layers stacked"
        return found[0], fit_stacks(table, self._shapes)

    def _find_config(
        self, table: Sequence[Row], names: Names | None, overrides: Overrides
    ) -> GriffinConfig:
        written, given = self.folder / CONFIG_FILE, overrides.fields
        self._has_config = written.is_file()
        if not self._has_config and (self._kind != "safetensors" or names is not None):
            known = fields_from_shapes(canonical_shapes(table, self._shapes), str(self.path))
            fields, self.origins = complete_fields(known, given, overrides.preset, str(self.path))
            self.unknown = [name for name in UNSEEN if name not in fields]
            if self.unknown:
                self.question = ask_for(self.unknown, known, str(self.path))
            # No shape depends on these, so that everything else can be checked without them.
            nothing = {"visible_keys": 1, "embedding_scale": False, "logits_soft_cap": 0.0}
            return GriffinConfig(**{**nothing, **fields})
        raw = read_json(written)
        if raw.get("model_type") == MODEL_TYPE:
            config, stated, absent = _own_config(raw, str(written)), set(raw), "default"
            if self.format is FORMATS["hf"]:  # the same but for its config
                self.format = FORMATS["griffin"]
        else:
            config, stated = to_griffin_config(raw, source=str(written)), stated_fields(raw)
            absent = "transformers' default"
        self.origins = {
            field.name: CONFIG_FILE if field.name in stated else absent
            for field in dataclasses.fields(GriffinConfig)
        }
        for name, value in given.items():
            if value != (stated_value := getattr(config, name)):
                logger.warning("%s is %s, not %s as in %s", name, value, stated_value, written)
            self.origins[name] = "given"
        return dataclasses.replace(config, **given)

    def _mismatches(self, table: Sequence[Row], names: Names | None) -> list[str]:
        """What separates the tensors that are there from those that the config asks for."""
        assert self.config is not None
        found = {n: t for n, t in self.container.tensors.items() if n not in self._ignored}
        problems = [] if names is None else self._coverage(names)
        head = _foreign(table, HEAD)
        embedding = next((b for b in self.bindings if b.canonical[0].name == EMBEDDING), None)
        if head in found and embedding is not None and embedding.foreign in found:
            del found[head]
            (op,) = {row.op for row in table if row.foreign == head}
            if self._same_bits(head, op, embedding):
                self.notes["lm_head"] = f"{head!r} equals the embedding, and is tied to it"
                self.left_out[head] = "equal to the embedding, and tied to it"
            else:
                problems.append(
                    f"{head!r} differs from {embedding.foreign!r}, but these models have one "
                    f"matrix for both: remove {head!r} if it is a leftover, or train with tied "
                    "embeddings"
                )
        expected = {binding.foreign: binding.shape for binding in self.bindings}
        by_foreign: dict[str, list[str]] = {}
        for binding in self.bindings:
            by_foreign.setdefault(binding.foreign, []).extend(s.name for s in binding.canonical)

        def show(name: str) -> str:
            ours = by_foreign.get(name, [name])
            if ours == [name]:
                return repr(name)
            between = " and " if len(ours) == 2 else " … "
            return f"{name!r} ({between.join(dict.fromkeys((ours[0], ours[-1])))})"

        bare = [n for n in found if n not in expected and f"model.{n}" in expected]
        if bare:
            problems.append(
                f"{len(bare)} names lack the prefix 'model.' ({listed(bare, repr)}), as a bare "
                "RecurrentGemmaModel saves them: save the RecurrentGemmaForCausalLM instead"
            )
        present = {*found, *(f"model.{name}" for name in bare)}
        missing = sorted(expected.keys() - present, key=natural_key)
        unexpected = [n for n in found if n not in expected and n not in bare]
        if missing:
            problems.append(f"{len(missing)} missing ({listed(missing, show)})")
        if unexpected:

            def hint(name: str) -> str:
                # A renamed key is near one that is missing; a surplus layer near one that is there.
                for known in (missing, list(expected)):
                    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
                        return f"{name!r}, nearest {show(near[0])}"
                return repr(name)

            more = "" if names is None else f", which no row of {names.path.name} names"
            if names is None and missing and not expected.keys() & found.keys():
                more = ": if they are named otherwise, give a table of names (--names, names=)"
            problems.append(f"{len(unexpected)} unexpected ({listed(unexpected, hint)}){more}")
        stacks = {row.foreign: row.stack for row in table if row.foreign in by_foreign}
        uses = Counter(binding.foreign for binding in self.bindings)
        beyond = {
            name: f"{uses[name]} of {len(stack)}"
            for name, stack in stacks.items()
            if isinstance(stack, Sequence) and uses[name] != len(stack)
        }
        if beyond:
            text = listed(beyond, lambda name: f"{show(name)}: {beyond[name]}")
            problems.append(f"{len(beyond)} stacks with layers that the model lacks ({text})")
        both = [name for name in expected if name in found]
        if reshaped := [n for n in both if tuple(found[n].shape) != expected[n]]:
            text = listed(
                reshaped, lambda n: f"{show(n)} is {tuple(found[n].shape)}, expected {expected[n]}"
            )
            problems.append(f"{len(reshaped)} of another shape ({text})")
        if refused := [n for n in both if float_dtype(found[n]) not in FLOATS]:
            text = listed(refused, lambda n: f"{show(n)} is {float_dtype(found[n])}")
            problems.append(
                f"{len(refused)} of a dtype other than {', '.join(FLOATS)} ({text}): quantized "
                "checkpoints are not supported"
            )
        return problems

    def _coverage(self, names: Names) -> list[str]:
        """Whether the rows of a user give every parameter once."""
        assert self.config is not None
        given = Counter(spec.name for binding in self.bindings for spec in binding.canonical)
        uses = Counter((binding.foreign, binding.entry) for binding in self.bindings)
        file = names.path.name
        problems = []
        if lacking := [name for name in param_specs(self.config) if name not in given]:
            problems.append(
                f"{len(lacking)} parameters that no row of {file} gives ({listed(lacking, repr)})"
            )
        if twice := [name for name, count in given.items() if count > 1]:
            problems.append(
                f"{len(twice)} parameters that several rows of {file} give ({listed(twice, repr)})"
            )
        if twice := list(dict.fromkeys(name for (name, _), count in uses.items() if count > 1)):
            problems.append(
                f"{len(twice)} tensors that several rows of {file} name ({listed(twice, repr)})"
            )
        return problems

    def _same_bits(self, head: str, op: Op, embedding: Binding) -> bool:
        import numpy as np

        container = self.container
        one, other = container.tensors[head], container.tensors[embedding.foreign]
        if one.dtype != other.dtype or tuple(other.shape) != embedding.shape:
            return False
        shape = embedding.canonical[0].shape
        if tuple(one.shape) != op.foreign_shape(shape):
            return False

        def rows(name: str, op: Op) -> Callable[[int, int], np.ndarray]:
            if op is SAME and isinstance(container, Sliced):
                return partial(container.numpy_slice, name)
            (whole,) = op.to_canonical(container.numpy(name))
            return lambda start, stop: np.ascontiguousarray(whole[start:stop])

        left, right = rows(head, op), rows(embedding.foreign, embedding.op)
        step = max(1, CHUNK_BYTES // max(1, one.nbytes // max(1, shape[0])))
        return all(
            np.array_equal(left(i, i + step).view(np.uint8), right(i, i + step).view(np.uint8))
            for i in range(0, shape[0], step)
        )


def open_container(path: Path, item: str | None = None) -> tuple[Container, str, str]:
    """Opens whatever lies at a path; gives the container, its kind and how it is laid out.

    Raises:
        NothingThere: nothing that looks like a checkpoint.
        CheckpointError: it cannot be opened.
    """
    if item is None and any(path.glob("*.safetensors*")):
        return SafetensorsFolder(path), "safetensors", "safetensors"

    from griffin_eval.converters.torch_file import TorchFile, looks_like_torch

    if looks_like_torch(path):
        return TorchFile(path, item=item), "torch", "torch.save"

    from griffin_eval.converters.orbax_folder import OrbaxFolder, looks_like_orbax

    if looks_like_orbax(path):
        container = OrbaxFolder(path, item=item)
        return container, "orbax", container.describe()
    if item is not None:
        raise NothingThere(f"{path} is neither Orbax nor a .pt file, so that it has no {item!r}")
    raise NothingThere(
        f"{path} holds no checkpoint: expected safetensors, an Orbax folder or a .pt file"
    )


def float_dtype(tensor: Tensor) -> str:
    """numpy's name of a dtype; of those that no parameter has, the container's."""
    return _SAFETENSORS_DTYPES.get(tensor.dtype, tensor.dtype)


def _foreign(table: Sequence[Row], canonical: str) -> str:
    """What a table calls a parameter that is of no layer; "" if it does not name it."""
    return next((row.foreign for row in table if row.canonical == (canonical,)), "")


def _own_config(raw: dict[str, Any], source: str) -> GriffinConfig:
    names = [field.name for field in dataclasses.fields(GriffinConfig)]
    given: dict[str, Any] = {key: value for key, value in raw.items() if key in names}
    if missing := [n for n in names if n not in given and n not in _ADDED]:
        raise CheckpointError(f"{source} lacks {', '.join(missing)}, which a griffin config has")
    try:
        given["block_pattern"] = tuple(given["block_pattern"])
        return GriffinConfig(**given)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {error}") from None

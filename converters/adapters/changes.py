"""Reads the changes that an adapter makes to each parameter off its tensors.

The change of each parameter follows from the names and shapes of an adapter's tensors. peft names
them after the modules of transformers' RecurrentGemma, as the parameters of a model are named here:
``base_model.model.`` + module + the kind of tensor.
"""

import dataclasses
import logging
import re
from collections.abc import Sequence

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.adapters.adapter import ADAPTER_CONFIG, LORA, Adapter
from griffin_eval.converters.naming.tables import EMBEDDING, HEAD
from griffin_eval.converters.tensors import (
    FLOATS,
    Shape,
)
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import param_specs
from griffin_eval.messages import brief, listed

logger = logging.getLogger(__name__)

PREFIX = "base_model.model."
_A, _B, _B_BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
_ROWS_A, _ROWS_B = "lora_embedding_A", "lora_embedding_B"
_MAGNITUDE, _TOKENS = "lora_magnitude_vector", "token_adapter.trainable_tokens_delta"
_FACTORS = (_A, _B, _B_BIAS, _ROWS_A, _ROWS_B, _MAGNITUDE)
_MAX_DEPTH = 4  # wrappers of a module
_EMBEDDING_MODULE, _HEAD_MODULE = EMBEDDING.removesuffix(".weight"), HEAD.removesuffix(".weight")


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of one parameter by an adapter. Names are of tensors of the adapter.

    Attributes:
        value: Tensor that replaces the parameter.
        shared: Whether ``value`` is a matrix shared by the embedding and the output head.
        a, b: Factors of the added product, ``scale`` B A.
        rows: Whether the product is transposed, for rows of an embedding: ``scale`` (B A)ᵀ.
        added: Tensor that is added times ``scale``.
        scale: Factor, with the adapter's weight in it.
        magnitude: Magnitudes of the rows of a linear map, or of the columns of an embedding.
        tokens: Tensor that replaces the rows ``ids``.
        by_peft: Shape of the linear map, [outputs, inputs], whose weight or bias peft's own layer
            changes (see `peft_layers`).
    """

    adapter: Adapter
    value: str | None = None
    shared: bool = False
    a: str | None = None
    b: str | None = None
    rows: bool = False
    added: str | None = None
    scale: float = 1.0
    magnitude: str | None = None
    tokens: str | None = None
    ids: tuple[int, ...] = ()
    by_peft: Shape = ()

    @property
    def adds(self) -> bool:
        """Whether the change is a mere sum, which can be weighted and combined with others."""
        return self.value is self.magnitude is self.tokens is None and not self.by_peft


def changes_of(adapter: Adapter, config: GriffinConfig) -> dict[str, Change]:
    """Return the changes of a model by an adapter, by canonical name; CheckpointError with
    everything that is wrong with its tensors.

    The output head goes by its name, also where it is tied to the embedding.
    """
    reading = _Reading(adapter, config)
    changes = reading.changes()
    if reading.problems:
        raise CheckpointError(f"{adapter.file}: {'; '.join(reading.problems)}")
    return changes


def vocabulary_of(adapter: Adapter, config: GriffinConfig) -> int:
    """Return the number of rows that the embedding has once an adapter is merged.

    An adapter trained after the vocabulary was resized holds the whole resized matrix. If embedding
    and head are two matrices and the adapter holds only one, the size stays, and the adapter is
    refused later.
    """
    rows: dict[str, int] = {}
    for name, tensor in adapter.container.tensors.items():
        parameter = re.sub(r"(\.token_adapter)?\.base_layer", "", name.removeprefix(PREFIX))
        if parameter in (EMBEDDING, HEAD) and tensor.shape[1:] == (config.width,):
            rows[parameter] = tensor.shape[0]
    trained = [name for name in rows if adapter.config.saves(name.removesuffix(".weight"))]
    both = rows.keys() == {EMBEDDING, HEAD}
    one = config.tie_embeddings and (not trained or adapter.config.ties)
    if len(set(rows.values())) == 1 and (both or one):
        return next(iter(rows.values()))
    return config.vocab_size


class _Reading:
    """One pass over an adapter's tensors, which are looked up by the names that changes of
    parameters have; any tensor left over is refused. ``problems`` lists a clause for each fault."""

    def __init__(self, adapter: Adapter, config: GriffinConfig):
        self.problems: list[str] = []
        self._adapter, self._config, self._tied = adapter, adapter.config, config.tie_embeddings
        self._method = "LoRA" if self._config.method == LORA else self._config.method
        self._tensors = adapter.container.tensors
        self._shapes: dict[str, Shape] = {n: s.shape for n, s in param_specs(config).items()}
        self._shapes.setdefault(HEAD, self._shapes[EMBEDDING])
        self._left = dict.fromkeys(self._tensors)
        self._by_parameter: dict[str, list[Change]] = {}
        self._adapted: set[str] = set()  # modules
        self._misshapen: list[str] = []
        self._unclear: dict[str, list[str]] = {}  # patterns of α by module

    def changes(self) -> dict[str, Change]:
        """Return the changes by canonical name."""
        for parameter, shape in self._shapes.items():
            self._read_values(parameter, shape)
        for module in dict.fromkeys(name.rpartition(".")[0] for name in self._shapes):
            self._read_module(module)
        changes = {name: self._combined(name, group) for name, group in self._by_parameter.items()}
        self._expect_all(changes)
        if self._left:
            self.problems.insert(
                0,
                f"{len(self._left)} tensors that are no part of a {self._method} of this model "
                f"({listed(self._left, repr)})",
            )
        if self._misshapen:
            advice = "adapter and base do not belong together"
            modules = tuple(f"'{PREFIX}{m}." for m in (_EMBEDDING_MODULE, _HEAD_MODULE))
            if all(each.startswith(modules) for each in self._misshapen):
                advice = (
                    "if the vocabulary was resized before the adapter was trained, save the "
                    "adapter again with both matrices (save_embedding_layers=True)"
                )
            self.problems.append(
                f"{len(self._misshapen)} of another shape ({listed(self._misshapen)}): {advice}"
            )
        others = [f"{n!r} is {t.dtype}" for n, t in self._tensors.items() if t.dtype not in FLOATS]
        if others:
            self.problems.append(
                f"{len(others)} that are not {', '.join(FLOATS)}: {listed(others)}"
            )
        if self._unclear:
            logger.warning(
                "%s: several keys of alpha_pattern with different values fit one module (%s): the "
                "first one in the file counts, and peft sorts them when it saves, so that it may "
                "have trained with another; keep only the one that it was trained with",
                self._adapter.folder / ADAPTER_CONFIG,
                listed(self._unclear, lambda m: f"{m}: {', '.join(map(brief, self._unclear[m]))}"),
            )
        return changes

    def _has(self, bare: str) -> bool:
        return PREFIX + bare in self._left

    def _take(self, bare: str, shape: Shape) -> str:
        """Return the full name of a tensor, note a wrong shape, and mark it as used."""
        del self._left[PREFIX + bare]
        if (found := self._tensors[PREFIX + bare].shape) != shape:
            self._misshapen.append(f"'{PREFIX}{bare}' is {found}, expected {shape}")
        return PREFIX + bare

    def _change(self, parameter: str, change: Change) -> None:
        self._by_parameter.setdefault(parameter, []).append(change)

    def _read_values(self, parameter: str, shape: Shape) -> None:
        """Find the tensor that replaces a parameter: its own, or a copy within a wrapper."""
        module, _, kind = parameter.rpartition(".")
        whole = parameter in (EMBEDDING, HEAD)
        places = {parameter: whole and not self._config.saves(module)}
        places |= {f"{module}.{'base_layer.' * n}{kind}": whole for n in range(1, _MAX_DEPTH)}
        places |= {f"{module}.token_adapter.base_layer.{kind}": True} if whole else {}
        if self._has(parameter):  # peft also saves copies of modules trained in full
            for wrapper in ("modules_to_save", "original_module"):
                self._left.pop(f"{PREFIX}{module}.{wrapper}.{kind}", None)
        for bare, shared in places.items():
            if self._has(bare):
                value = self._take(bare, shape)
                self._change(parameter, Change(self._adapter, value=value, shared=shared))

    def _read_module(self, module: str) -> None:
        """Find the changes by the tensors of one module."""
        if self._config.method != LORA:
            self._read_layer_of_peft(module)
            return
        # Parameters that peft adapts directly. It wraps the first one first, so that the last
        # one is outside.
        targeted = [
            name
            for name in self._shapes
            if name.rpartition(".")[0] == module and _ends(name, self._config.target_parameters)
        ]
        if self._has(f"{module}.{_TOKENS}") and f"{module}.weight" in (EMBEDDING, HEAD):
            self._adapted.add(module)
            self._read_tokens(module)
        for depth, parameter in enumerate(targeted[::-1] or [f"{module}.weight"]):
            place = f"{module}.{'base_layer.' * depth}"
            parts = [part for part in _FACTORS if self._has(place + part)]
            if not parts:
                continue
            self._adapted.add(module)
            if module.endswith(".conv_1d") and not targeted:
                self.problems.append(
                    f"{module} is a convolution of each channel by itself, and its adapter mixes "
                    "channels, so that no weight can hold it"
                )
                for part in parts:
                    del self._left[PREFIX + place + part]
            elif len(self._shapes.get(parameter, ())) in ((2, 3) if targeted else (2,)):
                self._read_factors(module, place, parameter, parts, targeted=bool(targeted))

    def _read_layer_of_peft(self, module: str) -> None:
        """Take all tensors of a linear map, whose names and shapes peft checks."""
        own = [name for name in self._left if name.startswith(f"{PREFIX}{module}.")]
        shape = self._shapes.get(f"{module}.weight", ())
        if not own or len(shape) != 2 or module in (_EMBEDDING_MODULE, _HEAD_MODULE):
            return
        self._adapted.add(module)
        for name in own:
            del self._left[name]
        for parameter in (f"{module}.weight", f"{module}.bias"):
            if parameter in self._shapes:
                self._change(parameter, Change(self._adapter, by_peft=shape))

    def _read_factors(
        self, module: str, place: str, parameter: str, parts: Sequence[str], *, targeted: bool
    ) -> None:
        adapted = parameter if targeted else module  # the name that rank patterns match
        rank, scale = self._config.rank_of(adapted), self._config.scale_of(adapted)
        scale *= self._adapter.weight
        if unclear := self._config.unclear_alphas(adapted):
            self._unclear[adapted] = unclear
        rows, shape = module == _EMBEDDING_MODULE and not targeted, self._shapes[parameter]
        stacked, out, inp = (1, *shape) if len(shape) == 2 else shape
        if rows:
            wanted: dict[str, Shape] = {_ROWS_A: (rank, out), _ROWS_B: (inp, rank)}
        else:
            wanted = {_A: (rank * stacked, inp), _B: (out, rank * stacked)}
        if self._config.magnitudes and not targeted:
            wanted[_MAGNITUDE] = (inp,) if rows else (out,)
        if self._config.bias and not targeted and not rows:
            wanted[_B_BIAS] = (out,)
        if missing := sorted(wanted.keys() - set(parts)):
            self.problems.append(f"{module} lacks {' and '.join(missing)}")
            for part in wanted.keys() & set(parts):
                del self._left[PREFIX + place + part]
            return
        names = {part: self._take(place + part, wanted[part]) for part in sorted(wanted)}
        a, b = (names[part] for part in ((_ROWS_A, _ROWS_B) if rows else (_A, _B)))
        magnitude = names.get(_MAGNITUDE)
        change = Change(self._adapter, a=a, b=b, rows=rows, scale=scale, magnitude=magnitude)
        self._change(parameter, change)
        if _B_BIAS in names and f"{module}.bias" not in self._shapes:
            self.problems.append(f"{module} has no bias that {_B_BIAS} could be added to")
        elif _B_BIAS in names:
            bias = Change(self._adapter, added=names[_B_BIAS], scale=scale)
            self._change(f"{module}.bias", bias)

    def _read_tokens(self, module: str) -> None:
        parameter, tokens = f"{module}.weight", self._config.tokens
        ids = next((i for m, i in tokens.items() if module.endswith(m)), ())
        if not ids and parameter == HEAD and self._tied:  # follows the embedding
            ids = next((i for m, i in tokens.items() if _EMBEDDING_MODULE.endswith(m)), ())
        vocab, width = self._shapes[parameter]
        if len(set(ids)) < len(ids) or any(i >= vocab for i in ids):
            self.problems.append(
                f"trainable_token_indices of {module} must be different ids below {vocab}"
            )
        name = self._take(f"{module}.{_TOKENS}", (len(ids), width))
        self._change(parameter, Change(self._adapter, tokens=name, ids=ids))

    def _combined(self, parameter: str, changes: Sequence[Change]) -> Change:
        """Return the single change of a parameter. Two changes are compatible only if they are a
        value and an addition to it, or a copy of the base's matrix and new rows of that copy."""
        values = [change for change in changes if change.value is not None]
        others = [change for change in changes if change.value is None]
        rows_of_new = values and others and others[0].tokens and not values[0].shared
        if max(len(values), len(others)) > 1 or rows_of_new:
            self.problems.append(f"{parameter} is changed in two ways")
        if values and others:
            return dataclasses.replace(others[0], value=values[0].value, shared=values[0].shared)
        return changes[0]

    def _expect_all(self, changes: dict[str, Change]) -> None:
        """Check that every module and parameter named in the config has tensors."""
        config, both = self._config, (_EMBEDDING_MODULE, _HEAD_MODULE)
        modules = [n.removesuffix(".weight") for n, s in self._shapes.items() if len(s) == 2]
        named = [m for m in modules if _ends(m, config.target_modules or ())]
        # peft trains modules that modules_to_save also names as a whole, without factors.
        lacking = [m for m in named if m not in self._adapted and not self._saved(m)]
        if config.ties:  # embedding and head are one matrix
            lacking = [m for m in lacking if m not in both]
        if lacking:
            self.problems.append(
                f"nothing for {len(lacking)} modules that target_modules names ({listed(lacking)})"
            )
        for parameter in self._shapes:
            if self._saved(parameter.rpartition(".")[0]) and parameter not in changes:
                self.problems.append(f"no {parameter}, though modules_to_save names it")
        for module in both:
            change = changes.get(f"{module}.weight")
            follows = module == _HEAD_MODULE and EMBEDDING in changes
            if not module.endswith(tuple(config.tokens)) or follows:
                continue
            if change is None or change.tokens is None:
                self.problems.append(
                    f"no {_TOKENS} of {module}, though trainable_token_indices names it"
                )

    def _saved(self, module: str) -> bool:
        """Return whether a module was trained in full, by itself or within another one."""
        around = [module[: m.start()] for m in re.finditer(r"\.|$", module)]
        return any(map(self._config.saves, around))


def _ends(name: str, endings: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in endings)

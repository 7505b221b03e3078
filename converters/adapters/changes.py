"""What an adapter does to each parameter, read off the names and shapes of its tensors.

peft names them after the modules of transformers' RecurrentGemma, as the parameters of a model are
named here: ``base_model.model.`` + module + what it is to the module.
"""

import dataclasses
import logging
import re
from typing import Any

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.adapters.adapter import Adapter
from griffin_eval.converters.adapters.files import ADAPTER_CONFIG
from griffin_eval.converters.naming.tables import EMBEDDING, HEAD
from griffin_eval.converters.tensors import FLOATS, Shape
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import param_specs
from griffin_eval.messages import brief, listed

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
_A, _B, _B_BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
_ROWS_A, _ROWS_B = "lora_embedding_A", "lora_embedding_B"
_MAGNITUDE, _TOKENS = "lora_magnitude_vector", "token_adapter.trainable_tokens_delta"
_PARTS = (_A, _B, _B_BIAS, _ROWS_A, _ROWS_B, _MAGNITUDE, _TOKENS, "weight", "bias")
_KEY = re.compile(
    r"(?P<module>[^.].*?)(?P<wraps>(?:\.base_layer)*)\." + f"(?P<part>{'|'.join(_PARTS)})"
)
# Further copies of the matrices of a module, as peft saves those of the embedding and the head.
_COPY = re.compile(r"(.+)\.(?:modules_to_save|original_module)(\.weight|\.bias)")
_ROWS_OF = re.compile(r"(.+)\.token_adapter\.base_layer(\.weight)")
_EMBEDDING_MODULE, _HEAD_MODULE = EMBEDDING.removesuffix(".weight"), HEAD.removesuffix(".weight")


@dataclasses.dataclass(frozen=True)
class Change:
    """What an adapter does to one parameter. Names are of tensors of the adapter.

    Attributes:
        adapter: the adapter.
        value: what takes the parameter's place.
        shared: whether that is of a matrix which the embedding and the output head share.
        a, b: factors of what is added, ``scale`` B A.
        rows: whether they are of rows of an embedding: ``scale`` (B A)ᵀ.
        added: what is added times ``scale``.
        scale: the factor, with the adapter's weight in it.
        magnitude: magnitudes of the rows of a linear map, or of the columns of an embedding.
        tokens: what takes the place of the rows ``ids``.
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

    @property
    def adds(self) -> bool:
        """Whether it only adds something, so that it can be weighted, and others be added, too."""
        return self.value is self.magnitude is self.tokens is None


def changes_of(adapter: Adapter, config: GriffinConfig) -> dict[str, Change]:
    """What an adapter does to each parameter of a model, by canonical name.

    The output head goes by its name, also where it is tied to the embedding.

    Raises:
        CheckpointError: everything that is wrong with the adapter's tensors.
    """
    found = _Reading(adapter, config)
    found.read()
    if found.problems:
        raise CheckpointError(f"{adapter.file}: {'; '.join(found.problems)}")
    return found.changes


def vocabulary_of(adapter: Adapter, config: GriffinConfig) -> int:
    """Return the number of rows that the embedding has once an adapter is merged.

    An adapter trained after the vocabulary was resized holds the whole resized matrix. One that
    lacks the other of two matrices of that size leaves the size as it is, and is refused later.
    """
    rows: dict[str, int] = {}
    for name, tensor in adapter.container.tensors.items():
        parameter = re.sub(r"(\.token_adapter)?\.base_layer", "", name.removeprefix(_PREFIX))
        if parameter in (EMBEDDING, HEAD) and tensor.shape[1:] == (config.width,):
            rows[parameter] = tensor.shape[0]
    trained = [name for name in rows if adapter.config.saves(name.removesuffix(".weight"))]
    both = rows.keys() == {EMBEDDING, HEAD}
    one = config.tie_embeddings and (not trained or adapter.config.ties)
    if len(set(rows.values())) == 1 and (both or one):
        return next(iter(rows.values()))
    return config.vocab_size


class _Reading:
    """The tensors of an adapter, sorted by what they change.

    Attributes:
        changes: by canonical name.
        problems: clauses about what is wrong.
    """

    def __init__(self, adapter: Adapter, config: GriffinConfig):
        self.changes: dict[str, Change] = {}
        self.problems: list[str] = []
        self._adapter, self._config, self._tied = adapter, adapter.config, config.tie_embeddings
        self._tensors = adapter.container.tensors
        self._shapes: dict[str, Shape] = {n: s.shape for n, s in param_specs(config).items()}
        self._shapes.setdefault(HEAD, self._shapes[EMBEDDING])
        self._modules: dict[tuple[str, int], dict[str, str]] = {}  # module, depth -> part -> name
        self._unknown: list[str] = []
        self._misshapen: list[str] = []
        self._unclear: dict[str, list[str]] = {}  # patterns of α by module

    def read(self) -> None:
        for name in self._tensors:
            self._sort(name)
        for (module, depth), parts in self._modules.items():
            self._read_module(module, depth, parts)
        self._expect_all()
        self._warn_of_unclear()
        if self._unknown:
            self.problems.insert(
                0,
                f"{len(self._unknown)} tensors that are no part of a LoRA of this model "
                f"({listed(self._unknown, repr)})",
            )
        if self._misshapen:
            advice = "adapter and base do not belong together"
            modules = tuple(f"'{_PREFIX}{m}." for m in (_EMBEDDING_MODULE, _HEAD_MODULE))
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

    def _warn_of_unclear(self) -> None:
        """Says for which modules the file leaves open what α they were trained with."""
        if self._unclear:
            logger.warning(
                "%s: several keys of alpha_pattern with different values fit one module (%s): the "
                "first one in the file counts, and peft sorts them when it saves, so that it may "
                "have trained with another; keep only the one that it was trained with",
                self._adapter.folder / ADAPTER_CONFIG,
                listed(self._unclear, lambda m: f"{m}: {', '.join(map(brief, self._unclear[m]))}"),
            )

    def _sort(self, name: str) -> None:
        """Takes note of a tensor."""
        bare = name.removeprefix(_PREFIX)
        if bare == name:
            self._unknown.append(name)
        elif bare in self._shapes:
            module = bare.rpartition(".")[0]
            shared = bare in (EMBEDDING, HEAD) and not self._config.saves(module)
            self._change(bare, value=self._shaped(name, self._shapes[bare]), shared=shared)
        elif (match := _COPY.fullmatch(bare)) and f"{_PREFIX}{match[1]}{match[2]}" in self._tensors:
            pass  # what peft trained in full lies beside it under its plain name
        elif (match := _ROWS_OF.fullmatch(bare)) and match[1] + match[2] in (EMBEDDING, HEAD):
            parameter = match[1] + match[2]
            self._change(parameter, value=self._shaped(name, self._shapes[parameter]), shared=True)
        elif match := _KEY.fullmatch(bare):
            module, part = match["module"], match["part"]
            depth = match["wraps"].count(".")
            if part not in ("weight", "bias"):
                self._modules.setdefault((module, depth), {})[part] = name
            elif depth and (parameter := f"{module}.{part}") in self._shapes:
                value = self._shaped(name, self._shapes[parameter])
                self._change(parameter, value=value, shared=parameter in (EMBEDDING, HEAD))
            else:
                self._unknown.append(name)
        else:
            self._unknown.append(name)

    def _read_module(self, module: str, depth: int, parts: dict[str, str]) -> None:
        """Finds what the tensors of one module change."""
        if module.endswith(".conv_1d") and not self._targets(module):
            self.problems.append(
                f"{module} is a convolution of each channel by itself, and its adapter mixes "
                "channels, so that no weight can hold it"
            )
            return
        if _TOKENS in parts:
            self._read_tokens(module, parts.pop(_TOKENS), depth)
            if not parts:
                return
        parameter, targeted = f"{module}.weight", self._targets(module)
        if targeted:  # peft wraps the first one first, so that the last one is outside
            if depth >= len(targeted):
                self._unknown += parts.values()
                return
            parameter = targeted[-1 - depth]
        shape = self._shapes.get(parameter, ())
        if len(shape) not in ((2, 3) if targeted else (2,)) or (depth and not targeted):
            self._unknown += parts.values()
            return
        self._read_factors(module, parameter, shape, parts, targeted=bool(targeted))

    def _read_factors(
        self, module: str, parameter: str, shape: Shape, parts: dict[str, str], *, targeted: bool
    ) -> None:
        adapted = parameter if targeted else module  # what patterns of ranks are matched with
        rank, scale = self._config.rank_of(adapted), self._config.scale_of(adapted)
        scale *= self._adapter.weight
        if unclear := self._config.unclear_alphas(adapted):
            self._unclear[adapted] = unclear
        rows = module == _EMBEDDING_MODULE and not targeted
        wanted = {_ROWS_A, _ROWS_B} if rows else {_A, _B}
        if self._config.magnitudes and not targeted:
            wanted.add(_MAGNITUDE)
        if self._config.bias and not targeted and not rows:
            wanted.add(_B_BIAS)
        if missing := sorted(wanted - parts.keys()):
            self.problems.append(f"{module} lacks {' and '.join(missing)}")
        self._unknown += [name for part, name in parts.items() if part not in wanted]
        if not wanted <= parts.keys():
            return
        stacked, out, inp = (1, *shape) if len(shape) == 2 else shape
        if rows:
            a, b, magnitudes = (rank, out), (inp, rank), (inp,)
        else:
            a, b, magnitudes = (rank * stacked, inp), (out, rank * stacked), (out,)
        shapes = {_A: a, _B: b, _ROWS_A: a, _ROWS_B: b, _MAGNITUDE: magnitudes, _B_BIAS: (out,)}
        for part in sorted(wanted):
            self._shaped(parts[part], shapes[part])
        self._change(
            parameter,
            a=parts[_ROWS_A if rows else _A],
            b=parts[_ROWS_B if rows else _B],
            rows=rows,
            scale=scale,
            magnitude=parts.get(_MAGNITUDE),
        )
        if _B_BIAS in wanted:
            bias = f"{module}.bias"
            if bias not in self._shapes:
                self.problems.append(f"{module} has no bias that {_B_BIAS} could be added to")
                return
            self._change(bias, added=parts[_B_BIAS], scale=scale)

    def _read_tokens(self, module: str, name: str, depth: int) -> None:
        parameter = f"{module}.weight"
        if parameter not in (EMBEDDING, HEAD) or depth:
            self._unknown.append(name)
            return
        tokens = self._config.tokens
        ids = next((i for m, i in tokens.items() if module.endswith(m)), ())
        if not ids and parameter == HEAD and self._tied:  # follows the embedding
            ids = next((i for m, i in tokens.items() if _EMBEDDING_MODULE.endswith(m)), ())
        vocab, width = self._shapes[parameter]
        if len(set(ids)) < len(ids) or any(i >= vocab for i in ids):
            self.problems.append(
                f"trainable_token_indices of {module} must be different ids below {vocab}"
            )
        self._change(parameter, tokens=self._shaped(name, (len(ids), width)), ids=ids)

    def _targets(self, module: str) -> list[str]:
        """The parameters of a module that peft adapts as such, in the order of the module."""
        endings = self._config.target_parameters
        return [
            name
            for name in self._shapes
            if name.rpartition(".")[0] == module
            and any(name == e or name.endswith(f".{e}") for e in endings)
        ]

    def _expect_all(self) -> None:
        """Checks that everything which the config names is there."""
        modules = [n.removesuffix(".weight") for n, s in self._shapes.items() if len(s) == 2]
        adapted = {module for module, _ in self._modules}
        if self._config.target_modules is not None:
            named = [m for m in modules if _ends(m, self._config.target_modules)]
            # Of what modules_to_save names, too, peft trains the whole alone.
            lacking = [m for m in named if m not in adapted and not self._saved(m)]
            if self._config.ties:  # both are one
                lacking = [m for m in lacking if m not in (_EMBEDDING_MODULE, _HEAD_MODULE)]
            if lacking:
                self.problems.append(
                    f"nothing for {len(lacking)} modules that target_modules names "
                    f"({listed(lacking)})"
                )
        for parameter in self._shapes:
            module = parameter.rpartition(".")[0]
            if self._saved(module) and parameter not in self.changes:
                self.problems.append(f"no {parameter}, though modules_to_save names it")
            named = any(module.endswith(m) for m in self._config.tokens)
            if (
                named
                and parameter.endswith(".weight")
                and module in (_EMBEDDING_MODULE, _HEAD_MODULE)
            ):
                known = self.changes.get(parameter)
                tied = parameter == HEAD and EMBEDDING in self.changes
                if (known is None or known.tokens is None) and not tied:
                    self.problems.append(
                        f"no {_TOKENS} of {module}, though trainable_token_indices names it"
                    )

    def _saved(self, module: str) -> bool:
        """Whether a module was trained in full, by itself or in another one."""
        around = [module[: m.start()] for m in re.finditer(r"\.|$", module)]
        return any(map(self._config.saves, around))

    def _shaped(self, name: str, shape: Shape) -> str:
        """The name, once the shape is compared."""
        if (found := tuple(self._tensors[name].shape)) != shape:
            self._misshapen.append(f"{name!r} is {found}, expected {shape}")
        return name

    def _change(self, parameter: str, **what: Any) -> None:
        known = self.changes.get(parameter)
        if known is None:
            self.changes[parameter] = Change(self._adapter, **what)
            return
        # A value and what is added to it belong together, and a copy of the base's matrix and rows
        # of it; everything else excludes each other.
        fresh = Change(self._adapter, **what)
        value, other = (known, fresh) if known.value is not None else (fresh, known)
        pair = {known.value is None, fresh.value is None}
        if pair != {True, False} or (other.tokens and not value.shared):
            self.problems.append(f"{parameter} is changed in two ways")
            return
        self.changes[parameter] = dataclasses.replace(other, value=value.value, shared=value.shared)


def _ends(module: str, endings: tuple[str, ...]) -> bool:
    return any(module == e or module.endswith(f".{e}") for e in endings)

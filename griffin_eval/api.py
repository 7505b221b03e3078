"""The Python interface of checkpoints: open, convert, compare, load and measure.

`griffin_eval.evaluator` has scoring and generation.

Paths are a folder in any format, a ``.pt`` file, or a hub id, as for the commands of
``griffin-eval``. Errors of the user raise a `ValueError` of one sentence, and missing libraries an
`ImportError` that names the pip command.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.overrides import Overrides
from griffin_eval.converters.verify import Comparison
from griffin_eval.errors import ArgumentError
from griffin_eval.generators import unchanged_generators

if TYPE_CHECKING:
    from griffin_eval import model_jax, model_torch
    from griffin_eval.analysis.memory import Memory

__all__ = [
    "Checkpoint",
    "Comparison",
    "convert",
    "load",
    "memory",
    "open_checkpoint",
    "verify",
]


def open_checkpoint(
    path: str | Path,
    *,
    preset: str | None = None,
    item: str | None = None,
    visible_keys: int | None = None,
    embedding_scale: bool | None = None,
    logits_soft_cap: float | None = None,
    names: str | Path | None = None,
    accept_differences: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format. Weights are read on demand.

    Args:
        path: Folder, ``.pt`` file or hub id.
        preset: Name in `PRESETS` that supplies fields which neither config nor shapes determine.
        item: Item of an Orbax checkpoint or ``.pt`` file that holds the parameters.
        visible_keys: Number of keys that local attention sees, including the query's own.
        embedding_scale: Whether embeddings are multiplied by the square root of the width.
        logits_soft_cap: Soft cap of the logits; 0 for none.
        names: TOML file that maps the names of the tensors, or the name of a built-in one.
        accept_differences: Whether to read weights although ``names`` says that their trainer
            computes something that this model does not.
        revision: Branch, tag or commit of a hub id.
        subfolder: Folder within it that holds the checkpoint.

    Returns:
        The checkpoint: ``config`` (a `GriffinConfig`), ``dtypes`` by parameter, and
        ``numpy(name)``, a parameter by its name in the model.

    Raises:
        ValueError: It cannot be read as a model; the message names the file or tensor and a remedy.
    """
    from griffin_eval.converters.source.resolve import resolve

    overrides = Overrides(
        preset=preset,
        item=item,
        visible_keys=visible_keys,
        embedding_scale=embedding_scale,
        logits_soft_cap=logits_soft_cap,
        names=names,
        accept_differences=accept_differences,
    )
    return Checkpoint(resolve(str(path), revision=revision, subfolder=subfolder), overrides)


def convert(
    source: str | Path | Checkpoint,
    destination: str | Path,
    *,
    to: str,
    dtype: str | None = None,
    max_shard_size: str | None = None,
    overwrite: bool = False,
) -> Checkpoint:
    """Write a checkpoint in another format, with a manifest of checksums.

    The destination appears only when it is complete. Memory does not grow with the model.

    Args:
        source: Path or open checkpoint.
        destination: Folder to write; for Orbax also a gs:// or s3:// URL.
        to: Name of a format, such as ``hf``, ``griffin``, ``deepmind-torch``, ``deepmind-flax``.
        dtype: Dtype of the tensors, such as ``bfloat16``; None for that of the source.
        max_shard_size: Maximum size of a safetensors file; None for 5GB.
        overwrite: Whether to replace a destination that holds only a checkpoint.

    Returns:
        The new checkpoint, open.

    Raises:
        ValueError: Format or dtype is unknown or cannot hold this model, the destination exists, or
            the disk is too small.
    """
    from griffin_eval.converters.convert import convert_checkpoint
    from griffin_eval.converters.formats import format_named
    from griffin_eval.converters.plan import make_plan, parse_dtypes, parse_shard_size

    checkpoint = opened(source)
    target = format_named(to)
    shard = parse_shard_size(max_shard_size, target, "max_shard_size")
    plan = make_plan(checkpoint, target, dtypes=parse_dtypes(dtype))
    convert_checkpoint(plan, destination, overwrite=overwrite, max_shard_size=shard)
    return opened(destination)


def verify(one: str | Path | Checkpoint, other: str | Path | Checkpoint) -> Comparison:
    """Compare two checkpoints in any formats, tensor by tensor.

    Returns:
        ``same``, true if all is bit-identical; ``config``, the fields that differ; ``tensors``, the
        parameters that differ; ``compared``, the number of parameters.

    Raises:
        ValueError: One of them cannot be read as a model.
    """
    from griffin_eval.converters.verify import compare

    return compare(opened(one), opened(other))


def load(
    checkpoint: str | Path | Checkpoint,
    *,
    framework: str | None = None,
    dtype: Any = "auto",
    device: Any = None,
    load: str | None = None,
    check: bool = True,
) -> "model_torch.griffin.Griffin | model_jax.griffin.Griffin":
    """Load the model of a checkpoint as a `torch.nn.Module` or `flax.nnx.Module` to build upon.

    Both have the same methods: ``init_state(batch)``, ``step(tokens, lengths, state)``, which
    returns hidden vectors [B, T, D] and the next state, and ``logits(hidden)`` [..., V].

    Args:
        checkpoint: Path or open checkpoint.
        framework: ``torch`` or ``jax``; None for the first of these that is installed.
        dtype: float32, bfloat16, float16, float64 as a name or a dtype of NumPy, PyTorch or JAX, or
            ``auto`` for that of the checkpoint.
        device: A `torch.device` or its name; a `jax.Device`, or a mesh of them from
            `griffin_eval.sharding.mesh_jax.make_mesh` over which the weights are split; None for
            the CPU in PyTorch and JAX's default.
        load: ``quantised`` keeps the matrices of a checkpoint of bitsandbytes or MLX quantised in
            memory, on one device, and dequantises each while it is used. None dequantises all of
            them.
        check: Whether to compare the weights with their checksums first: the manifest beside them,
            those in a ``.pt`` file, and the hub's for files in its cache.

    Raises:
        ValueError: The checkpoint cannot be read as a model, its weights differ from a checksum, or
            an argument is invalid.
        ImportError: The framework is not installed.
    """
    from griffin_eval.converters.checkpoint import collect_not_finite
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.opened import open_model
    from griffin_eval.runners.load import check_packed

    given = checkpoint if isinstance(checkpoint, Checkpoint) else None
    arguments = {
        "pretrained": checkpoint if given is None else given.path,
        "framework": framework,
        "dtype": dtype,
        "load": load,
        "check": check,
    }
    model = open_model(parse_arguments(arguments), checkpoint=given, reads_texts=False)
    source, packed = model.checkpoint, load is not None
    if packed:
        check_packed(source)
    model.confirm_weights()
    with unchanged_generators(), collect_not_finite() as not_finite:
        if model.arguments.framework == "torch":
            import torch

            from griffin_eval.model_torch import loading as in_torch
            from griffin_eval.runners.torch_runner import choose_device

            where = None if device is None else choose_device(str(device))
            read = in_torch.load_packed if packed else in_torch.load
            module = read(source, getattr(torch, model.dtype), where)
        else:
            import jax

            from griffin_eval.model_jax import loading as in_jax
            from griffin_eval.runners.jax_runner import choose_device

            if model.dtype == "float64" and not jax.config.read("jax_enable_x64"):
                raise ArgumentError(
                    "float64 in JAX needs jax.config.update('jax_enable_x64', True)"
                )
            where = choose_device(device) if isinstance(device, str) else device
            read = in_jax.load_packed if packed else in_jax.load
            module = read(source, model.dtype, where)
    model.check_finite(not_finite)
    return module


def memory(
    checkpoint: str | Path | Checkpoint,
    *,
    text: str | None = None,
    tokens: int = 4096,
    framework: str | None = None,
    device: str | None = None,
    check: bool = True,
) -> "Memory":
    """Measure how long a checkpoint remembers, and what it keeps of a sequence.

    Args:
        checkpoint: Path or open checkpoint.
        text: Text on which the gates are measured; None for Python's manual.
        tokens: Maximum number of its tokens to read; with 0 no gate is measured.
        framework: ``torch`` or ``jax``; None for the first of these that is installed.
        device: The framework's name of the device; None for its default.
        check: Whether to compare the weights with their checksums first.

    Returns:
        ``numbers``, as ``griffin-eval memory --json`` prints them, ``layers`` with the half-lives
        of each channel, and ``figures()``, matplotlib figures by name.

    Raises:
        ValueError: The checkpoint cannot be read as a model, or the text is too short.
    """
    from griffin_eval.analysis.memory import memory_of
    from griffin_eval.model_arguments import parse_arguments
    from griffin_eval.opened import open_model

    given = checkpoint if isinstance(checkpoint, Checkpoint) else None
    arguments = {
        "pretrained": checkpoint if given is None else given.path,
        "framework": framework,
        "device": device,
        "data_parallel_size": 1,
        "check": check,
    }
    model = open_model(parse_arguments(arguments), checkpoint=given, reads_texts=False)
    model.confirm_weights()
    return memory_of(
        model,
        str(model.checkpoint.folder),
        text=text,
        text_name="text",
        tokens=tokens,
        progress=lambda count: None,
    )


def opened(checkpoint: str | Path | Checkpoint) -> Checkpoint:
    """Return an open checkpoint as it is, or open the one at a path."""
    return checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)

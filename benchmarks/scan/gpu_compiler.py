"""The Triton kernels compiled for GPUs that this machine lacks, and the resources that they take.

Triton brings the assembler and tools of NVIDIA that this needs. Nothing here is measured on a GPU.
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.commands import tell
from benchmarks.report import Report
from griffin_eval.errors import ArgumentError, MissingExtraError
from griffin_eval.kernels.rglru import triton_torch
from griffin_eval.kernels.rglru.reference import Gates

KERNELS = "griffin_eval.kernels.rglru.triton_kernels"
OPERATIONS = {"scan": False, "RG-LRU": True}  # name: whether decays are computed from gates


class Target(NamedTuple):
    """A GPU: its compute capability, such as 90, and its number of multiprocessors."""

    capability: int
    multiprocessors: int


TARGETS = {"sm_80": Target(80, 108), "sm_90": Target(90, 132)}  # A100; H100 and H200 (SXM)

_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
_POINTERS |= {torch.uint8: "*u8", torch.int64: "*i64"}


class Launch(NamedTuple):
    """A launch of a kernel, recorded instead of run.

    Attributes:
        kernel: Name of the kernel in `triton_kernels`.
        arguments: Arguments by name; tensors have no values.
        options: Options of the compiler.
        grid: Numbers of programs, or a function from a configuration to them.
    """

    kernel: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]

    @property
    def pass_name(self) -> str:
        """``reduce`` if each chunk is only reduced to its effect on a state, or else ``write``."""
        results = {"forward": "h", "backward": "dx", "scan_chunks": "states"}[self.kernel]
        return "reduce" if self.arguments[results] is None else "write"

    def configurations(self) -> list[Any]:
        """Return the configurations from which Triton chooses on the device by time."""
        kernels = importlib.import_module(KERNELS)
        if self.kernel == "forward":
            return kernels.forward_configs(self.arguments["a"])
        if self.kernel == "backward":
            return kernels.FEW_STEPS
        steps = {name: self.arguments[name] for name in ("STEPS", "BLOCK")}
        return [kernels.triton.Config({**steps, "STAGES": 1}, self.options["num_warps"])]

    def programs(self, configuration: Any) -> int:
        """Return the number of programs with one of `configurations`."""
        grid = self.grid(configuration.kwargs) if callable(self.grid) else self.grid
        return torch.Size(grid).numel()

    def build(self, configuration: Any, target: Target) -> Any:
        """Compile the kernel for a GPU with one of `configurations`."""
        arguments, options = dict(self.arguments), dict(self.options)
        if self.kernel != "scan_chunks":
            arguments |= configuration.kwargs
            options["num_warps"] = configuration.num_warps
        return compile_for(function(self.kernel), arguments, options, target)


class _Recorder:
    """A stand-in for a kernel that records its launches."""

    def __init__(self, name: str, launches: list[Launch]):
        self._name, self._launches = name, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(
            *positional: Any, num_warps: int = 1, enable_fp_fusion: bool, **named: Any
        ) -> None:
            names = function(self._name).arg_names
            arguments = named | dict(zip(names, positional, strict=False))
            options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
            self._launches.append(Launch(self._name, arguments, options, grid))

        return launch


def function(kernel: str) -> Any:
    """Return the triton.JITFunction of a kernel by name."""
    found: Any = getattr(importlib.import_module(KERNELS), kernel)
    return getattr(found, "fn", found) if hasattr(found, "configs") else found


def launches(
    gates: bool,
    dtype: torch.dtype,
    time: int,
    width: int,
    blocks: int,
    chunks: int,
    padded: bool = False,
) -> list[Launch]:
    """Return the launches of a forward and a backward pass over one row of ``time`` tokens.

    Args:
        gates: Whether decays are computed from gates (the RG-LRU) or given (the scan).
        dtype: Dtype of inputs and weights.
        time: Number of tokens.
        width: Number of columns.
        blocks: Number of blocks of the gates.
        chunks: Number of chunks of time.
        padded: Whether the row has document starts and a length.
    """
    recorded: list[Launch] = []
    names = ("forward", "backward", "scan_chunks")
    kernels = SimpleNamespace(INTERPRETED=True, **{n: _Recorder(n, recorded) for n in names})
    layout: dict[str, Any] = {"chunks": chunks}
    with torch.device("meta"), mock.patch.object(triton_torch, "_kernels", lambda: kernels):
        if padded:
            layout["resets"] = torch.zeros(1, time, dtype=torch.bool)
            layout["lengths"] = torch.zeros(1, dtype=torch.int64)
        x = torch.zeros(1, time, width, dtype=dtype, requires_grad=True)
        h0 = torch.zeros(1, width, requires_grad=True)
        if gates:
            weight = torch.zeros(blocks, width // blocks, width // blocks, dtype=dtype)
            bias = weight[:, 0]
            parameters = Gates(bias.flatten(), weight, bias, weight, bias)
            h, last = triton_torch.rglru(x, parameters, h0, **layout)
        else:
            h, last = triton_torch.linear_scan(x, x, h0, **layout)
        torch.autograd.grad(h.float().sum() + last.sum(), (x, h0))
    return recorded


def compile_for(
    kernel: Any, arguments: dict[str, Any], options: dict[str, Any], target: Target
) -> Any:
    """Compile a triton.JITFunction as a launch would.

    Args:
        kernel: Function to compile.
        arguments: Arguments by name; only the dtype of tensors matters.
        options: Options of the compiler.
        target: GPU to compile for.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, constants, aligned = {}, {}, {}
    for parameter in kernel.params:
        value, place = arguments[parameter.name], (parameter.num,)
        divisible = False  # by 16, which lets a thread load several columns at once
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[place] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], divisible = _POINTERS[value.dtype], True
        else:
            signature[parameter.name] = "i32"
            divisible = value % 16 == 0 and not parameter.do_not_specialize
        if divisible:
            aligned[place] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    return compile(source, target=GPUTarget("cuda", target.capability, 32), options=options)


def usage(cubin: bytes) -> dict[str, int]:
    """Return the resources of a thread by Triton's cuobjdump, such as {"REG": 64, "LOCAL": 0}."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}


def measure(targets: Sequence[str], shapes: Sequence[tuple[int, int, int]], report: Report) -> None:
    """Compile every kernel for every target, in bfloat16.

    ``configuration`` is rows of a group x columns, and the stages of prefetching. ``spills`` are
    the bytes of local memory and stack of a thread.

    Args:
        targets: Names in `TARGETS`.
        shapes: Number of tokens, width and number of gate blocks of each problem.
        report: Report to which the table is added.

    Raises:
        ArgumentError: A target is unknown.
        MissingExtraError: triton is not installed.
    """
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        raise ArgumentError(f"unknown GPU {', '.join(unknown)}: one of {', '.join(TARGETS)}")
    if find_spec("triton") is None:
        raise MissingExtraError("triton", "torch")
    rows = report.tables["compiled without a GPU, bfloat16"] = []
    for target in targets:
        for time, width, blocks in shapes:
            rows += _rows(target, time, width, blocks)


def _rows(name: str, time: int, width: int, blocks: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel and configuration, with the chunks of a batch of one row."""
    target = TARGETS[name]
    for operation, gates in OPERATIONS.items():
        chunks = triton_torch.time_chunks(1, time, width, target.multiprocessors, gates=gates)
        for launch in launches(gates, torch.bfloat16, time, width, blocks, chunks):
            for config in launch.configurations():
                row = {"target": name, "shape": f"1 x {time} x {width}", "operation": operation}
                row |= {"kernel": launch.kernel, "pass": launch.pass_name}
                row["configuration"] = "{STEPS} x {BLOCK}, {STAGES}".format(**config.kwargs)
                tell(", ".join(row.values()))
                built = launch.build(config, target)
                taken = usage(built.asm["cubin"])
                yield row | {
                    "registers": taken["REG"],
                    "shared_bytes": built.metadata.shared,
                    "spills": taken["LOCAL"] + taken["STACK"],
                    "warps": config.num_warps,
                    "programs": launch.programs(config),
                }

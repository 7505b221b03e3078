"""Triton kernels compiled for devices that this machine lacks."""

import re
import subprocess

import torch
import triton

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
POINTERS |= {torch.uint8: "*u8", torch.int64: "*i64"}


def compile_for(kernel, arguments, options, capability, multiples):
    """Compile a kernel as a launch would.

    Args:
        kernel: triton.JITFunction.
        arguments: Name -> argument; only the dtype of tensors matters.
        options: Options of the compiler.
        capability: Compute capability of the device, such as 90.
        multiples: Names of integer arguments that are multiples of 16.
    """
    signature, constants, aligned = {}, {}, {}
    for parameter in kernel.params:
        value, place = arguments[parameter.name], (parameter.num,)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[place] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        else:
            signature[parameter.name] = "i32"
        if isinstance(value, torch.Tensor) or parameter.name in multiples:
            aligned[place] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options)


def usage(cubin, tmp_path):
    """Return the resources of a thread by triton's cuobjdump, such as {"REG": 64, "LOCAL": 0}."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    command = [tool, "--dump-resource-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}

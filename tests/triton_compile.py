"""Triton's compiler without a GPU. Import it only where no interpreter is asked for."""

from __future__ import annotations

from typing import Any

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from graphed_sampling.backends import triton

TYPES = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
}
TARGET = GPUTarget("cuda", 90, 32)

triton._capability = lambda device: (TARGET.arch // 10, 0)


def arguments_of(dtype: torch.dtype, unit: int) -> Any:
    """The arguments of a step whose logits are of a dtype, with dtypes in place of tensors."""
    i32, i64 = torch.int32, torch.int64
    return triton._Arguments(
        dtype, *[i32] * 7, i64, i32,
        stride=unit, bitmask_stride=0, logits_bytes=dtype.itemsize, unit=unit, mode=0,
    )  # fmt: skip


def compiled(launch: Any, last: str = "") -> Any:
    """What Triton makes of a launch's kernel: its verified IR, or what comes of the stages up to
    `last`, "ttgir" or "ptx"."""
    compiler = make_backend(TARGET)
    names = launch.kernel.arg_names
    signature = {n: TYPES.get(a, "i32") for n, a in zip(names, launch.arguments, strict=False)}
    constants = {n: launch.keywords[n] for n in names[len(launch.arguments) :]}
    signature |= dict.fromkeys(constants, "constexpr")
    context = ir.context()
    ir.load_dialects(context)
    compiler.load_dialects(context)
    keywords = ("num_warps", "enable_fp_fusion", "maxnreg")
    options = compiler.parse_options({n: launch.keywords[n] for n in keywords})
    source = ASTSource(
        launch.kernel, signature, {(names.index(n),): c for n, c in constants.items()}
    )
    module = source.make_ir(
        TARGET, options, compiler.get_codegen_implementation(options),
        compiler.get_module_map(), context,
    )  # fmt: skip
    assert module.verify()
    if last:
        stages: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        compiler.add_stages(stages, options, source.language)
        for stage in ("ttir", "ttgir", "llir", "ptx"):
            module = stages[stage](module, metadata)
            if stage == last:
                break
    return module

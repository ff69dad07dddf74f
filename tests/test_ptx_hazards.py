"""No function of the triton backend's kernels begins beside what its caller has not ended."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from ptx_hazards import hazards_of
from test_triton_backend import run_python

PTX = """
.version 8.4
.target sm_90a
.extern .shared .align 16 .b8 shared[];
.func (.param .b32 func_retval0) of_$_module_$_callee__i32
(
    .param .b32 of_$_module_$_callee__i32_param_0
)
;
.visible .entry kernel(
    .param .u64 kernel_param_0
)
.reqntid 128
{
    .reg .b32 %r<9>;
    bar.sync 0;
    ld.shared.b32 %r1, [shared];
    @%p1 bra $L__BB0_2;
    BEFORE
    { // callseq 0
    call.uni (retval0), of_$_module_$_callee__i32, (param0);
    } // callseq 0
$L__BB0_2:
    AFTER
    ret;
}
.func (.param .b32 func_retval0) of_$_module_$_callee__i32(
    .param .b32 of_$_module_$_callee__i32_param_0
)
{
    FIRST
    st.shared.b32 [shared], %r1;
    bar.sync 0;
    ld.shared.b32 %r2, [shared];
    LAST
    ret;
}
.section .debug_abbrev
{
.b8 1
}
"""
BARRIER = "bar.sync 0;"
ENTRY = ["load in kernel, line 17 -> store in callee, line 32"]
EXIT = ["load in callee, line 34 -> store in kernel, line 24"]
AGAIN = [*ENTRY, "load in callee, line 34 -> store in callee, line 32"]


@pytest.mark.parametrize(
    ("before", "first", "last", "after", "found"),
    [
        ("", "", "", "", ENTRY),
        (BARRIER, "", "", "", []),
        ("", BARRIER, "", "", []),
        ("@%p2 bra $L__BB0_2;", "", "", "", ENTRY),
        ("bar.warp.sync -1;", "", "", "", ENTRY),  # a warp's, not the block's
        ("barrier.cta.sync.aligned 0;", "", "", "", []),
        ("", BARRIER, "", "st.shared.b32 [shared], %r1;", EXIT),
        ("", BARRIER, BARRIER, "st.shared.b32 [shared], %r1;", []),
        ("", BARRIER, "", "ld.shared.b32 %r1, [shared];", []),  # of loads none waits for another
        ("", f"@%p1 ret;\n    {BARRIER}", "", "", []),
        # Its end beside its beginning, the second time.
        (BARRIER, "", "", "call of_$_module_$_callee__i32, (param0);", AGAIN),
        ("", "@%p3 bra $L__BB1_1;\n    bar.sync 0;\n$L__BB1_1:", "", "", ENTRY),
    ],
)
def test_what_lies_between_two_functions(
    before: str, first: str, last: str, after: str, found: list[str]
) -> None:
    """A barrier of the block on every way."""
    ptx = PTX
    for place, text in (("BEFORE", before), ("FIRST", first), ("LAST", last), ("AFTER", after)):
        ptx = ptx.replace(place, text)
    names = [hazard.split(", line")[0] for hazard in hazards_of(ptx)]
    assert names == [hazard.split(", line")[0] for hazard in found]
    if not first:
        assert hazards_of(ptx) == found


@pytest.mark.parametrize(
    "unknown",
    [
        "@%p1 bar.sync 0;",
        "bar.sync 1, 64;",
        "@%p1 call.uni of_$_module_$_callee__i32, (param0);",
        "call.uni (retval0),",
        "call (retval0), %rd1, (param0), prototype_0;",
        "brx.idx %r1, table;",
        "/* bar.sync 0; */",
        "\n}",
    ],
)
def test_what_is_not_understood_is_an_error(unknown: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        hazards_of(PTX.replace("BEFORE", unknown))


CHECK = """
import os
import torch
from ptx_hazards import hazards_of
from triton_compile import arguments_of, compiled
from graphed_sampling.backends import triton
from graphed_sampling.layout import TableLayout

i32, i64, bf16, gpu = torch.int32, torch.int64, torch.bfloat16, torch.device("cuda")
layout = TableLayout(1000, 4, 3, 3, 3, 3, 3, 3, 1)
for launch in (
    *triton.launches(arguments_of(bf16, 8), layout, 1, gpu, triton.Draw(triton.SLAB)),
    *triton.scoring_launches(
        bf16, 8, 8, i64, i64, i64, i32, i32, layout, 1, gpu, triton._Scoring(True, True)
    ),
):
    if launch.kernel.fn.__name__ == os.environ["KERNEL"]:
        ptx = compiled(launch, "ptx")
        assert ptx.count("call.uni") > 3 and ptx.count("bar.sync") > 9
        print(hazards_of(ptx))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there all kernels that are compiled are")
@pytest.mark.parametrize("kernel", ["finish", "score"])
def test_no_barrier_is_missing(kernel: str) -> None:
    """Those that call functions which begin by themselves; by slab, which all others lack."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    assert run_python(CHECK, KERNEL=kernel) == ["[]"]

"""Every kernel compiles for the GPUs of four generations with the text and options of a real run.

NVRTC comes from PyPI and needs no GPU; where it is missing these tests fail, they are not skipped.
"""
import re

import pytest

from refimpl import kernels
from tests.nvrtc import compile_ptx

FILES = sorted(path.name for path in kernels.folder().glob("*.cu"))
KERNELS = {  # all names, by hand: what collective.buffers and the check on a GPU may ask for
    "add.cu": ["add_float16", "add_bfloat16", "add_float32", "add_float64", "add_int32",
               "add_int64", "add_float32_float16", "add_float32_bfloat16"],
    "wire.cu": [f"wire_{what}_{word}" for what in ("encode", "decode")
                for word in ("float16", "bfloat16")],
    "pack.cu": [f"pack_{back}{a}_{b}" for back in ("", "back_")
                for a in ("float32", "float16", "bfloat16")
                for b in ("float32", "float16", "bfloat16")],
    "lars.cu": ["lars_norms_float32", "lars_ratio_nnl", "lars_ratio_tf"],
    "update.cu": ["update_float32"],
    "images.cu": ["images_float32", "images_float16", "images_bfloat16"]}


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("file", FILES)
def test_every_kernel_compiles_without_a_warning(file, architecture):
    code, log, ptx = compile_ptx(kernels.source(file),
                                 (*kernels.OPTIONS, f"--gpu-architecture={architecture}"))
    assert code == 0 and not log.strip(), log
    assert sorted(re.findall(r"\.entry (\w+)\(", ptx)) == sorted(KERNELS[file])
    assert "fma.rn" not in ptx, "a fused multiply-add rounds once where NumPy rounds twice"
    assert ".local" not in ptx, "an array that does not fit the registers"


@pytest.mark.parametrize("file", FILES)
def test_every_kernel_reads_and_writes_vectors(file):
    """Where all arrays are aligned: several elements in one access (the compiler may split it)."""
    ptx = compile_ptx(kernels.source(file), (*kernels.OPTIONS, "--gpu-architecture=sm_80"))[2]
    for entry in ptx.split(".entry ")[1:]:
        name = entry.split("(")[0]
        if not name.startswith("lars_ratio"):  # a few thousand numbers in all
            assert re.search(r"ld(\.global)?\.(v4|v2\.[fu]64)", entry), name
        if not name.startswith("lars"):  # these write one number
            assert re.search(r"st(\.global)?\.(v4|v2\.[fu]64)", entry), name


def test_an_error_in_a_source_is_reported_with_its_line():
    text = kernels.source("add.cu").replace("sum.at[k] = ", "summ.at[k] = ")
    code, log, _ = compile_ptx(text, (*kernels.OPTIONS, "--gpu-architecture=sm_80"))
    assert code != 0 and '"summ" is undefined' in log

"""The CUDA kernels of kernels/*.cu: found, compiled for the present device, launched.

Kernel `<file>_<types>` stands in `<file>.cu`; what it does and its arguments stand at the head of
that file. Nothing here imports CuPy: `collective.buffers`, which does, passes the module in.
"""
import functools
import pathlib
import re

import numpy as np

from refimpl.errors import UsageError

THREADS, BLOCKS_PER_MULTIPROCESSOR = 256, 8  # 2048 threads: as many as one holds at a time
PIECE_LENGTH = 16384  # elements: a block's work; ResNet-50 is 1,700 pieces
OPTIONS = ("--std=c++17", "--fmad=false")  # no fused multiply-add: the bits are NumPy's
NULL = np.uintp(0)  # for an array argument that a kernel allows to be absent
PIECE = np.dtype([("start", "<i8"), ("offset", "<i8"), ("tensor", "<i4"), ("length", "<i4")])


def folder() -> pathlib.Path:
    """Where the sources are: inside the package in a wheel, beside it in a checkout."""
    here = pathlib.Path(__file__).resolve().parent
    for place in (here / "cuda", here.parent / "kernels"):
        if (place / "add.cu").exists():
            return place
    raise UsageError(f"the CUDA sources are neither in {here / 'cuda'} nor in "
                     f"{here.parent / 'kernels'}: install the package again, or run a checkout")


def source(file: str) -> str:
    """The text of one .cu file with our headers put in place of their #include lines: no include
    path at run time, and a compiler cache that knows a text by its hash sees every change."""
    seen = set()

    def text(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        return re.sub(r'^#include "(.+)"$', lambda line: text(line[1]),
                      (folder() / name).read_text().replace("#pragma once\n", ""), flags=re.M)

    return text(file)


@functools.lru_cache(maxsize=None)
def kernel(cupy, name: str):
    """The compiled kernel `name` (a cupy.RawKernel, which compiles once per device)."""
    module = cupy.RawModule(code=source(name.split("_")[0] + ".cu"), options=OPTIONS)
    return module.get_function(name)


def launch(cupy, name: str, blocks: int, *arguments) -> None:
    """Run a kernel on CuPy's current stream; it loops if `blocks` is more than the device holds.

    Scalars must be NumPy scalars of the kernel's type; arrays are passed by address.
    """
    if blocks > 0:
        most = _most_blocks(cupy, cupy.cuda.runtime.getDevice())
        kernel(cupy, name)((min(blocks, most),), (THREADS,), arguments)


@functools.lru_cache(maxsize=None)
def _most_blocks(cupy, device: int) -> int:
    return cupy.cuda.Device(device).attributes["MultiProcessorCount"] * BLOCKS_PER_MULTIPROCESSOR


def elementwise(cupy, name: str, n: int, *arguments) -> None:
    """Run a kernel whose last argument is the number of elements `n`."""
    launch(cupy, name, -(-n // (4 * THREADS)), *arguments, np.int64(n))


def pieces(sizes, length: int = PIECE_LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Cut tensors of `sizes` elements, laid one behind the other in a flat buffer, into pieces.

    Returns the table (dtype PIECE; CuPy takes it as `table.view(numpy.uint8)`) and, for each
    tensor and one past the last, its first piece: a bucket of tensors is a range of pieces.
    """
    table, first, start = [], [0], 0
    for tensor, size in enumerate(sizes):
        table += [(start + at, at, tensor, min(length, size - at)) for at in range(0, size, length)]
        first.append(len(table))
        start += size
    return np.array(table, PIECE), np.array(first, np.int64)

"""kernels/*.cu compiled as plain C++ and run thread by thread (see kernels/host.h)."""
import concurrent.futures
import ctypes
import functools
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np

from refimpl import kernels

FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-Wall",
         "-shared", "-fPIC", "-pthread",
         "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")  # as fatal as on a GPU
SCALARS = {np.float32: ctypes.c_float, np.int64: ctypes.c_int64, np.int32: ctypes.c_int,
           np.uintp: ctypes.c_void_p}


@functools.cache
def library(stem: str) -> ctypes.CDLL:
    return build(stem, kernels.folder())


def build(stem: str, folder: pathlib.Path) -> ctypes.CDLL:
    """The host build of one .cu file; no compiler is a failure, not a skip."""
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to test the kernels on the host: install it (apt: g++)"
    with tempfile.TemporaryDirectory() as place:
        out = pathlib.Path(place) / f"{stem}.so"
        job = subprocess.run([compiler, *FLAGS, "-x", "c++", str(folder / f"{stem}.cu"), "-o",
                              str(out)], capture_output=True, text=True)
        assert job.returncode == 0, job.stderr
        return ctypes.CDLL(str(out))


def run(name: str, *arguments, blocks: int = 2, threads: int = 3, lib=None) -> None:
    """Play all threads of all blocks; arrays are passed by address."""
    lib = lib or library(name.split("_")[0])
    call = functools.partial(lib[name], *(_c(a) for a in arguments))
    lib.grid(blocks, threads)
    barriers = name.startswith("lars")  # threads of a block meet: each needs a host thread

    def play(block, thread):
        lib.place(block, thread)
        call()

    if not barriers:
        for block in range(blocks):
            for thread in range(threads):
                play(block, thread)
        return
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for block in range(blocks):
            for done in [pool.submit(play, block, thread) for thread in range(threads)]:
                done.result()


def _c(argument):
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    return SCALARS[type(argument)](argument.item())


def addresses(arrays) -> np.ndarray:
    """A table of pointers to arrays (which must outlive it)."""
    return np.array([a.ctypes.data for a in arrays], np.uint64)


def placed(x: np.ndarray, shift: int) -> np.ndarray:
    """A copy of x that starts `shift` elements behind a 64-byte boundary, with known bytes around:
    its `.base` chain is one uint8 array whose other bytes are 0xA5."""
    room = np.full(x.nbytes + 256, 0xA5, np.uint8)
    start = -room.ctypes.data % 64 + 64 + shift * x.itemsize
    view = room[start:start + x.nbytes].view(x.dtype)
    view[...] = x
    return view


def untouched_around(x: np.ndarray) -> bool:
    """No byte before or behind a `placed` array was written."""
    room = x
    while room.base is not None:
        room = room.base
    start = x.ctypes.data - room.ctypes.data
    return bool(np.all(room[:start] == 0xA5) and np.all(room[start + x.nbytes:] == 0xA5))

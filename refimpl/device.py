"""What this rank runs on: its device, its threads, its loader processes, its code."""
import functools
import hashlib
import os
import pathlib

import numpy as np
import torch

from refimpl.errors import UsageError

WORDS = 1024  # cores a node may have, for the map of who may run where


def choose_device(wanted: str, comm) -> torch.device:
    """cuda where there is one (GPU by local rank) unless told otherwise; UsageError if not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda, but torch sees no GPU here: check the driver and the torch "
                         "build (torch.version.cuda), or use --device cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    from refimpl.launch import gpu_of
    node = comm.Split_type(_shared())
    device = torch.device("cuda", gpu_of(node.rank, torch.cuda.device_count()))
    node.Free()
    torch.cuda.set_device(device)
    return device


def set_threads(wanted: int, comm) -> int:
    """Intra-op threads of this rank: as told, else its fair share of the cores it may run on."""
    mine, everyone = np.zeros(WORDS, np.int32), np.zeros(WORDS, np.int32)
    mine[[core for core in os.sched_getaffinity(0) if core < WORDS]] = 1
    node = comm.Split_type(_shared())
    node.Allreduce(mine, everyone)  # per core: how many ranks of this node may run there
    node.Free()
    share = (1 / everyone[mine > 0]).sum() if mine.any() else 1
    threads = wanted or max(1, int(share + 1e-9))
    torch.set_num_threads(threads)
    return threads


def loader_processes(wanted: int, threads: int, device: torch.device) -> int:
    """As told; else the cores a GPU rank does not compute on (at most 8), and none on a CPU,
    where decoding and computing would share the same cores."""
    if wanted >= 0:
        return wanted
    return min(8, max(1, threads - 1)) if device.type == "cuda" else 0


@functools.cache
def code_digest() -> str:
    """SHA-256 over the package's Python files: ranks with another version are found at the start."""
    root, sha = pathlib.Path(__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        sha.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return sha.hexdigest()[:16]


def _shared() -> int:
    from mpi4py import MPI
    return MPI.COMM_TYPE_SHARED

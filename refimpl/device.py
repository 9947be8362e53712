"""Where this rank runs: which GPU, how many threads, which code; and what the launcher says.

The shared-memory split says which ranks share a node; launchers' variables are only a hint.
"""
import functools
import hashlib
import os
import pathlib
import sys
from collections.abc import Mapping

import numpy

from refimpl import kernels
from refimpl.collective import buffers
from refimpl.collective.exchange import waiting
from refimpl.collective.grid import split_by_node
from refimpl.collective.guard import gather_text
from refimpl.errors import UsageError
from refimpl.settings import Settings

# Open MPI, MPICH and Intel, MVAPICH, Cray, PMIx, Slurm: the nearest launcher first
RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "PMIX_RANK",
        "SLURM_PROCID")
SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK",
         "PALS_LOCAL_RANKID", "SLURM_LOCALID")


def _hint(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    return next((int(environ[n]) for n in names if environ.get(n, "").isdecimal()), None)


def rank_hint(environ: Mapping[str, str]) -> int | None:
    """The rank by the launcher's variables, before MPI is asked; None without a launcher."""
    return _hint(RANK, environ)


def refuse_split_world(comm, environ: Mapping[str, str] = os.environ) -> None:
    """UsageError where a launcher started N processes and each is alone: another MPI's launcher."""
    started = _hint(SIZE, environ)
    if comm.size == 1 and started and started > 1:
        raise UsageError(
            f"the launcher started {started} processes, but each is rank 0 of 1: its MPI is not "
            f"mpi4py's, which is {mpi_library()}. Use that MPI's mpirun, or with Slurm the right "
            "--mpi (see srun --mpi=list)")


def choose_gpu(local_rank: int, local_size: int, visible: int,
               environ: Mapping[str, str] = os.environ) -> int:
    """Device number: the rank's place in its node, modulo the visible GPUs.

    The launcher's variable counts only where the split sees one rank (a container per rank).
    """
    hint = _hint(LOCAL, environ)
    return (hint if local_size == 1 and hint is not None else local_rank) % visible


def check_device(s: Settings) -> None:
    """UsageError where a GPU is asked for and this rank sees none (perhaps this rank alone)."""
    import torch
    if s.device == "cuda" and not torch.cuda.device_count():
        raise UsageError("--device cuda: no GPU is visible here; try --device cpu or auto")


def choose_device(s: Settings, comm):
    """torch.device of this rank; a GPU becomes the current one; two ranks on one are told."""
    import torch
    visible = torch.cuda.device_count() if s.device != "cpu" else 0
    if not visible:
        return torch.device("cpu")
    with waiting("nodes", comm):
        node = split_by_node(comm)
    index = choose_gpu(node.rank, node.size, visible)
    torch.cuda.set_device(index)
    identity = str(getattr(torch.cuda.get_device_properties(index), "uuid", index))
    sharing = gather_text(node, identity).count(identity)
    if sharing > 1 and node.rank == 0:
        print(f"refimpl: {sharing} ranks share GPU {index}: start one rank per GPU",
              file=sys.stderr)
    node.Free()
    return torch.device("cuda", index)


def set_threads(s: Settings, comm) -> int:
    """Tell torch its threads per rank, and return them: equal on all ranks, for equal bits."""
    import torch
    threads = s.threads or free_cores(comm)
    torch.set_num_threads(threads)
    return threads


def free_cores(comm) -> int:
    """Cores per rank, the least of all ranks: those it is bound to, shared with whoever is bound to
    the same ones (unbound ranks of a node: all its cores over its ranks)."""
    mine, everywhere = own_cores(), numpy.empty(comm.size, numpy.int64)
    with waiting("cores", comm):
        node = split_by_node(comm)
        share = len(mine) // gather_text(node, str(mine)).count(str(mine))
        node.Free()
        comm.Allgather(numpy.array([share]), everywhere)
    return max(1, int(everywhere.min()))


def loader_processes(s: Settings, threads: int, device) -> int:
    """As asked; else all cores but one beside a GPU, and a quarter of them beside CPU training."""
    if s.loaders >= 0:
        return s.loaders
    return min(16, threads - 1 if str(device).startswith("cuda") else threads // 4)


def normaliser(device, layout):
    """normalise(images) of uint8 batches: on a CPU, or without CuPy, by torch; else one kernel."""
    from refimpl.data.loader import normalise
    try:
        if device.type != "cpu":
            return _by_kernel(device, layout)
    except ImportError:
        pass
    return lambda images: normalise(images.to(device, non_blocking=True), layout)


def _by_kernel(device, layout):
    import torch
    from refimpl.data.loader import SCALE, SHIFT
    constants = [buffers.from_device(torch.tensor(c, device=device)) for c in (SCALE, SHIFT)]
    cupy, planar = buffers.module(constants[0]), numpy.int32(layout is torch.contiguous_format)

    def normalise(images):
        images = images.to(device, non_blocking=True)
        n, height, width, _ = images.shape
        out = torch.empty((n, 3, height, width), device=device, memory_format=layout)
        with buffers.on_stream(torch.cuda.current_stream(device).cuda_stream):
            kernels.launch(cupy, "images_float32", -(-images.numel() // (12 * kernels.THREADS)),
                           buffers.from_device(out), buffers.from_device(images), *constants,
                           numpy.int64(n), numpy.int64(height * width), planar)
        return out
    return normalise


@functools.cache
def code_digest() -> str:
    """Of the package's Python files: ranks that run different versions are refused."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def one_node(comm) -> bool:
    """Do all ranks share one node?"""
    with waiting("nodes", comm):
        node = split_by_node(comm)
    alone = node.size == comm.size
    node.Free()
    return alone


def mpi_library() -> str:
    """Name and version of the MPI that is loaded."""
    from mpi4py import MPI
    return " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ").split())


def own_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))

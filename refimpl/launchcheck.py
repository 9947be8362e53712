"""`python -m refimpl.launch --check` under mpirun or srun: what was started, and does it add up?"""
import os
import socket
import sys
from collections import Counter

from refimpl.errors import UsageError
from refimpl.device import choose_gpu, mpi_library, own_cores, refuse_split_world
from refimpl.collective.guard import gather_text

LENGTH = 1_000_003  # not divisible by any grid


def check() -> int:
    """Print a report on rank 0; 0: fine, 1: the sum is wrong, 2: the launch cannot work."""
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    try:
        refuse_split_world(comm)
    except UsageError as error:
        print(f"refimpl.launch: {error}", file=sys.stderr, flush=True)
        return 2
    from refimpl.collective.grid import default_shape, ranks_per_node, split_by_node
    node = split_by_node(comm)
    gpus = _gpus()
    gpu = choose_gpu(node.rank, node.size, gpus) if gpus else None
    everyone = gather_text(comm, f"{socket.gethostname()}|{node.size}|{len(own_cores())}|{gpus}")
    per_node = ranks_per_node(comm)
    rows, columns = default_shape(comm.size, per_node)
    wrong, where = _sum(comm, gpu)
    if comm.rank == 0:
        level = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled",
                 MPI.THREAD_SERIALIZED: "serialized", MPI.THREAD_MULTIPLE: "multiple"}
        print(f"MPI library    {mpi_library()}\n"
              f"ranks          {comm.size}, in one world\n"
              f"thread level   {level[MPI.Query_thread()]}\n"
              f"CUDA-aware     {_aware(gpus)}")
        hosts = Counter(tuple(line.split("|")) for line in everyone)
        for (host, ranks, cores, count), seen in hosts.items():
            share = f"; {int(ranks) / int(count):g} ranks per GPU" if int(count) else ""
            print(f"host           {host}: {seen} ranks, {ranks} share memory; each may use "
                  f"{cores} cores and {count} GPUs{share}")
        print(f"grid           {rows} rows x {columns} columns; {_rows(columns, per_node)}\n"
              f"allreduce      torus, {LENGTH} float32 {where}: "
              + ("right on every rank" if not wrong else f"WRONG on {wrong} ranks"), flush=True)
    node.Free()
    return 1 if wrong else 0


def _rows(columns: int, per_node: int | None) -> str:
    if not per_node:
        return "the hosts hold different numbers of ranks, so rows may cut them"
    if per_node >= columns:
        return f"{per_node // columns} rows per host"
    return f"a row lies on {columns // per_node} hosts"


def _gpus() -> int:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0  # torch takes seconds to import
    import torch
    return torch.cuda.device_count()


def _aware(gpus: int) -> str:
    if not gpus:
        return "not asked: no GPU is visible"
    from refimpl.collective.cuda_aware import mpi_reads_device_memory
    return ("yes" if mpi_reads_device_memory() else
            "no: gradients go through pinned host memory; an MPI built with CUDA would be faster")


def _sum(comm, gpu: int | None) -> tuple[int, str]:
    """Sum small whole numbers, whose sum is known and exact: (ranks that got it wrong, where)."""
    import numpy
    from refimpl.collective import allreducer
    index = numpy.arange(LENGTH) % 1000
    buffer, where = (index + comm.rank).astype(numpy.float32), "in host memory"
    reduce = allreducer("torus", comm)
    if gpu is None:
        reduce(buffer)
    else:  # as the trainer does it
        import torch
        from refimpl.gradients import as_array
        tensor = torch.from_numpy(buffer).to(torch.device("cuda", gpu))
        torch.cuda.set_device(gpu)
        reduce(as_array(tensor))
        buffer, where = tensor.cpu().numpy(), "in GPU memory"
    expected = index * comm.size + comm.size * (comm.size - 1) // 2
    wrong = numpy.array([int((buffer != expected).any())])
    comm.Allreduce(wrong.copy(), wrong)
    return int(wrong[0]), where

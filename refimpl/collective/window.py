"""Allreduce through shared memory (an MPI-3 window), for ranks of one node: no messages at all.

    buffers in the window           rank 0: [ a0 | b0 | c0 ]  rank 1: [ a1 | b1 | c1 ]  rank 2: ...
    barrier, reduce-scatter         rank r reads chunk r + 1 of all and adds it up in its own buffer
    barrier, all-gather, barrier    rank r copies the other chunks from their owners

Order of addition: the ring's, so the bits are the ring's. Costs per rank: 2(P-1)/P of the bytes read
from others, three barriers. The buffer must come from `empty`; for any other buffer, with a 16-bit
wire, and where ranks share no memory or too little of it, the ring sends messages.
"""
import os
import sys

import numpy

from . import ring
from .buffers import add, chunk, on_device
from .exchange import waiting
from .grid import split_by_node

BLOCK = 1 << 17  # bytes added at a time: partial sums stay in the cache
_windows: list["Shared"] = []


class Shared:
    """`nbytes` of memory of every rank of one node; each rank sees all of it."""

    def __init__(self, node, nbytes: int):
        from mpi4py import MPI
        self.group, self.handle = node.Get_group(), MPI.Win.Allocate_shared(nbytes, 1, comm=node)
        self.handle.Lock_all()  # for the window's life: what makes Sync legal
        self.words = [numpy.frombuffer(self.handle.Shared_query(rank)[0], numpy.uint8)[:nbytes]
                      for rank in range(node.size)]
        self.mine = self.words[node.rank]
        _windows.append(self)

    def views(self, buffer, comm):
        """The slice that `buffer` is, as every rank of `comm` has it; None if it is not here."""
        low = buffer.ctypes.data - self.mine.ctypes.data
        if not 0 <= low < self.mine.size:
            return None
        ranks = comm.Get_group().Translate_ranks(None, self.group)
        return None if min(ranks) < 0 else [
            self.words[r][low:low + buffer.nbytes].view(buffer.dtype) for r in ranks]

    def meet(self, comm, phase):
        """All ranks see what all ranks have written."""
        self.handle.Sync()
        with waiting(phase, comm):
            comm.Barrier()
        self.handle.Sync()


def empty(comm, length: int, dtype):
    """An array in memory that the ranks of each node share; an ordinary one if there is no room."""
    node, nbytes = split_by_node(comm), length * numpy.dtype(dtype).itemsize
    room = numpy.empty(node.size, numpy.int64)
    node.Allgather(numpy.array([_free_shared_memory()]), room)
    if room.min() < nbytes * node.size + (16 << 20):  # too little ends in SIGBUS, without a word
        if node.rank == 0:
            print(f"window: {nbytes * node.size >> 20} MB of shared memory needed, "
                  f"{room.min() >> 20} MB free: messages instead (enlarge /dev/shm)", file=sys.stderr)
        return numpy.empty(length, dtype)
    return Shared(node, nbytes).mine.view(dtype)


def serves(buffer, comm, wire=None) -> bool:
    """Does the buffer lie in memory shared by all ranks of `comm`?"""
    return bool(_windows) and not wire and not on_device(buffer) and any(
        shared.views(buffer, comm) for shared in _windows)


def allreduce(buffer, comm, wire=None):
    """Sum `buffer` over the ranks of `comm`, in place, with the ring's bits."""
    if serves(buffer, comm, wire):
        reduce_scatter(buffer, comm)
        all_gather(buffer, comm)
    else:
        ring.allreduce(buffer, comm, wire)


def reduce_scatter(buffer, comm, wire=None, phase="reduce-scatter"):
    """The ring's reduce_scatter, for a buffer in a window."""
    (shared, views), size, owned = _find(buffer, comm), comm.size, comm.rank + 1
    shared.meet(comm, phase)
    others = [chunk(views[r % size], size, owned) for r in range(owned, owned + size - 1)]
    if others:
        _fold(others, chunk(buffer, size, owned))
    return chunk(buffer, size, owned)


def all_gather(buffer, comm, wire=None, phase="all-gather"):
    """The ring's all_gather, for a buffer in a window."""
    (shared, views), size = _find(buffer, comm), comm.size
    shared.meet(comm, phase)
    for owner in range(comm.rank + 1, comm.rank + size):
        chunk(buffer, size, owner + 1)[...] = chunk(views[owner % size], size, owner + 1)
    shared.meet(comm, phase)


def reduce_to_leader(buffer, node):
    """Every rank adds up one chunk, (x0 + x1) + ..., in the leader's buffer."""
    shared, views = _find(buffer, node)
    shared.meet(node, "node reduce")
    total, *others = (chunk(view, node.size, node.rank) for view in views)
    step = max(1, BLOCK // total.itemsize)
    for low in range(0, total.size, step):
        for other in others:
            add(total[low:low + step], other[low:low + step])
    shared.meet(node, "node reduce")


def broadcast_from_leader(buffer, node):
    """Every rank copies the leader's buffer."""
    shared, views = _find(buffer, node)
    shared.meet(node, "node broadcast")
    if node.rank:
        buffer[...] = views[0]
    shared.meet(node, "node broadcast")


def _fold(others, own):
    """own = ((o0 + o1) + ...) + own, a block at a time."""
    step = max(1, BLOCK // own.itemsize)
    total = numpy.empty(min(step, own.size), own.dtype)
    for low in range(0, own.size, step):
        first, *more = (other[low:low + step] for other in others)
        if more:
            total[:first.size] = first
            first = total[:first.size]
        for other in more:
            add(first, other)
        add(own[low:low + step], first)


def _find(buffer, comm):
    return next((shared, views) for shared in _windows if (views := shared.views(buffer, comm)))


def _free_shared_memory() -> int:
    stat = os.statvfs("/dev/shm")
    return stat.f_bavail * stat.f_frsize

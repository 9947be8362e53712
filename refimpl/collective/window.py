"""Allreduce through shared memory (an MPI-3 window), for ranks of one node: no messages at all.

    buffers in the window     rank 0: [ a0 | b0 | c0 ]    rank 1: [ a1 | b1 | c1 ]    rank 2: ...
    barrier                   rank r alone reads and writes chunk r + 1 of all ranks: it adds them
    barrier                   up and writes the sum to everybody, a block at a time

Order of addition: the ring's (oracle: --order ring). Costs per rank: the buffer is read and written
once, two barriers. Buffers that are not from `empty`, and all with a wire, go as the ring's messages.
"""
import os
import sys

import numpy

from . import ring
from .buffers import add, chunk, on_device, pieces
from .exchange import waiting
from .grid import split_by_node

BLOCK = 1 << 18  # bytes added at a time: partial sums stay in the cache
_made = 0  # windows so far, as far as this rank has heard
_windows: list["Shared"] = []


class Shared:
    """`nbytes` of memory of every rank of one node; each rank sees all of it."""

    def __init__(self, comm, node, nbytes: int, number: int):
        from mpi4py import MPI
        self.comm, self.node, self.group, self.number = comm, node, node.Get_group(), number
        self.handle = MPI.Win.Allocate_shared(nbytes, 1, comm=node)
        self.handle.Lock_all()  # for the window's life: what makes Sync legal
        self.words = [numpy.frombuffer(self.handle.Shared_query(rank)[0], numpy.uint8)[:nbytes]
                      for rank in range(node.size)]
        _windows.append(self)

    def meet(self, comm, phase):
        """All ranks see what all ranks have written."""
        self.handle.Sync()
        with waiting(phase, comm):
            comm.Barrier()
        self.handle.Sync()


def empty(comm, length: int, dtype):
    """An array in memory that the ranks of each node share; ordinary ones if a node has no room."""
    global _made
    node, nbytes = split_by_node(comm), length * numpy.dtype(dtype).itemsize
    shm, heard = os.statvfs("/dev/shm"), numpy.empty((comm.size, 2), numpy.int64)
    lack = nbytes * node.size + (16 << 20) - shm.f_bavail * shm.f_frsize
    comm.Allgather(numpy.array([lack, _made]), heard)
    lacks, _made = heard[:, 0], int(heard[:, 1].max()) + 1  # a number that all its ranks know
    if lacks.max() <= 0:
        return Shared(comm, node, nbytes, _made).words[node.rank].view(dtype)
    node.Free()
    if comm.rank == 0:  # a window would end in SIGBUS, without a word
        print(f"window: the node of rank {lacks.argmax()} lacks {(lacks.max() >> 20) + 1} MB of "
              "shared memory: messages instead (enlarge /dev/shm)", file=sys.stderr)
    return numpy.empty(length, dtype)


def free(comm) -> None:
    """Give back all windows made over `comm`; the arrays in them must not be touched any more."""
    for shared in [shared for shared in _windows if shared.comm is comm]:
        _windows.remove(shared)
        shared.handle.Unlock_all()
        shared.handle.Free()
        shared.node.Free()


def locate(buffer):
    """(window, byte of it at which `buffer` starts); (None, None) for any other memory."""
    for shared in () if on_device(buffer) else _windows:
        mine = shared.words[shared.node.rank]
        low = buffer.ctypes.data - mine.ctypes.data
        if 0 <= low < mine.size:
            return shared, low
    return None, None


def place(buffer) -> str:
    """Where the buffer lies, in words that are equal on ranks whose buffers belong together."""
    shared, low = locate(buffer)
    return f"window {shared.number}, byte {low}" if shared else "no window"


def find(buffer, comm, wire=None):
    """(window, this slice of it as each rank of `comm` has it); None if they do not share it."""
    shared, low = locate(buffer)
    if wire or not shared:
        return None
    ranks = comm.Get_group().Translate_ranks(None, shared.group)
    return None if min(ranks) < 0 else (shared, [
        shared.words[rank][low:low + buffer.nbytes].view(buffer.dtype) for rank in ranks])


def allreduce(buffer, comm, wire=None):
    """Sum `buffer` over the ranks of `comm`, in place, with the ring's bits."""
    found = find(buffer, comm, wire)
    if not found:
        return ring.allreduce(buffer, comm, wire)
    reduce_scatter(buffer, comm, to_all=True)
    found[0].meet(comm, "all-gather")


def reduce_scatter(buffer, comm, wire=None, phase="reduce-scatter", to_all=False):
    """The ring's reduce_scatter, for a buffer in a window; to_all: every rank gets the sum."""
    (shared, views), size, owned = find(buffer, comm), comm.size, comm.rank + 1
    shared.meet(comm, phase)
    chunks = (chunk(views[r % size], size, owned) for r in range(owned, owned + size))
    for *others, own in zip(*(pieces(c, BLOCK) for c in chunks)):
        for other in others[1:]:
            add(others[0], other)  # the first rank's memory serves as scratch
        if others:
            add(own, others[0])
        for other in others if to_all else ():
            other[...] = own
    return chunk(buffer, size, owned)


def all_gather(buffer, comm, wire=None, phase="all-gather"):
    """The ring's all_gather, for a buffer in a window."""
    (shared, views), size = find(buffer, comm), comm.size
    shared.meet(comm, phase)
    for owner in range(comm.rank + 1, comm.rank + size):
        chunk(buffer, size, owner + 1)[...] = chunk(views[owner % size], size, owner + 1)
    shared.meet(comm, phase)


def reduce_to_leader(found, node):
    """Every rank adds up one chunk, (x0 + x1) + ..., in the leader's buffer."""
    shared, views = found
    shared.meet(node, "node reduce")
    chunks = (chunk(view, node.size, node.rank) for view in views)
    for total, *others in zip(*(pieces(c, BLOCK) for c in chunks)):
        for other in others:
            add(total, other)
    shared.meet(node, "node reduce")


def broadcast_from_leader(found, node):
    """Every rank copies the leader's buffer."""
    shared, views = found
    shared.meet(node, "node broadcast")
    if node.rank:
        views[node.rank][...] = views[0]
    shared.meet(node, "node broadcast")

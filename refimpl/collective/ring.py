"""Ring allreduce: reduce-scatter, then all-gather (Goyal et al. 2017 sec. 4.1: "bucket" algorithm).

    reduce-scatter, 4 ranks: what each rank sends to the next one; + marks a partial sum
              rank 0          rank 1          rank 2          rank 3
    round 0   x0 of chunk 0   x1 of chunk 1   x2 of chunk 2   x3 of chunk 3
    round 1   + of chunk 3    + of chunk 0    + of chunk 1    + of chunk 2
    round 2   + of chunk 2    + of chunk 3    + of chunk 0    + of chunk 1
    owns      chunk 1         chunk 2         chunk 3         chunk 0          (rank r: r + 1)

Order of addition: chunk c is ((x_c + x_{c+1}) + x_{c+2}) + ..., ranks mod P.
Costs per rank: 2(P-1) messages, 2(P-1)/P of the buffer's bytes sent and as many received.
"""
from .buffers import chunk, round_to
from .exchange import exchange


def reduce_scatter(buffer, comm, wire=None, phase="reduce-scatter"):
    """Leave the sum of chunk rank + 1 in its place and return it; the other chunks are scratch."""
    rank, size = comm.rank, comm.size
    for turn in range(size - 1):
        exchange(comm, chunk(buffer, size, rank - turn), (rank + 1) % size,
                 chunk(buffer, size, rank - turn - 1), (rank - 1) % size,
                 add=True, wire=wire, phase=phase, turn=turn)
    return chunk(buffer, size, rank + 1)


def all_gather(buffer, comm, wire=None, phase="all-gather"):
    """Spread chunk rank + 1 of every rank; with a wire it must hold 16-bit values already."""
    rank, size = comm.rank, comm.size
    for turn in range(size - 1):
        exchange(comm, chunk(buffer, size, rank + 1 - turn), (rank + 1) % size,
                 chunk(buffer, size, rank - turn), (rank - 1) % size,
                 wire=wire, phase=phase, turn=turn)


def allreduce(buffer, comm, wire=None, phase=""):
    """Sum `buffer` over the ranks of `comm`, in place, the same bits everywhere."""
    owned = reduce_scatter(buffer, comm, wire, phase + "reduce-scatter")
    round_to(owned, wire)  # all ranks get the bits that the wire can carry, the owner too
    all_gather(buffer, comm, wire, phase + "all-gather")

"""Recursive halving and doubling (Goyal et al. 2017 sec. 4.1; Rabenseifner; Thakur et al.).

    reduce-scatter, 4 ranks: each pair halves what it holds; the lower rank keeps the first half
              rank 0       rank 1       rank 2       rank 3
    holds     0 1 2 3      0 1 2 3      0 1 2 3      0 1 2 3      (quarters of the buffer)
    step 0    0 1          2 3          0 1          2 3          0 with 1, 2 with 3
    step 1    0            2            1            3            0 with 2, 1 with 3
    all-gather: the same steps backwards

Not a power of two: binary blocks, the largest on the lowest ranks.

    44 ranks:  block 0: ranks 0-31     block 1: 32-39     block 2: 40-43
    after the halving the sums of block 2 go to block 1, theirs then to block 0; before the doubling
    the result comes back the same way

Order of addition: in a block the tree ((0+1)+(2+3))+((4+5)+(6+7)); over blocks T(0) + (T(1) + T(2)).
Costs per rank of P = 2^k: 2k messages, 2(P-1)/P of the bytes. With blocks of b > c ranks, a rank of
the smaller one sends b/c messages more and receives as many, one of the larger one sends and receives
one more; n/b elements each.
"""
from .buffers import chunk, round_to
from .exchange import exchange


def allreduce(buffer, comm, wire=None):
    """Sum `buffer` over the ranks of `comm`, in place, the same bits everywhere."""
    start, size, larger, smaller = blocks(comm.rank, comm.size)
    owned = halve(buffer, comm, start, size, wire)
    gather_blocks(buffer, owned, comm, start, size, larger, smaller, wire)
    round_to(owned, wire)
    spread_blocks(buffer, owned, comm, start, size, larger, smaller, wire)
    double(buffer, comm, start, size, wire)


def blocks(rank: int, ranks: int):
    """(first rank, size) of the rank's binary block, sizes of the next larger and smaller (or 0)."""
    sizes = [1 << bit for bit in reversed(range(ranks.bit_length())) if ranks >> bit & 1]
    start = 0
    for i, size in enumerate(sizes):
        if rank < start + size:
            return start, size, sizes[i - 1] if i else 0, (sizes + [0])[i + 1]
        start += size
    raise AssertionError(f"rank {rank} of {ranks}")


def halve(buffer, comm, start, size, wire):
    """Reduce-scatter inside the block; returns the view that this rank owns."""
    held, index = buffer, comm.rank - start
    for step in range(size.bit_length() - 1):
        upper, partner = index >> step & 1, start + (index ^ 1 << step)
        keep, give = chunk(held, 2, upper), chunk(held, 2, 1 - upper)
        exchange(comm, give, partner, keep, partner,
                 add=True, wire=wire, phase="halving", turn=step)
        held = keep
    return held


def double(buffer, comm, start, size, wire):
    """All-gather inside the block: halve backwards, so what was given comes back."""
    index, steps = comm.rank - start, size.bit_length() - 1
    for step in reversed(range(steps)):
        upper, partner = index >> step & 1, start + (index ^ 1 << step)
        held = piece(buffer, index, 1 << step)
        exchange(comm, chunk(held, 2, upper), partner, chunk(held, 2, 1 - upper), partner,
                 wire=wire, phase="doubling", turn=steps - 1 - step)


def gather_blocks(buffer, owned, comm, start, size, larger, smaller, wire):
    """Sums climb from the smallest block to the largest."""
    if smaller:
        child = start + size + (comm.rank - start) % smaller
        exchange(comm, None, None, owned, child, add=True, wire=wire, phase="blocks up")
    for turn in range(larger // size):
        parent = comm.rank - larger + turn * size
        exchange(comm, piece(buffer, parent - (start - larger), larger), parent, None, None,
                 wire=wire, phase="blocks up", turn=turn)


def spread_blocks(buffer, owned, comm, start, size, larger, smaller, wire):
    """The result comes back from the largest block to the smallest."""
    for turn in range(larger // size):
        parent = comm.rank - larger + turn * size
        exchange(comm, None, None, piece(buffer, parent - (start - larger), larger), parent,
                 wire=wire, phase="blocks down", turn=turn)
    if smaller:
        child = start + size + (comm.rank - start) % smaller
        exchange(comm, owned, child, None, None, wire=wire, phase="blocks down")


def piece(buffer, index: int, size: int):
    """What rank `index` of a block of `size` ranks owns: bit s of the index chooses at step s."""
    for step in range(size.bit_length() - 1):
        buffer = chunk(buffer, 2, index >> step & 1)
    return buffer

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

Order of addition: in a block the tree ((0+1)+(2+3))+((4+5)+(6+7)); then T(0) + (T(1) + T(2)).
Costs per rank of P = 2^k: 2k messages, 2(P-1)/P of the bytes. Between blocks of b > c ranks, each
of the smaller one sends and receives b/c messages more, of the larger one one more; n/b elements.
"""
from .buffers import chunk, round_to
from .exchange import exchange


def allreduce(buffer, comm, wire=None):
    """Sum `buffer` over the ranks of `comm`, in place, the same bits everywhere."""
    start, size, larger, smaller = blocks(comm.rank, comm.size)
    index = comm.rank - start
    child = start + size + index % smaller if smaller else None
    parents = [(start - larger + i, piece(buffer, i, larger)) for i in range(index, larger, size)]

    held = halve(buffer, comm, start, size, wire)
    owned = held[-1]
    if smaller:
        exchange(comm, None, None, owned, child, add=True, wire=wire, phase="blocks up")
    for turn, (parent, part) in enumerate(parents):
        exchange(comm, part, parent, None, None, wire=wire, phase="blocks up", turn=turn)
    round_to(owned, wire)
    for turn, (parent, part) in enumerate(parents):
        exchange(comm, None, None, part, parent, wire=wire, phase="blocks down", turn=turn)
    if smaller:
        exchange(comm, owned, child, None, None, wire=wire, phase="blocks down")
    double(held, comm, start, wire)


def blocks(rank: int, ranks: int):
    """First rank and size of this rank's block, sizes of the next larger and smaller (or 0)."""
    sizes = [1 << bit for bit in reversed(range(ranks.bit_length())) if ranks >> bit & 1]
    block = next(i for i in range(len(sizes)) if rank < sum(sizes[:i + 1]))
    larger, size, smaller = [0, *sizes, 0][block:block + 3]
    return sum(sizes[:block]), size, larger, smaller


def halve(buffer, comm, start, size, wire):
    """Reduce-scatter inside the block; returns what the rank held at first and after each step."""
    held, index = [buffer], comm.rank - start
    for step in range(size.bit_length() - 1):
        upper, partner = index >> step & 1, start + (index ^ 1 << step)
        keep, give = chunk(held[-1], 2, upper), chunk(held[-1], 2, 1 - upper)
        exchange(comm, give, partner, keep, partner,
                 add=True, wire=wire, phase="halving", turn=step)
        held.append(keep)
    return held


def double(held, comm, start, wire):
    """All-gather inside the block: halve backwards, so what was given comes back."""
    index, steps = comm.rank - start, len(held) - 1
    for step in reversed(range(steps)):
        upper, partner = index >> step & 1, start + (index ^ 1 << step)
        exchange(comm, held[step + 1], partner, chunk(held[step], 2, 1 - upper), partner,
                 wire=wire, phase="doubling", turn=steps - 1 - step)


def piece(buffer, index: int, size: int):
    """What rank `index` of a block of `size` ranks owns: bit s of the index chooses at step s."""
    for step in range(size.bit_length() - 1):
        buffer = chunk(buffer, 2, index >> step & 1)
    return buffer

"""The grid of ranks: rank = row * C + column, as MPI's Cartesian communicators number it.

    R = 2 rows, C = 3 columns        rank 0   rank 1   rank 2    <- row 0: communicator `row`
                                     rank 3   rank 4   rank 5    <- row 1
                                       ^ column 0: communicator `column`

Mikami et al. 2018: X is the row length (here C), Y the column length (here R).
"""
from typing import Any, NamedTuple

import numpy

from ..errors import UsageError


class Grid(NamedTuple):
    """One rank's place: all ranks, its row (C ranks), its column (R ranks), R and C."""
    comm: Any
    row: Any
    column: Any
    rows: int
    columns: int

    def Free(self):
        for comm in self[:3]:
            comm.Free()


def make_grid(comm, shape: tuple[int, int] | None = None) -> Grid:
    """Lay the ranks of `comm` out as R x C; without a shape as `default_shape` says.

    Raises UsageError, alike on all ranks and before any message, if R * C is not the rank count.
    """
    if shape is None:
        shape = default_shape(comm.size, ranks_per_node(comm))
    rows, columns = fitting(shape, comm.size)
    cart = comm.Create_cart((rows, columns), periods=(True, True), reorder=False)
    return Grid(cart, cart.Sub((False, True)), cart.Sub((True, False)), rows, columns)


def fitting(shape, size: int) -> tuple[int, int]:
    """The shape as (R, C); UsageError if it is none or R * C is not `size`."""
    sides = tuple(shape)
    if len(sides) != 2 or not all(isinstance(side, (int, numpy.integer)) and side > 0
                                  for side in sides) or sides[0] * sides[1] != size:
        choices = ", ".join(f"{size // c}x{c}" for c in range(1, size + 1) if size % c == 0)
        raise UsageError(f"a grid of {' x '.join(map(str, sides))} does not hold {size} ranks: "
                         f"choose one of {choices}")
    return int(sides[0]), int(sides[1])


def default_shape(size: int, ranks_per_node: int | None = None) -> tuple[int, int]:
    """(R, C) with the fewest steps 2(R-1) + 2(C-1) whose rows do not cut nodes; C >= R if equal.

    A row lies inside a node (C divides the ranks per node) or is made of whole nodes. Where nodes
    are uneven (None) only the number of steps counts. A prime size gives 1 x N.
    """
    node = ranks_per_node or 1
    allowed = [c for c in range(1, size + 1) if size % c == 0 and (node % c == 0 or c % node == 0)]
    columns = min(allowed, key=lambda c: (c + size // c, -c))
    return size // columns, columns


def ranks_per_node(comm) -> int | None:
    """Ranks of each node, if they are equally many and numbered node by node; otherwise None."""
    node = split_by_node(comm)
    leader = numpy.array([comm.rank])
    node.Bcast(leader, root=0)
    mine = numpy.array([node.size, int(leader[0]) + node.rank - comm.rank])
    everyone = numpy.empty((comm.size, 2), mine.dtype)
    comm.Allgather(mine, everyone)
    node.Free()
    return int(mine[0]) if (everyone == (mine[0], 0)).all() else None


def split_by_node(comm, ranks_per_node: int | None = None):
    """Communicator of the ranks that share memory, or of blocks of `ranks_per_node` ranks."""
    if ranks_per_node is not None:
        return comm.Split(comm.rank // ranks_per_node, comm.rank)
    shared = 0  # a simulated communicator knows its nodes without being told the kind
    if type(comm).__module__.startswith("mpi4py"):
        from mpi4py import MPI
        shared = MPI.COMM_TYPE_SHARED
    return comm.Split_type(shared, comm.rank)

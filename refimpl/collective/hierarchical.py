"""Hierarchical allreduce (Goyal et al. 2017 sec. 4.1): inside the node, across nodes, inside again.

    node of 4 ranks, leader L = local rank 0         L -> 1 -> 2 -> 3 -> L    sum, piece after piece
    across nodes, leaders only                       L <=> L <=> L            ring or another
    inside the node                                  L -> 1 -> 2 -> 3         result, piece by piece

Order of addition: the leader ends with ((x0 + x1) + x2) + ... in local order, at full precision;
then the order of the algorithm across. A 16-bit wire serves between nodes only.
Costs inside the node: the buffer is sent and received at most twice by a rank, all links busy at once.
"""
from typing import Any, Callable, NamedTuple

import numpy

from ..errors import UsageError
from . import halving_doubling, ring, torus, window
from . import exchange as moving
from .buffers import pieces
from .grid import fitting, make_grid, split_by_node

ACROSS = {"ring": ring, "torus": torus, "halving_doubling": halving_doubling}


class Nodes(NamedTuple):
    """The ranks of this node, and how the leaders (local rank 0) reduce among themselves."""
    node: Any
    leaders: Any  # communicator or grid; None on the other ranks
    across: Callable

    def Free(self):
        self.node.Free()
        if self.leaders is not None:
            self.leaders.Free()


def make_nodes(comm, ranks_per_node=None, across="ring", shape=None) -> Nodes:
    """Nodes as the machine has them, or blocks of `ranks_per_node`; they may be uneven.

    Raises UsageError for an unknown `across`; shape (R, C) is the grid of the leaders' torus.
    """
    if across not in ACROSS:
        raise UsageError(f"across {across!r}: choose from {', '.join(ACROSS)}")
    if ranks_per_node is not None and ranks_per_node < 1:
        raise UsageError(f"ranks_per_node {ranks_per_node}: use 1 or more")
    node, leading = split_by_node(comm, ranks_per_node), numpy.empty(comm.size, numpy.int64)
    comm.Allgather(numpy.array([int(node.rank == 0)]), leading)
    if across == "torus" and shape is not None:
        fitting(shape, int(leading.sum()))  # all ranks know, not the leaders alone
    leaders = among = comm.Split(min(node.rank, 1), comm.rank)
    if node.rank == 0 and across == "torus":
        among = make_grid(leaders, shape)
    if node.rank or among is not leaders:
        leaders.Free()
    return Nodes(node, None if node.rank else among, ACROSS[across].allreduce)


def allreduce(buffer, nodes, wire=None):
    """Sum `buffer` over all ranks of all nodes, in place, the same bits everywhere."""
    node, last = nodes.node, nodes.node.size - 1
    shared = window.find(buffer, node)
    if shared:
        window.reduce_to_leader(shared, node)
    elif last:
        chain(buffer, node, links=node.size, add=True, phase="node reduce")
    if nodes.leaders is not None:
        nodes.across(buffer, nodes.leaders, wire)
    if shared:
        window.broadcast_from_leader(shared, node)
    else:
        chain(buffer, node, links=last, add=False, phase="node broadcast")


def chain(buffer, node, links, add, phase):
    """At turn t, link i (local rank i to i + 1; the last one to the leader) carries piece t - i.

    The leader never adds: a sum comes back to it whole, the other ranks' buffers were its scratch.
    """
    before, after = (node.rank - 1) % node.size, (node.rank + 1) % node.size
    waits = dict(enumerate(pieces(buffer, moving.SEGMENT)))
    for turn in range(len(waits) + links - 1):
        goes = waits.get(turn - node.rank) if node.rank < links else None
        comes = waits.get(turn - before) if before < links else None
        if goes is not None or comes is not None:
            moving.exchange(node, goes, after, comes, before, add=add and node.rank > 0,
                            phase=phase, turn=turn)

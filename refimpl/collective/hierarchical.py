"""Hierarchical allreduce (Goyal et al. 2017 sec. 4.1): inside the node, across nodes, inside the node.

    node of 4 ranks, leader L = local rank 0         L -> 1 -> 2 -> 3 -> L    sum, piece after piece
    across nodes, leaders only                       L <=> L <=> L            ring or another
    inside the node                                  L -> 1 -> 2 -> 3         result, piece by piece

Order of addition: the leader ends with ((x0 + x1) + x2) + ... in local order, at full precision; then
the order of the algorithm across, over the nodes' sums. A 16-bit wire is used between nodes only.
Costs inside the node: each rank sends and receives the buffer at most twice (a chain keeps all links
busy at once); 2 messages per piece (one segment). Across, the leader's costs are the chosen algorithm's.
"""
from typing import Any, Callable, NamedTuple

from ..errors import UsageError
from . import exchange as moving
from . import halving_doubling, ring, torus, window
from .exchange import exchange
from .grid import make_grid, split_by_node


class Nodes(NamedTuple):
    """The ranks of this node, and how the leaders (local rank 0) reduce among themselves."""
    node: Any
    leaders: Any  # communicator or grid; None on the other ranks
    across: Callable


def make_nodes(comm, ranks_per_node=None, across="ring", shape=None) -> Nodes:
    """Nodes as the machine has them, or blocks of `ranks_per_node`; they may be uneven.

    Raises UsageError for an unknown `across`; shape (R, C) is the grid of the leaders' torus.
    """
    algorithms = {"ring": ring, "torus": torus, "halving_doubling": halving_doubling}
    if across not in algorithms:
        raise UsageError(f"across {across!r}: choose from {', '.join(algorithms)}")
    if ranks_per_node is not None and ranks_per_node < 1:
        raise UsageError(f"ranks_per_node {ranks_per_node}: use 1 or more")
    node = split_by_node(comm, ranks_per_node)
    leaders = comm.Split(min(node.rank, 1), comm.rank)
    if node.rank == 0 and across == "torus":
        leaders = make_grid(leaders, shape)
    return Nodes(node, leaders if node.rank == 0 else None, algorithms[across].allreduce)


def allreduce(buffer, nodes, wire=None):
    """Sum `buffer` over all ranks of all nodes, in place, the same bits everywhere."""
    shared = window.serves(buffer, nodes.node)
    (window.reduce_to_leader if shared else reduce_in_node)(buffer, nodes.node)
    if nodes.leaders is not None:
        nodes.across(buffer, nodes.leaders, wire)
    (window.broadcast_from_leader if shared else broadcast_in_node)(buffer, nodes.node)


def reduce_in_node(buffer, node):
    """The leader ends with the left fold over local ranks; the others' buffers become scratch."""
    pieces, last = _pieces(buffer), node.size - 1
    if last == 0:
        return
    for turn in range(len(pieces) + last):  # at turn t, link i -> i + 1 carries piece t - i
        goes = _at(pieces, turn - node.rank)
        comes = _at(pieces, turn - (node.rank - 1) % node.size)
        if goes is not None or comes is not None:
            exchange(node, goes, (node.rank + 1) % node.size, comes, (node.rank - 1) % node.size,
                     add=node.rank > 0, phase="node reduce", turn=turn)


def broadcast_in_node(buffer, node):
    """The leader's buffer goes down the chain, every rank passing on what it has."""
    pieces, last = _pieces(buffer), node.size - 1
    for turn in range(len(pieces) + last - 1):
        goes = _at(pieces, turn - node.rank) if node.rank < last else None
        comes = _at(pieces, turn - node.rank + 1) if node.rank > 0 else None
        if goes is not None or comes is not None:
            exchange(node, goes, node.rank + 1, comes, node.rank - 1,
                     phase="node broadcast", turn=turn)


def _pieces(buffer) -> list:
    step = max(1, min(moving.SEGMENT, moving.LIMIT) // buffer.itemsize)
    return [buffer[i:i + step] for i in range(0, max(1, buffer.size), step)]


def _at(pieces, index):
    return pieces[index] if 0 <= index < len(pieces) else None

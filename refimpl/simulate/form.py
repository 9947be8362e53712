"""How long an allreduce takes: in closed form, round by round, and as simulated ranks take it.

A round is many equal messages at a time. Only between binary blocks is every message looked at.
"""
import collections
import heapq

import numpy as np

from refimpl.collective import exchange
from refimpl.collective.grid import default_shape
from refimpl.simulate.cost import COPIES, LINKS, Cluster, Cost, Place, segments
from refimpl.simulate.world import run

ALGORITHMS = ("ring", "torus", "halving_doubling", "hierarchical")
ALL, IN_TURN = slice(None), "in turn"


def rounds(algorithm: str, ranks: int, nbytes: float, shape=None, per_node=1,
           across="halving_doubling"):
    """(times, source ranks, their destinations, bytes, share that is added, who) of every kind of
    round; who: all ranks, these, or (IN_TURN) one after another for a rank of the smaller block."""
    r = np.arange(ranks)
    if algorithm == "ring":
        return [(ranks - 1, r, (r + 1) % ranks, nbytes / ranks, adds, ALL) for adds in (1, 0)]
    if algorithm == "torus":
        (rows, columns), down = shape, (r + shape[1]) % ranks
        right = r - r % columns + (r + 1) % columns
        return [(columns - 1, r, right, nbytes / columns, 1, ALL),
                *((rows - 1, r, down, nbytes / ranks, adds, ALL) for adds in (1, 0)),
                (columns - 1, r, right, nbytes / columns, 0, ALL)]
    if algorithm == "halving_doubling":
        return _binary_blocks(ranks, nbytes)
    leaders, many = r[::per_node], min(per_node, ranks)
    middle = [(times, leaders[s], leaders[d], b, adds, who if isinstance(who, (slice, str))
               else leaders[who]) for times, s, d, b, adds, who in rounds(
                   across, len(leaders), nbytes, default_shape(len(leaders)))]
    return [*_chain(r, per_node, many, nbytes, 1 - 1 / many), *middle,  # the leader never adds
            *_chain(r, per_node, many - 1, nbytes, 0)] if many > 1 else middle


def _chain(r, per_node, links, nbytes, adds):
    """Rounds in which 1, 2, ... of a node's links are at work, then all, then ever fewer."""
    pieces = max(1, -(-int(nbytes) // exchange.SEGMENT))
    full = min(links, pieces)
    for at_work in range(1, full + 1):
        source = r[np.isin(r % per_node, np.arange(at_work) * links // at_work)]
        dest = np.where(source % per_node < per_node - 1, source + 1, source // per_node * per_node)
        source, dest = source[dest <= r[-1]], dest[dest <= r[-1]]
        times = 2 if at_work < full else pieces + links + 1 - 2 * full
        yield times, source, dest, nbytes / pieces, adds, ALL


def _binary_blocks(ranks, nbytes):
    """Each block halves by itself; the smallest one's sums climb from block to block, the result
    comes down the same way, and each block doubles as soon as it has it."""
    sizes = [1 << bit for bit in reversed(range(ranks.bit_length())) if ranks >> bit & 1]
    starts, halving, up, down = np.cumsum([0, *sizes]), [], [], []
    for i, size in enumerate(sizes):
        r = starts[i] + np.arange(size)
        halving.append([(1, r, starts[i] + (r - starts[i] ^ 1 << s), nbytes / 2 ** (s + 1))
                        for s in range(size.bit_length() - 1)])
        if i:
            ends = np.tile(r, sizes[i - 1] // size), starts[i - 1] + np.arange(sizes[i - 1])
            up.insert(0, (1, *ends, nbytes / sizes[i - 1], 1, IN_TURN))
            down.append((1, *ends[::-1], nbytes / sizes[i - 1], 0, IN_TURN))
    return [*((*step, 1, step[1]) for steps in halving for step in steps), *up,
            *down, *((*step, 0, step[1]) for steps in halving for step in steps[::-1])]


def _in_turn(cost: Cost, clock, source, dest, nbytes: float, adds: bool) -> None:
    """Advance the clocks of both ends of these messages. The smaller block's ranks come in the same
    order again and again; each has one message at a time, which waits for its other end."""
    stride, pieces = min(len({*source}), len({*dest})), segments(nbytes)
    asks = [(max(clock[source[k]], clock[dest[k]]), k, 1, 0.0) for k in range(stride)]
    heapq.heapify(asks)
    while asks:  # as exchange does it: two segments under way, each added when it is there
        now, k, piece, before = heapq.heappop(asks)
        end, there, add = cost.transfer(source[k], dest[k], nbytes / pieces, now,
                                        (k, "" if adds else COPIES[0]))
        added = max(there, before) + add
        if piece < pieces:
            heapq.heappush(asks, (max(now, before), k, piece + 1, added))
            continue
        clock[source[k]], clock[dest[k]] = end, added
        if (k := k + stride) < len(source):
            heapq.heappush(asks, (max(clock[source[k]], clock[dest[k]]), k, 1, 0.0))


def closed_form(cluster: Cluster, algorithm: str, ranks: int, nbytes: float, shape=None,
                across="halving_doubling") -> dict:
    """Seconds, messages of a rank, bytes by link class over all ranks, and the busiest class."""
    place, share = Place(cluster, ranks, nbytes), collections.Counter()
    clock, messages, cost = np.zeros(ranks), np.zeros(ranks, int), Cost(place)
    moved, late = collections.Counter(inside=0.0, between=0.0, uplink=0.0), np.zeros(ranks)
    every = rounds("ring" if algorithm == "window" else algorithm, ranks, nbytes, shape,
                   cluster.per_node(ranks), across)
    if algorithm == "window" and not place.node[-1]:  # no messages: all values are added once
        clock += (ranks - 1) * nbytes * place.per_byte / (place.cores or ranks) + 2 * place.barrier
        every = []
    for times, source, dest, size, adds, who in every:
        before, link = clock.max(), LINKS[int(place.node[-1] > 0)]
        if not (times and len(source)):
            continue
        if who is IN_TURN:
            _in_turn(cost, clock, source.tolist(), dest.tolist(), size, adds)
            np.add.at(messages, source, 1)
        else:
            took, wire, link = place.round(source, dest, size, adds)
            clock[who] = clock[who].max() + times * took
            messages[who] += times
            late[who] += times * (wire - took) * (wire > 0)  # a bucket fills while ranks work
        share[link] += clock.max() - before
        apart, far = (times * size * (at[source] != at[dest]).sum() for at in (place.node, place.leaf))
        moved.update(between=apart, inside=times * size * len(source) - apart, uplink=far)
    seconds = (clock + np.maximum(0.0, late - place.credit)).max() + place.start
    return {"seconds": float(seconds), "rounds": int(messages.max()), **moved,
            "busiest": max(share, key=share.get, default="none")}


def simulated(cluster: Cluster, algorithm: str, ranks: int, nbytes: float, shape=None,
              across="halving_doubling") -> list[float]:
    """Seconds of every rank, the algorithm run on clocks; an element stands for many bytes."""
    from refimpl.collective import allreducer
    per_node, inner = cluster.per_node(ranks), algorithm == "hierarchical"
    parts = -(-ranks // per_node) if inner else ranks
    if (across if inner else algorithm) == "halving_doubling":
        parts = 1 << parts.bit_length() - 1  # a multiple of which gives equal parts, as in the model
    elements = parts * max(1, round(nbytes / parts / (exchange.SEGMENT // 4)))
    magnify = nbytes / (4 * elements)
    options = {"ranks_per_node": per_node, "across": across} if inner else {}
    place = Place(cluster, ranks, nbytes)

    def program(comm):
        reduce = allreducer(algorithm, comm, shape if algorithm == "torus" else None, **options)
        comm.Barrier()
        before = comm.me.clock
        reduce(np.zeros(elements, np.float32))
        return comm.me.clock - before + place.start
    kept = exchange.SEGMENT
    exchange.SEGMENT = max(4, round(kept / magnify))  # the same segments, in bytes of the model
    try:
        return run(ranks, program, cost=Cost(place), magnify=magnify).results
    finally:
        exchange.SEGMENT = kept

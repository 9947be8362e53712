"""The world of simulated ranks: one greenlet each, switched only inside MPI calls, so every run of
the same program takes the same course. A message moves when both its ends are there (rendezvous):
one copy, no buffering, and a Send nobody receives is found out as the deadlock it may be on MPI.
"""
import functools
import heapq
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from refimpl.collective.exchange import traffic
from refimpl.errors import UsageError


class Deadlock(RuntimeError):
    """Ranks wait for each other, or for one that has ended; the message says who for whom."""


class RankFailed(RuntimeError):
    """An exception ended one rank, and with it the run; `__cause__` is that exception."""


class Rank:
    """What one simulated rank is doing."""

    def __init__(self, number: int):
        self.number, self.clock, self.ended = number, 0.0, False
        self.waits: Any = None  # what it is blocked on, for the deadlock report
        self.sent: dict[str, list] = {}  # phase -> [messages, modelled bytes]
        self.result = self.greenlet = None
        self.record: Any = None  # exchange's notes: .waiting[1:3] is (phase, round)

    @property
    def phase(self) -> str:
        return self.record.waiting[1] if self.record.waiting else ""

    def __str__(self):
        waiting = self.record and self.record.waiting
        where = f" ({waiting[1]}, round {waiting[2]})" if waiting else ""
        return f"rank {self.number}{where} {self.waits}"


class World:
    """All ranks of a run; `run` makes it, and returns it when every rank has ended."""

    def __init__(self, size, ranks_per_node, magnify, cost, watch):
        self.ranks = [Rank(n) for n in range(size)]
        self.ranks_per_node, self.magnify = ranks_per_node or size, magnify
        self.cost, self.watch = cost, watch
        self.pending: dict[tuple, list] = {}  # messages that lack their other end
        self.ready: list[tuple] = []  # heap of (clock, order of waking, rank)
        self.woken = self.contexts = 0
        self.hub, self.failed = getcurrent(), None

    @property
    def results(self) -> list:
        """What the program returned, by rank."""
        return [r.result for r in self.ranks]

    @property
    def seconds(self) -> float:
        """The modelled time of the slowest rank."""
        return max(r.clock for r in self.ranks)

    def sent(self, rank: int, phase: str | None = None) -> tuple[int, float]:
        """(messages, modelled bytes) that `rank` sent, in one phase or in all."""
        rows = [v for k, v in self.ranks[rank].sent.items() if phase in (None, k)]
        return sum(r[0] for r in rows), sum(r[1] for r in rows)

    def wake(self, rank: Rank, clock: float) -> None:
        """Let a rank run again when all ranks with an earlier clock have had their turn."""
        self.woken += 1
        heapq.heappush(self.ready, (clock, self.woken, rank))

    def block(self, rank: Rank, why) -> None:
        """Let the others run until something wakes `rank`."""
        rank.waits = why
        begun = self.ready and self.ready[0][2].greenlet  # only the hub may start a rank, or the
        following = self.next() if begun else self.hub    # depth of Python's stack would add up
        if following is not rank.greenlet:
            following.switch()

    def next(self) -> greenlet:
        """The rank whose turn it is, its clock set."""
        clock, _, rank = heapq.heappop(self.ready)
        if clock > rank.clock:
            rank.clock = clock
        return rank.greenlet

    def loop(self) -> None:
        """Run until nobody can: control comes back here whenever a rank ends."""
        while self.ready and not self.failed:
            self.next().switch()
        if self.failed:
            rank, error = self.failed
            raise RankFailed(f"rank {rank.number} of {len(self.ranks)}: "
                             f"{type(error).__name__}: {error}") from error
        stuck = [r for r in self.ranks if not r.ended]
        if stuck:
            raise Deadlock(self.who_waits(stuck))

    def who_waits(self, stuck: list[Rank], most: int = 16) -> str:
        """The report of a deadlock: a circle of waiting ranks if there is one, then the others."""
        chain, rank = [], stuck[0]
        while not rank.ended and rank not in chain:
            chain.append(rank)
            rank = self.ranks[rank.waits.lacks()[0]]
        circle = chain[chain.index(rank):] if rank in chain else chain
        lines = [f"deadlock: {len(stuck)} of {len(self.ranks)} ranks wait for ever"]
        lines += [f"  {r}" for r in circle[:most]]
        if len(circle) > most:
            lines.append(f"  ... {len(circle) - most} more in this chain")
        lines.append(f"  which is where this circle closes: rank {rank.number}" if rank in chain
                     else f"  rank {rank.number} has ended")
        rest = [r for r in stuck if r not in circle]
        lines += [f"  {r}" for r in rest[:most]]
        return "\n".join(lines + ([f"  ... and {len(rest) - most} more"] * (len(rest) > most)))

    def close(self) -> None:
        """End every rank that is still inside its program, so that its `finally` parts run."""
        for rank in self.ranks:
            if not rank.ended:
                rank.greenlet.throw(GreenletExit)


def run(size: int, program: Callable, *, ranks_per_node: int | None = None, magnify: float = 1.0,
        cost=None, watch: Callable | None = None) -> World:
    """Run `program(comm)` on `size` simulated ranks and return their World.

    Each real byte stands for `magnify` bytes of the model. `cost` (see cost.py) gives the clocks;
    without it time stands still. `watch(source, dest, data, into)` sees each message just before
    it is copied; source and dest are of type Rank. Raises RankFailed or Deadlock.
    """
    from refimpl.simulate.comm import Comm  # comm.py builds on this file
    if size < 1:
        raise UsageError(f"{size} ranks cannot run anything: give at least 1")
    world = World(size, ranks_per_node, magnify, cost, watch)

    def body(rank, comm):
        rank.record = traffic()
        try:
            rank.result = program(comm)
        except Exception as error:
            world.failed = world.failed or (rank, error)
        rank.ended = True

    group, shared = tuple(range(size)), {"context": 0}
    for rank in world.ranks:
        comm = Comm(world, rank, group, rank.number, (), shared)
        rank.greenlet = greenlet(functools.partial(body, rank, comm))
        world.wake(rank, 0.0)
    try:
        world.loop()
    finally:
        world.close()
    return world

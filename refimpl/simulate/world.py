"""The world of simulated ranks: one greenlet each, switched only inside MPI calls, so every run of
the same program takes the same course. A message moves when both its ends are there (rendezvous):
one copy, no buffering, and a Send nobody receives is found out as the deadlock it may be on MPI.
"""
import collections
import functools
import heapq
import itertools
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from refimpl.collective.exchange import traffic
from refimpl.errors import UsageError
from refimpl.simulate.comm import Comm, Group


class Deadlock(RuntimeError):
    """Ranks wait for each other, or for one that has ended; the message says who for whom."""


class RankFailed(RuntimeError):
    """An exception ended one rank, and with it the run; `__cause__` is that exception."""


class Rank:
    """What one simulated rank is doing."""
    __slots__ = ("number", "clock", "ended", "waits", "sent", "result", "greenlet", "record")

    def __init__(self, number: int):
        self.number, self.clock, self.ended = number, 0.0, False
        self.waits: Any = None  # the Request or Meeting that it sleeps on
        self.sent = collections.defaultdict(lambda: [0, 0.0])  # phase -> messages, modelled bytes
        self.record: Any = None  # exchange's notes: .waiting[1:3] is (phase, round)

    def __str__(self):
        note = self.record and self.record.waiting
        where = f" ({note[1]}, round {note[2]})" if note else ""
        return f"rank {self.number}{where} waits {self.waits}"


class World:
    """All ranks of a run; `run` makes it, and returns it when every rank has ended."""

    def __init__(self, size, ranks_per_node, magnify, cost, watch):
        self.ranks, self.ranks_per_node = [Rank(n) for n in range(size)], ranks_per_node or size
        self.magnify, self.cost, self.watch = magnify, cost, watch
        # messages that lack their other end: (communicator, source, dest, tag) -> requests
        self.pending: dict = collections.defaultdict(collections.deque)
        self.clocks: list[float] = []  # heap of the moments at which ranks can go on,
        self.ready: dict[float, list] = {}  # and those ranks: who woke last goes first, caches are warm
        self.contexts = itertools.count()  # numbers of communicators
        self.hub, self.failed = getcurrent(), None
        self.results: list = []  # what the program returned, by rank

    def sent(self, rank: int, phase: str | None = None) -> tuple[int, float]:
        """(messages, modelled bytes) that `rank` sent, in one phase or in all."""
        rows = [(0, 0), *(v for k, v in self.ranks[rank].sent.items() if phase in (None, k))]
        return tuple(map(sum, zip(*rows)))

    def wake(self, rank: Rank, clock: float) -> None:
        """Let a rank run again when all ranks with an earlier clock have had their turn."""
        if clock not in self.ready:
            self.ready[clock] = []
            heapq.heappush(self.clocks, clock)
        self.ready[clock].append(rank)

    def sleep(self, rank: Rank, why) -> None:
        """Let the others run until something wakes `rank`."""
        rank.waits = why
        if (following := self.next()) is not rank.greenlet:
            following.switch()

    def next(self) -> greenlet:
        """The rank whose turn it is, its clock set; the hub if there is none or it never ran:
        a rank started by another one would sit on top of its stack."""
        if not self.clocks:
            return self.hub
        woken = self.ready[clock := self.clocks[0]]
        if not (rank := woken[-1]).greenlet and getcurrent() is not self.hub:
            return self.hub
        woken.pop()
        if not woken:
            del self.ready[heapq.heappop(self.clocks)]
        rank.clock = clock
        return rank.greenlet

    def loop(self) -> None:
        """Run until nobody can: control comes back here whenever a rank ends."""
        while self.clocks and not self.failed:
            self.next().switch()
        if self.failed:
            number, error = self.failed[0].number, self.failed[1]
            raise RankFailed(f"rank {number} of {len(self.ranks)}: {type(error).__name__}: {error}"
                             ) from error
        if stuck := [r for r in self.ranks if not r.ended]:
            raise Deadlock(self.who_waits(stuck))

    def who_waits(self, stuck: list[Rank], most: int = 16) -> str:
        """The report of a deadlock: from the first rank along the chain of who waits for whom."""
        chain, rank = {}, stuck[0]
        while not rank.ended and rank not in chain:
            chain[rank] = None
            rank = self.ranks[rank.waits.lacks()[0]]
        lines = [f"deadlock: {len(stuck)} of {len(self.ranks)} ranks wait for ever; rank "
                 f"{rank.number} {'has ended' if rank.ended else 'closes the circle'}",
                 *(f"  {r}" for r in {**chain, **dict.fromkeys(stuck)})]
        return "\n".join(lines[:most] + [f"  ... and {len(lines) - most} more"][:len(lines) > most])


def run(size: int, program: Callable, *, ranks_per_node: int | None = None, magnify: float = 1.0,
        cost=None, watch: Callable | None = None) -> World:
    """Run `program(comm)` on `size` simulated ranks and return their World.

    Each real byte stands for `magnify` bytes of the model. `cost` (see cost.py) gives the clocks;
    without it time stands still. `watch(source, dest, data, into)` sees each message just before
    it is copied; source and dest are of type Rank. Raises RankFailed or Deadlock.
    """
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

    everyone = Group(world, list(range(size)))
    for rank in reversed(world.ranks):  # rank 0 goes first
        rank.greenlet = greenlet(functools.partial(
            body, rank, Comm(world, rank, everyone, rank.number)))
        world.wake(rank, 0.0)
    try:
        world.loop()
    finally:  # ranks that are still inside their program: its `finally` parts run
        for rank in world.ranks:
            if not rank.ended:
                rank.greenlet.throw(GreenletExit)
    world.results = [rank.result for rank in world.ranks]
    return world

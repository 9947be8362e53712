"""A communicator with mpi4py's buffer methods, as far as collectives use them, for simulated ranks.

Buffers are NumPy or CuPy arrays; data moves by slice assignment only, so it stays where it is.
"""
import functools
import operator

import numpy as np


class Request:
    """One end of a message: what Isend and Irecv return, and what Wait waits for."""
    __slots__ = ("comm", "sends", "peer", "tag", "data", "done", "work", "asleep")

    def __init__(self, comm, sends, peer, tag, data):
        self.comm, self.sends, self.peer, self.tag, self.data = comm, sends, peer, tag, data
        self.done, self.work = None, 0.0  # clock when complete; seconds to deal with what came
        self.asleep = False  # its rank waits for it

    def Wait(self) -> bool:
        """Block until the buffer may be used again; ranks that are behind that moment go first."""
        me, world = self.comm.me, self.comm.world
        if self.done is None:
            self.asleep = True
            world.sleep(me, self)
        elif self.work or self.done > me.clock:
            world.wake(me, max(me.clock, self.done) + self.work)
            world.sleep(me, self)
        return True

    def lacks(self) -> list[int]:
        return [self.comm.group.ranks[self.peer]]

    def __str__(self):
        return (f"{'to send to' if self.sends else 'for a message from'} rank {self.lacks()[0]}, "
                f"tag {self.tag}")


class Group:
    """What the ranks of one communicator share: their numbers in the world, and their calls."""

    def __init__(self, world, ranks):
        self.ranks, self.context = ranks, next(world.contexts)
        self.meetings: dict[int, Meeting] = {}  # number of a collective call -> that call


class Meeting:
    """A collective call in progress: what each rank brought, until the last one arrives."""

    def __init__(self, name: str, group: Group, first: int):
        self.name, self.group, self.first, self.brought = name, group, first, {}
        self.results: list = []

    def lacks(self) -> list[int]:
        return [w for r, w in enumerate(self.group.ranks) if r not in self.brought]

    def __str__(self):
        late = self.lacks()
        return f"in {self.name} for ranks {late[:8]}{' ...' if len(late) > 8 else ''}"


class Comm:
    """One rank's view of one communicator; ranks inside it are numbered as MPI numbers them."""

    def __init__(self, world, me, group: Group, rank: int, dims=()):
        self.world, self.me, self.group, self.rank, self.dims = world, me, group, rank, dims
        self.size, self.context, self.calls = len(group.ranks), group.context, 0

    def Free(self):
        pass

    def post(self, sends: bool, data, peer: int, tag: int) -> Request:
        """Half a message; if its other half is waiting, it moves now."""
        assert 0 <= peer < self.size, f"peer {peer} is not among ranks 0 to {self.size - 1}"
        mine = Request(self, sends, peer, tag, data)
        source, dest = (self.rank, peer) if sends else (peer, self.rank)
        queue = self.world.pending[self.context, source, dest, tag]
        if not queue or queue[0].sends == sends:
            queue.append(mine)
        elif sends:
            move(mine, queue.popleft())
        else:
            move(queue.popleft(), mine)
        return mine

    def Isend(self, buf, dest, tag=0):
        return self.post(True, buf, dest, tag)

    def Irecv(self, buf, source, tag=0):
        return self.post(False, buf, source, tag)

    def Send(self, buf, dest, tag=0):
        self.post(True, buf, dest, tag).Wait()

    def Recv(self, buf, source, tag=0):
        self.post(False, buf, source, tag).Wait()

    def Sendrecv(self, sendbuf, dest, sendtag, recvbuf, source, recvtag):
        incoming = self.post(False, recvbuf, source, recvtag)
        self.post(True, sendbuf, dest, sendtag).Wait()
        incoming.Wait()

    def meet(self, name: str, value, combine):
        """Bring `value`, wait for all ranks, return this rank's entry of `combine(values)`."""
        meetings, number, world = self.group.meetings, self.calls, self.world
        self.calls += 1
        if number not in meetings:
            meetings[number] = Meeting(name, self.group, self.rank)
        meeting = meetings[number]
        if meeting.name != name:
            raise RuntimeError(f"calls {name} while rank {self.group.ranks[meeting.first]} calls "
                               f"{meeting.name}")
        meeting.brought[self.rank] = value
        if len(meeting.brought) < self.size:
            world.sleep(self.me, meeting)
        else:
            del meetings[number]
            meeting.results = combine([meeting.brought[r] for r in range(self.size)])
            ranks = [world.ranks[w] for w in self.group.ranks]
            self.me.clock = max(r.clock for r in ranks)
            for rank in ranks:
                if rank is not self.me:
                    world.wake(rank, self.me.clock)
        return meeting.results[self.rank]

    def Barrier(self):
        self.meet("Barrier", None, lambda values: values)

    def Bcast(self, buf, root=0):
        buf.reshape(-1)[...] = self.meet(f"Bcast(root={root})", buf.reshape(-1),
                                   lambda values: [values[root].copy()] * self.size)

    def Allgather(self, sendbuf, recvbuf):
        out = recvbuf.reshape(-1)

        def combine(values):
            n, joined = len(values[0]), out.copy()
            for r, value in enumerate(values):
                joined[r * n:(r + 1) * n] = value
            return [joined] * self.size
        out[...] = self.meet("Allgather", sendbuf.reshape(-1).copy(), combine)

    def Allreduce(self, sendbuf, recvbuf):
        """The sum in rank order; sendbuf may be MPI.IN_PLACE."""
        mine = (sendbuf if hasattr(sendbuf, "dtype") else recvbuf).reshape(-1)
        recvbuf.reshape(-1)[...] = self.meet("Allreduce", mine.copy(), lambda values:
                                       [functools.reduce(operator.add, values)] * self.size)

    def Split(self, color=0, key=0):
        """The ranks of equal color, in order of (key, rank)."""
        def combine(values):
            groups, places = {}, {}
            for _, r, c in sorted((k, r, c) for r, (c, k) in enumerate(values)):
                if c not in groups:
                    groups[c] = Group(self.world, [])
                group = groups[c]
                places[r] = group, len(group.ranks)
                group.ranks.append(self.group.ranks[r])
            return places
        return Comm(self.world, self.me, *self.meet("Split", (color, key), combine))

    def Split_type(self, split_type, key=0):
        """The ranks of one simulated node: blocks of `ranks_per_node` world ranks."""
        return self.Split(self.me.number // self.world.ranks_per_node, key)

    def Dup(self):
        return self.Create_cart(self.dims) if self.dims else self.Split()

    def Create_cart(self, dims, periods=None, reorder=False):
        grid = self.Split()
        grid.dims = dims
        return grid

    def Sub(self, remain_dims):
        """The slice of the grid through this rank along the dimensions that remain."""
        coords = np.unravel_index(self.rank, self.dims)
        line = self.Split(tuple(c for c, keep in zip(coords, remain_dims) if not keep), self.rank)
        line.dims = [d for d, keep in zip(self.dims, remain_dims) if keep]
        return line


def move(send: Request, receive: Request) -> None:
    """Copy the message, count it, and set the clocks of both ends."""
    data, into, world = send.data, receive.data, send.comm.world
    here, there, n = send.comm.me, receive.comm.me, len(data)
    if n != len(into):
        into = into[:n]
    if n != len(into) or data.dtype != into.dtype:
        raise ValueError(
            f"rank {here.number} sends {n} x {data.dtype} to rank {there.number}, which "
            f"receives {len(into)} x {into.dtype} (tag {send.tag})")
    if world.watch:
        world.watch(here, there, data, into)
    into[...] = data
    nbytes, waiting = data.nbytes * world.magnify, here.record.waiting
    phase = waiting[1] if waiting else ""
    try:
        count = here.sent[phase]
    except KeyError:
        count = here.sent[phase] = [0, 0.0]
    count[0] += 1
    count[1] += nbytes
    if world.cost:
        now = max(here.clock, there.clock)
        send.done, receive.done, receive.work = world.cost.transfer(
            here.number, there.number, nbytes, now, phase)
    else:
        send.done = receive.done = 0.0
    if send.asleep:
        world.wake(here, send.done)
    if receive.asleep:
        world.wake(there, receive.done + receive.work)

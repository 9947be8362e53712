"""A communicator with mpi4py's buffer methods, as far as collectives use them, for simulated ranks.

Buffers are NumPy or CuPy arrays; data moves by slice assignment only, so it stays where it is.
"""
import numpy as np


class Request:
    """One end of a message: what Isend and Irecv return, and what Wait waits for."""
    __slots__ = ("comm", "sends", "peer", "tag", "data", "done", "work", "asleep")

    def __init__(self, comm, sends, peer, tag, data):
        self.comm, self.sends, self.peer, self.tag, self.data = comm, sends, peer, tag, data
        self.done = self.asleep = None  # clock when complete; does its rank wait for it?
        self.work = 0.0  # seconds to deal with what came

    def Wait(self) -> bool:
        """Block until the buffer may be used again; ranks that are behind that moment go first."""
        comm = self.comm
        if self.done is None:
            self.asleep = True
            comm.world.sleep(comm.me, self)
        elif self.work or self.done > comm.me.clock:
            comm.world.wake(comm.me, max(comm.me.clock, self.done) + self.work)
            comm.world.sleep(comm.me, self)
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
        self.name, self.group, self.first, self.brought, self.results = name, group, first, {}, []

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
        mine, rank = Request(self, sends, peer, tag, data), self.rank
        queue = self.world.pending[(self.context, rank, peer, tag) if sends else
                                   (self.context, peer, rank, tag)]
        if not queue or queue[0].sends == sends:
            queue.append(mine)
        else:
            move(*((mine, queue.popleft()) if sends else (queue.popleft(), mine)))
        return mine

    def Isend(self, buf, dest, tag=0):
        return self.post(True, buf, dest, tag)

    def Irecv(self, buf, source, tag=0):
        return self.post(False, buf, source, tag)

    def meet(self, name: str, value, combine):
        """Bring `value`, wait for all ranks, return this rank's entry of `combine(values)`."""
        meetings, number, world = self.group.meetings, self.calls, self.world
        self.calls += 1
        meeting = meetings.setdefault(number, Meeting(name, self.group, self.rank))
        if meeting.name != name:
            first = self.group.ranks[meeting.first]
            raise RuntimeError(f"calls {name} while rank {first} calls {meeting.name}")
        meeting.brought[self.rank] = value
        if len(meeting.brought) == self.size:  # the last one, who wakes the others and itself
            meeting.results = combine([meeting.brought[r] for r in range(self.size)])
            ranks = [world.ranks[w] for w in meetings.pop(number).group.ranks]
            latest = max(rank.clock for rank in ranks)
            for rank in ranks:
                world.wake(rank, latest)
        world.sleep(self.me, meeting)
        return meeting.results[self.rank]

    def Barrier(self):
        self.meet("Barrier", None, lambda values: values)

    def Bcast(self, buf, root=0):
        buf.reshape(-1)[...] = self.meet(f"Bcast(root={root})", buf.reshape(-1),
                                   lambda values: [values[root].copy()] * self.size)

    def Allgather(self, sendbuf, recvbuf):
        n, out = sendbuf.size, recvbuf.reshape(-1)

        def combine(values):
            joined = out.copy()
            for r, value in enumerate(values):
                joined[r * n:(r + 1) * n] = value
            return [joined] * self.size
        out[...] = self.meet("Allgather", sendbuf.reshape(-1).copy(), combine)

    def Split(self, color=0, key=0):
        """The ranks of equal color, in order of (key, rank)."""
        def combine(values):
            groups, places = {}, {}
            for _, r, c in sorted((k, r, c) for r, (c, k) in enumerate(values)):
                group = groups[c] = groups.get(c) or Group(self.world, [])
                places[r] = group, len(group.ranks)
                group.ranks.append(self.group.ranks[r])
            return places
        return Comm(self.world, self.me, *self.meet("Split", (color, key), combine))

    def Split_type(self, split_type, key=0):
        """The ranks of one simulated node: blocks of `ranks_per_node` world ranks."""
        return self.Split(self.me.number // self.world.ranks_per_node, key)

    def Dup(self):
        return self.Create_cart(self.dims)

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
    nbytes, note = data.nbytes * world.magnify, here.record.waiting
    count = here.sent[note[1] if note else ""]
    count[0] += 1
    count[1] += nbytes
    if world.cost:
        send.done, receive.done, receive.work = world.cost.transfer(
            here.number, there.number, nbytes, max(here.clock, there.clock), note)
    else:
        send.done = receive.done = 0.0
    if send.asleep:
        world.wake(here, send.done)
    if receive.asleep:
        world.wake(there, receive.done + receive.work)

"""A communicator with mpi4py's buffer methods, as far as collectives use them, for simulated ranks.

Buffers are NumPy or CuPy arrays, alone or as [array, (count,) type]; data moves by slice
assignment only, so it stays where it is.
"""
import math

from refimpl.simulate.world import Rank, World, run

__all__ = ["Comm", "Request", "run"]


def array_of(spec):
    """The flat array behind a buffer argument."""
    if not isinstance(spec, (list, tuple)):
        return spec if spec.ndim == 1 else spec.reshape(-1)
    flat = spec[0].reshape(-1)
    count = next((x for x in spec[1:] if isinstance(x, int)), None)
    return flat if count is None else flat[:count]


class Request:
    """One end of a message: what Isend and Irecv return, and what Wait waits for."""
    __slots__ = ("comm", "sends", "peer", "tag", "data", "done", "work", "asleep")

    def __init__(self, comm, sends, peer, tag, data):
        self.comm, self.sends, self.peer, self.tag, self.data = comm, sends, peer, tag, data
        self.done, self.work = None, 0.0  # clock when complete; seconds to deal with what came
        self.asleep = False

    def Wait(self, status=None) -> bool:
        """Block until the buffer may be used again."""
        me = self.comm.me
        if self.done is None:
            self.asleep = True
            self.comm.world.block(me, self)
        elif self.work or self.done > me.clock:  # ranks that are behind this moment go first
            self.comm.world.wake(me, max(me.clock, self.done) + self.work)
            self.comm.world.block(me, self)
        return True

    def lacks(self) -> list[int]:
        return [self.comm.group[self.peer]]

    def __str__(self):
        return (f"waits {'to send to' if self.sends else 'for a message from'} "
                f"rank {self.comm.group[self.peer]}, tag {self.tag}")


class Meeting:
    """A collective call in progress: what each rank brought, until the last one arrives."""

    def __init__(self, comm, name):
        self.comm, self.name, self.first = comm, name, comm.rank
        self.brought, self.results = {}, None

    def lacks(self) -> list[int]:
        return [w for r, w in enumerate(self.comm.group) if r not in self.brought]

    def __str__(self):
        late = self.lacks()
        return f"waits in {self.name} for ranks {late[:8]}{' ...' if len(late) > 8 else ''}"


class Comm:
    """One rank's view of one communicator; ranks inside it are numbered as MPI numbers them."""

    def __init__(self, world: World, me: Rank, group, rank: int, path: tuple, shared: dict,
                 dims=()):
        self.world, self.me, self.group, self.rank = world, me, group, rank
        self.size, self.path, self.dims = len(group), path, list(dims)
        self.meetings = shared  # number of the collective call -> Meeting, same object on all ranks
        self.calls, self.context, self.pending = 0, shared["context"], world.pending

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Get_coords(self, rank):
        coords = []
        for dim in reversed(self.dims):
            rank, c = divmod(rank, dim)
            coords.insert(0, c)
        return coords

    def Free(self):
        pass

    def post(self, sends: bool, spec, peer: int, tag: int) -> Request:
        """Half a message; if its other half is waiting, it moves now."""
        if not 0 <= peer < self.size:
            raise ValueError(f"peer {peer} is not among ranks 0 to {self.size - 1}")
        mine = Request(self, sends, peer, tag, array_of(spec))
        key = (self.context, self.rank, peer, tag) if sends else (self.context, peer, self.rank, tag)
        try:
            queue = self.pending[key]
        except KeyError:
            queue = self.pending[key] = []
        if queue and queue[0].sends != sends:
            other = queue.pop(0)
            move(mine, other) if sends else move(other, mine)
        else:
            queue.append(mine)
        return mine

    def Isend(self, buf, dest, tag=0):
        return self.post(True, buf, dest, tag)

    def Irecv(self, buf, source, tag=0):
        return self.post(False, buf, source, tag)

    def Send(self, buf, dest, tag=0):
        self.post(True, buf, dest, tag).Wait()

    def Recv(self, buf, source, tag=0, status=None):
        self.post(False, buf, source, tag).Wait()

    def Sendrecv(self, sendbuf, dest, sendtag=0, recvbuf=None, source=0, recvtag=0, status=None):
        incoming = self.post(False, recvbuf, source, recvtag)
        self.post(True, sendbuf, dest, sendtag).Wait()
        incoming.Wait()

    def meet(self, name: str, value, combine):
        """Bring `value`, wait for all ranks, return this rank's entry of `combine(values)`."""
        number, self.calls = self.calls, self.calls + 1
        meeting = self.meetings.setdefault(number, Meeting(self, name))
        if meeting.name != name:
            raise RuntimeError(f"calls {name} while rank {self.group[meeting.first]} calls "
                               f"{meeting.name}")
        meeting.brought[self.rank] = value
        if len(meeting.brought) < self.size:
            self.world.block(self.me, meeting)
        else:
            del self.meetings[number]
            meeting.results = combine([meeting.brought[r] for r in range(self.size)])
            late = max(self.world.ranks[w].clock for w in self.group)
            if self.world.cost:
                late += self.world.cost.meeting(self.size)
            for w in self.group:
                if w != self.me.number:
                    self.world.wake(self.world.ranks[w], late)
            self.me.clock = late
        return meeting.results[self.rank]

    def Barrier(self):
        self.meet("Barrier", None, lambda values: values)

    def Bcast(self, buf, root=0):
        array = array_of(buf)
        array[...] = self.meet(f"Bcast(root={root})", array,
                               lambda values: [values[root].copy()] * len(values))

    def Allgather(self, sendbuf, recvbuf):
        out = array_of(recvbuf)

        def combine(values):
            n, joined = len(values[0]), out.copy()
            for r, value in enumerate(values):
                joined[r * n:(r + 1) * n] = value
            return [joined] * len(values)
        out[...] = self.meet("Allgather", array_of(sendbuf).copy(), combine)

    def Allreduce(self, sendbuf, recvbuf, op=None):
        """Sum in rank order, or MPI.MIN or MPI.MAX; sendbuf may be MPI.IN_PLACE."""
        out = array_of(recvbuf)
        mine = array_of(sendbuf) if hasattr(sendbuf, "dtype") else out
        which = op(2, 3) if op is not None else 5  # an mpi4py operation can be called

        def combine(values):
            total = values[0].copy()
            for value in values[1:]:
                if which == 5:
                    total += value
                else:
                    better = value < total if which == 2 else value > total
                    total[better] = value[better]
            return [total] * len(values)
        out[...] = self.meet("Allreduce", mine.copy(), combine)

    def Split(self, color=0, key=0):
        """The ranks of equal color, in order of (key, rank)."""
        number = self.calls

        def combine(values):
            made, out = {}, []
            for c in sorted({c for c, _ in values}):
                members = sorted((r for r, v in enumerate(values) if v[0] == c),
                                 key=lambda r: (values[r][1], r))
                self.world.contexts += 1
                made[c] = (members, tuple(self.group[r] for r in members),
                           {"context": self.world.contexts})
            where = {r: (i, *made[c][1:]) for c in made for i, r in enumerate(made[c][0])}
            return [where[r] for r in range(len(values))]
        rank, group, shared = self.meet("Split", (color, key), combine)
        return Comm(self.world, self.me, group, rank, (*self.path, number, color), shared)

    def Split_type(self, split_type=0, key=0, info=None):
        """The ranks of one simulated node: blocks of `ranks_per_node` world ranks."""
        return self.Split(self.me.number // self.world.ranks_per_node, key)

    def Dup(self, info=None):
        return self.Create_cart(self.dims) if self.dims else self.Split()

    def Create_cart(self, dims, periods=None, reorder=False):
        if math.prod(dims) != self.size:
            raise ValueError(f"a grid {list(dims)} does not hold {self.size} ranks")
        grid = self.Split()
        grid.dims = list(dims)
        return grid

    def Sub(self, remain_dims):
        """The slice of the grid through this rank along the dimensions that remain."""
        dropped = tuple(c for c, keep in zip(self.Get_coords(self.rank), remain_dims) if not keep)
        line = self.Split(dropped, self.rank)
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
        send.done, receive.done, receive.work = world.cost.transfer(here, there, nbytes, now)
    else:
        send.done = receive.done = 0.0
    if send.asleep:
        world.wake(here, send.done)
    if receive.asleep:
        world.wake(there, receive.done + receive.work)

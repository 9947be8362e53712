"""The one function that moves data between ranks, and what it writes down about it.

                   segment k-1          segment k            segment k+1
    send     ..... Isend ............. Isend ............. Isend .....
    receive  ..... Irecv ............. Irecv ............. Irecv .....
    add      ....... wait k-2, add ..... wait k-1, add ..... wait k, add ...

While one segment is added the next one is already under way. Two scratch segments per direction are
all the memory beyond the buffer.
"""
import contextlib
import contextvars
import time
import weakref

import numpy

from . import buffers

SEGMENT = 1 << 20  # bytes of a segment: with more ranks than cores each wait costs a switch
LIMIT = 1 << 30    # bytes of any message (from 2^31 on Open MPI 5.0 refuses)


class Traffic:
    """What one rank (or one of its threads) has sent, per phase, and what it waits for just now."""

    def __init__(self):
        self.sent: dict[str, list[int]] = {}  # phase -> [messages, bytes]; a message may be segmented
        self.waiting = None   # (since, phase, round, comm, to, source), for the watchdog
        self.timeline = None  # or a list, filled with (phase, round, to, source, bytes, start, end)
        self.scratch = {}
        everyone.add(self)

    def count(self, phase: str, nbytes: int) -> None:
        try:
            entry = self.sent[phase]
        except KeyError:
            entry = self.sent[phase] = [0, 0]
        entry[0] += 1
        entry[1] += nbytes


everyone: "weakref.WeakSet[Traffic]" = weakref.WeakSet()
_mine: contextvars.ContextVar = contextvars.ContextVar("traffic")


def traffic() -> Traffic:
    """The record of the calling thread (or of the calling simulated rank)."""
    try:
        return _mine.get()
    except LookupError:
        _mine.set(record := Traffic())
        return record


@contextlib.contextmanager
def waiting(phase: str, comm=None):
    """Tell the watchdog that what happens inside may block until the other ranks come."""
    record = traffic()
    before, record.waiting = record.waiting, (time.monotonic(), phase, 0, comm, None, None)
    yield
    record.waiting = before


def exchange(comm, send, to, recv, source, *, add=False, wire=None, phase="", turn=0) -> None:
    """Send the array `send` to rank `to` while `recv` is received from rank `source`.

    add: `recv` += what arrives, otherwise it is replaced. wire: 16-bit type on the way. Either side
    may be None. Returns when `send` may be changed again and `recv` is complete (for a device array:
    complete in the order of the current stream).
    """
    record, start = traffic(), time.monotonic()
    record.waiting = (start, phase, turn, comm, to, source)
    short = min(SEGMENT, LIMIT)
    if (send is None or send.nbytes <= short) and (recv is None or recv.nbytes <= short):
        _whole(comm, send, to, recv, source, add, wire, record.scratch)
    else:
        _in_segments(comm, send, to, recv, source, add, wire, record.scratch)
    record.waiting = None
    sent = 0 if send is None else send.size * (2 if wire else send.itemsize)
    if send is not None:
        record.count(phase, sent)
    if record.timeline is not None:
        record.timeline.append((phase, turn, to, source, sent, start, time.monotonic()))


def library_allreduce(buffer, comm) -> None:
    """MPI's own sum, in messages below the limit; it counts as one message of the whole buffer."""
    from mpi4py import MPI
    record = traffic()
    for piece in _cut(buffer, SEGMENT if buffers.staged(buffer) else LIMIT):
        where = _outgoing(piece, None, record.scratch, 0)
        buffers.synchronise(piece)
        with waiting("MPI_Allreduce", comm):
            comm.Allreduce(MPI.IN_PLACE, where)
        if where is not piece:
            buffers.land(where, piece, False, None)
    record.count("MPI_Allreduce", buffer.nbytes)


def _whole(comm, send, to, recv, source, add, wire, scratch):
    """One message each way."""
    outgoing = incoming = None
    if send is not None:
        outgoing = _outgoing(send, wire, scratch, 0)
    if recv is not None:
        incoming = _incoming(recv, add, wire, scratch, 0)
    buffers.synchronise(recv if send is None else send)
    if send is None:
        comm.Irecv(_words(incoming), source=source).Wait()
    elif recv is None:
        comm.Isend(_words(outgoing), dest=to).Wait()
    else:
        comm.Sendrecv(_words(outgoing), to, 0, _words(incoming), source, 0)
    if recv is not None and incoming is not recv:
        buffers.land(incoming, recv, add, wire)


def _in_segments(comm, send, to, recv, source, add, wire, scratch):
    """The same in segments, as drawn above."""
    outgoing, incoming = _cut(send, SEGMENT), _cut(recv, SEGMENT)
    leaving, arriving = [], None
    for k in range(max(len(outgoing), len(incoming)) + 1):
        if len(leaving) == 2:
            leaving.pop(0).Wait()  # its scratch is free again
        out = _outgoing(outgoing[k], wire, scratch, k) if k < len(outgoing) else None
        slot = _incoming(incoming[k], add, wire, scratch, k) if k < len(incoming) else None
        buffers.synchronise(recv if send is None else send)
        request = comm.Irecv(_words(slot), source=source) if slot is not None else None
        if out is not None:
            leaving.append(comm.Isend(_words(out), dest=to))
        if arriving:
            arriving[0].Wait()
            if arriving[1] is not incoming[k - 1]:
                buffers.land(arriving[1], incoming[k - 1], add, wire)
        arriving = (request, slot) if request is not None else None
    for request in leaving:
        request.Wait()


def _cut(array, most) -> list:
    """Views of at most `most` bytes; both sides of a message cut alike, an empty array is one."""
    if array is None:
        return []
    step = max(1, min(most, LIMIT) // array.itemsize)
    return [array[i:i + step] for i in range(0, max(1, array.size), step)]


def _outgoing(segment, wire, scratch, k):
    """What MPI sends for this segment: itself, or its packed form in scratch."""
    if not wire and not buffers.staged(segment):
        return segment
    out = _scratch(segment, wire, scratch, "out", k)
    buffers.pack(segment, out, wire)
    return out


def _incoming(segment, add, wire, scratch, k):
    """Where MPI puts what arrives for this segment."""
    if not add and not wire and not buffers.staged(segment):
        return segment
    return _scratch(segment, wire, scratch, "in", k)


def _scratch(segment, wire, scratch, direction, k):
    dtype = buffers.WIRES[wire] if wire else segment.dtype
    key = direction, k % 2, dtype, buffers.module(segment), buffers.staged(segment)
    if key not in scratch or scratch[key].size < segment.size:
        scratch[key] = buffers.empty(segment, segment.size, dtype)
    return scratch[key][:segment.size]


def _words(array):
    """MPI knows no half type: its bits travel as 16-bit words."""
    return array.view(numpy.uint16) if array.dtype == numpy.float16 else array

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
import itertools
import time
import weakref

import numpy

from . import buffers

SEGMENT = 1 << 20  # bytes, the longest message: with more ranks than cores each wait costs a switch


def segment(nbytes: int) -> int:
    """Bytes of a chunk's segments: links must not run dry for long while the last one is added."""
    return SEGMENT if nbytes <= SEGMENT else min(SEGMENT, max(SEGMENT // 4, nbytes // 16))


class Traffic:
    """What one rank (or one of its threads) has sent, per phase, and what it waits for just now."""

    def __init__(self):
        self.sent: dict[str, list[int]] = {}  # phase -> [messages (cut or not), bytes]
        self.waiting = None   # (since, phase, round, comm, to, source), for the watchdog
        self.timeline = None  # or a list, filled with (phase, round, to, source, bytes, start, end)
        self.pause = 0.0      # or seconds of sleep between looks, beside a thread that computes
        self.kept = {}        # scratch
        everyone.add(self)

    def count(self, phase: str, nbytes: int) -> None:
        entry = self.sent.setdefault(phase, [0, 0])
        entry[0] += 1
        entry[1] += nbytes

    def scratch(self, segment, wire, direction: str, k: int):
        """Memory that MPI can use for `segment`; what segment k - 1 uses is left alone."""
        dtype = buffers.WIRES[wire] if wire else segment.dtype
        key = direction, k % 2, dtype, buffers.module(segment), buffers.staged(segment)
        if key not in self.kept or self.kept[key].size < segment.size:
            self.kept[key] = buffers.empty(segment, segment.size, dtype)
        return self.kept[key][:segment.size]

    def wait(self, request) -> None:
        while self.pause and not request.Test():  # MPI's own waiting may poll, on a core in use
            time.sleep(self.pause)
        request.Wait()

    def packed(self, segment, wire, k: int):
        """Scratch that holds `segment` as MPI can send it: in 16 bits, in host memory."""
        out = self.scratch(segment, wire, "out", k)
        buffers.pack(segment, out, wire)
        return out


everyone: "weakref.WeakSet[Traffic]" = weakref.WeakSet()
_mine: contextvars.ContextVar = contextvars.ContextVar("traffic")


def traffic() -> Traffic:
    """The record of the calling thread (or of the calling simulated rank)."""
    if not _mine.get(None):
        _mine.set(Traffic())
    return _mine.get()


@contextlib.contextmanager
def waiting(phase: str, comm):
    """Tell the watchdog that what happens inside may block until the other ranks come."""
    record = traffic()
    before, record.waiting = record.waiting, (time.monotonic(), phase, 0, comm, None, None)
    try:
        yield
    finally:
        record.waiting = before


def exchange(comm, send, to, recv, source, *, add=False, wire=None, phase="", turn=0) -> None:
    """Send `send` to rank `to` while `recv` is filled from rank `source`; either may be None.

    add: `recv` += what arrives, otherwise it is replaced. wire: 16-bit type on the way. On return
    `send` may be changed and `recv` is complete (on a device: in the order of the current stream).
    """
    record, start = traffic(), time.monotonic()
    record.waiting = (start, phase, turn, comm, to, source)
    direct = not wire and not buffers.staged(recv if send is None else send)
    outgoing = () if send is None else buffers.pieces(send, segment(send.nbytes))
    incoming = () if recv is None else buffers.pieces(recv, segment(recv.nbytes))  # cut alike
    leaving, arriving = [], None
    for k, (out, into) in enumerate(itertools.zip_longest(outgoing, incoming)):
        if len(leaving) == 2:
            record.wait(leaving.pop(0))  # its scratch is free again
        if out is not None:
            out = out if direct else record.packed(out, wire, k)
        if into is not None:
            landing = into if direct and not add else record.scratch(into, wire, "in", k)
        buffers.synchronise(recv if send is None else send)
        before, arriving = arriving, None
        if into is not None:
            arriving = comm.Irecv(_words(landing), source), landing, into
        if out is not None:
            leaving.append(comm.Isend(_words(out), to))
        if before:
            _finish(record, *before, add)
    if arriving:
        _finish(record, *arriving, add)
    for request in leaving:
        record.wait(request)
    record.waiting, sent = None, 0
    if send is not None:
        sent = send.size * (2 if wire else send.itemsize)
        record.count(phase, sent)
    if record.timeline is not None:
        record.timeline.append((phase, turn, to, source, sent, start, time.monotonic()))


def _finish(record, request, landing, into, add):
    record.wait(request)
    if landing is not into:
        buffers.land(landing, into, add)


def _words(array):
    """MPI knows no half type: its bits travel as 16-bit words."""
    return array.view(numpy.uint16) if array.dtype == numpy.float16 else array

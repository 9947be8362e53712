"""Agreement before data moves, and an end instead of a hang."""
import faulthandler
import hashlib
import os
import sys
import threading
import time
from collections import Counter

import numpy

from ..errors import UsageError
from .exchange import everyone, waiting


class Disagreement(UsageError):
    """The ranks do not do the same; raised with the same message on all of them."""


def agree(comm, **facts) -> None:
    """Raise Disagreement on all ranks of `comm` unless all gave the same facts. It names the first
    rank that differs from the majority (rank 0 where there is none) and both values. One message
    of 8 bytes per rank; the texts travel only where these differ."""
    text = "\n".join(str(value) for value in facts.values())
    sha = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8)
    digest, digests = numpy.frombuffer(sha.digest(), "u8"), numpy.empty(comm.size, "u8")
    with waiting("agreement", comm):
        comm.Allgather(digest, digests)
    if (digests == digests[0]).all():
        return
    for name, values in zip(facts, zip(*(t.split("\n") for t in gather_text(comm, text)))):
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            raise Disagreement(
                f"the ranks differ in {name}: rank {odd[0]} has {values[odd[0]]!r}, "
                f"rank {values.index(usual)} has {usual!r}"
                + (f" (so do not ranks {odd[1:8]})" if odd[1:] else "")
                + "; every rank must make the same calls in the same order")


def gather_text(comm, text: str) -> list[str]:
    """Every rank's text, on every rank; bytes of a path that are no text survive."""
    words, lengths = text.encode(errors="surrogateescape"), numpy.empty(comm.size, numpy.int64)
    with waiting("agreement", comm):
        comm.Allgather(numpy.array([len(words)]), lengths)
        texts = numpy.empty(comm.size, f"S{max(1, lengths.max())}")
        comm.Allgather(numpy.array([words], texts.dtype).view(numpy.uint8), texts.view(numpy.uint8))
    return [each.decode(errors="surrogateescape") for each in texts.tolist()]


class Watchdog:
    """Ends a job that hangs: `with Watchdog(300): ...` around all of a rank's work.

    A rank that waits longer than `seconds` prints its phase, round and peers, gives the others a
    second to print theirs, then calls Abort; the process ends even if Abort does not return.
    """

    def __init__(self, seconds: float):
        self.seconds, self._stop = seconds, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()  # a thread that still runs when the interpreter ends may crash it

    def _watch(self):
        while not self._stop.wait(min(0.2, self.seconds / 4)):
            for note in [record.waiting for record in list(everyone)]:
                if note and time.monotonic() - note[0] > self.seconds:
                    self._end(note)

    def _end(self, note):
        from mpi4py import MPI
        print(describe(note), file=sys.stderr, flush=True)
        time.sleep(1)
        # Abort may block, with the interpreter's lock: this ends the process from a C thread
        faulthandler.dump_traceback_later(5, exit=True, file=sys.__stderr__)
        MPI.COMM_WORLD.Abort(1)
        os._exit(1)


def describe(note) -> str:
    """Who waits for whom, in ranks of the world."""
    from mpi4py import MPI
    since, phase, turn, comm, to, source = note

    def names(ranks):
        return list(comm.Get_group().Translate_ranks(ranks, MPI.COMM_WORLD.Get_group()))
    whom = [f"for data from rank {names([source])[0]}"] if source is not None else []
    whom += [f"for rank {names([to])[0]} to take data"] if to is not None else []
    whom = " and ".join(whom) or f"for all of ranks {names(None)}"
    return (f"watchdog: rank {MPI.COMM_WORLD.rank} waits {time.monotonic() - since:.1f} s in phase "
            f"{phase!r}, round {turn}, {whom}; aborting. A rank that prints no such line does not "
            "wait: look there first, or allow more time")

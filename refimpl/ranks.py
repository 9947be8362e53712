"""How the ranks speak about small things: a common error, one rank's word for all."""
import contextlib
import json
import os
import signal
import stat

import numpy as np

from refimpl.collective.exchange import waiting
from refimpl.collective.guard import gather_text
from refimpl.errors import CannotWrite, UsageError


class StopSignal:
    """`asked` becomes true on SIGUSR1, SIGTERM or Ctrl-C; the run saves at its next step and ends."""
    signals = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.asked = False

    def listen(self, signals=signals) -> None:
        """Again after MPI has started: some MPIs take signals for themselves."""
        for number in signals:
            signal.signal(number, self._hear)

    def _hear(self, number, frame) -> None:
        self.asked = True


def everywhere(comm, call):
    """call() on every rank; where any rank meets a UsageError, all ranks raise the first one."""
    problem, result = "", None
    try:
        result = call()
    except UsageError as error:
        problem = str(error)
    texts = gather_text(comm, problem)
    failed = [rank for rank, text in enumerate(texts) if text]
    if failed:
        alike = len(failed) == comm.size and len(set(texts)) == 1
        raise UsageError(texts[0] if alike else f"rank {failed[0]}: {texts[failed[0]]}")
    return result


def writable(path: str, setting: str, mark: bytes):
    """The file, opened for bytes, as it is: who writes, cuts it then. UsageError where it cannot be
    written, before any training, or holds something else than such a file, which begins with `mark`."""
    if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        raise UsageError(f"{setting} {path}: a pipe, which would wait for a reader; give a file")
    try:
        if os.path.isfile(path):
            with open(path, "rb") as old:
                head = old.read(128)
            if head and mark not in head:
                raise UsageError(f"{setting} {path}: holds something else; give a new file")
        open(path, "ab").close()
        return open(path, "r+b")
    except OSError as error:
        raise UsageError(f"{setting} {path}: {error.strerror or error}; give a file in a folder that "
                         "exists and may be written") from None


def cut(file) -> None:
    """What an older file has from here on goes; a device has nothing."""
    if os.path.isfile(file.name):
        file.truncate()


@contextlib.contextmanager
def writing(path):
    """Around writing on an open file: a full disk is told with path and cure."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"{path} could not be written on: {error.strerror or error}; make room, or "
                          "give another path") from None


def tell(comm, value=None):
    """Rank 0's `value` (of JSON's types) on every rank."""
    words = np.frombuffer(json.dumps(value).encode(), np.uint8).copy() if comm.rank == 0 else None
    length = np.array([len(words) if comm.rank == 0 else 0])
    with waiting("word from rank 0", comm):
        comm.Bcast(length, root=0)
        if comm.rank:
            words = np.empty(int(length[0]), np.uint8)
        comm.Bcast(words, root=0)
    return json.loads(words.tobytes())

"""Agreement before data moves, and an end instead of a hang."""
import hashlib
from collections import Counter

import numpy

from ..errors import UsageError


class Disagreement(UsageError):
    """The ranks do not do the same; raised with the same message on all of them."""


def agree(comm, **facts) -> None:
    """Return if every rank of `comm` gave the same facts, otherwise raise Disagreement on all.

    One message of 8 bytes per rank; the texts travel only where these differ. The message names
    the first rank that differs from the majority (rank 0 where there is none) and both values.
    """
    text = "\n".join(str(value) for value in facts.values()).encode()
    digest = numpy.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), numpy.uint64)
    digests = numpy.empty(comm.size, numpy.uint64)
    comm.Allgather(digest, digests)
    if (digests == digests[0]).all():
        return
    for name, values in zip(facts, _texts(comm, text)):
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            raise Disagreement(
                f"the ranks differ in {name}: rank {odd[0]} has {values[odd[0]]!r}, "
                f"rank {values.index(usual)} has {usual!r}"
                + (f" (so do not ranks {odd[1:8]})" if odd[1:] else "")
                + "; every rank must make the same calls in the same order")


def _texts(comm, text: bytes) -> list[tuple[str, ...]]:
    """For each fact, its value on every rank."""
    lengths = numpy.empty(comm.size, numpy.int64)
    comm.Allgather(numpy.array([len(text)]), lengths)
    padded = numpy.frombuffer(text.ljust(int(lengths.max()), b"\0"), numpy.uint8)
    texts = numpy.empty((comm.size, padded.size), numpy.uint8)
    comm.Allgather(padded, texts)
    return list(zip(*(row[:n].tobytes().decode().split("\n") for row, n in zip(texts, lengths))))

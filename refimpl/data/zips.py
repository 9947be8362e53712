"""Stored zips: members found by one read of the directory, then by one pread each.

Why not zipfile: for ImageNet's 1.28 million members it needs seconds and about a gigabyte per
process, and it cannot go on with a half-written archive. See docs/input.md for the measurement.
"""
import os
import struct

from refimpl.errors import UsageError

END, END64, LOCATOR64, ENTRY, LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
FULL = 0xFFFFFFFF


def directory(path):
    """Yield (name, size, header offset, crc, flags, method) of each member of a zip or zip64."""
    with open(path, "rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - 70_000))
        tail = file.read()
        at = tail.rfind(END)
        if at < 0 or len(tail) < at + 22:
            raise UsageError(f"{path} is not a zip, or was cut off: its directory is missing; "
                             "make or copy it again")
        size, start = struct.unpack_from("<LL", tail, at + 12)
        wide = tail.rfind(LOCATOR64, 0, at)
        if wide >= 0 and wide + 20 == at:
            file.seek(struct.unpack_from("<Q", tail, wide + 8)[0])
            size, start = struct.unpack_from("<QQ", file.read(56), 40)
        file.seek(start)
        entries = file.read(size)
    if len(entries) != size or (size and entries[:4] != ENTRY):
        raise UsageError(f"the directory of {path} is damaged; make or copy it again")
    yield from _entries(path, entries)


def _entries(path, entries):
    at, form = 0, struct.Struct("<4s4xHH4xLLLHHH8xL")
    while at < len(entries):
        try:
            mark, flags, method, crc, packed, size, n, extra, note, offset = form.unpack_from(
                entries, at)
            if mark != ENTRY:
                raise ValueError
            name = entries[at + 46:at + 46 + n]
            if FULL in (packed, size, offset):
                size, offset = _wide(entries[at + 46 + n:at + 46 + n + extra], packed, size, offset)
        except (struct.error, ValueError):
            raise UsageError(f"the directory of {path} is damaged at byte {at}; "
                             "make or copy it again") from None
        yield name, size, offset, crc, flags, method
        at += 46 + n + extra + note


def _wide(extra, packed, size, offset):
    """The 64-bit values, which stand in this order for each field that is full."""
    at = 0
    while True:
        kind, length = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == 1:
            break
        at += length
    if size == FULL:
        (size,), at = struct.unpack_from("<Q", extra, at), at + 8
    if packed == FULL:
        at += 8
    if offset == FULL:
        (offset,) = struct.unpack_from("<Q", extra, at)
    return size, offset

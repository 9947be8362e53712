"""Stored zips: members found by one read of the directory, then by one pread each.

Why not zipfile: for ImageNet's 1.28 million members it needs seconds and about a gigabyte per
process, and it cannot go on with a half-written archive. See docs/input.md for the measurement.
"""
import os
import struct
import zlib
from array import array

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


class Writer:
    """Writes a stored zip; what a killed one left is taken up again, member by member.

    The unfinished file has whole members and no directory; `finish` adds that.
    """

    def __init__(self, path):
        self.file = open(path, "r+b" if os.path.exists(path) else "w+b", buffering=1 << 20)
        self.names, self.at = [], 0
        self.places = array("Q")  # crc, size, offset of each member

    def kept(self, name):
        """The data of the next member if it is `name` and whole, else None: cut the file there."""
        head = self.file.read(30 + len(name))
        if head[:4] == LOCAL and head[30:] == name:
            crc, size = struct.unpack_from("<LL", head, 14)
            data = self.file.read(size)
            if len(data) == size and zlib.crc32(data) == crc:
                self._note(name, crc, size)
                return data
        self.file.seek(self.at)
        self.file.truncate()
        return None

    def add(self, name, data):
        crc, size = zlib.crc32(data), len(data)
        self.file.write(struct.pack("<4s5H3L2H", LOCAL, 20, 0x800, 0, 0, 0x21, crc, size, size,
                                    len(name), 0) + name + data)
        self._note(name, crc, size)

    def _note(self, name, crc, size):
        self.names.append(name)
        self.places.extend((crc, size, self.at))
        self.at += 30 + len(name) + size

    def finish(self):
        """Write the directory (zip64 where it must be) and close."""
        file, start, count = self.file, self.at, len(self.names)
        for i, name in enumerate(self.names):
            crc, size, offset = self.places[3 * i:3 * i + 3]
            extra = struct.pack("<HHQ", 1, 8, offset) if offset >= FULL else b""
            file.write(struct.pack("<4s6H3L5H2L", ENTRY, 0x32D, 45, 0x800, 0, 0, 0x21, crc, size, size,
                                   len(name), len(extra), 0, 0, 0, 0o644 << 16, min(offset, FULL))
                       + name + extra)
        end = file.tell()
        if count >= 0xFFFF or end >= FULL:
            file.write(struct.pack("<4sQ2H2L4Q", END64, 44, 45, 45, 0, 0, count, count, end - start,
                                   start) + struct.pack("<4sLQL", LOCATOR64, 0, end, 1))
        few = min(count, 0xFFFF)
        file.write(struct.pack("<4s4H2LH", END, 0, 0, few, few, min(end - start, FULL),
                               min(start, FULL), 0))
        file.flush()
        os.fsync(file.fileno())
        file.close()

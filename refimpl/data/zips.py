"""Writes stored zips; one left unfinished by a kill is taken up again, which zipfile cannot."""
import os
import struct
import zlib
from array import array

LOCAL, ENTRY, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"
END64, LOCATOR64, FULL = b"PK\6\6", b"PK\6\7", 0xFFFFFFFF


class Writer:
    """The unfinished file is whole members without a directory; `finish` adds that."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "r+b" if os.path.exists(path) else "w+b", buffering=1 << 20)
        self.names, self.at = [], 0
        self.places = array("Q")  # crc, size, offset of each member

    def kept(self, name: bytes) -> bytes | None:
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

    def add(self, name: bytes, data: bytes) -> None:
        crc, size = zlib.crc32(data), len(data)
        self.file.write(struct.pack("<4s5H3L2H", LOCAL, 20, 0x800, 0, 0, 0x21, crc, size, size,
                                    len(name), 0) + name + data)
        self._note(name, crc, size)

    def _note(self, name, crc, size):
        self.names.append(name)
        self.places.extend((crc, size, self.at))
        self.at += 30 + len(name) + size

    def finish(self) -> None:
        """Write the directory (zip64 where it must be) and close."""
        file, start, count = self.file, self.at, len(self.names)
        for i, name in enumerate(self.names):
            crc, size, offset = self.places[3 * i:3 * i + 3]
            extra = struct.pack("<HHQ", 1, 8, offset) if offset >= FULL else b""
            file.write(struct.pack(
                "<4s6H3L5H2L", ENTRY, 0x32D, 45, 0x800, 0, 0, 0x21, crc, size, size, len(name),
                len(extra), 0, 0, 0, 0o644 << 16, min(offset, FULL)) + name + extra)
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

"""What a folder or a stored zip holds below train/ or val/: names, sizes, offsets; sorted, once each."""
import os
import zipfile
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from refimpl.errors import UsageError

FOLDERS = {"train": ("train",), "val": ("val", "validation")}
SUFFIXES = (b".jpg", b".jpeg", b".png", b".webp", b".bmp", b".gif", b".tif", b".tiff", b".ppm",
            b".pgm")
LOOSE = "files outside any class folder ignored"


class Listing:
    """Collects <class>/<file> names; what is no image is skipped and noted once, with the first."""

    def __init__(self, path, split):
        self.names, self.rows, self.classes, self.odd = [], array("q"), set(), {}
        self.stamps = {}  # what must not have changed for a cached index to be good
        entries = self._tree if os.path.isdir(path) else self._zip
        for name, *row in entries(path, split):
            self._add(name, *row)
        if not self.names:
            here = os.path.join(path, self.folder)
            raise UsageError(f"{here} is flat: images outside class folders have no labels; sort them "
                             "into <class>/ folders, or let `python -m refimpl.data pack` do that from "
                             "the ground truth" if LOOSE in self.odd else
                             f"{here} has no image; it must look like {self.folder}/<class>/*.jpg")

    def _add(self, name, size, offset=-1, crc=0):
        parts = name.split(b"/")
        if any(part.startswith(b".") or part == b"__MACOSX" for part in parts):
            return self._note("hidden entries ignored", name)
        if len(parts) == 1:
            return self._note(LOOSE, name)
        self.classes.add(parts[0])
        if name.endswith(b"/"):
            return None
        if not name.lower().endswith(SUFFIXES):
            return self._note("files without an image's suffix ignored", name)
        if size < 0:
            self._note("dangling links or unreadable entries (bad images)", name)
        self.names.append(name)
        self.rows.extend((max(size, 0), offset, crc))
        return None

    def _note(self, what, name):
        self.odd.setdefault(what, [0, os.fsdecode(name)])[0] += 1

    def _choose(self, path, split, present):
        found = [f for f in FOLDERS[split] if f in present]
        if len(found) != 1:
            raise UsageError(
                f"{path} has both {found[0]}/ and {found[1]}/; remove one" if found else
                f"{path} has no {'/ or '.join(FOLDERS[split])}/ (it has "
                f"{', '.join(sorted(present)[:8]) or 'nothing'}); give the folder above that")
        return found[0]

    def _zip(self, path, split):
        """(name, size, header offset, crc) of the members, which may stand in one common folder."""
        self.stamps[path] = stamp(path)
        try:
            with zipfile.ZipFile(path) as file:
                members = file.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise UsageError(f"{path} is no zip, or was cut off ({error}); make or copy it again") from None
        raw = [m.orig_filename.encode("utf-8" if m.flag_bits & 0x800 else "cp437") for m in members]
        tops = {os.fsdecode(name.split(b"/")[0]) for name in raw if b"/" in name}
        root = ""
        if len(tops) == 1 and not tops & {"train", "val", "validation"}:
            root = tops.pop() + "/"
            tops = {os.fsdecode(name.split(b"/")[1]) for name in raw if name.count(b"/") > 1}
        self.folder = root + self._choose(path, split, tops)
        prefix = os.fsencode(self.folder) + b"/"
        for name, m in zip(raw, members):
            if name[:1] == b"/" or name[1:2] == b":" or b"\\" in name or b"\0" in name or (
                    b".." in name.split(b"/")):
                raise UsageError(f"{path} has the hostile member name {name!r}; do not trust it")
            if name.startswith(prefix) and name != prefix:
                if (m.compress_type or m.flag_bits & 1) and m.file_size:
                    raise UsageError(f"{path} is compressed or encrypted ({m.filename}); unzip it and "
                                     "run `python -m refimpl.data pack FOLDER OUT.zip`")
                yield name[len(prefix):], m.file_size, m.header_offset, m.CRC

    def _tree(self, path, split):
        with os.scandir(path) as entries:
            self.folder = self._choose(path, split, {e.name for e in entries if e.is_dir()})
        top = os.path.join(path, self.folder)
        loose, folders = self._scan(top, "", links=True)
        yield from loose
        yield from ((os.fsencode(name) + b"/", 0) for name in folders)
        visible = [name for name in folders if not name.startswith(".") and name != "__MACOSX"]
        with ThreadPoolExecutor(16) as pool:  # a network file system answers many at once
            for files in pool.map(partial(self._below, top), visible):
                yield from files

    def _below(self, top, name):
        found, todo = [], [name]
        while todo:
            files, folders = self._scan(top, todo.pop(), links=False)
            found += files
            todo += folders
        return found

    def _scan(self, top, name, links):
        """Files as (name, size), folders; links to folders count only at the top (no loops)."""
        place, files, folders = os.path.join(top, name), [], []
        try:
            self.stamps[place] = stamp(place)
            with os.scandir(place) as entries:
                for e in entries:
                    rest = os.path.join(name, e.name)
                    if e.is_dir(follow_symlinks=links):
                        folders.append(rest)
                    elif e.is_file() or e.is_symlink() and not os.path.exists(e.path):
                        files.append((os.fsencode(rest), e.stat().st_size if e.is_file() else -1))
        except OSError as error:
            raise UsageError(f"cannot list {place}: {error.strerror}; mend that first") from None
        return files, folders


def stamp(path):
    status = os.stat(path)
    return [status.st_mtime_ns, status.st_size]

"""What a folder or a stored zip holds below train/ or val/, whatever else lies there."""
import os
import stat
import zipfile
from array import array
from concurrent.futures import ThreadPoolExecutor

from refimpl.errors import UsageError

FOLDERS = {"train": ("train",), "val": ("val", "validation")}
FORMAT = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP", ".gif": "GIF",
          ".tif": "TIFF", ".tiff": "TIFF", ".ppm": "PPM", ".pgm": "PPM"}  # no EPS: that one starts a program
SUFFIXES = tuple(suffix.encode() for suffix in FORMAT)
LOOSE = "files outside any class folder ignored"


def stamp(path: str) -> list[int]:
    """What changes when a zip is written or a folder gains or loses an entry."""
    status = os.stat(path)
    return [status.st_mtime_ns, status.st_size]


class Listing:
    """names <class>/<file> (bytes), rows of (size, header offset or -1, crc), classes, oddities.

    What is no image is skipped and counted in `odd`, with the first of its kind; `stamps` are of
    everything that must not have changed for a kept index to be good.
    """

    def __init__(self, path: str, split: str) -> None:
        self.names, self.rows, self.classes, self.odd, self.stamps = [], array("q"), set(), {}, {}
        for name, *row in (self._tree if os.path.isdir(path) else self._zip)(path, split):
            self._add(name, *row)
        if not self.names:
            here = os.path.join(path, self.folder)
            raise UsageError(
                f"{here} is flat: images outside class folders have no labels; sort them into "
                "<class>/, or let `python -m refimpl.data pack` do that from the ground truth"
                if LOOSE in self.odd and not self.classes else
                f"{here} has no image; it must look like {self.folder}/<class>/*.jpg")

    def _add(self, name, size, offset=-1, crc=0):  # size -1: cannot be read; -2: is no file
        parts, what = name.split(b"/"), None
        if any(part.startswith(b".") or part == b"__MACOSX" for part in parts):
            what = "hidden entries ignored"
        elif len(parts) == 1:
            what = LOOSE
        else:
            self.classes.add(parts[0])
            if size == -2:
                what = "entries that are no files (pipes, links to folders, folders named like images)"
            elif not name.endswith(b"/") and not name.lower().endswith(SUFFIXES):
                what = "files without an image's suffix ignored"
            elif not name.endswith(b"/"):
                what = "dangling links or unreadable entries (bad images)" if size < 0 else None
                self.names.append(name)
                self.rows.extend((max(size, 0), offset, crc))
        if what:
            self.odd.setdefault(what, [0, os.fsdecode(name)])[0] += 1

    def _choose(self, path, split, present):
        found = [f for f in FOLDERS[split] if f in present]
        if len(found) != 1:
            raise UsageError(
                f"{path} has both {found[0]}/ and {found[1]}/; remove one" if found else
                f"{path} has no {'/ or '.join(FOLDERS[split])}/ (it has "
                f"{', '.join(sorted(present)[:8]) or 'nothing'}); give the folder that holds it, "
                "or pack ImageNet's own layout first: `python -m refimpl.data pack`")
        beside = {f for f in present if f[:1] not in "._"}.difference(*FOLDERS.values())
        if beside and split == "train":  # said once
            self.odd["folders beside train/ and val/ not used"] = [len(beside), min(beside)]
        return found[0]

    def _zip(self, path, split):
        """Members below the split's folder, which may stand in one folder common to all."""
        self.stamps[path] = stamp(path)
        try:
            with zipfile.ZipFile(path) as file:
                members = file.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise UsageError(f"{path} is no zip, or was cut off ({error}); make it again") from None
        names = [m.orig_filename.encode("utf-8" if m.flag_bits & 0x800 else "cp437") for m in members]
        tops, root = {os.fsdecode(n.split(b"/")[0]) for n in names if b"/" in n}, ""
        if len(tops) == 1 and not tops & {"train", "val", "validation"}:
            root = tops.pop() + "/"
            tops = {os.fsdecode(n.split(b"/")[1]) for n in names if n.count(b"/") > 1}
        self.folder = root + self._choose(path, split, tops)
        prefix = os.fsencode(self.folder) + b"/"
        for name, m in zip(names, members):
            if name[:1] == b"/" or name[1:2] == b":" or b"\\" in name or b"\0" in name or (
                    b".." in name.split(b"/")):
                raise UsageError(f"{path} has the hostile member name {name!r}; do not trust it")
            if name.startswith(prefix) and name != prefix:
                if (m.compress_type or m.flag_bits & 1) and m.file_size:
                    raise UsageError(f"{path} is compressed or encrypted ({m.filename}); unzip it "
                                     "and run `python -m refimpl.data pack FOLDER OUT.zip`")
                if stat.S_ISLNK(m.external_attr >> 16) or m.file_size > m.compress_size or (
                        m.header_offset + 30 + len(name) + m.file_size > self.stamps[path][1]):
                    raise UsageError(f"{path}: {m.filename} is a link, or larger than the file's room")
                yield name[len(prefix):], m.file_size, m.header_offset, m.CRC

    def _tree(self, path, split):
        self.folder = self._choose(path, split, {e.name for e in os.scandir(path) if e.is_dir()})
        top = os.path.join(path, self.folder)
        self.stamps[top] = stamp(top)
        folders = {e.name: e.is_dir() for e in os.scandir(top)}
        yield from ((os.fsencode(name) + b"/" * is_dir, 0) for name, is_dir in folders.items())
        visible = [os.path.join(top, name) for name, is_dir in folders.items()
                   if is_dir and not name.startswith(".") and name != "__MACOSX"]
        with ThreadPoolExecutor(16) as pool:  # a network file system answers many at once
            for files in pool.map(self._files, visible):
                yield from ((os.fsencode(file[len(top) + 1:]), size) for file, size in files)

    def _files(self, folder):
        """(path, size) below a class folder; links to folders in it are not followed."""
        found = []
        for here, folders, names in os.walk(folder, onerror=_fail):
            self.stamps[here] = stamp(here)
            names += [f for f in folders
                      if f.lower().endswith(tuple(FORMAT)) or os.path.islink(os.path.join(here, f))]
            for path in (os.path.join(here, name) for name in names):
                try:
                    status = os.stat(path)
                    size = status.st_size if stat.S_ISREG(status.st_mode) else -2
                except OSError:
                    size = -1
                found.append((path, size))
        return found


def _fail(error):
    raise error

"""Which images there are, in one order on every host: a sorted, hashed list of names.

A source is a folder or a stored zip (not compressed, so that a member is one read) that holds
train/<class>/* and val/<class>/* (or validation/). A class's number is its place among the sorted
folder names of train, as in torchvision's ImageFolder. Tree and zip of the same files have the
same digest.
"""
import hashlib
import json
import os
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from refimpl.data import zips
from refimpl.errors import UsageError

FOLDERS = {"train": ("train",), "val": ("val", "validation")}
SUFFIXES = (b".jpg", b".jpeg", b".png", b".webp", b".bmp", b".gif", b".tif", b".tiff", b".ppm",
            b".pgm")


class Place(NamedTuple):
    """Where one image's bytes are; offset is that of the member's header, -1 in a tree."""
    file: str
    name: str
    offset: int = -1
    size: int = 0
    crc: int = 0


class Names:
    """A sequence of strings in two arrays: about 45 bytes a name instead of 110."""

    def __init__(self, names):
        self.text = b"".join(names)
        self.ends = np.cumsum([0, *map(len, names)], dtype=np.int64)

    def __len__(self):
        return len(self.ends) - 1

    def __getitem__(self, i):
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        return os.fsdecode(self.text[self.ends[i]:self.ends[i + 1]])


@dataclass(frozen=True, eq=False)
class Index:
    """The images of one split. labels, sizes int64 [N]; names are <class>/<file>."""
    source: str
    folder: str
    classes: tuple[str, ...]
    names: Names
    labels: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray
    crcs: np.ndarray
    digest: str
    notes: tuple[str, ...]  # what a person should hear once

    def __len__(self):
        return len(self.names)

    def path(self, i):
        return os.path.join(self.source, self.folder, self.names[i])

    def place(self, i) -> Place:
        """What `read` needs, small enough to send to a loader process with each batch."""
        offset = int(self.offsets[i])
        return Place(self.source if offset >= 0 else self.path(i), self.path(i), offset,
                     int(self.sizes[i]), int(self.crcs[i]))

    def read(self, i) -> bytes:
        return read(self.place(i))


def read(place: Place) -> bytes:
    """The file's bytes; OSError if it cannot be read or is not what the zip's directory says."""
    if place.offset < 0:
        with open(place.file, "rb") as file:
            return file.read()
    handle = _handle(place.file)
    head = os.pread(handle, 30, place.offset)
    skip = 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    data = os.pread(handle, place.size, place.offset + skip)
    if head[:4] != zips.LOCAL or len(data) != place.size or zlib.crc32(data) != place.crc:
        raise OSError(f"the zip is damaged here, or was changed since the start: {place.name}")
    return data


@lru_cache(maxsize=8)
def _handle(path):  # pread has no position, so one handle serves all threads of a process
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def open_index(path, split, classes=None, cache=None) -> Index:
    """List `split` ("train" or "val") of a folder or stored zip; UsageError says what to mend.

    classes: the training classes, which a validation set must fit (and a training set must equal).
    cache: a folder for the finished index, made again when a folder or the zip has changed.
    """
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise UsageError(f"no such data: {path}; give a folder or a zip with train/ and val/")
    key = hashlib.sha256(f"{path} {split}".encode()).hexdigest()[:16]
    stored = os.path.join(cache, f"index-{key}.npz") if cache else None
    index = _load(stored) if stored else None
    if index is None:
        index, stamps = _build(path, split)
        if stored:
            _store(stored, index, stamps)
    return index if classes is None else _fit(index, split, tuple(classes))


def _build(path, split):
    stamps = {}
    entries = _tree if os.path.isdir(path) else _zip
    folder, entries = entries(path, split, stamps)
    found = _Listing(path, folder)
    for entry in entries:
        found.add(*entry)
    return found.index(split), stamps


class _Listing:
    """Collects entries, skips what is no image, and says so once."""

    def __init__(self, source, folder):
        self.source, self.folder = source, folder
        self.names, self.sizes, self.offsets = [], array("q"), array("q")
        self.crcs, self.classes = array("L"), set()
        self.odd = {}  # what -> [count, first name]

    def add(self, name, size, offset=-1, crc=0):
        parts = name.split(b"/")
        if any(part.startswith(b".") or part == b"__MACOSX" for part in parts):
            return self.note("hidden entries ignored", name)
        if len(parts) == 1:
            return self.note("files outside any class folder ignored", name)
        if name.endswith(b"/"):
            if len(parts) == 2:
                self.classes.add(parts[0])
            return None
        self.classes.add(parts[0])
        if not name.lower().endswith(SUFFIXES):
            return self.note("files without an image's suffix ignored", name)
        if size < 0:
            self.note("dangling links or unreadable entries (bad images if read)", name)
        self.names.append(name)
        self.sizes.append(max(size, 0))
        self.offsets.append(offset)
        self.crcs.append(crc)
        return None

    def note(self, what, name):
        self.odd.setdefault(what, [0, os.fsdecode(name)])[0] += 1

    def index(self, split):
        place = os.path.join(self.source, self.folder)
        if not self.names:
            if "files outside any class folder ignored" in self.odd:
                raise UsageError(
                    f"{place} is flat: images without class folders have no labels; sort them "
                    "into <class>/ folders, or let `python -m refimpl.data pack` do it from the "
                    "ground-truth file")
            raise UsageError(f"{place} holds no image; it must look like {self.folder}/<class>/*")
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        names = [self.names[i] for i in order]
        same = next((a for a, b in zip(names, names[1:]) if a == b), None)
        if same:
            raise UsageError(f"{os.fsdecode(same)} stands twice in {self.source}; make the zip anew")
        classes = sorted(self.classes)
        number = {name: i for i, name in enumerate(classes)}
        labels = np.array([number[name[:name.index(b"/")]] for name in names], np.int64)
        empty = [classes[i] for i in np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0)]
        if empty and split == "train":
            raise UsageError(f"class {os.fsdecode(empty[0])} in {place} has no image ({len(empty)} "
                             "such); fill or remove the folder")
        notes = [f"{place}: {n} {what} (first: {first})" for what, (n, first) in self.odd.items()]
        if empty:
            notes.append(f"{place}: {len(empty)} empty classes (first: {os.fsdecode(empty[0])})")
        if any(c.isdigit() for c in classes) and sorted(classes, key=len) != classes:
            notes.append(f"{place}: classes are numbered in sorted order of their names as text: "
                         + ", ".join(map(os.fsdecode, classes[:3])) + ", ...")
        sizes, offsets, crcs = (np.array(a, kind)[order] for a, kind in (
            (self.sizes, np.int64), (self.offsets, np.int64), (self.crcs, np.uint32)))
        names = Names(names)
        return Index(self.source, self.folder, tuple(map(os.fsdecode, classes)), names, labels,
                     sizes, offsets, crcs, _digest(classes, names, labels, sizes), tuple(notes))


def _digest(classes, names, labels, sizes):
    h = hashlib.sha256(b"\0".join(classes) + b"\0\0" + names.text)
    for a in (names.ends, labels, sizes):
        h.update(a.astype("<i8"))
    return h.hexdigest()


def _one_folder(path, split, present):
    found = [f for f in FOLDERS[split] if f in present]
    if len(found) == 1:
        return found[0]
    has = ", ".join(sorted(present)[:8]) or "nothing"
    if found:
        raise UsageError(f"{path} has both {found[0]}/ and {found[1]}/; remove one")
    raise UsageError(f"{path} has no {' or '.join(f + '/' for f in FOLDERS[split])} (it has {has}); "
                     "give the folder above it")


def _zip(path, split, stamps):
    """Members of a zip, below the split's folder, which may stand in one common top folder."""
    stamps[path] = _stamp(path)
    members = list(zips.directory(path))
    tops = {m[0].partition(b"/")[0] for m in members}
    tops = {os.fsdecode(t) for t in tops if not t.startswith(b".") and t != b"__MACOSX"}
    root = ""
    if len(tops) == 1 and not tops & {f for names in FOLDERS.values() for f in names}:
        root = tops.pop() + "/"
        tops = {os.fsdecode(m[0].split(b"/")[1]) for m in members if m[0].count(b"/") > 1}
    folder = root + _one_folder(path, split, tops)
    prefix = os.fsencode(folder) + b"/"

    def entries():
        for name, size, offset, crc, flags, method in members:
            parts = name.split(b"/")
            if name[:1] == b"/" or b".." in parts or b"\\" in name or b"\0" in name or (
                    name[1:2] == b":"):
                raise UsageError(f"{path} has the hostile member name {name!r}; do not trust it")
            if name.startswith(prefix) and name != prefix:
                if (method or flags & 1) and size:
                    raise UsageError(f"{path} is compressed or encrypted ({os.fsdecode(name)}); "
                                     "unzip it and store it: python -m refimpl.data pack DIR OUT.zip")
                yield name[len(prefix):], size, offset, crc
    return folder, entries()


def _tree(path, split, stamps):
    present = [e.name for e in os.scandir(path) if e.is_dir()]
    folder = _one_folder(path, split, present)
    top = os.path.join(path, folder)
    loose, folders = _scan(top, "", stamps, follow=True)

    def below(name):
        found, todo = [], [name]
        while todo:
            files, folders = _scan(top, todo.pop(), stamps, follow=False)
            found += files
            todo += folders
        return found

    def entries():
        yield from loose
        visible = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        yield from ((os.fsencode(name) + b"/", 0) for name in folders)
        with ThreadPoolExecutor(16) as pool:  # a network file system answers many at once
            for files in pool.map(below, visible):
                yield from files
    return folder, entries()


def _scan(top, name, stamps, follow):
    """Files as (name, size) and folders in one folder; a link to a folder only at the top."""
    place, files, folders = os.path.join(top, name), [], []
    try:
        stamps[place] = _stamp(place)
        with os.scandir(place) as entries:
            for e in entries:
                rest = os.path.join(name, e.name)
                if e.is_dir(follow_symlinks=follow):
                    folders.append(rest)
                elif e.is_file() or (e.is_symlink() and not e.is_dir()):
                    try:
                        files.append((os.fsencode(rest), e.stat().st_size))
                    except OSError:
                        files.append((os.fsencode(rest), -1))
    except OSError as error:
        raise UsageError(f"cannot list {place}: {error.strerror}; mend it or its permissions") from None
    return files, folders


def _stamp(path):
    s = os.stat(path)
    return [s.st_mtime_ns, s.st_size]


def _store(file, index, stamps):
    os.makedirs(os.path.dirname(file), exist_ok=True)
    about = json.dumps([index.source, index.folder, index.classes, index.digest, index.notes, stamps])
    with open(f"{file}.{os.getpid()}", "wb") as out:  # beside, then renamed: never half a file
        np.savez(out, about=about, text=np.frombuffer(index.names.text, np.uint8),
                 ends=index.names.ends, labels=index.labels, sizes=index.sizes,
                 offsets=index.offsets, crcs=index.crcs)
    os.replace(out.name, file)


def _load(file):
    """The cached index, or None if there is none, it is damaged, or its source has changed."""
    try:
        with np.load(file) as kept:
            source, folder, classes, digest, notes, stamps = json.loads(str(kept["about"]))
            if any(_stamp(path) != stamp for path, stamp in stamps.items()):
                return None
            names = Names([])
            names.text, names.ends = kept["text"].tobytes(), kept["ends"]
            return Index(source, folder, tuple(classes), names, kept["labels"], kept["sizes"],
                         kept["offsets"], kept["crcs"], digest, tuple(notes))
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _fit(index, split, classes):
    """Number the labels by `classes`; UsageError if the split's classes do not fit them."""
    strange = sorted(set(index.classes) - set(classes))
    lacking = sorted(set(classes) - set(index.classes))
    where = os.path.join(index.source, index.folder)
    if strange or (lacking and split == "train"):
        raise UsageError(f"{where} and the training classes differ: "
                         + (f"class {strange[0]} is unknown to training" if strange else
                            f"class {lacking[0]} is missing")
                         + f" ({len(strange)} unknown, {len(lacking)} missing); "
                         "use the data the model was trained on, or remove the folder")
    seen = set(index.labels.tolist())
    if len(seen) == 1 < len(classes):
        raise UsageError(f"{where} has images of one class only, of {len(classes)}; "
                         "sort them into their class folders")
    number = np.array([classes.index(c) for c in index.classes], np.int64)
    labels = number[index.labels]
    notes = index.notes
    if lacking:
        notes += (f"{where}: no images of {len(lacking)} classes (first: {lacking[0]})",)
    digest = _digest([os.fsencode(c) for c in classes], index.names, labels, index.sizes)
    return Index(index.source, index.folder, classes, index.names, labels, index.sizes,
                 index.offsets, index.crcs, digest, notes)

"""Which images there are, in one order on every host: a sorted, hashed list of names.

A source is a folder or a stored zip (not compressed, so that a member is one read) that holds
train/<class>/* and val/<class>/* (or validation/). A class's number is its place among the sorted
folder names of train, as in torchvision's ImageFolder. A tree and a zip of it have the same digest.
"""
import hashlib
import json
import os
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Sequence

import numpy as np

from refimpl.data.listing import Listing, stamp
from refimpl.errors import UsageError


class Place(NamedTuple):
    """Where one image's bytes are; offset is that of the member's header in a zip, -1 in a tree."""
    file: str
    name: str
    offset: int = -1
    size: int = 0
    crc: int = 0


def read(place: Place) -> bytes:
    """The bytes; OSError if they cannot be read or are not what the zip's directory says."""
    if place.offset < 0:
        with open(place.file, "rb") as file:
            return file.read()
    handle = _handle(place.file)
    head = os.pread(handle, 30, place.offset)
    skip = 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    data = os.pread(handle, place.size, place.offset + skip)
    if head[:4] != b"PK\3\4" or zlib.crc32(data) != place.crc:
        raise OSError("the zip is damaged here, or was changed after the start")
    return data


@lru_cache(maxsize=8)
def _handle(path):  # one for all threads of a process: pread has no position
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@dataclass(frozen=True, eq=False)
class Index:
    """The images of one split; names are <class>/<file> as bytes [N]; labels, sizes int64 [N]."""
    source: str
    folder: str
    classes: tuple[str, ...]
    names: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray
    crcs: np.ndarray
    digest: str
    notes: tuple[str, ...]  # what a person should hear once

    def __len__(self) -> int:
        return len(self.names)

    def name(self, i: int) -> str:
        return os.fsdecode(self.names[i])

    def path(self, i: int) -> str:
        return os.path.join(self.source, self.folder, self.name(i))

    def place(self, i: int) -> Place:
        """What `read` needs, small enough to go to a loader process with each batch."""
        path, offset = self.path(i), int(self.offsets[i])
        return Place(path if offset < 0 else self.source, path, offset, int(self.sizes[i]),
                     int(self.crcs[i]))

    def read(self, i: int) -> bytes:
        return read(self.place(i))


def open_index(path: str, split: str, classes: Sequence[str] | None = None,
               cache: str | None = None) -> Index:
    """List `split` ("train" or "val") of a folder or stored zip; UsageError says what to mend.

    classes: the training classes; a validation set must fit them, a training set must equal them.
    cache: a folder to keep the index in; it is made again when a folder or the zip has changed.
    """
    path = os.path.abspath(path)
    if not (os.path.isdir(path) or os.path.isfile(path)):  # opening a pipe would wait for ever
        what = "a pipe or a device" if os.path.exists(path) else "no such data"
        raise UsageError(f"{what}: {path}; give a folder or stored zip with train/ and val/")
    key = hashlib.sha256(f"{path} {split}".encode()).hexdigest()[:16]
    kept = os.path.join(cache, f"index-{key}.npz") if cache else None
    index = _load(kept) if kept else None
    if index is None:
        try:
            listing = Listing(path, split)
            index = _index(path, split, listing)
            if kept:
                _store(kept, index, listing.stamps)
        except OSError as error:
            raise UsageError(f"{error.filename or path}: {error.strerror}; mend that first") from None
    return index if classes is None else _fit(index, split, tuple(classes))


def _index(path, split, listing):
    here, names = os.path.join(path, listing.folder), np.array(listing.names)
    order = np.argsort(names, kind="stable")
    names = names[order]
    sizes, offsets, crcs = np.array(listing.rows, np.int64).reshape(-1, 3)[order].T.copy()
    if (twice := np.flatnonzero(names[1:] == names[:-1])).size:
        raise UsageError(f"{os.fsdecode(names[twice[0]])} is in {path} twice; make the zip anew")
    classes = sorted(listing.classes)
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number[name.partition(b"/")[0]] for name in names.tolist()], np.int64)
    notes = [f"{here}: {n} {what} (first: {first})" for what, (n, first) in listing.odd.items()]
    if (empty := np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0)).size:
        first = os.fsdecode(classes[empty[0]])
        notes.append(f"{len(empty)} classes of {here} have no image (first: {first})")
        if split == "train":
            raise UsageError(f"{notes[-1]}; fill or remove such folders")
    if (digits := [c for c in classes if c.isdigit()]) != sorted(digits, key=int):
        notes.append(f"{here}: classes are numbered in the order of names as text, 10 before 2")
    return Index(path, listing.folder, tuple(map(os.fsdecode, classes)), names, labels, sizes,
                 offsets, crcs, _digest(classes, names, labels, sizes), tuple(notes))


def _digest(classes, names, labels, sizes):
    hashed = hashlib.sha256(b"\0".join(classes) + b"\0\0" + b"\0".join(names.tolist()))
    for numbers in (labels, sizes):
        hashed.update(numbers.astype("<i8"))
    return hashed.hexdigest()


ARRAYS = ("names", "labels", "sizes", "offsets", "crcs")


def _store(file, index, stamps):
    os.makedirs(os.path.dirname(file), exist_ok=True)
    about = json.dumps([index.source, index.folder, index.classes, index.digest, index.notes, stamps])
    beside = f"{file}.{os.uname().nodename}.{os.getpid()}"
    with open(beside, "wb") as out:  # then renamed: never half a file
        np.savez(out, about=about, **{name: getattr(index, name) for name in ARRAYS})
    os.replace(beside, file)


def _load(file):
    """The kept index; None if there is none, it is damaged, or its source has changed."""
    try:
        with np.load(file) as kept:
            source, folder, classes, digest, notes, stamps = json.loads(str(kept["about"]))
            if all(stamp(path) == was for path, was in stamps.items()):
                return Index(source, folder, tuple(classes), *(kept[name] for name in ARRAYS),
                             digest, tuple(notes))
    except Exception:  # numpy and zipfile raise many kinds on a damaged file; it is only a cache
        pass
    return None


def _fit(index, split, classes):
    """The index with labels by `classes`; UsageError if its classes do not fit them."""
    here = os.path.join(index.source, index.folder)
    strange = sorted(set(index.classes) - set(classes))
    lacking = sorted(set(classes) - set(index.classes))
    if strange or lacking and split == "train":
        raise UsageError(
            f"{here} has " + (f"class {strange[0]}, which training lacks" if strange else
                              f"no class {lacking[0]}, which the model was trained on")
            + f" ({len(strange)} unknown, {len(lacking)} missing); use the training's data, "
            "or mend the folder")
    if len(set(index.labels.tolist())) == 1 < len(classes):
        raise UsageError(f"{here} has images of one class only, of {len(classes)}; sort them into "
                         "their class folders")
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number[name] for name in index.classes], np.int64)[index.labels]
    notes = index.notes
    if lacking:
        notes += (f"{here}: no image of {len(lacking)} classes (first: {lacking[0]})",)
    digest = _digest([os.fsencode(c) for c in classes], index.names, labels, index.sizes)
    return replace(index, classes=classes, labels=labels, digest=digest, notes=notes)

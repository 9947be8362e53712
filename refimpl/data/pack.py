"""Makes the stored zip that training reads best, from the forms in which people have images."""
import io
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from refimpl.data import images, zips
from refimpl.data.index import open_index
from refimpl.data.layouts import parts_of
from refimpl.data.pool import cores, ordered
from refimpl.errors import UsageError

SETTINGS = b"pack.json"


def pack(source: str, out: str, short_side: int | None = None, quality: int = 90,
         at_most: tuple[int, int] | None = None, truth: str | None = None, processes: int = 0,
         progress=lambda jobs, total: jobs) -> list[str]:
    """Write `source` (folder tree, stored zip, ILSVRC layout, IDX files) to the stored zip `out`.

    Bytes stay as they are unless short_side is given: then images are shrunk to it and saved as
    JPEG. at_most: (train, val) images to keep of each class. Started again after a stop it goes on;
    every member is read back before the file gets its name. Returns notes for the user.
    """
    if os.path.exists(out):
        raise UsageError(f"{out} exists already; remove it or give another name")
    if short_side is not None and short_side < 1 or not 1 <= quality <= 100:
        raise UsageError(f"short side {short_side}, quality {quality}: from 1, and from 1 to 100")
    parts = parts_of(source, truth)
    settings = json.dumps({"short_side": short_side, "quality": quality if short_side else None,
                           "at_most": at_most, "parts": [[p.folder, len(p.names), p.digest]
                                                         for p in parts]}).encode()
    kept = [_keep(part, at_most[part.folder == "val"] if at_most else None) for part in parts]
    jobs = ((_member(part, i, short_side), part.job(i))
            for part, ids in zip(parts, kept) for i in ids)
    unfinished, notes = f"{out}.part", [note for part in parts for note in part.notes]
    file = zips.Writer(unfinished)
    left, total = _resume(file, settings, jobs), sum(map(len, kept)) + 1
    made = ordered(partial(_make, short_side=short_side, quality=quality), left, processes)
    for name, data, heard in progress(made, total - len(file.names)):
        file.add(os.fsencode(name), data)
        notes += heard
    file.finish()
    _verify(unfinished, parts, kept, whole=not short_side and not at_most)
    os.replace(unfinished, out)
    return notes


def _keep(part, limit):
    if limit is None:
        return range(len(part.names))
    by_class = [np.flatnonzero(part.labels == c)[:limit] for c in np.unique(part.labels)]
    return np.sort(np.concatenate(by_class)).tolist()


def _member(part, i, short_side):
    name = f"{part.folder}/{part.names[i]}"
    return name if not short_side or name.lower().endswith((".jpg", ".jpeg")) else name + ".jpg"


def _resume(file, settings, jobs):
    """The jobs whose members the unfinished file lacks."""
    kept = file.kept(SETTINGS)
    if kept is None:
        file.add(SETTINGS, settings)
    elif kept != settings:
        raise UsageError(f"{file.file.name} was begun with other settings or data; remove it")
    for name, job in jobs:
        if file.kept(os.fsencode(name)) is None:
            return itertools.chain([(name, job)], jobs)
    return iter(())


def _make(item, short_side, quality):
    name, job = item
    if short_side:
        try:
            return name, *images.view(job, name, partial(_shrunk, short_side=short_side,
                                                         quality=quality))
        except images.BadImage as error:
            return name, job(), [f"kept as it is: {error}"]
    return name, job(), []


def _shrunk(data, short_side, quality):
    image = images.opened(data)
    scale = min(1, short_side / min(image.size))
    if scale == 1 and image.format == "JPEG":
        return data
    size = tuple(max(1, round(side * scale)) for side in image.size)
    images.reduced(image, scale)
    out = io.BytesIO()
    images.rgb(image).resize(size, images.Image.Resampling.BICUBIC).save(
        out, "JPEG", quality=quality, optimize=True)
    return out.getvalue()


def _verify(path, parts, kept, whole):
    """Read every member back; RuntimeError if the disk did not keep what was written."""
    for part, ids in zip(parts, kept):
        index = open_index(path, part.folder)
        if len(index) != len(ids) or (whole and part.digest and index.digest != part.digest):
            raise RuntimeError(f"{path}: {part.folder} is not what was written; remove that file")
        with ThreadPoolExecutor(cores()) as pool:
            for start in range(0, len(index), 1000):
                list(pool.map(index.read, range(start, min(start + 1000, len(index)))))

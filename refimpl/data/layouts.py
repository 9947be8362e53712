"""The forms in which people have images: our tree or zip, ILSVRC with a flat val, IDX files."""
import csv
import glob
import gzip
import io
import os
import struct
from functools import partial
from typing import Callable, NamedTuple

import numpy as np
from PIL import Image

from refimpl.data.index import Place, open_index, read
from refimpl.data.listing import SUFFIXES
from refimpl.errors import UsageError

CURE = ("give --truth: LOC_val_solution.csv, or a text file with one class per line in the order "
        "of the file names, or ILSVRC2012_validation_ground_truth.txt beside meta.mat")


class Part(NamedTuple):
    """What goes to train/ or val/: names <class>/<file>, labels, and job(i)(), the bytes."""
    folder: str
    names: list[str]
    labels: np.ndarray
    job: Callable
    digest: str = ""
    notes: tuple[str, ...] = ()


def parts_of(source: str, truth: str | None = None) -> list[Part]:
    """The training and validation parts of `source`."""
    if os.path.isdir(source):
        if found := glob.glob(os.path.join(glob.escape(source), "*images*idx3*")):
            return _idx(source, found)
        for below in ("", "Data/CLS-LOC", "ILSVRC/Data/CLS-LOC"):
            root = os.path.join(source, below)
            if os.path.isdir(os.path.join(root, "train")):
                if os.path.isdir(val := os.path.join(root, "val")) and (flat := _flat(val)):
                    train = open_index(root, "train")
                    return [_part(train, "train"), _labelled(root, flat, train.classes, truth)]
                source = root
                break
    train = open_index(source, "train")
    return [_part(train, "train"), _part(open_index(source, "val", train.classes), "val")]


def _part(index, folder):
    return Part(folder, [index.name(i) for i in range(len(index))], index.labels,
                lambda i: partial(read, index.place(i)), index.digest, index.notes)


def _flat(folder):
    return sorted(e.name for e in os.scandir(folder) if e.is_file() and not e.name.startswith(".")
                  and os.fsencode(e.name).lower().endswith(SUFFIXES))


def _labelled(root, files, classes, truth):
    """A flat validation folder with the class of each file from the ground truth."""
    csvs = [os.path.join(root, "../" * up, "LOC_val_solution.csv") for up in range(4)]
    truth = truth or next(filter(os.path.exists, csvs), "LOC_val_solution.csv")
    if not os.path.exists(truth):
        raise UsageError(f"{root}/val is flat, and there is no {truth}; {CURE}")
    with open(truth, newline="") as file:
        lines = [row for row in csv.reader(file) if row]
    if lines and len(lines[0]) > 1:  # image,"class x y x y ..."
        known = {os.path.splitext(row[0])[0]: row[1].split()[0] for row in lines if row[1].split()}
        labels = [known.get(os.path.splitext(name)[0]) for name in files]
    else:
        labels = [row[0].strip() for row in lines]
        if len(labels) != len(files):
            raise UsageError(f"{truth} has {len(labels)} lines for {len(files)} images; {CURE}")
        if set(labels) - set(classes) and all(label.isdigit() for label in labels):
            labels = _from_numbers(labels, truth)
    for name, label in zip(files, labels):
        if label not in classes:
            raise UsageError(f"{truth} gives {name} the class {label}, which train lacks; {CURE}")
    places = [Place(path, path) for path in (os.path.join(root, "val", name) for name in files)]
    return Part("val", [f"{label}/{name}" for label, name in zip(labels, files)],
                np.array([classes.index(label) for label in labels]),
                lambda i: partial(read, places[i]))


def _from_numbers(numbers, truth):
    """ILSVRC's own class numbers -> folder names, by meta.mat (they are not in sorted order)."""
    try:
        from scipy.io import loadmat
        meta = loadmat(os.path.join(os.path.dirname(truth), "meta.mat"), squeeze_me=True)["synsets"]
        names = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in meta}
    except ImportError:
        raise UsageError(f"{truth} holds class numbers, and reading meta.mat needs scipy: "
                         f"pip install scipy; or {CURE}") from None
    except (OSError, KeyError, ValueError):
        raise UsageError(f"{truth} holds class numbers, but there is no usable meta.mat beside it; "
                         f"{CURE}") from None
    return [names.get(int(number)) for number in numbers]


def _idx(source, found):
    """MNIST's files as lossless PNGs; classes are the label numbers, padded so that they sort."""
    parts = []
    for folder, marks in (("train", ("train",)), ("val", ("t10k", "test"))):
        mine = [path for path in found if any(m in os.path.basename(path) for m in marks)]
        if len(mine) != 1:
            raise UsageError(f"{source} has {len(mine)} files *{marks[0]}*images*idx3*, not one")
        pixels = _array(mine[0], 3)
        base = os.path.basename(mine[0]).replace("images", "labels").replace("idx3", "idx1")
        labels = _array(os.path.join(source, base), 1).astype(np.int64)
        if len(labels) != len(pixels):
            raise UsageError(f"{mine[0]} has {len(pixels)} images, {base} {len(labels)} labels")
        wide = len(str(labels.max(initial=0)))
        names = [f"{label:0{wide}}/{i:06}.png" for i, label in enumerate(labels)]
        parts.append(Part(folder, names, labels, lambda i, pixels=pixels: partial(_png, pixels[i])))
    return parts


def _array(path, dimensions):
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            data = file.read()
        shape = struct.unpack_from(f">{dimensions}L", data, 4)
        if data[:4] != bytes((0, 0, 8, dimensions)):
            raise ValueError("not unsigned bytes of that many dimensions")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error) as error:
        raise UsageError(f"{path} is not a whole IDX file: {error}") from None


def _png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()

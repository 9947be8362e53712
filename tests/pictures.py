"""A tiny data set made in memory: each class has its own colour, so that a network can learn it."""
import io
import pathlib
import zipfile

import numpy as np
from PIL import Image


def jpeg(seed: int, label: int, size: tuple[int, int] = (40, 32)) -> bytes:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 120, (size[1], size[0], 3), np.uint8)
    pixels[..., label % 3] += np.uint8(60 + 30 * (label % 4))
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=85)
    return out.getvalue()


def make_zip(path: pathlib.Path, classes: int = 3, train: int = 12, val: int = 4) -> pathlib.Path:
    """A stored zip with `train` and `val` images per class."""
    with zipfile.ZipFile(path, "w") as archive:
        for label in range(classes):
            for number in range(train + val):
                split = "train" if number < train else "val"
                archive.writestr(f"{split}/class{label}/{number:03d}.jpg",
                                 jpeg(1000 * label + number, label))
    return path


SMALL = ("--depth", "1,1", "--width", "8", "--stem", "small", "--image-size", "24",
         "--val-short-side", "28", "--threads", "1", "--device", "cpu")

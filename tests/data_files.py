"""Small image files and folders for the tests of the input."""
import io

import numpy as np
from PIL import Image


def picture(width=40, height=30, number=0):
    """Smooth, so that JPEG changes little; the corners and `number` differ."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 // width, y * 255 // height, np.full_like(x, number * 37 % 256)], -1)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image, form="JPEG", **options):
    out = io.BytesIO()
    image.save(out, form, **({"quality": 95} if form == "JPEG" else {}) | options)
    return out.getvalue()


def tree(root, files):
    """Write {path below root: bytes, or None for an empty folder}."""
    for name, data in files.items():
        path = root / name
        (path if data is None else path.parent).mkdir(parents=True, exist_ok=True)
        if data is not None:
            path.write_bytes(data)
    return root


def photos(root, train=6, val=2, classes=("cat", "dog"), **size):
    """A tree of train/ and val/ with that many pictures of each class."""
    return tree(root, {f"{split}/{c}/{i}.jpg": encoded(picture(number=7 * k + i, **size))
                       for split, n in (("train", train), ("val", val))
                       for k, c in enumerate(classes) for i in range(n)})


def names(index):
    return [index.name(i) for i in range(len(index))]

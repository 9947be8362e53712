"""Bytes of one image file -> uint8 pixels [size, size, 3]: one path for training, one for validation.

    train: crop of 8-100 % of the area, aspect 3/4-4/3 --resize--> size x size, mirrored half the time
    val:   short side --resize--> short_side, then the size x size centre
"""
import io
import math
import warnings

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # no EPS: that one starts a program
MAX_PIXELS = 89_478_485  # where Pillow only begins to warn of decompression bombs
RESAMPLE = Image.Resampling.BILINEAR
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class BadImage(ValueError):
    """An image that cannot be used, with its path and why."""


def draws(seed, epoch, sample):
    """The generator of one sample's augmentation: of (seed, epoch, sample) alone, never of ranks."""
    return np.random.Generator(np.random.Philox(key=[seed << 32 | epoch, sample]))


def opened(data):
    """The undecoded image; ValueError if no image, of a format not wanted, or too large."""
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} is more than {MAX_PIXELS} pixels")
    return image


def rgb(image):
    """Three 8-bit channels of any mode; alpha is dropped; EXIF rotation is not applied."""
    if image.mode.startswith("I"):  # 16-bit grey: convert alone would clip to white
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels")
    return image if image.mode == "RGB" else image.convert("RGB")


def crop_box(width, height, rng):
    """(left, top, right, bottom) as in fb.resnet.torch: ten tries, then the centre square."""
    for _ in range(10):
        area = width * height * (0.08 + 0.92 * rng.random())
        aspect = 3 / 4 + (4 / 3 - 3 / 4) * rng.random()
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if rng.random() < 0.5:
            w, h = h, w
        if 0 < w <= width and 0 < h <= height:
            left = int(rng.random() * (width - w + 1))
            top = int(rng.random() * (height - h + 1))
            return left, top, left + w, top + h
    return centre_box(width, height, 1, 1)


def centre_box(width, height, size, short_side):
    """The part of the source that the size x size centre of the resized image is made from."""
    short = min(width, height)
    w, h = (int(short_side * side / short) for side in (width, height))
    left, top = round((w - size) / 2), round((h - size) / 2)
    return (left * width / w, top * height / h, (left + size) * width / w, (top + size) * height / h)


def resized(image, box, size):
    """The box as (width, height); a JPEG is decoded at 1/2, 1/4 or 1/8 where that leaves enough."""
    left, top, right, bottom = box
    want = max(size[0] / (right - left), size[1] / (bottom - top))
    if image.format in ("JPEG", "MPO") and want <= 0.5:
        width, height = image.size
        image.draft(None, (math.ceil(width * want), math.ceil(height * want)))
        shrunk = max(round(width / image.width), 1)
        box = [side / shrunk for side in box]
        box = (box[0], box[1], min(box[2], image.width), min(box[3], image.height))
    return rgb(image).resize(size, RESAMPLE, box)


def train_view(data, size, rng):
    """A random crop or its mirror, uint8 [size, size, 3] (Goyal, section 5.1)."""
    image = opened(data)
    box, mirror = crop_box(*image.size, rng), rng.random() < 0.5
    pixels = np.asarray(resized(image, box, (size, size)))
    return pixels[:, ::-1] if mirror else pixels


def val_view(data, size, short_side):
    """The centre crop, uint8 [size, size, 3]."""
    image = opened(data)
    return np.asarray(resized(image, centre_box(*image.size, size, short_side), (size, size)))


def view(get, path, make):
    """make(get()) and the warnings it gave; whatever goes wrong becomes BadImage with the path."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            return make(get()), [f"{path}: {w.message}" for w in heard]
        except Exception as error:  # Pillow raises nearly anything on a hostile file
            raise BadImage(f"{path}: {type(error).__name__}: {error}") from None

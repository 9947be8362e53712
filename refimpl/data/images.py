"""Bytes of an image file -> uint8 pixels [size, size, 3]: one way to train, one to validate.

    train: crop of 8-100 % of the area, aspect 3/4-4/3 --resize--> size x size, half mirrored
    val:   short side --resize--> short_side, then the size x size centre

Pillow decodes; torch resizes (bicubic, antialiased, as fb.resnet.torch's scaling), at five times
Pillow's speed. docs/input.md has the measurements, and the differences from torchvision.
"""
import io
import math
import warnings

import numpy as np
from PIL import Image

from refimpl.data.colour import recolour
from refimpl.data.listing import FORMAT
from refimpl.errors import BadImage

FORMATS = tuple(dict.fromkeys(FORMAT.values()))
MAX_PIXELS = 89_478_485  # where Pillow begins to warn of decompression bombs
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def draws(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The generator of one sample's augmentation: of (seed, epoch, sample), never of ranks."""
    return np.random.Generator(np.random.Philox(key=[seed << 32 | epoch, sample]))


def opened(data: bytes) -> Image.Image:
    """The undecoded image; BadImage if no image, of a format not wanted, or too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # Pillow raises nearly anything on a hostile file
        raise BadImage(str(error).partition(" <_io")[0] if data else "empty file") from None
    if image.width * image.height > MAX_PIXELS:
        raise BadImage(f"{image.width} x {image.height} is more than {MAX_PIXELS} pixels")
    return image


def rgb(image: Image.Image) -> Image.Image:
    """Decoded, three 8-bit channels of any mode; alpha is dropped; EXIF rotation is not applied."""
    try:
        image.load()
        if image.mode.startswith("I"):  # 16-bit grey: convert alone would clip to white
            image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
        elif image.mode == "F":
            raise ValueError("floating-point pixels")
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:
        raise BadImage(f"{type(error).__name__}: {error}") from None


def reduced(image: Image.Image, ratio: float) -> int:
    """Have a JPEG decoded at 1/2, 1/4 or 1/8 (DCT scaling); return 2, 4, 8, or 1 for not."""
    ratio *= 2  # nearer than that it differs by more than the choice of filter does: docs/input.md
    width = image.width
    if image.format in ("JPEG", "MPO") and ratio <= 0.5:
        image.draft(None, (math.ceil(width * ratio), math.ceil(image.height * ratio)))
    return max(round(width / image.width), 1)


def crop_box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
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
    side = min(width, height)
    left, top = centre(width, height, side)
    return left, top, left + side, top + side


def centre(width: int, height: int, size: int) -> tuple[int, int]:
    """(left, top) of the size x size centre."""
    return round((width - size) / 2), round((height - size) / 2)


def _resize(image, width, height):
    """Pixels uint8 [height, width, 3]; within 1 level of Pillow's BICUBIC resize."""
    import torch
    pixels = torch.from_numpy(np.array(image))[None].permute(0, 3, 1, 2)  # channels last
    out = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    return out.permute(0, 2, 3, 1)[0].numpy()


def train_view(data: bytes, size: int, rng: np.random.Generator, jitter=0.0, lighting=0.0) -> np.ndarray:
    """A random crop or its mirror, recoloured if asked, uint8 [size, size, 3] (Goyal, section 5.1)."""
    image = opened(data)
    left, top, right, bottom = crop_box(*image.size, rng)
    scale = reduced(image, size / min(right - left, bottom - top))
    box = [min(round(edge / scale), limit)
           for edge, limit in zip((left, top, right, bottom), image.size * 2)]
    image = rgb(image).crop(box)
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return recolour(_resize(image, size, size), rng, jitter, lighting)


def val_view(data: bytes, size: int, short_side: int) -> np.ndarray:
    """The centre crop, uint8 [size, size, 3]."""
    image = opened(data)
    short = min(image.size)
    width, height = (int(short_side * side / short) for side in image.size)
    if width * height > MAX_PIXELS:
        raise BadImage(f"{image.width} x {image.height} is too narrow: {width} x {height} when scaled")
    left, top = centre(width, height, size)
    return _resize(rgb(image), width, height)[top:top + size, left:left + size]


def view(get, path: str, make) -> tuple:
    """make(get()) and the warnings it gave; BadImage names the path, also if it cannot be read."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            return make(get()), [f"{path}: {w.message}" for w in heard]
        except (BadImage, OSError) as error:
            raise BadImage(f"{path}: {getattr(error, 'strerror', None) or error}") from None

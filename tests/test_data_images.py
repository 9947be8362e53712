"""Pixels: every kind of file, the crops, and the difference from Pillow's own scaling."""
import warnings

import numpy as np
import pytest
from PIL import Image

from refimpl.data import images
from refimpl.data.images import BadImage, centre, crop_box, draws, opened, rgb, train_view, val_view
from tests.data_files import encoded, picture


def pixels(data):
    return np.asarray(rgb(opened(data))).astype(int)


def forms():
    plain = picture()
    grey = np.asarray(plain.convert("L"))
    clear = plain.convert("RGBA")
    clear.putalpha(Image.fromarray(grey))
    palette = plain.quantize(256)
    return {
        "jpeg": (encoded(plain), plain), "progressive": (encoded(plain, progressive=True), plain),
        "png": (encoded(plain, "PNG"), plain),
        "webp": (encoded(plain, "WEBP", lossless=True), plain),
        "bmp": (encoded(plain, "BMP"), plain), "cmyk": (encoded(plain.convert("CMYK")), plain),
        "grey": (encoded(plain.convert("L")), plain.convert("L").convert("RGB")),
        "alpha": (encoded(clear, "PNG"), plain),
        "palette": (encoded(palette, "PNG"), palette.convert("RGB")),
        "palette, alpha": (encoded(palette, "PNG", transparency=bytes(range(256))),
                           palette.convert("RGB")),
        "16-bit": (encoded(Image.fromarray(grey.astype(np.uint16) << 8), "PNG"),
                   plain.convert("L").convert("RGB")),
        "rotated": (encoded(plain, exif=orientation(6)), plain),
    }


def orientation(value):
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


@pytest.mark.parametrize("form", forms())
def test_every_form_gives_three_sensible_channels(form):
    data, expected = forms()[form]
    found = pixels(data)
    assert found.shape == (30, 40, 3)  # EXIF rotation is not applied
    assert abs(found - np.asarray(expected).astype(int)).mean() < 3


@pytest.mark.parametrize("data, why", [
    (b"", "empty file"), (b"<html>not an image</html>", "cannot identify"),
    (encoded(picture())[:400], ""), (encoded(picture())[:-2], ""),
    (encoded(picture(), "PNG")[:90], ""), (encoded(picture(), "EPS"), "cannot identify"),
    (encoded(Image.new("F", (9, 9)), "TIFF"), "floating-point"),
    (b"P5 30000 30000 255\n", "more than|exceeds"), (b"P5 9460 9460 255\n", "more than"),
], ids=range(9))
def test_what_cannot_be_used_is_a_bad_image_and_nothing_else(data, why):
    with pytest.raises(BadImage, match=f"some/path.jpg: .*({why})"):
        images.view(lambda: data, "some/path.jpg", lambda d: train_view(d, 16, draws(0, 0, 0)))


def test_a_file_that_cannot_be_read_is_a_bad_image_but_a_bug_is_not():
    with pytest.raises(BadImage, match="gone.jpg: No such file"):
        images.view(lambda: open("/nowhere/gone.jpg"), "gone.jpg", len)
    with pytest.raises(AttributeError):
        images.view(lambda: b"", "x", lambda d: d.nothing)


def test_warnings_come_with_the_path_and_do_not_leak():
    palette = encoded(picture().quantize(9), "PNG", transparency=bytes(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, heard = images.view(lambda: palette, "a/b.png", lambda d: val_view(d, 16, 18))
    assert heard and all(note.startswith("a/b.png: ") for note in heard)


def test_crops_follow_fb_resnet_torch():
    boxes = np.array([crop_box(500, 375, draws(0, e, i)) for e in range(2) for i in range(2000)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes[:, 2].max() <= 500 and boxes[:, 3].max() <= 375
    area, aspect = w * h / (500 * 375), w / h
    assert 0.079 < area.min() < 0.09 and 0.95 < area.max() <= 1
    assert 0.745 < aspect.min() < 0.77 and 1.3 < aspect.max() < 1.34  # rounded to whole pixels
    left = boxes[:, 0] / np.maximum(500 - w, 1)
    assert abs(left.mean() - 0.5) < 0.03  # 4,000 draws: five standard errors
    assert len({tuple(box) for box in boxes}) > 3990


def test_an_image_no_crop_fits_gives_the_centre_square():
    assert crop_box(1000, 10, draws(0, 0, 0)) == (495, 0, 505, 10)
    assert train_view(encoded(picture(400, 2)), 16, draws(0, 0, 0)).shape == (16, 16, 3)
    assert train_view(encoded(picture(1, 1)), 16, draws(0, 0, 0)).shape == (16, 16, 3)
    assert val_view(encoded(picture(1, 90)), 16, 18).shape == (16, 16, 3)


def test_draws_depend_on_seed_epoch_and_sample_alone():
    keys = [(s, e, i) for s in (0, 1) for e in (0, 1) for i in (0, 1, 2)]
    first = {key: draws(*key).random() for key in keys}
    assert len(set(first.values())) == len(keys)
    assert {key: draws(*key).random() for key in reversed(keys)} == first


def test_half_the_training_views_are_mirrored():
    ramp = encoded(picture(64, 64))
    falls = [train_view(ramp, 16, draws(0, 0, i))[:, -1, 0].mean()
             < train_view(ramp, 16, draws(0, 0, i))[:, 0, 0].mean() for i in range(200)]
    assert 70 < sum(falls) < 130  # four standard deviations


def test_the_validation_view_is_the_centre():
    image = np.zeros((60, 80, 3), np.uint8)  # short side 60 -> 30: the centre 20 of 30 x 40
    image[10:50, 20:60] = 200
    for inside, outside in ((200, 0), (0, 200)):
        image[:] = outside
        image[10:50, 20:60] = inside
        view = val_view(encoded(Image.fromarray(image), "PNG"), 20, 30).astype(int)
        assert abs(view[2:-2, 2:-2] - inside).max() == 0  # bicubic reaches two pixels over an edge
        assert 0 < abs(view[0] - inside).max() < 60
    assert centre(40, 30, 20) == (10, 5)


@pytest.mark.parametrize("size, to", [((300, 200), (60, 50)), ((50, 40), (96, 96)),
                                      ((97, 61), (64, 64))])
def test_scaling_is_within_one_level_of_pillows(size, to):
    noise = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    ours = images._resize(Image.fromarray(noise), *to).astype(int)
    theirs = np.asarray(Image.fromarray(noise).resize(to, Image.Resampling.BICUBIC)).astype(int)
    assert ours.shape == theirs.shape and abs(ours - theirs).max() <= 1


def test_a_large_jpeg_is_decoded_reduced_for_training_and_looks_the_same(monkeypatch):
    data = encoded(picture(800, 600))
    reduced = train_view(data, 32, draws(0, 0, 3)).astype(int)
    with monkeypatch.context() as m:
        m.setattr(images, "reduced", lambda image, ratio: 1)
        full = train_view(data, 32, draws(0, 0, 3)).astype(int)
    assert 0 < abs(reduced - full).max() and abs(reduced - full).mean() < 1
    image = opened(data)
    assert images.reduced(image, 0.2) == 2 and image.size == (400, 300)
    assert images.reduced(opened(data), 0.06) == 8 and images.reduced(opened(data), 0.26) == 1
    assert images.reduced(opened(encoded(picture(800, 600), "PNG")), 0.05) == 1

"""Colour jitter and lighting against values worked out by hand."""
import numpy as np

from refimpl.data.colour import EIGENVALUES, EIGENVECTORS, GREY, recolour


class Fixed:
    """A generator whose draws are known."""

    def __init__(self, order, alpha=0.0, shift=(0, 0, 0)):
        self.order, self.alpha, self.shift = order, alpha, shift

    def permutation(self, n):
        return self.order

    def uniform(self, low, high):
        return self.alpha

    def normal(self, mean, deviation, n):
        return np.array(self.shift, float) * deviation


PIXELS = np.array([[[100, 150, 200], [50, 50, 50]]], np.uint8)


def test_brightness_contrast_and_saturation_by_hand():
    assert recolour(PIXELS, Fixed([0], -0.4), 0.4, 0).tolist() == [[[60, 90, 120], [30, 30, 30]]]
    # grey values 0.299 100 + 0.587 150 + 0.114 200 = 140.75 and 50; their mean 95.375
    assert recolour(PIXELS, Fixed([1], -0.4), 0.4, 0).tolist() == [[[98, 128, 158], [68, 68, 68]]]
    assert recolour(PIXELS, Fixed([2], -0.4), 0.4, 0).tolist() == [[[116, 146, 176], [50, 50, 50]]]


def test_lighting_moves_all_pixels_along_the_axes():
    out = recolour(PIXELS, Fixed([], shift=(1, 0, 0)), 0, 0.1).astype(int) - PIXELS
    by_hand = np.rint(255 * 0.1 * 0.2175 * np.array([-0.5675, -0.5808, -0.5836]))
    assert (out == by_hand).all() and by_hand.tolist() == [-3, -3, -3]
    assert np.allclose(EIGENVECTORS.T @ EIGENVECTORS, np.eye(3), atol=2e-3)
    assert GREY.sum() == 1 and (EIGENVALUES > 0).all()


def test_off_is_untouched_and_draws_nothing():
    assert recolour(PIXELS, None, 0, 0) is PIXELS


def test_white_stays_white_and_nothing_wraps():
    white = np.full((2, 2, 3), 255, np.uint8)
    assert (recolour(white, Fixed([0, 1, 2], 0.4), 0.4, 0) == 255).all()

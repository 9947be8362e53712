"""The kernels around a training step: pack, LARS, update, images. The same sources, compiled
for the host, against NumPy, the published formulas and numbers worked by hand.
"""
import itertools

import numpy as np
import pytest

from refimpl import kernels
from tests import kernel_twins as twins
from tests.kernel_host import addresses, placed, run, untouched_around
from tests.kernel_twins import STORED, samples, same

F32, I64 = np.float32, np.int64
FLOATS = ("float32", "float16", "bfloat16")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # inf - inf, overflow: wanted


SIZES = (64, 1, 0, 147, 33, 16, 7, 1000)


def test_pieces_cover_every_element_once_and_stay_inside_their_tensor():
    table, first = kernels.pieces(SIZES, 32)
    assert table.dtype.itemsize == 24 and len(table) == first[-1]
    starts = np.cumsum([0, *SIZES])
    for t, size in enumerate(SIZES):
        mine = table[first[t]:first[t + 1]]
        covered = [i for p in mine for i in range(p["offset"], p["offset"] + p["length"])]
        assert covered == list(range(size)) and all(mine["tensor"] == t)
        assert all(mine["start"] - mine["offset"] == starts[t]) and all(mine["length"] <= 32)


@pytest.mark.parametrize("flat, tensor", [*itertools.product(FLOATS, FLOATS)])
def test_pack_and_back_scale_and_round_once(flat, tensor):
    table, first = kernels.pieces(SIZES, 32)
    tensors = [placed(samples(n, tensor, 4), t % 3) for t, n in enumerate(SIZES)]
    buffer = placed(np.zeros(sum(SIZES), STORED[flat]), 1)
    for bucket in np.array_split(table, 3):  # a bucket is a range of pieces
        run(f"pack_{flat}_{tensor}", buffer, addresses(tensors), bucket, I64(len(bucket)), F32(4))
    assert same(buffer, twins.scaled(np.concatenate(tensors), tensor, flat, 4), flat)

    source = placed(samples(buffer.size, flat, 5), 2)
    run(f"pack_back_{tensor}_{flat}", addresses(tensors), source, table, I64(len(table)),
        F32(2**-4))
    want = twins.scaled(source, flat, tensor, 2**-4)
    assert same(np.concatenate(tensors), want, tensor)
    assert all(untouched_around(x) for x in (*tensors, buffer, source))


def plain(n, seed):
    """Values of the size that weights and gradients have: 2^-14 to 2^3."""
    rng = np.random.default_rng([seed, n])
    return (rng.standard_normal(n) * 2.0 ** rng.integers(-12, 1, n)).astype(F32)


def lars(form, weights, gradients, decay=1e-4, adapt=None, c=0.001, eps=1e-6, blocks=2, threads=8,
         length=32):
    """Both LARS kernels on a list of tensors; returns (sums per tensor, ratios)."""
    sizes = [len(w) for w in weights]
    table, first = kernels.pieces(sizes, length)
    sums, ratio = np.full((len(table), 2), np.nan), np.full(len(sizes), np.nan, F32)
    flat = np.concatenate(gradients)
    run("lars_norms_float32", sums, addresses(weights), flat, table, I64(len(table)),
        blocks=blocks, threads=threads)
    decays = np.full(len(sizes), decay, F32)
    adapts = np.ones(len(sizes), np.uint8) if adapt is None else np.array(adapt, np.uint8)
    run(f"lars_ratio_{form}", ratio, sums, first, decays, adapts, I64(len(sizes)), F32(c), F32(eps),
        blocks=blocks, threads=threads)
    return np.array([sums[a:b].sum(0) for a, b in itertools.pairwise(first)]), ratio


def test_lars_by_hand():
    """w = (3, 4), g = (0.6, 0.8), decay 1e-4, coefficient 0.001: 0.005 / 1.0005."""
    w, g = np.array([3, 4], F32), np.array([0.6, 0.8], F32)
    for form in ("nnl", "tf"):
        sums, ratio = lars(form, [w], [g], eps=0 if form == "tf" else 1e-6)
        assert sums[0, 0] == 25 and abs(sums[0, 1] - 1) < 1e-7  # 0.6 and 0.8 in float32
        assert abs(ratio[0] / (0.005 / 1.0005) - 1) < 2**-22


@pytest.mark.parametrize("form", ["nnl", "tf"])
def test_lars_ratios_are_the_published_formula_on_float64_norms(form):
    weights, gradients = ([plain(n, seed) for n in (1, 33, 100, 1009)] for seed in (6, 7))
    adapt = (1, 1, 0, 1)
    sums, ratio = lars(form, weights, gradients, adapt=adapt)
    want = twins.lars_norms(weights, gradients)
    n = np.array([[len(w)] for w in weights])
    assert np.all(np.abs(sums - want) <= 2 * n * 2.0**-53 * want)  # both orders, positive terms
    decay, c, eps = (float(F32(x)) for x in (1e-4, 0.001, 1e-6))
    for t, (w, g) in enumerate(np.sqrt(want)):
        expected = twins.lars_ratio(form, w, g, decay, adapt[t], c, eps)
        assert abs(ratio[t] - expected) <= 2.0**-23 * expected


@pytest.mark.parametrize("form", ["nnl", "tf"])
@pytest.mark.parametrize("w, g", [(0, 1), (0, 0), (1, 0), (1e-30, 1e-30), (1e-25, 1e30)])
def test_lars_is_finite_and_positive_at_vanishing_norms(form, w, g):
    for decay in (0, 1e-4):
        _, ratio = lars(form, [np.full(5, w, F32)], [np.full(5, g, F32)], decay=decay)
        assert np.isfinite(ratio[0]) and ratio[0] > 0 or (form, w) == ("tf", F32(1e-25))
        if w == 0 or g == 0 and form == "tf":
            assert ratio[0] == 1
        elif g == 0 and decay == 0:  # NNL: 0.001 |w| / eps, harmless: the gradient is 0
            assert ratio[0] == pytest.approx(1000 * 5**0.5, rel=2**-22)


def test_lars_norm_of_many_large_values_does_not_overflow():
    g = np.full(70000, 2.0**100, F32)
    sums, _ = lars("nnl", [np.ones(70000, F32)], [g], length=kernels.PIECE_LENGTH)
    assert sums.tolist() == [[70000, 2.0**200 * 70000]]


def test_lars_bits_do_not_depend_on_the_grid():
    w, g = ([plain(n, seed) for n in (500, 77)] for seed in (8, 9))
    runs = [lars("nnl", w, g, blocks=b) for b in (1, 2, 7)]
    assert all(np.array_equal(a, b) for r in runs[1:] for a, b in zip(r, runs[0]))


SETTINGS = {"eq9": (1, 0.9, 0.1),  # inside, carry, outside: Goyal eq. (9)
            "eq10": (0.3, 0.9 * 3, 1)}  # eq. (10), corrected for a rate that went from 0.1 to 0.3


@pytest.mark.parametrize("form, nesterov, with_ratio",
                         [*itertools.product(SETTINGS, (0, 1), (False, True))])
def test_update_has_the_bits_of_numpy(form, nesterov, with_ratio):
    table, first = kernels.pieces(SIZES, 32)
    start = np.cumsum([0, *SIZES])
    weights = [placed(samples(n, "float32", 10), t % 4) for t, n in enumerate(SIZES)]
    before = [w.copy() for w in weights]
    g, u = samples(start[-1], "float32", 11), samples(start[-1], "float32", 12)
    u1, g1 = placed(u, 3), placed(g, 2)
    decay = np.array([1e-4 * (t % 2) for t in range(len(SIZES))], F32)
    ratio = np.array([0.5 + t for t in range(len(SIZES))], F32)
    inside, carry, outside = SETTINGS[form]
    scalars = dict(inside=inside, carry=carry, momentum=0.9, nesterov=nesterov, outside=outside)
    arguments = [np.int32(v) if k == "nesterov" else F32(v) for k, v in scalars.items()]
    run("update_float32", addresses(weights), u1, g1, table, I64(len(table)), decay,
        ratio if with_ratio else kernels.NULL, *arguments)
    for t in range(len(SIZES)):
        cut = slice(start[t], start[t + 1])
        w, v = twins.update(before[t], u[cut], g[cut], decay=decay[t],
                            ratio=ratio[t] if with_ratio else 1, **scalars)
        assert same(weights[t], w, "float32") and same(u1[cut], v, "float32"), t
    assert all(untouched_around(x) for x in (*weights, u1, g1))


def scalar_run(rates, settings, nesterov=0):
    """Weight 1, gradient 1, no decay: the weight after each step."""
    w, u, g, seen = np.ones(1, F32), np.zeros(1, F32), np.ones(1, F32), []
    table, _ = kernels.pieces([1])
    for step, lr in enumerate(rates):
        inside, carry, outside = settings(lr, rates[max(step - 1, 0)])
        run("update_float32", addresses([w]), u, g, table, I64(1), np.zeros(1, F32), kernels.NULL,
            F32(inside), F32(carry), F32(0.9), np.int32(nesterov), F32(outside))
        seen.append(float(w[0]))
    return seen


def test_momentum_forms_by_hand_when_the_rate_changes():
    rates = (0.1, 0.2, 0.4)
    near = lambda want: pytest.approx(want, abs=8 * 2**-24)  # a dozen roundings, values below 2
    assert scalar_run(rates, lambda lr, _: (1, 0.9, lr)) == near([0.9, 0.52, -0.564])
    assert scalar_run(rates, lambda lr, old: (lr, 0.9 * lr / old, 1)) == near([0.9, 0.52, -0.564])
    assert scalar_run(rates, lambda lr, _: (lr, 0.9, 1)) == near([0.9, 0.61, -0.051])


def test_nesterov_by_hand():
    """u = 1, 1.9, 2.71; steps 0.1 (1 + 0.9 u) = 0.19, 0.271, 0.3439: the same in both forms."""
    for settings in (lambda lr, _: (1, 0.9, lr), lambda lr, _: (lr, 0.9, 1)):
        assert scalar_run((0.1, 0.1, 0.1), settings, 1) == pytest.approx(
            [0.81, 0.539, 0.1951], abs=8 * 2**-24)


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("planar", [1, 0])
def test_images_have_the_bits_of_numpy_in_both_layouts(name, planar):
    scale, shift = twins.image_constants(MEAN, STD)
    shapes = (0, 4, 4), (1, 1, 1), (2, 3, 5), (3, 2, 2), (2, 8, 6)
    for shape, a, b in itertools.product(shapes, (0, 1, 4), (0, 3, 4)):
        x = np.random.default_rng(13).integers(0, 256, (*shape, 3), np.uint8)
        source, out = placed(x.reshape(-1), b), placed(np.zeros(x.size, STORED[name]), a)
        run(f"images_{name}", out, source, scale, shift, I64(shape[0]), I64(shape[1] * shape[2]),
            np.int32(planar))
        want = twins.images(x, MEAN, STD, name, planar)
        assert same(out, want.reshape(-1), name) and untouched_around(out), (shape, a, b)


def test_normalisation_is_the_usual_one_within_its_roundings():
    x = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, 16, 16, 3)
    usual = (x / 255 - np.array(MEAN)) / np.array(STD)
    # two constants rounded, a product below 4.5, a sum below 3
    bound = (2 * 4.5 + 2.2 + 3) * 2**-24
    assert np.max(np.abs(twins.images(x, MEAN, STD, "float32", 0) - usual)) < bound

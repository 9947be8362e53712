"""The kernels' arithmetic, from the same sources compiled for the host, against NumPy and by hand.

Every thread of a small grid is played; arrays start at every offset from a 16-byte boundary, and
the bytes around them must stay as they were.
"""
import ctypes
import itertools
import math
import mmap
import re

import numpy as np
import pytest

from refimpl import kernels
from tests import kernel_twins as twins
from tests.kernel_host import addresses, build, library, placed, run, untouched_around
from tests.kernel_twins import STORED, samples, same

F32, I64 = np.float32, np.int64
LENGTHS = (0, 1, 2, 3, 7, 31, 32, 33, 1009, 1023, 1024, 1025)
WORDS = ("float16", "bfloat16")
FLOATS = ("float32", *WORDS)
ADDITIONS = [(t, t) for t in STORED] + [("float32", w) for w in WORDS]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # inf - inf, overflow: wanted


def shifts(n):
    """All pairs of offsets for short arrays, some for long ones."""
    pairs = itertools.product(range(8), range(8))
    return pairs if n < 40 else [(0, 0), (1, 1), (3, 3), (0, 1), (5, 0), (7, 3), (2, 6)]


def bits(name):
    return STORED[name]().itemsize * 8


@pytest.mark.parametrize("into, source", ADDITIONS)
def test_add_has_the_bits_of_numpy_at_every_length_and_alignment(into, source):
    name = f"add_{into}" if into == source else f"add_{into}_{source}"
    for n in LENGTHS:
        x, y = samples(n, into, 1), np.roll(samples(n, source, 2), n // 3)
        want = twins.add(x, y, into, source)
        for a, b in shifts(n):
            x1, y1 = placed(x, a), placed(y, b)
            run(name, x1, y1, I64(n))
            assert same(x1, want, into), (n, a, b)
            assert same(y1, y, source) and untouched_around(x1) and untouched_around(y1)


@pytest.mark.parametrize("blocks, threads", [(1, 1), (1, 32), (5, 7), (40, 32)])
def test_any_grid_visits_each_element_once(blocks, threads):
    for n in (0, 1, 33, 1025):
        x = placed(np.arange(n, dtype=np.int32), 3)
        run("add_int32", x, np.ones(n, np.int32), I64(n), blocks=blocks, threads=threads)
        assert np.array_equal(x, np.arange(n) + 1)


def test_elements_beyond_2_to_the_31_are_reached():
    n, at = 2**31 + 8, 2**31 + 3
    try:
        room = mmap.mmap(-1, 2 * n, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # no reserve
    except OSError as error:
        pytest.skip(f"no 4 GiB of address space: {error}")
    x, flag, lib = np.frombuffer(room, np.float16), np.zeros(1, np.int32), library("finite")
    x[at] = np.inf
    lib.grid(2**20 + 1, 256)  # one thread per 8 elements: only the two played here touch memory
    for block, thread, found in [(2**20 - 1, 255, 0), (2**20, 0, 1)]:
        lib.place(block, thread)
        lib.finite_float16(ctypes.c_void_p(flag.ctypes.data), ctypes.c_void_p(x.ctypes.data),
                           ctypes.c_int64(n))
        assert flag[0] == found


def exact(word, name):
    """The value of a positive 16-bit word by the definition of the format; the word behind the
    largest finite one counts as the next power of two, which is where rounding sends it."""
    fraction_bits, bias = (10, 15) if name == "float16" else (7, 127)
    exponent, fraction = divmod(word, 1 << fraction_bits)
    if exponent == 0:
        return math.ldexp(fraction, 1 - bias - fraction_bits)
    return math.ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits)


@pytest.mark.parametrize("name, infinity", [("float16", 0x7c00), ("bfloat16", 0x7f80)])
def test_all_finite_words_decode_exactly_and_all_midpoints_round_to_even(name, infinity):
    words = np.arange(infinity, dtype=np.uint16)
    values = [exact(w, name) for w in range(infinity + 1)]
    n, floats = infinity, np.empty(infinity, F32)
    run(f"wire_decode_{name}", floats, words, I64(n))
    assert floats.tolist() == values[:-1]

    middle = np.array([(a + b) / 2 for a, b in itertools.pairwise(values)], F32)
    assert middle.tolist() == [(a + b) / 2 for a, b in itertools.pairwise(values)]  # exact
    for sign, top in ((1, 0), (-1, 0x8000)):
        for at, want in [(np.nextafter(middle, F32(0)), words), (middle, words + (words & 1)),
                         (np.nextafter(middle, F32(np.inf)), words + 1)]:
            got = np.empty(n, np.uint16)
            run(f"wire_encode_{name}", got, sign * at, I64(n))
            assert np.array_equal(got, want | top)


@pytest.mark.parametrize("name", WORDS)
def test_infinity_nan_and_huge_values_encode_as_such(name):
    x = np.array([np.inf, -np.inf, np.nan, 3.402e38, -3.402e38, -0.0], F32)
    payloads = np.array([0x7f800001, 0xff800001, 0x7fffffff, 0xffffffff], np.uint32).view(F32)
    words, decoded = np.empty(10, np.uint16), np.empty(10, F32)
    run(f"wire_encode_{name}", words, np.concatenate([x, payloads]), I64(10))
    run(f"wire_decode_{name}", decoded, words, I64(10))
    assert decoded[[0, 3]].tolist() == [np.inf] * 2 and decoded[[1, 4]].tolist() == [-np.inf] * 2
    assert np.isnan(decoded[[2, 6, 7, 8, 9]]).all() and words[5] == 0x8000


@pytest.mark.parametrize("name", WORDS)
def test_the_wire_has_the_bits_of_numpy_at_every_length_and_alignment(name):
    for n in LENGTHS:
        x = samples(n, "float32", 3)
        words, values = twins.wire_round(x, name)
        for a, b in shifts(n):
            out, source = placed(np.zeros_like(words), a), placed(x, b)
            run(f"wire_encode_{name}", out, source, I64(n))
            assert same(out, words, name) and same(source, x, "float32")
            out[:] = 0
            run(f"wire_round_{name}", out, source, I64(n))
            assert same(out, words, name) and same(source, values, "float32")
            source[:] = 0
            run(f"wire_decode_{name}", source, out, I64(n))
            assert same(source, values, "float32"), (n, a, b)
            assert untouched_around(out) and untouched_around(source)


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


def plain(n, name, seed):
    """Values that a norm of any kind can take: 2^-14 to 2^3 in size."""
    rng = np.random.default_rng([seed, n])
    return twins.narrow((rng.standard_normal(n) * 2.0 ** rng.integers(-12, 1, n)).astype(F32), name)


def lars(form, weights, gradients, name="float32", decay=1e-4, adapt=None, c=0.001, eps=1e-6,
         scale=1.0, blocks=2, threads=8, length=32):
    """Both LARS kernels on a list of tensors; returns (sums per tensor, ratios)."""
    sizes = [len(w) for w in weights]
    table, first = kernels.pieces(sizes, length)
    sums, ratio = np.full((len(table), 2), np.nan), np.full(len(sizes), np.nan, F32)
    flat = np.concatenate(gradients)
    run(f"lars_norms_{name}", sums, addresses(weights), flat, table, I64(len(table)), F32(scale),
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


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("form", ["nnl", "tf"])
def test_lars_ratios_are_the_published_formula_on_float64_norms(form, name):
    weights = [plain(n, "float32", 6) for n in (1, 33, 100, 1009)]
    gradients = [plain(n, name, 7) for n in (1, 33, 100, 1009)]
    adapt, scale = (1, 1, 0, 1), 2.0**-10
    sums, ratio = lars(form, weights, gradients, name, adapt=adapt, scale=scale)
    want = twins.lars_norms(weights, gradients, name, scale)
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
        if w == 0:
            assert ratio[0] == 1


def test_lars_norm_of_many_large_float16_values_does_not_overflow():
    g = np.full(70000, 300, np.float16)
    sums, _ = lars("nnl", [np.ones(70000, F32)], [g], "float16", length=kernels.PIECE_LENGTH)
    assert sums.tolist() == [[70000, 300**2 * 70000]]


def test_lars_bits_do_not_depend_on_the_grid():
    w, g = ([plain(n, name, 8) for n in (500, 77)] for name in ("float32", "bfloat16"))
    runs = [lars("nnl", w, g, "bfloat16", blocks=b) for b in (1, 2, 7)]
    assert all(np.array_equal(a, b) for r in runs[1:] for a, b in zip(r, runs[0]))


SETTINGS = {  # inside, carry, outside: Goyal eq. (9); eq. (10) with its correction for lr 0.1 -> 0.3
    "eq9": (1, 0.9, 0.1), "eq10": (0.3, 0.9 * 3, 1)}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("form, nesterov, with_ratio",
                         [*itertools.product(SETTINGS, (0, 1), (False, True))])
def test_update_has_the_bits_of_numpy(name, form, nesterov, with_ratio):
    table, first = kernels.pieces(SIZES, 32)
    start = np.cumsum([0, *SIZES])
    weights = [placed(samples(n, "float32", 10), t % 4) for t, n in enumerate(SIZES)]
    before = [w.copy() for w in weights]
    g, u = samples(start[-1], name, 11), samples(start[-1], "float32", 12)
    u1, g1 = placed(u, 3), placed(g, 2)
    decay = np.array([1e-4 * (t % 2) for t in range(len(SIZES))], F32)
    ratio = np.array([0.5 + t for t in range(len(SIZES))], F32)
    inside, carry, outside = SETTINGS[form]
    scalars = dict(scale=2**-8, inside=inside, carry=carry, momentum=0.9, nesterov=nesterov,
                   outside=outside)
    arguments = [np.int32(v) if k == "nesterov" else F32(v) for k, v in scalars.items()]
    common = (addresses(weights), u1, g1, table, I64(len(table)), decay,
              ratio if with_ratio else None)
    run(f"update_{name}", *common, np.ones(1, np.int32), *arguments)  # overflow: nothing moves
    assert all(same(a, b, "float32") for a, b in zip([*weights, u1], [*before, u]))
    run(f"update_{name}", *common, np.zeros(1, np.int32), *arguments)
    for t in range(len(SIZES)):
        cut = slice(start[t], start[t + 1])
        w, v = twins.update(before[t], u[cut], g[cut], name, decay=decay[t],
                            ratio=ratio[t] if with_ratio else 1, **scalars)
        assert same(weights[t], w, "float32") and same(u1[cut], v, "float32"), t
    assert all(untouched_around(x) for x in (*weights, u1, g1))


def scalar_run(rates, settings, nesterov=0):
    """Weight 1, gradient 1, no decay: the weight after each step."""
    w, u, g, seen = np.ones(1, F32), np.zeros(1, F32), np.ones(1, F32), []
    table, _ = kernels.pieces([1])
    for step, lr in enumerate(rates):
        inside, carry, outside = settings(lr, rates[max(step - 1, 0)])
        run("update_float32", addresses([w]), u, g, table, I64(1), np.zeros(1, F32), None, None,
            F32(1), F32(inside), F32(carry), F32(0.9), np.int32(nesterov), F32(outside))
        seen.append(float(w[0]))
    return seen


def test_momentum_forms_by_hand_when_the_rate_changes():
    rates = (0.1, 0.2, 0.4)
    near = lambda want: pytest.approx(want, abs=8 * 2**-24)  # a dozen roundings of values below 2
    assert scalar_run(rates, lambda lr, _: (1, 0.9, lr)) == near([0.9, 0.52, -0.564])
    assert scalar_run(rates, lambda lr, old: (lr, 0.9 * lr / old, 1)) == near([0.9, 0.52, -0.564])
    assert scalar_run(rates, lambda lr, _: (lr, 0.9, 1)) == near([0.9, 0.61, -0.051])


def test_nesterov_by_hand():
    """u = 1, 1.9, 2.71; steps 0.1 (1 + 0.9 u) = 0.19, 0.271, 0.3439: the same in both forms."""
    for settings in (lambda lr, _: (1, 0.9, lr), lambda lr, _: (lr, 0.9, 1)):
        assert scalar_run((0.1, 0.1, 0.1), settings, 1) == pytest.approx(
            [0.81, 0.539, 0.1951], abs=8 * 2**-24)


@pytest.mark.parametrize("name", FLOATS)
def test_one_value_that_is_not_finite_is_found_wherever_it_is(name):
    largest = twins.narrow(np.array([65504, 3.38e38, 3.4e38], F32)[
        [("float16", "bfloat16", "float32").index(name)]], name)[0]
    bad = twins.narrow(np.array([np.inf, -np.inf, np.nan], F32), name)
    for n, shift in itertools.product((0, 1, 3, 7, 31, 33), range(8)):
        x, flag = placed(np.full(n, largest, STORED[name]), shift), np.zeros(1, np.int32)
        run(f"finite_{name}", flag, x, I64(n))
        assert flag[0] == 0
        for at in range(n):
            flag[0], x[at] = 0, bad[at % 3]
            run(f"finite_{name}", flag, x, I64(n))
            assert flag[0] == 1, (n, shift, at)
            x[at] = largest
        run(f"finite_{name}", flag, x, I64(n))
        assert flag[0] == (n > 0)  # an earlier find stays


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("planar", [1, 0])
def test_images_have_the_bits_of_numpy_in_both_layouts(name, planar):
    offset, factor = twins.image_constants(MEAN, STD)
    for shape, a, b in itertools.product([(0, 4, 4), (1, 1, 1), (2, 3, 5), (3, 2, 2), (2, 8, 6)],
                                         (0, 1, 4), (0, 3, 4)):
        x = np.random.default_rng(13).integers(0, 256, (*shape, 3), np.uint8)
        source, out = placed(x.reshape(-1), b), placed(np.zeros(x.size, STORED[name]), a)
        run(f"images_{name}", out, source, offset, factor, I64(shape[0]), I64(shape[1] * shape[2]),
            np.int32(planar))
        want = twins.images(x, MEAN, STD, name, planar)
        assert same(out, want.reshape(-1), name) and untouched_around(out), (shape, a, b)


def test_normalisation_is_the_usual_one_within_its_roundings():
    x = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, 16, 16, 3)
    usual = (x / 255 - np.array(MEAN)) / np.array(STD)
    # offset is off by <= 2^-18 of 255, then three roundings of values below 3
    bound = 2**-18 / (255 * min(STD)) + 3 * 3 * 2**-24
    assert np.max(np.abs(twins.images(x, MEAN, STD, "float32", 0) - usual)) < bound


@pytest.mark.parametrize("file, right, wrong", [
    ("sweep.h", "tail + (s - head)", "s"),
    ("sweep.h", "lanes.first; g < groups", "lanes.first + 1; g < groups"),
    ("numbers.h", "(u >> 16 & 1u)", "1u"),
    ("numbers.h", "+ 0x7fffu +", "+ 0x8000u +")])
def test_a_planted_bug_is_seen(tmp_path, file, right, wrong):
    for source in kernels.folder().iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    text = (tmp_path / file).read_text()
    assert right in text
    (tmp_path / file).write_text(text.replace(right, wrong))
    lib, differs = build("wire", tmp_path), []
    for shift in range(4):
        x, words = samples(37, "float32"), placed(np.zeros(37, np.uint16), shift)
        run("wire_encode_bfloat16", words, placed(x, shift), I64(37), lib=lib)
        differs.append(not same(words, twins.narrow(x, "bfloat16"), "bfloat16"))
    assert any(differs)


def test_every_source_opens_with_its_contract_and_names_its_kernels_after_itself():
    for path in kernels.folder().glob("*.cu"):
        assert path.read_text().startswith("// "), path.name
        for name in re.findall(r"void (\w+?)(?:_##\w+)*\(\w+\*.*\\", path.read_text()):
            assert name == "name" or name.split("_")[0] == path.stem, name

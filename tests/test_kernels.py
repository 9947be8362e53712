"""Addition, wire and the sweep below all kernels: the same sources, compiled for the host, against
NumPy and the definitions of the formats.

Every thread of a small grid is played; arrays start at every offset from a 16-byte boundary, and
the bytes around them must stay as they were.
"""
import ctypes
import itertools
import math
import mmap

import numpy as np
import pytest

from refimpl import kernels
from tests import kernel_twins as twins
from tests.kernel_host import build, library, placed, run, untouched_around
from tests.kernel_twins import STORED, samples, same

F32, I64 = np.float32, np.int64
LENGTHS = (0, 1, 2, 3, 7, 31, 32, 33, 1009, 1023, 1024, 1025)
WORDS = ("float16", "bfloat16")
ADDITIONS = [(t, t) for t in STORED] + [("float32", w) for w in WORDS]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # inf - inf, overflow: wanted


def shifts(n):
    """All pairs of offsets for short arrays, some for long ones."""
    pairs = itertools.product(range(8), range(8))
    return pairs if n < 40 else [(0, 0), (1, 1), (3, 3), (0, 1), (5, 0), (7, 3), (2, 6)]


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
        room = mmap.mmap(-1, 4 * n, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # no reserve
    except OSError as error:
        pytest.skip(f"no 8 GiB of address space: {error}")
    x, y = np.frombuffer(room, np.float16).reshape(2, n)
    y[at], lib = 1, library("add")
    lib.grid(2**20 + 1, 256)  # one thread per 8 elements: only the two played here touch memory
    for block, thread, want in [(2**20 - 1, 255, 0), (2**20, 0, 1)]:
        lib.place(block, thread)
        lib.add_float16(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data),
                        ctypes.c_int64(n))
        assert x[at] == want


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
        words = twins.narrow(x, name)
        for a, b in shifts(n):
            out, source = placed(np.zeros_like(words), a), placed(x, b)
            run(f"wire_encode_{name}", out, source, I64(n))
            assert same(out, words, name) and same(source, x, "float32")
            source[:] = 0
            run(f"wire_decode_{name}", source, out, I64(n))
            assert same(source, twins.widen(words, name), "float32"), (n, a, b)
            assert untouched_around(out) and untouched_around(source)


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


def test_every_source_opens_with_its_contract():
    assert all(p.read_text().startswith("// ") for p in kernels.folder().iterdir())

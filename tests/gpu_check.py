"""Kernels on a GPU: right bits against NumPy, and bandwidth against a device copy.

    python -m tests.gpu_check [--elements 64M] [--json FILE]

Each kernel runs at awkward lengths and alignments and is compared with its NumPy twin; then at full
size it is timed. GB/s counts each byte that must be read or written once; a copy counts both sides.
Exit code 0: all right; 1: a wrong result; 2: no GPU or no CuPy.
"""
import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from refimpl import kernels
from refimpl.kernels import elementwise, launch
from tests import kernel_twins as twins

F32, I64 = np.float32, np.int64
WORDS, FLOATS = ("float16", "bfloat16"), ("float32", "float16", "bfloat16")
LENGTHS = (0, 1, 7, 33, 1025, 300_007)  # the last one, a prime, fills many blocks
SHIFTS = (0, 1, 3)  # elements that an array starts behind an aligned address
REPEATS, ROUNDS = 10, 7  # launches in one measurement; measurements


class Case(NamedTuple):
    """One kernel at one size."""
    arrays: list[np.ndarray]
    ready: Callable  # ready(cupy, *device arrays) -> a function that launches the kernel
    right: Callable  # right(*arrays as they are after one launch) -> bool
    moved: int  # bytes that must cross the memory bus


def draw(n, name, seed):
    return np.resize(twins.samples(min(n, 100_003), name, seed), n)


def size(name):
    return twins.STORED[name]().itemsize


def zeros(n, name):
    return np.zeros(n, twins.STORED[name])


def add(kernel, n, into, source):
    x, y = draw(n, into, 1), np.roll(draw(n, source, 2), 5)
    return Case([x, y], lambda cp, a, b: partial(elementwise, cp, kernel, n, a, b),
                lambda a, b: twins.same(a, twins.add(x, y, into, source), into),
                n * (2 * size(into) + size(source)))


def wire(kernel, n, what, word):
    source, target = ("float32", word) if what == "encode" else (word, "float32")
    convert = twins.narrow if what == "encode" else twins.widen
    x = draw(n, source, 3)
    return Case([zeros(n, target), x], lambda cp, y, a: partial(elementwise, cp, kernel, n, y, a),
                lambda y, a: (twins.same(y, convert(x, word), target)
                              and twins.same(a, x, source)), 6 * n)


def images(kernel, n, name, planar):
    count, side = (n // (3 * 224**2), 224) if n > 1e6 else (2, n % 29)
    x = np.random.default_rng(n).integers(0, 256, (count, side, side, 3), np.uint8)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    scalars = I64(count), I64(side**2), np.int32(planar)
    return Case([zeros(x.size, name), x.ravel(), *twins.image_constants(mean, std)],
                lambda cp, *a: partial(launch, cp, kernel, -(-x.size // 3072), *a, *scalars),
                lambda y, *_: twins.same(y, twins.images(x, mean, std, name, planar).ravel(), name),
                x.size * (1 + size(name)))


def tensors(n):
    """Sizes like ResNet-50's, about n elements in all, where each starts, and their pieces."""
    unit = [64, 256, 2048, 147_456, 2_359_296] if n > 1e6 else [64, 1, n, 20]
    sizes = unit * max(1, n // sum(unit))
    table, first = kernels.pieces(sizes)
    return np.cumsum([0, *sizes]), table, first


def addresses(cp, flat, starts):
    """A device table of pointers to tensors that lie at `starts` in one device array."""
    base = np.uint64(flat.__cuda_array_interface__["data"][0])
    return cp.asarray(base + starts.astype(np.uint64) * np.uint64(flat.dtype.itemsize))


def pack(kernel, n, flat, tensor, back):
    starts, table, first = tensors(n)
    n, count, scale = int(starts[-1]), int(first[-1]), 2.0**-3
    source, target = (flat, tensor) if back else (tensor, flat)
    x = draw(n, source, 4)

    def ready(cp, y, x, table):
        pair = (addresses(cp, y, starts), x) if back else (y, addresses(cp, x, starts))
        return partial(launch, cp, kernel, count, *pair, table, I64(count), F32(scale))

    return Case([zeros(n, target), x, table], ready,
                lambda y, *_: twins.same(y, twins.scaled(x, source, target, scale), target),
                n * (size(source) + size(target)))


def lars(kernel, n, form):
    """Norms and ratios together, as they are used; float64 sums compared within their roundings."""
    starts, table, first = tensors(n)
    n, count, tensor_count = int(starts[-1]), int(first[-1]), len(starts) - 1
    w = np.resize(np.random.default_rng(5).standard_normal(10_007), n).astype(F32)
    g = F32(0.5) * w[::-1]
    decay, adapt = np.full(tensor_count, 1e-4, F32), np.ones(tensor_count, np.uint8)

    def ready(cp, ratio, sums, w, g, table, first, decay, adapt):
        pointers = addresses(cp, w, starts)

        def both():
            launch(cp, kernel, count, sums, pointers, g, table, I64(count))
            launch(cp, f"lars_ratio_{form}", tensor_count, ratio, sums, first, decay, adapt,
                           I64(tensor_count), F32(0.001), F32(1e-6))
        return both

    def right(ratio, *_):
        cut = [slice(a, b) for a, b in zip(starts, starts[1:])]
        norms = np.sqrt(twins.lars_norms([w[c] for c in cut], [g[c] for c in cut]))
        want = [twins.lars_ratio(form, *x, float(F32(1e-4)), True, float(F32(0.001)),
                                 float(F32(1e-6))) for x in norms]
        return np.allclose(ratio, want, rtol=2**-22, atol=0)  # one float32 rounding, and to spare

    return Case([zeros(tensor_count, "float32"), np.zeros(2 * count), w, g, table, first, decay,
                 adapt], ready, right, n * 8)


def update(kernel, n):
    starts, table, first = tensors(n)
    n, count, tensor_count = int(starts[-1]), int(first[-1]), len(starts) - 1
    w, u, g = (draw(n, "float32", seed) for seed in (6, 7, 8))
    decay = np.resize(np.array([0, 1e-4], F32), tensor_count)
    ratio = np.resize(np.array([0.5, 1, 3], F32), tensor_count)
    values = dict(inside=1, carry=0.9, momentum=0.9, nesterov=1, outside=0.1)
    scalars = [np.int32(v) if k == "nesterov" else F32(v) for k, v in values.items()]

    def ready(cp, w, u, g, table, decay, ratio):
        return partial(launch, cp, kernel, count, addresses(cp, w, starts), u, g, table,
                       I64(count), decay, ratio, *scalars)

    def right(w1, u1, *_):
        each = [np.repeat(x, np.diff(starts)) for x in (decay, ratio)]
        want = twins.update(w, u, g, decay=each[0], ratio=each[1], **values)
        return twins.same(w1, want[0], "float32") and twins.same(u1, want[1], "float32")

    return Case([w, u, g, table, decay, ratio], ready, right, n * 20)


def cases() -> Iterator[tuple[str, Callable[[int], Case]]]:
    """Every kernel: its name, and how to make it at a size."""
    for t in twins.STORED:
        yield f"add_{t}", partial(add, into=t, source=t)
    for t in WORDS:
        yield f"add_float32_{t}", partial(add, into="float32", source=t)
        for what in ("encode", "decode"):
            yield f"wire_{what}_{t}", partial(wire, what=what, word=t)
    for t in FLOATS:
        for planar in (1, 0):
            yield f"images_{t}", partial(images, name=t, planar=planar)
        for flat in FLOATS:
            yield f"pack_{flat}_{t}", partial(pack, flat=flat, tensor=t, back=False)
            yield f"pack_back_{t}_{flat}", partial(pack, flat=flat, tensor=t, back=True)
    for form in ("nnl", "tf"):
        yield "lars_norms_float32", partial(lars, form=form)
    yield "update_float32", update


def place(cp, x, shift=0):
    """A device copy of x that starts `shift` elements behind an aligned address."""
    if x.dtype == kernels.PIECE:  # no CuPy type; kernels see an address
        return cp.asarray(x.view(np.uint8))
    room = cp.zeros(x.size + shift, x.dtype)
    room[shift:] = cp.asarray(x)
    return room[shift:]


def wrong(cp, kernel, make) -> list[str]:
    """The sizes and shifts at which the result is not the twin's."""
    bad = []
    for n, shift in ((n, shift) for n in LENGTHS for shift in SHIFTS):
        case = make(kernel, n)
        device = [place(cp, x, shift) for x in case.arrays]
        case.ready(cp, *device)()
        if not case.right(*(cp.asnumpy(x) for x in device)):
            bad.append(f"n={n} shift={shift}")
    return bad


def seconds(cp, run) -> list[float]:
    """Time of one launch, once per round, measured by the device's own clock."""
    found = []
    for warm in range(ROUNDS + 1):
        start, stop = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        for _ in range(REPEATS):
            run()
        stop.record()
        stop.synchronize()
        if warm:
            found.append(cp.cuda.get_elapsed_time(start, stop) / 1000 / REPEATS)
    return found


def timed(cp, kernel, make, n, copy) -> dict:
    case = make(kernel, n)
    times = seconds(cp, case.ready(cp, *(place(cp, x) for x in case.arrays)))
    rate = case.moved / statistics.median(times) / 1e9
    return dict(kernel=kernel, bytes=case.moved, median_s=statistics.median(times),
                min_s=min(times), max_s=max(times), n=ROUNDS, gb_per_s=rate, of_copy=rate / copy)


def copy_rate(cp, n) -> float:
    x, y = cp.zeros(n, np.float32), cp.zeros(n, np.float32)
    return 8 * n / statistics.median(seconds(cp, partial(cp.copyto, x, y))) / 1e9


def main(argv=None, cp=None) -> int:
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--elements", default=64 << 20, help="of a timed array, such as 64M",
                       type=lambda s: int(s.rstrip("M")) << (20 if s.endswith("M") else 0))
    parse.add_argument("--json", help="write the rows to this file")
    options = parse.parse_args(argv)
    try:
        if cp is None:
            import cupy as cp
        name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    except Exception as error:  # no CuPy, no driver, no device: each raises its own kind
        print(f"no GPU for the kernels: {error}; install cupy-cuda12x or -13x on a machine with a "
              "CUDA device", file=sys.stderr)
        return 2
    copy = copy_rate(cp, options.elements)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True,
                            text=True).stdout.strip() or "not a checkout"
    print(f"{name}, CuPy {cp.__version__}, commit {commit}; device copy of "
          f"{4 * options.elements / 1e6:.0f} MB: {copy:.0f} GB/s; median of {ROUNDS} (min to max)")
    print(f"{'kernel':28} {'bits':>6} {'MB':>6} {'ms':>24} {'GB/s':>6} {'of copy':>7}")
    rows, failed = [], 0
    with np.errstate(all="ignore"):
        for kernel, make in cases():
            bad = wrong(cp, kernel, make)
            row = timed(cp, kernel, make, options.elements, copy) | {"wrong": bad}
            rows.append(row)
            failed += bool(bad)
            ms = "{:.3f} ({:.3f} to {:.3f})".format(
                *(1000 * row[k] for k in ("median_s", "min_s", "max_s")))
            bits = "WRONG" if bad else "right"
            print(f"{kernel:28} {bits:>6} {row['bytes'] / 1e6:6.0f} {ms:>24} "
                  f"{row['gb_per_s']:6.0f} {row['of_copy']:7.0%}{' '.join(['', *bad[:3]])}")
    slow = [r["kernel"] for r in rows if r["of_copy"] < 0.8]
    print(f"{len(rows) - failed} of {len(rows)} right; below 80 % of a copy: "
          f"{', '.join(slow) or 'none'}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": name, "commit": commit, "copy_gb_per_s": copy, "rows": rows}, file)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

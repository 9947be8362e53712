"""The bits of every algorithm on real ranks are those that oracle/spec.py states.

One launch of 8 ranks has communicators of 1 to 8: 8, 7 + 1, 6 + 2, 5 + 3, 4 + 4, side by side.
"""
import functools

import numpy as np
import pytest

from refimpl.collective import DTYPES, allreducer, buffers, exchange, mpi
from refimpl.collective.guard import Watchdog
from refimpl.oracle import spec



def in_groups(most):
    """Run the test on communicators of every size up to `most`, in a world of `most` ranks."""
    def decorate(test):
        @pytest.mark.ranks(most)
        @functools.wraps(test)
        def split(comm):
            with Watchdog(30):  # a hang ends with who waits for whom
                for first in range(comm.size, (comm.size - 1) // 2, -1):
                    group = comm.Split(comm.rank >= first, comm.rank)
                    test(group)
                    group.Free()
        return split
    return decorate


EVERY, FEW = in_groups(8), in_groups(4)


def data(rank, length, dtype, seed=0):
    """Values of mixed sign over six decades that differ per rank and index."""
    rng = np.random.default_rng([seed, rank, length])
    if dtype.startswith("int"):
        return rng.integers(-2**30, 2**30, length).astype(dtype)
    values = rng.standard_normal(length) * 10.0 ** rng.integers(-3, 3, length)
    if dtype == "bfloat16":
        out = np.empty(length, np.uint16)
        buffers.to_bfloat16(values.astype(np.float32), out)
        return out
    return values.astype(dtype)


def lengths(size):
    return [*sorted({0, 1, size - 1, size, size + 1, 2 * size, 1009}), 37]


def grids(size):
    return [(r, size // r) for r in range(1, size + 1) if size % r == 0]


def check(reduce, order, size, rank, length, dtype, wire=None):
    xs = [data(r, length, dtype) for r in range(size)]
    mine, expected = xs[rank].copy(), order(xs, wire=wire, dtype=dtype)
    reduce(mine, wire=wire, dtype=dtype)
    assert mine.tobytes() == expected.tobytes(), (length, dtype, wire)


def check_all(reduce, order, comm, some_lengths=None):
    """Every length in float32, the last one in every dtype and over every wire."""
    *_, last = some_lengths = some_lengths or lengths(comm.size)
    cases = [(length, "float32", None) for length in some_lengths]
    cases += [(last, dtype, None) for dtype in DTYPES if dtype != "float32"]
    cases += [(last, "float32", wire) for wire in buffers.WIRES]
    with reduce:
        for case in cases:
            check(reduce, order, comm.size, comm.rank, *case)


@EVERY
def test_ring_folds_each_chunk_from_its_own_rank(comm):
    check_all(allreducer("ring", comm), spec.ring, comm)


@EVERY
def test_torus_is_a_fold_of_folds_on_every_grid(comm):
    for shape in grids(comm.size):
        check_all(allreducer("torus", comm, shape),
                  lambda xs, **k: spec.torus(xs, *shape, **k), comm)


@EVERY
def test_halving_doubling_is_a_tree_in_binary_blocks(comm):
    check_all(allreducer("halving_doubling", comm), spec.halving_doubling, comm)


@EVERY
def test_hierarchical_folds_the_node_first(comm):
    for per_node in range(1, comm.size + 1):
        for across in ("ring", "halving_doubling"):
            check_all(allreducer("hierarchical", comm, ranks_per_node=per_node, across=across),
                      lambda xs, **k: spec.hierarchical(xs, per_node, across, **k), comm, [0, 1, 53])


@FEW
def test_segments_change_no_bits(comm):
    before = exchange.SEGMENT, mpi.LIMIT
    try:
        for segment in (12, 100):
            exchange.SEGMENT = mpi.LIMIT = segment
            check_all(allreducer("ring", comm), spec.ring, comm, [comm.size, 101])
            check_all(allreducer("halving_doubling", comm), spec.halving_doubling, comm, [101])
            check_all(allreducer("hierarchical", comm, ranks_per_node=3),
                      lambda xs, **k: spec.hierarchical(xs, 3, **k), comm, [101])
            check(allreducer("mpi", comm), spec.ring, comm.size, comm.rank, 101, "int64")
    finally:
        exchange.SEGMENT, mpi.LIMIT = before


@FEW
def test_a_long_buffer_in_every_algorithm(comm):
    n = 1_200_007  # several segments per chunk, and a prime
    for name, order in (("ring", spec.ring), ("halving_doubling", spec.halving_doubling)):
        with allreducer(name, comm) as reduce:
            check(reduce, order, comm.size, comm.rank, n, "float32")
            check(reduce, order, comm.size, comm.rank, n, "float32", "bfloat16")
    with allreducer("hierarchical", comm, ranks_per_node=2) as reduce:
        check(reduce, lambda xs, **k: spec.hierarchical(xs, 2, **k),
              comm.size, comm.rank, n, "float32")


@FEW
def test_mpi_sums_integers_like_all_others(comm):
    for length in lengths(comm.size):
        check(allreducer("mpi", comm), spec.ring, comm.size, comm.rank, length, "int64")


@FEW
def test_infinities_and_nans_arrive(comm):
    mine = np.array([np.inf, np.nan, 3e38, 1.0], np.float32)
    for wire in (None, "float16", "bfloat16"):
        got = mine.copy()
        allreducer("ring", comm)(got, wire=wire)
        assert np.isinf(got[0]) and np.isnan(got[1]) and got[3] == comm.size


@FEW
def test_a_buffer_that_lies_in_a_window_keeps_its_bits(comm):
    size, rank, orders = comm.size, comm.rank, [("window", None, spec.ring)]
    orders += [("torus", s, lambda xs, s=s, **k: spec.torus(xs, *s, **k)) for s in grids(size)]
    orders += [("hierarchical", None, lambda xs, **k: spec.hierarchical(xs, size, **k))]
    for name, shape, order in orders:
        with allreducer(name, comm, shape) as reduce:
            for length, dtype in ((0, "float32"), (1, "bfloat16"), (size + 1, "float64"),
                                  (100_003, "float32")):
                inside = reduce.empty(length, dtype)

                def through(mine, **kind):  # the same call on a copy in the window
                    inside[:] = mine
                    reduce(inside, **kind)
                    mine[:] = inside
                check(through, order, size, rank, length, dtype)
    with allreducer("window", comm) as reduce:
        inside = reduce.empty(99)
        check(through, spec.ring, size, rank, 99, "float32", "float16")


@pytest.mark.ranks(4)
def test_memory_beyond_the_buffer_is_two_segments_a_direction(comm):
    import tracemalloc
    buffer = np.ones(8_000_000, np.float32)  # 32 MB
    for name in ("ring", "torus", "halving_doubling", "hierarchical"):
        reduce = allreducer(name, comm)
        for wire in (None, "bfloat16"):
            tracemalloc.start()
            reduce(buffer, wire=wire)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 8 << 20, (name, wire, peak)
            buffer[:] = 1

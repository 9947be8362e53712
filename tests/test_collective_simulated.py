"""The same functions on simulated ranks: order of arrival is at its worst there, and is repeatable."""
import numpy as np
import pytest

from refimpl.collective import (exchange, grid, halving_doubling, hierarchical, make_grid, ring,
                                torus)
from refimpl.oracle import spec
from refimpl.simulate.world import run
from tests.test_collective_bits import data, grids

RANKS = (1, 2, 3, 5, 6, 7, 12, 13)


def programs(size):
    """(function of (buffer, comm, wire), order) of every algorithm and grid."""
    yield ring.allreduce, spec.ring
    yield halving_doubling.allreduce, spec.halving_doubling
    for shape in grids(size):
        yield (lambda x, comm, wire, s=shape: torus.allreduce(x, make_grid(comm, s), wire),
               lambda xs, s=shape, **k: spec.torus(xs, *s, **k))
    for per_node in (2, 3, size):
        yield (lambda x, comm, wire, p=per_node: hierarchical.allreduce(
                   x, hierarchical.make_nodes(comm, p, "halving_doubling"), wire),
               lambda xs, p=per_node, **k: spec.hierarchical(xs, p, "halving_doubling", **k))


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("segment", [32, 1 << 20])
def test_bits_are_the_spec_in_segments_too(size, segment, monkeypatch):
    monkeypatch.setattr(exchange, "SEGMENT", segment)
    for reduce, order in programs(size):
        for length in (0, 1, size + 1, 40 * size + 3):
            for dtype, wire in (("float32", None), ("bfloat16", None), ("float32", "float16")):
                xs = [data(r, length, dtype) for r in range(size)]

                def program(comm):
                    mine = xs[comm.rank].copy()
                    reduce(mine, comm, wire)
                    return mine.tobytes()
                expected = order(xs, wire=wire, dtype=dtype).tobytes()
                assert set(run(size, program).results) == {expected}, (length, dtype, wire)


@pytest.mark.parametrize("size", RANKS)
def test_messages_and_bytes_are_the_closed_forms(size):
    n = 24 * size
    full = 2 * (size - 1) * n * 4 // size  # 2(P-1)/P of the buffer

    def sent(reduce):
        def program(comm):
            reduce(np.ones(n, np.float32), comm)
            return exchange.traffic().sent
        return [tuple(map(sum, zip((0, 0), *of.values()))) for of in run(size, program).results]
    assert set(sent(ring.allreduce)) == {(2 * (size - 1), full)}
    for rows, columns in grids(size):
        assert set(sent(lambda x, comm: torus.allreduce(x, make_grid(comm, (rows, columns))))) == {
            (2 * (columns - 1) + 2 * (rows - 1), full)}
    if size & (size - 1) == 0:
        steps = size.bit_length() - 1
        assert set(sent(halving_doubling.allreduce)) == {(2 * steps, full)}


def test_44_ranks_are_blocks_of_32_8_and_4():
    found = {r: halving_doubling.blocks(r, 44) for r in (0, 31, 32, 39, 40, 43)}
    assert found == {0: (0, 32, 0, 8), 31: (0, 32, 0, 8), 32: (32, 8, 32, 4),
                     39: (32, 8, 32, 4), 40: (40, 4, 8, 0), 43: (40, 4, 8, 0)}


@pytest.mark.parametrize("size, node, shape", [
    (1, 1, (1, 1)), (7, 7, (1, 7)), (7, None, (1, 7)), (8, 4, (2, 4)), (12, None, (3, 4)),
    (16, 8, (4, 4)), (1024, 4, (32, 32)), (2048, 4, (32, 64)), (2176, 4, (34, 64)),
    (3456, 4, (54, 64)), (10, 5, (2, 5)), (6, 3, (2, 3)), (9, 3, (3, 3))])
def test_default_grids_are_near_square_and_rows_do_not_cut_nodes(size, node, shape):
    assert grid.default_shape(size, node) == shape


def test_uneven_nodes_and_ranks_dealt_round_are_seen():
    def even(per_node):
        return set(run(6, grid.ranks_per_node, ranks_per_node=per_node).results)
    assert even(3) == {3} and even(6) == {6} and even(4) == {None}
    shapes = run(6, lambda comm: make_grid(comm)[3:], ranks_per_node=4).results
    assert set(shapes) == {(2, 3)}


def test_phases_are_named_while_messages_move():
    def program(comm):
        torus.allreduce(np.ones(8), make_grid(comm, (2, 2)))
        return exchange.traffic().sent
    for sent in run(4, program).results:
        assert sent == {"row reduce-scatter": [1, 32], "column reduce-scatter": [1, 16],
                        "column all-gather": [1, 16], "row all-gather": [1, 32]}

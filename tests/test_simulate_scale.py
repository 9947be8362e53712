"""The collectives, unchanged, at the papers' scales: results, messages, bytes per rank, phase."""
import numpy as np
import pytest

from refimpl.collective import allreducer
from refimpl.collective.exchange import traffic
from refimpl.oracle import spec
from refimpl.simulate.world import run


def inputs(size, length, dtype):
    rng = np.random.default_rng(size)
    if dtype is np.int64:
        return rng.integers(-2**62, 2**62, (size, length), dtype)
    return (rng.standard_normal((size, length)) * np.exp2(rng.integers(-20, 20, length))
            ).astype(dtype)


def allreduce(algorithm, xs, **options):
    """(World, result) after every rank has summed its row of xs; all ranks hold the same bits."""
    first = []

    def program(comm):
        buffer = xs[comm.rank].copy()
        allreducer(algorithm, comm, **options)(buffer)
        first.append(buffer) if not first else None
        assert np.array_equal(first[0].view(np.uint8), buffer.view(np.uint8))
        return dict(traffic().sent)
    world = run(len(xs), program)
    for r, sent in enumerate(world.results):  # the exchange itself counts the same
        assert {p: list(world.sent(r, p)) for p in world.ranks[r].sent} == sent
    return world, first[0]


def check(algorithm, size, length, dtype, closed_form, order, **options):
    xs = inputs(size, length, dtype)
    world, result = allreduce(algorithm, xs, **options)
    wanted = (xs.sum(0) if dtype is np.int64 else order(list(xs)))
    assert np.array_equal(wanted.view(np.uint8), result.view(np.uint8))
    for r in range(size):
        phases = {p: world.sent(r, p) for p in world.ranks[r].sent}
        assert phases == closed_form(r, length * xs.itemsize)


def ring_costs(size):
    """2(N-1) messages, 2(N-1)/N of the bytes."""
    return lambda r, s: {phase: (size - 1, s * (size - 1) // size)
                         for phase in ("reduce-scatter", "all-gather")}


def torus_costs(rows, columns):
    """2(C-1) + 2(R-1) messages, not the paper's 2(X-1), and the ring's bytes."""
    def costs(r, s):
        in_row = (columns - 1, s * (columns - 1) // columns)
        in_column = (rows - 1, s // columns * (rows - 1) // rows)
        assert 2 * (in_row[1] + in_column[1]) * rows * columns == 2 * s * (rows * columns - 1)
        return {"row reduce-scatter": in_row, "column reduce-scatter": in_column,
                "column all-gather": in_column, "row all-gather": in_row}
    return costs


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_ring_of_256(dtype):
    check("ring", 256, 512, dtype, ring_costs(256), spec.ring)


def test_torus_of_2176_as_34_rows_of_64():
    check("torus", 2176, 2176, np.float32, torus_costs(34, 64),
          lambda xs: spec.torus(xs, 34, 64), shape=(34, 64))


@pytest.mark.slow
def test_torus_of_3456_as_48_rows_of_72():
    check("torus", 3456, 3456, np.int64, torus_costs(48, 72), None, shape=(48, 72))


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_halving_doubling_of_44_servers_in_blocks_of_32_8_and_4(dtype):
    def costs(r, s):
        if r < 32:  # holds 1/32 at the end of the halving, gives it to the block of 8
            return {"halving": (5, s * 31 // 32), "doubling": (5, s * 31 // 32),
                    "blocks down": (1, s // 32)}
        if r < 40:  # its eighth goes to 4 ranks of block 0, and later to one of block 2
            return {"halving": (3, s * 7 // 8), "doubling": (3, s * 7 // 8),
                    "blocks up": (4, s // 8), "blocks down": (1, s // 8)}
        return {"halving": (2, s * 3 // 4), "doubling": (2, s * 3 // 4), "blocks up": (2, s // 4)}
    check("halving_doubling", 44, 320, dtype, costs, spec.halving_doubling)


@pytest.mark.parametrize("steps", range(8))
def test_halving_doubling_takes_2_log2_p_messages_and_the_rings_bytes(steps):
    size = 2 ** steps
    half = {} if size == 1 else {p: (steps, 4 * 256 * (size - 1) // size)
                                 for p in ("halving", "doubling")}
    check("halving_doubling", size, 256, np.float32, lambda r, s: half, spec.halving_doubling)


@pytest.mark.parametrize("across", ["ring", "halving_doubling", "torus"])
def test_hierarchical_of_44_servers_with_8_ranks(across):
    xs = inputs(352, 440, np.float32)
    order = {"torus": "torus:4x11"}.get(across, across)
    world, result = allreduce("hierarchical", xs, ranks_per_node=8, across=across,
                              **({"shape": (4, 11)} if across == "torus" else {}))
    assert np.array_equal(result, spec.by_order(f"hierarchical:8:{order}", list(xs)))
    for r in range(352):
        assert world.sent(r, "node reduce") == (1, 1760)
        assert world.sent(r, "node broadcast") == ((1, 1760) if r % 8 < 7 else (0, 0))


@pytest.mark.parametrize("algorithm, options", [
    ("ring", {}), ("torus", {"shape": (4, 5)}), ("halving_doubling", {}),
    ("hierarchical", {"ranks_per_node": 6})])
@pytest.mark.parametrize("length", [0, 1, 19, 20, 21, 97])
def test_awkward_lengths_on_20_ranks(algorithm, options, length):
    xs = inputs(20, length, np.float32)
    order = {"torus": "torus:4x5", "hierarchical": "hierarchical:6"}.get(algorithm, algorithm)
    result = allreduce(algorithm, xs, **options)[1]
    assert np.array_equal(result, spec.by_order(order, list(xs)))


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_a_16_bit_wire_halves_the_modelled_bytes(wire):
    xs = inputs(12, 120, np.float32)
    world = run(12, lambda comm: allreducer("torus", comm, shape=(3, 4))(
        xs[comm.rank].copy(), wire=wire), magnify=1000)
    assert all(world.sent(r)[1] == 1000 * 2 * 120 * 2 * 11 / 12 for r in range(12))

"""Device buffers: every use by MPI is behind a synchronisation, staged or not."""
import numpy as np
import pytest

from refimpl.collective import allreducer, buffers, cuda_aware, exchange
from tests import fake_device
from tests.test_collective_bits import data

from refimpl.oracle import spec

CASES = [("float32", None), ("float32", "float16"), ("float32", "bfloat16"), ("bfloat16", None),
         ("float16", None), ("int64", None)]


def reduce_on_device(comm, aware, algorithm, order, length, dtype, wire):
    fake_device.install()
    buffers.cuda_aware = lambda: aware
    xs = [data(r, length, dtype) for r in range(comm.size)]
    mine = fake_device.ndarray(np.zeros_like(xs[0]))
    mine[...] = xs[comm.rank]  # the gradient kernel, not finished when the collective starts
    allreducer(algorithm, comm)(mine, wire=wire, dtype=dtype)
    fake_device.cuda.get_current_stream().synchronize()  # the reader's own
    expected = order(xs, wire=wire, dtype=dtype)
    assert mine.host.tobytes() == expected.tobytes(), (aware, algorithm, length, dtype, wire)


@pytest.mark.ranks(1, 2, 3, 4)
def test_device_buffers_have_the_bits_of_the_spec(comm):
    for aware in (True, False):
        for dtype, wire in CASES:
            for algorithm, order in (("ring", spec.ring),
                                     ("halving_doubling", spec.halving_doubling)):
                reduce_on_device(comm, aware, algorithm, order, 37, dtype, wire)


@pytest.mark.ranks(2, 3)
def test_device_buffers_in_segments(comm):
    exchange.SEGMENT, before = 64, exchange.SEGMENT
    try:
        for aware in (True, False):
            for dtype, wire in CASES:
                reduce_on_device(comm, aware, "ring", spec.ring, 203, dtype, wire)
    finally:
        exchange.SEGMENT = before


@pytest.mark.ranks(3)
def test_without_any_synchronisation_the_sums_are_wrong(comm):
    for segment in (64, 1 << 20):
        exchange.SEGMENT, before = segment, exchange.SEGMENT
        keep, buffers.synchronise = buffers.synchronise, lambda array: None
        try:
            for aware in (True, False):
                with pytest.raises(AssertionError):
                    reduce_on_device(comm, aware, "ring", spec.ring, 203, "float32", None)
        finally:
            buffers.synchronise, exchange.SEGMENT = keep, before


@pytest.mark.ranks(2)
def test_mpi_own_sum_of_device_buffers(comm):
    for aware in (True, False):
        reduce_on_device(comm, aware, "mpi", spec.ring, 37, "int64", None)


@pytest.mark.parametrize("version, env, query, answer", [
    ("Open MPI v5.0.11", {}, 0, False),
    ("Open MPI v5.0.11", {}, 1, True),
    ("MPICH Version: 5.0.2", {}, 1, True),
    ("MPICH Version: 5.0.2", {"MPIR_CVAR_ENABLE_GPU": "0"}, 1, False),
    ("MPI VERSION : CRAY MPICH version 8.1.27", {}, 1, False),
    ("MPI VERSION : CRAY MPICH version 8.1.27", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, 0, True),
    ("MVAPICH2 Version : 2.3.7", {"MV2_USE_CUDA": "1"}, 0, True),
    ("MVAPICH2 Version : 2.3.7", {}, 1, False),
    ("Some MPI 1.0", {}, 0, False)])
def test_each_mpi_is_asked_in_its_own_way(version, env, query, answer):
    assert cuda_aware.mpi_reads_device_memory(version, env, lambda: query) is answer


@pytest.mark.ranks(1)
def test_these_mpis_can_be_asked(comm):
    assert cuda_aware.mpi_reads_device_memory() in (True, False)

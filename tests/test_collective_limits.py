"""At MPI's limits: nothing is buffered for the sender, ResNet-50's length, more than 2^31 bytes."""
import pathlib

import numpy as np
import pytest

from refimpl.collective import allreducer, exchange
from refimpl.oracle import spec
from tests.mpi import flavours, mpirun

UNBUFFERED = {"mpich": {"UCX_RNDV_THRESH": "0", "MPIR_CVAR_NOLOCAL": "1"},
              "openmpi": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl_sm_eager_limit": "200"}}


def unbuffered():
    """Run on ranks: first make sure that no send of 1 KB ends before it is received."""
    from mpi4py import MPI
    comm, kilobyte = MPI.COMM_WORLD, np.zeros(1024, np.uint8)
    if comm.rank == 0:
        request = comm.Isend(kilobyte, 1, tag=0)
        assert not any(request.Test() for _ in range(10_000)), "the message was buffered"
        comm.Send(kilobyte, 1, tag=1)
        request.Wait()
    elif comm.rank == 1:
        for tag in (1, 0):
            comm.Recv(kilobyte, 0, tag)
    orders = {"ring": spec.ring, "torus": lambda xs: spec.torus(xs, 1, comm.size),
              "halving_doubling": spec.halving_doubling,
              "hierarchical": lambda xs: spec.hierarchical(xs, comm.size)}
    for segment in (2000, exchange.SEGMENT):
        exchange.SEGMENT = segment
        for name, order in orders.items():
            for length in (1, 1000 * comm.size + 1):
                xs = np.random.default_rng(length).random((comm.size, length), np.float32)
                expected = order(list(xs))
                options = {"ranks_per_node": comm.size} if name == "hierarchical" else {}
                allreducer(name, comm, **options)(xs[comm.rank])
                assert xs[comm.rank].tobytes() == expected.tobytes(), (name, length)


@pytest.mark.parametrize("mpi", flavours())
def test_no_algorithm_needs_a_buffered_message(mpi):
    job = mpirun(mpi, 3, "-c", "from tests.test_collective_limits import unbuffered; unbuffered()",
                 env=UNBUFFERED.get(mpi))
    assert job.returncode == 0, job.stderr[-3000:]


@pytest.mark.ranks(2)
def test_the_gradient_of_resnet_50(comm):
    xs = [np.random.default_rng(r).random(25_557_032, np.float32) for r in range(2)]
    expected = spec.ring(xs)
    for name in ("ring", "halving_doubling", "hierarchical", "window"):
        with allreducer(name, comm) as reduce:
            mine = reduce.empty(expected.size)
            mine[:] = xs[comm.rank]
            reduce(mine)
            assert np.array_equal(mine, expected), name


def free_memory() -> int:
    lines = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


@pytest.mark.slow
@pytest.mark.skipif(free_memory() < 8 << 30, reason="needs 8 GiB of free memory")
@pytest.mark.ranks(2)
def test_more_than_2_to_31_bytes(comm):
    pattern = np.arange(1 << 20, dtype=np.float32)
    buffer = np.resize(pattern, (1 << 29) + 2)
    for times, name in ((2, "ring"), (4, "mpi")):
        allreducer(name, comm)(buffer)
        assert all(np.array_equal(piece, times * pattern[:piece.size])
                   for piece in np.split(buffer, range(1 << 20, buffer.size, 1 << 20))), name

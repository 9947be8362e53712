"""Ranks that do not do the same are told so, all of them; ranks that wait for ever are ended."""
import textwrap
import time

import numpy as np
import pytest

from refimpl.collective import allreducer, make_grid
from refimpl.collective.guard import Disagreement, agree
from refimpl.errors import UsageError
from tests.mpi import flavours, mpirun

MANY = pytest.mark.ranks(2, 3, 4)


def message(call, kind=Disagreement) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.mark.ranks(1, 2, 4)
def test_equal_facts_pass(comm):
    agree(comm, length=10, dtype="float32")


@MANY
def test_the_rank_that_differs_is_named_on_all_ranks(comm):
    odd = comm.size - 1
    said = message(lambda: agree(comm, call=3, length=11 if comm.rank == odd else 10))
    named = (odd, 0) if comm.size > 2 else (1, 0)
    assert f"length: rank {named[0]} has '11', rank {named[1]} has '10'" in said
    agree(comm, after=1)  # and the communicator is still good


@MANY
def test_lengths_dtypes_wires_and_order_must_agree(comm):
    reduce, first = allreducer("ring", comm), comm.rank == 0
    calls = [dict(buffer=np.zeros(4 + first, np.float32)),
             dict(buffer=np.zeros(4, "f4" if first else "f8")),
             dict(buffer=np.zeros(4, np.float32), wire="float16" if first else None),
             dict(buffer=np.zeros(4, np.float32), name="A" if first else "B")]
    for call, word in zip(calls, ("length", "dtype", "wire", "bucket")):
        assert word in message(lambda: reduce(**call))
    x = np.ones(4, np.float32)
    reduce(x)
    assert (x == comm.size).all()


@MANY
def test_algorithms_must_agree(comm):
    name = "ring" if comm.rank == 0 else "halving_doubling"
    assert "algorithm" in message(lambda: allreducer(name, comm))


@pytest.mark.ranks(1, 2, 3)
def test_a_bad_layout_is_refused_alike(comm):
    reduce = allreducer("ring", comm)
    grid, ordered = np.zeros((3, 3), np.float32), np.zeros(6, np.float32)
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    for bad in (ordered[::2], grid, grid.T[0], [1.0, 2.0], frozen, np.zeros(3, ">f4"),
                np.zeros(3, "c8"), np.zeros(3, "u2"), np.zeros(3, bool)):
        with pytest.raises(UsageError):
            reduce(bad)
        mixed = ordered[:len(bad)] if comm.rank == 0 and comm.size > 1 else bad
        with pytest.raises(UsageError, match="rank|use|must"):
            reduce(mixed)
    with pytest.raises(UsageError, match="wire"):
        reduce(np.zeros(3), wire="float16")
    with pytest.raises(UsageError, match="another algorithm"):
        allreducer("mpi", comm)(np.zeros(3, np.float16))


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_grid_that_does_not_fit_is_refused_before_any_message(comm):
    for shape in ((comm.size, 2), (0, 3), (comm.size + 1, 1)):
        with pytest.raises(UsageError, match="choose one of"):
            make_grid(comm, shape)
    with pytest.raises(UsageError, match="across"):
        allreducer("hierarchical", comm, across="mpi")


@pytest.mark.parametrize("mpi", flavours())
@pytest.mark.parametrize("algorithm", ["ring", "mpi"])
def test_a_rank_that_does_not_come_ends_the_job_with_who_waits_for_whom(mpi, algorithm, tmp_path):
    program = tmp_path / "late.py"
    program.write_text(textwrap.dedent(f"""
        import time, numpy
        from mpi4py import MPI
        from refimpl.collective import allreducer
        from refimpl.collective.guard import Watchdog
        comm = MPI.COMM_WORLD
        with Watchdog(1.5):
            reduce = allreducer("{algorithm}", comm, check="first")
            x = numpy.zeros(500_000)
            reduce(x)
            if comm.rank == 1:
                time.sleep(60)
            reduce(x)
        """))
    start = time.monotonic()
    job = mpirun(mpi, 3, str(program), timeout=40)
    said = job.stdout + job.stderr
    assert job.returncode not in (0, 124), said
    assert time.monotonic() - start < 30
    phase = {"ring": "'reduce-scatter', round 0", "mpi": "'MPI_Allreduce'"}[algorithm]
    for rank in (0, 2):
        assert f"rank {rank} waits" in said and phase in said, said
    assert "rank 1 waits" not in said
    if algorithm == "ring":
        assert "from rank 1" in said.split("rank 2 waits")[1].split("\n")[0]


@pytest.mark.parametrize("mpi", flavours())
def test_the_process_ends_even_if_abort_does_not_return(mpi, tmp_path):
    program = tmp_path / "stuck.py"
    program.write_text(textwrap.dedent("""
        import sys, time
        from mpi4py import MPI
        from refimpl.collective import guard
        class Stuck:
            COMM_WORLD = type("World", (), {"rank": 0, "Get_group": lambda s: s,
                                            "Translate_ranks": lambda s, ranks, to: [0],
                                            "Abort": lambda s, code: time.sleep(60)})()
        sys.modules["mpi4py.MPI"] = sys.modules["mpi4py"].MPI = Stuck
        with guard.Watchdog(0.2), guard.waiting("test", Stuck.COMM_WORLD):
            time.sleep(60)
        """))
    start = time.monotonic()
    job = mpirun(mpi, 1, str(program), timeout=40)
    assert job.returncode not in (0, 124), job.stderr
    assert time.monotonic() - start < 30


@pytest.mark.ranks(2, 3)
def test_two_threads_with_a_reducer_each_do_not_meet(comm):
    import threading
    reducers, wrong = [allreducer("ring", comm), allreducer("ring", comm)], []

    def work(value, reduce):
        for _ in range(100):
            x = np.full(64, value)
            reduce(x)
            if (x != value * comm.size).any():
                wrong.append(value)
    threads = [threading.Thread(target=work, args=pair) for pair in zip((1, 1000), reducers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@MANY
def test_a_window_on_some_ranks_only_is_refused(comm):
    reduce = allreducer("window", comm)
    inside = reduce.empty(10)
    mine = inside if comm.rank else np.zeros(10, np.float32)
    assert "place in shared memory" in message(lambda: reduce(mine))


@MANY
def test_different_places_of_a_window_are_refused(comm):
    with allreducer("window", comm) as reduce:
        inside = reduce.empty(10)
        assert "place in shared memory" in message(lambda: reduce(inside[comm.rank:comm.rank + 4]))


@pytest.mark.ranks(2)
def test_freed_reducers_leave_nothing_behind(comm):
    from mpi4py import MPI
    times = 550 if "MPICH" in MPI.Get_library_version() else 10  # MPICH has 2048 communicators
    for name, options in (("torus", {"shape": (2, 1)}),
                          ("hierarchical", {"ranks_per_node": 1, "across": "torus"})):
        for _ in range(times):
            with allreducer(name, comm, **options) as reduce:
                reduce(np.ones(2))
    for _ in range(20):
        with allreducer("window", comm) as reduce:
            reduce(reduce.empty(1000))


@pytest.mark.ranks(2, 3)
def test_buffers_of_two_windows_are_refused_alike(comm):
    """Their places in the windows are equal, the windows are not: the sums would be mixed."""
    for name in ("window", "torus", "hierarchical"):
        with allreducer(name, comm) as reduce:
            first, second = reduce.empty(6), reduce.empty(6)
            mine = first if comm.rank == 0 else second
            assert "place in shared memory" in message(lambda: reduce(mine))


@pytest.mark.ranks(4)
def test_a_window_of_half_the_ranks_is_no_window_of_all(comm):
    half = comm.Split(comm.rank % 2, comm.rank)
    with allreducer("window", half) as narrow, allreducer("window", comm) as wide:
        inner, outer = narrow.empty(6), wide.empty(6)
        mine = inner if comm.rank % 2 else outer
        assert "place in shared memory" in message(lambda: wide(mine))
        inner[:] = comm.rank + 1  # all in windows of their halves: by messages, and right
        wide(inner)
        assert inner.tolist() == [10.0] * 6
    half.Free()


@pytest.mark.ranks(4)
def test_a_bad_grid_of_leaders_is_refused_on_all_ranks(comm):
    for shape in ((5, 7), (1.5, 2), (3,), "1x2"):
        with pytest.raises(UsageError, match="does not hold 2 ranks"):
            allreducer("hierarchical", comm, shape, ranks_per_node=2, across="torus")


@pytest.mark.ranks(2)
def test_a_wire_of_no_known_kind_on_one_rank_is_refused_on_all(comm):
    with allreducer("ring", comm) as reduce:
        buffer = np.zeros(3, np.float32)
        assert "wire" in message(lambda: reduce(buffer, wire=["float16"] if comm.rank else None))

"""Simulated ranks behave as MPI ranks: messages, collective calls, communicators, ends."""
import numpy as np
import pytest

from refimpl.errors import UsageError
from refimpl.simulate.world import Deadlock, RankFailed, run


def pass_on(comm, buffer, times):
    """Send `buffer` around the ring `times` times, in place."""
    into = np.empty_like(buffer)
    for _ in range(times):
        incoming = comm.Irecv(into, (comm.rank - 1) % comm.size, 3)
        comm.Isend(buffer, (comm.rank + 1) % comm.size, 3).Wait()
        incoming.Wait()
        buffer[...] = into
    return buffer


@pytest.mark.parametrize("size", [1, 2, 3, 8, 500])
def test_what_goes_round_the_ring_comes_home_and_is_counted(size):
    world = run(size, lambda comm: pass_on(comm, np.full(5, comm.rank, np.float32), size - 1))
    assert [r[0] for r in world.results] == [(r + 1) % size for r in range(size)]
    assert all(world.sent(r) == (size - 1, 20 * (size - 1)) for r in range(size))


def test_messages_of_one_tag_keep_their_order_and_tags_do_not_mix():
    def program(comm):
        data = np.arange(4.0)
        if comm.rank == 0:
            requests = [comm.Isend(data[i:i + 1], 1, tag) for i, tag in enumerate([5, 9, 5, 9])]
        else:
            data[:] = -1
            requests = [comm.Irecv(data[i:i + 1], 0, tag) for i, tag in enumerate([9, 9, 5, 5])]
        for request in requests:
            request.Wait()
        return data.tolist()
    assert run(2, program).results[1] == [1, 3, 0, 2]


def test_a_shorter_message_fills_the_front_and_a_longer_one_is_an_error():
    def program(comm, sent, room):
        if comm.rank == 0:
            comm.Isend(np.ones(sent), 1).Wait()
        else:
            into = np.zeros(room)
            comm.Irecv(into, 0).Wait()
            return into.tolist()
    assert run(2, lambda c: program(c, 2, 3)).results[1] == [1, 1, 0]
    with pytest.raises(RankFailed, match="rank 0 sends 4 x float64 to rank 1, which receives 3"):
        run(2, lambda c: program(c, 4, 3))


def test_collective_calls_give_every_rank_the_same():
    def program(comm):
        mine = np.array([comm.rank, 10 * comm.rank])
        gathered = np.empty(2 * comm.size, int)
        comm.Allgather(mine, gathered)
        root = mine.copy()
        comm.Bcast(root, 2)
        comm.Barrier()
        return gathered.tolist(), root.tolist()
    assert run(4, program).results == [([0, 0, 1, 10, 2, 20, 3, 30], [2, 20])] * 4


def test_grids_rows_columns_and_nodes_are_numbered_as_mpi_numbers_them():
    def program(comm):
        grid = comm.Create_cart([3, 4], [True, True], reorder=False)
        row, column = grid.Sub([False, True]), grid.Sub([True, False])
        node = comm.Split_type(0)
        last_first = comm.Split(comm.rank % 2, -comm.rank)
        return ((row.rank, row.size), (column.rank, column.size),
                (node.rank, node.size), last_first.rank, pass_on(column, np.array([comm.rank]), 1))
    results = run(12, program, ranks_per_node=5).results
    for r, (row, column, node, reverse, came) in enumerate(results):
        assert row == (r % 4, 4) and column == (r // 4, 3)
        assert node == (r % 5, 2 if r >= 10 else 5) and reverse == 5 - r // 2
        assert came[0] == (r - 4) % 12


def test_messages_of_different_communicators_do_not_mix():
    def program(comm):
        other, into = comm.Dup(), np.zeros(2)
        if comm.rank == 0:
            requests = [comm.Isend(np.array([1.0]), 1), other.Isend(np.array([2.0]), 1)]
        else:
            requests = [other.Irecv(into[:1], 0), comm.Irecv(into[1:], 0)]
        for request in requests:
            request.Wait()
        return into.tolist()
    assert run(2, program).results[1] == [2, 1]


def test_a_deadlock_says_who_waits_for_whom():
    def program(comm):  # everyone sends first: works on MPI only while messages are small
        comm.Isend(np.zeros(1), (comm.rank + 1) % comm.size, 7).Wait()
        comm.Irecv(np.zeros(1), (comm.rank - 1) % comm.size, 7).Wait()
    with pytest.raises(Deadlock) as caught:
        run(3, program)
    for r in range(3):
        assert (f"rank {r} waits to send to rank {(r + 1) % 3}, tag 7"
                in str(caught.value))
    assert "rank 0 closes the circle" in str(caught.value)


def test_a_deadlock_on_a_rank_that_left_or_has_another_tag_is_told():
    def left(comm):
        if comm.rank:
            comm.Irecv(np.zeros(1), 0, 1).Wait()
    with pytest.raises(Deadlock, match="(?s)rank 0 has ended.*rank 1 waits for .* rank 0, tag 1"):
        run(2, left)

    def missing(comm):
        if comm.rank != 3:
            comm.Barrier()
    with pytest.raises(Deadlock, match=r"(?s)has ended.*rank 0 waits in Barrier for ranks \[3\]"):
        run(5, missing)


def test_different_collective_calls_are_named():
    def program(comm):
        comm.Barrier() if comm.rank == 2 else comm.Bcast(np.zeros(1), 0)
    with pytest.raises(RankFailed, match=r"rank 2 of 4.*calls Barrier while rank 0 calls Bcast"):
        run(4, program)


def test_an_exception_ends_the_run_names_its_rank_and_unwinds_the_others():
    unwound = []

    def program(comm):
        try:
            if comm.rank == 4:
                raise ZeroDivisionError("boom")
            comm.Barrier()
        finally:
            unwound.append(comm.rank)
    with pytest.raises(RankFailed, match="rank 4 of 6: ZeroDivisionError: boom") as caught:
        run(6, program)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert sorted(unwound) == [0, 1, 2, 3, 4]


def test_runs_are_the_same_run_again():
    def course():
        seen = []
        run(9, lambda comm: pass_on(comm.Split(comm.rank % 2), np.array([comm.rank]), 5),
            watch=lambda source, dest, data, into: seen.append(
                (source.number, dest.number, data.tolist())))
        return seen
    assert course() == course() and len(course()) == 45


def test_a_byte_may_stand_for_many():
    world = run(4, lambda comm: pass_on(comm, np.zeros(2, np.float16), 3), magnify=1e6)
    assert world.sent(2) == (3, 12e6)


def test_no_ranks_is_refused():
    with pytest.raises(UsageError, match="0 ranks"):
        run(0, lambda comm: None)


class DeviceArray:
    """What a CuPy array offers, with no way to the host: any NumPy function on it fails."""

    def reshape(self, *shape):
        assert shape == (-1,) and self.ndim == 1
        return self

    def __init__(self, data):
        self._data = data
        self.dtype, self.ndim, self.nbytes, self.size = data.dtype, 1, data.nbytes, data.size

    def __len__(self):
        return len(self._data)

    def __array__(self, *_):
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __getitem__(self, key):
        return DeviceArray(self._data[key])

    def __setitem__(self, key, value):
        self._data[key] = value._data

    def copy(self):
        return DeviceArray(self._data.copy())


def test_device_buffers_never_come_to_the_host():
    def program(comm):
        mine, into, all_of_them = (DeviceArray(np.full(n, comm.rank)) for n in (3, 3, 12))
        pair = comm.Isend(mine, (comm.rank + 1) % 4), comm.Irecv(into, (comm.rank - 1) % 4)
        [end.Wait() for end in pair]
        comm.Allgather(into, all_of_them)
        comm.Bcast(mine, 3)
        return all_of_them._data.tolist(), mine._data.tolist()
    assert run(4, program).results == [([3] * 3 + [0] * 3 + [1] * 3 + [2] * 3, [3] * 3)] * 4

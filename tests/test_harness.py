"""The harness itself: a failure on one rank ends the launch and shows that rank's message."""
import time

import pytest

from tests.conftest import _run
from tests.mpi import flavours, mpirun

BROKEN = '''
def test_one(comm):
    comm.Barrier()
def test_two(comm):
    assert comm.rank != 1, "rank one is ill"
    comm.Barrier()
def test_three(comm):
    comm.Barrier()
'''


@pytest.mark.parametrize("mpi", flavours())
def test_a_failure_on_one_rank_is_reported_and_the_others_run(tmp_path, mpi):
    (tmp_path / "broken.py").write_text(BROKEN)
    outcome = _run(str(tmp_path / "broken.py"), mpi, 2, ["test_one", "test_two", "test_three"])
    assert outcome["test_one"] == outcome["test_three"] == ""
    assert "rank 1" in outcome["test_two"] and "rank one is ill" in outcome["test_two"]


@pytest.mark.parametrize("mpi", flavours())
def test_a_launch_that_hangs_is_killed_within_its_limit(mpi):
    start = time.monotonic()
    job = mpirun(mpi, 2, "-c", "import time; time.sleep(60)", timeout=3)
    assert job.returncode == 124 and time.monotonic() - start < 20


def test_ranks_count_themselves(comm):
    assert 0 <= comm.rank < comm.size

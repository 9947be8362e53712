"""The harness itself: a failure on one rank ends the launch and shows that rank's message."""
import os
import pathlib
import shutil
import subprocess
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


def test_what_a_killed_launcher_left_in_tmp_stops_no_launch():
    if "openmpi" not in flavours():
        pytest.skip("no Open MPI here")
    launcher, env = flavours()["openmpi"]
    left = "mkdir -p /tmp/ompi.$$ && touch /tmp/ompi.$$/pmix.vm.tool{,.$$} && echo $$ && exec "
    job = subprocess.run(["bash", "-c", left + '"$@"', "-", *launcher, "-np", "1", "true"],
                         env={**os.environ, **env}, capture_output=True, text=True, timeout=30)
    shutil.rmtree(pathlib.Path("/tmp") / f"ompi.{job.stdout.strip()}", ignore_errors=True)
    assert job.returncode == 0, job.stderr


def test_ranks_count_themselves(comm):
    assert 0 <= comm.rank < comm.size

"""All algorithms over several hosts: network namespaces with their own names and limited links.

Needs root, ip, tc and MPICH; the reason is shown where that is missing (`pytest -rs`).
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.mpi import ROOT, flavours

STANDIN = pathlib.Path(__file__).with_name("emulated_hosts.sh")


def missing() -> str:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return "emulated hosts need root, ip and tc"
    if "mpich" not in flavours():
        return "emulated hosts are launched by MPICH's mpirun"
    if " " in f"{ROOT}{sys.prefix}":
        return "MPICH's launcher for other hosts cannot pass a path with a space"
    tried = subprocess.run(["ip", "netns", "add", "refimpl-try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "refimpl-try"], capture_output=True)
    return tried.stderr.strip()


@pytest.fixture(params=[(2, 4), (4, 1)], ids=["2x4", "4x1"])
def hosts(request):
    """(number of hosts, ranks on each); they are gone afterwards."""
    if why := missing():
        pytest.skip(f"SEVERAL HOSTS NOT TESTED: {why}")
    subprocess.run([STANDIN, "down"], check=True, timeout=30)
    subprocess.run([STANDIN, "up", str(request.param[0]), "1gbit"], check=True, timeout=60)
    yield request.param
    subprocess.run([STANDIN, "down"], check=True, timeout=30)


def launch(hosts, *command):
    count, per_host = hosts
    names = ",".join(f"10.87.0.{i + 1}" for i in range(count))
    return subprocess.run(
        [*flavours()["mpich"][0], "-localhost", "10.87.0.254", "-launcher", "ssh", "-launcher-exec",
         STANDIN, "-hosts", names, "-ppn", str(per_host), "-np", str(count * per_host),
         sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
             "UCX_TLS": "tcp,self"},  # nothing crosses hosts through shared memory
        cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_all_algorithms_are_right_across_hosts(hosts, tmp_path):
    job = launch(hosts, "-m", "refimpl.bench", "allreduce", "--sizes", "2M", "--repeats", "1",
                 "--warmup", "1", "--shared", "--json", str(tmp_path / "rows"), "--algorithms",
                 "ring", "torus", "halving_doubling", "hierarchical", "window", "mpi")
    assert job.returncode == 0, job.stderr[-2000:]  # every sum was checked on every rank
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert {r["ranks"] for r in rows} == {hosts[0] * hosts[1]} and len(rows) == 6


@pytest.mark.slow
def test_rows_of_the_default_grid_lie_inside_hosts(hosts):
    expected = {(2, 4): (4, 2, 4), (4, 1): (1, 2, 2)}[hosts]
    job = launch(hosts, "-c", "from mpi4py import MPI; from refimpl.collective import grid; "
                 "g = grid.make_grid(MPI.COMM_WORLD); n = grid.split_by_node(MPI.COMM_WORLD); "
                 f"assert (n.size, g.rows, g.columns) == {expected}, (n.size, g)")
    assert job.returncode == 0, job.stderr[-2000:]

"""All algorithms over several hosts: network namespaces with their own names and limited links.

Needs root, ip, tc and MPICH; the reason is shown where that is missing (`pytest -rs`).
"""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.mpi import ROOT, flavours
from tests.pictures import SMALL, make_zip
from tests.test_failures import left_behind, told

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


def start(hosts, *command):
    count, per_host = hosts
    names = ",".join(f"10.87.0.{i + 1}" for i in range(count))
    return subprocess.Popen(
        [*flavours()["mpich"][0], "-localhost", "10.87.0.254", "-launcher", "ssh", "-launcher-exec",
         STANDIN, "-hosts", names, "-ppn", str(per_host), "-np", str(count * per_host),
         sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
             "UCX_TLS": "tcp,self"},  # nothing crosses hosts through shared memory
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def launch(hosts, *command, seconds=100):
    return finish(start(hosts, *command), seconds)


def finish(job, seconds):
    """Waits for the launcher; what is left of it after that time is killed, and 124 its code."""
    try:
        out, err = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, err = job.communicate()
        job.returncode = 124
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


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


def host(number, *command):
    """On the emulated machine: a link, or whatever else, of a host."""
    subprocess.run([STANDIN, command[0], str(number), *command[1:]], check=True, timeout=30)


NETWORK = {
    "a link goes down": [("cut", 2)],
    "a host disappears": [("cut", 2), ("kill", 2)]}
four = pytest.mark.parametrize("hosts", [(4, 1)], ids=["4x1"], indirect=True)


def training(hosts, out, *more):
    """A long run with a checkpoint per epoch, returned when it has made two."""
    job = start(hosts, "-m", "refimpl.train", *SMALL, "--workers", "4", "--n", "2", "--epochs", "3000",
                "--warmup-epochs", "1", "--eval-every", "0", "--allreduce", "ring", "--data",
                str(make_zip(out / "data.zip")), "--out", str(out), *more)
    limit = time.monotonic() + 90
    while not list(out.glob("*/checkpoint-older.pt")) and job.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.1)
    return job


@pytest.mark.slow
@four
@pytest.mark.parametrize("fault", NETWORK)
def test_a_lost_host_ends_the_job_with_who_waits_for_it(fault, hosts, tmp_path):
    job = training(hosts, tmp_path, "--timeout", "4")
    begin = time.monotonic()
    for verb, number in NETWORK[fault]:
        host(number, verb)
    ended = finish(job, 60)
    told(fault, "mpich", ended.returncode, time.monotonic() - begin)
    assert ended.returncode not in (0, 124), ended.stderr
    assert "watchdog: rank" in ended.stderr and "rank 1" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr and not left_behind(tmp_path), ended.stderr
    (left,) = tmp_path.glob("*/checkpoint.pt")
    assert torch.load(left, weights_only=True)["step"]


@pytest.mark.slow
@four
def test_a_slow_link_slows_the_run_and_the_report_says_what_it_waits_for(hosts, tmp_path):
    job = training(hosts, tmp_path)
    (log,) = tmp_path.glob("*/log.jsonl")
    lines = lambda: [json.loads(line)["times"] for line in log.read_text().splitlines()[1:-1]]
    before = lines()[-1]
    host(2, "slow", "1mbit")
    limit, count = time.monotonic() + 60, len(lines()) + 3
    while len(lines()) < count and time.monotonic() < limit and job.poll() is None:
        time.sleep(0.2)
    assert job.poll() is None, finish(job, 1).stderr  # it goes on
    times = lines()[-1]
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    told(f"a link becomes slow: allreduce {before['allreduce_share']:.0%} to "
         f"{times['allreduce_share']:.0%} of the time", "mpich", 0, 0)
    assert times["allreduce_share"] > max(0.6, before["allreduce_share"]), times
    assert times["worker_s"]["slow"] == [], times  # no rank computes slowly: it is the network

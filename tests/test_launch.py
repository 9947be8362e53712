"""Which GPU a rank takes, what the Slurm script does when it runs, and what --check says."""
import json
import os
import shlex
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

from refimpl import device, launch
from refimpl.config import parse
from refimpl.errors import UsageError
from tests.mpi import ROOT, flavours, mpirun

OPEN, MPICH, SLURM = "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"


@pytest.mark.parametrize("rank, size, visible, environ, gpu", [
    (0, 4, 4, {}, 0), (3, 4, 4, {}, 3),        # one GPU per rank
    (3, 4, 1, {}, 0),                          # Slurm shows each task its own GPU as number 0
    (5, 8, 4, {}, 1),                          # two ranks share
    (2, 4, 4, {OPEN: "1"}, 2),                 # the split counts, not the variable
    (2, 4, 4, {SLURM: "0"}, 2),                # Slurm's is 0 in the shell that calls mpirun
    (0, 1, 4, {OPEN: "3"}, 3),                 # a container per rank: the split sees one rank
    (0, 1, 4, {MPICH: "2", SLURM: "0"}, 2),    # the nearer launcher counts
    (0, 1, 2, {SLURM: "3"}, 1), (0, 1, 4, {OPEN: "x"}, 0), (0, 1, 4, {}, 0)])
def test_gpu_choice(rank, size, visible, environ, gpu):
    assert device.choose_gpu(rank, size, visible, environ) == gpu


@pytest.mark.parametrize("environ, rank", [
    ({}, None), ({"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "0"}, 3), ({"PMI_RANK": "2"}, 2),
    ({"SLURM_PROCID": "5"}, 5), ({"PMIX_RANK": "-1"}, None)])
def test_rank_hint(environ, rank):
    assert device.rank_hint(environ) == rank


@pytest.mark.parametrize("environ, size, refused", [
    ({"OMPI_COMM_WORLD_SIZE": "4"}, 1, True), ({"PMI_SIZE": "2"}, 1, True),
    ({"SLURM_STEP_NUM_TASKS": "8"}, 1, True), ({"OMPI_COMM_WORLD_SIZE": "1"}, 1, False),
    ({}, 1, False), ({"OMPI_COMM_WORLD_SIZE": "4"}, 4, False),
    ({"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, 4, False)])
def test_many_worlds_of_one_rank_are_refused(environ, size, refused):
    comm = SimpleNamespace(size=size)
    if refused:
        with pytest.raises(UsageError, match="each is rank 0 of 1.*mpirun"):
            device.refuse_split_world(comm, environ)
    else:
        device.refuse_split_world(comm, environ)


@pytest.mark.parametrize("loaders, threads, where, processes", [
    (3, 8, "cpu", 3), (0, 8, "cuda:1", 0), (-1, 1, "cpu", 0), (-1, 8, "cpu", 2),
    (-1, 1, "cuda", 0), (-1, 10, "cuda:3", 9), (-1, 64, "cuda", 16)])
def test_loader_processes(loaders, threads, where, processes):
    s = parse(["--loaders", str(loaders)])[0]
    assert device.loader_processes(s, threads, where) == processes


def test_the_digest_of_the_code_is_short_and_stable():
    assert len(device.code_digest()) == 16 and device.code_digest() == device.code_digest()


# --- the Slurm script ---------------------------------------------------------------------------


def lines(script):
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]


@pytest.mark.parametrize("recipe, nodes, per_node, grid", [
    ("goyal_8k", 32, 8, None), ("goyal_11k", 44, 8, None), ("goyal_64", 1, 2, None),
    ("mikami_v1_224s", 544, 4, "34x64"), ("mikami_v2_122s", 864, 4, "48x72")])
def test_the_script_asks_for_the_published_machine(recipe, nodes, per_node, grid):
    script = launch.sbatch(recipe, "/data/imagenet", [])
    assert {f"nodes={nodes}", f"ntasks-per-node={per_node}", f"gpus-per-node={per_node}",
            "signal=USR1@300", "requeue", f"job-name={recipe}"} <= set(lines(script))
    assert (f"--grid {grid} " in script) == bool(grid) and "--resume auto" in script


def test_own_numbers_of_nodes_and_options():
    script = launch.sbatch("mikami_v1_224s", "/d", ["--epochs", "9"], nodes=2, per_node=8,
                           options={"time": "1:00:00"})
    assert {"nodes=2", "ntasks-per-node=8", "time=1:00:00"} <= set(lines(script))
    assert "--epochs 9" in script and "--grid" not in script
    assert "gpus-per-node" not in launch.sbatch("demo", "/d", ["--device", "cpu"])
    assert "--resume auto" not in launch.sbatch("demo", "/d", ["--resume", "x.pt"])
    assert "--grid" not in launch.sbatch("mikami_v2_122s", "/d", ["--allreduce", "ring"])
    across = ["--allreduce", "hierarchical", "--across", "torus", "--grid", "4x8"]  # of the nodes
    assert "--grid 4x8" in launch.sbatch("goyal_8k", "/d", across)


@pytest.mark.parametrize("time, lead", [
    ("5", 60), ("5:30", 66), ("0:10:00", 120), ("25", 300), ("1-0", 300), ("1-00:00:00", 300),
    ("UNLIMITED", 300)])
def test_the_signal_comes_in_the_last_fifth_of_a_short_time(time, lead, capsys):
    assert launch.main(["sbatch", "goyal_8k", "--data", "/d", "--time", time]) == 0
    assert {f"signal=USR1@{lead}", f"time={time}"} <= set(lines(capsys.readouterr().out))


@pytest.mark.parametrize("argv, message", [
    ("sbatch demo --data x --time soon", "--time 'soon': minutes, h:mm:ss"),
    ("sbatch demo --data x --time 1:2:3:4", "--time '1:2:3:4': minutes"),
    ("sbatch demo --data x --time 1", "2 minutes or more"),
    ("sbatch demo --data x --nodes 9", "9 nodes x 8 ranks for 12 workers"),
    ("sbatch goyal_8k --data x --allreduce torus --grid 10x10", "--grid 10x10 for 256 places (32 nodes x 8 ranks"),
    ("sbatch goyal_8k --data x --dry-run", "only print"),
    ("sbatch dmo --data x", "did you mean demo"), ("sbatch demo --data x --epchs 3", "--epchs"),
    ("sbatch demo --data x --account 'a b; rm'", "--account 'a b; rm': letters")])
def test_bad_requests_end_with_code_2_and_the_cure(argv, message, capsys):
    assert launch.main(shlex.split(argv)) == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out


@pytest.fixture
def cluster(tmp_path):
    """srun and scontrol that write down how they were called; srun runs only shell commands."""
    (tmp_path / "bin").mkdir()
    log = tmp_path / "log"
    for name, body in {
            "srun": 'for a; do if [ "$a" = bash ]; then while [ "$1" != bash ]; do shift; done; '
                    'exec "$@"; fi; done; case "$*" in *refimpl.train*) exit "$CODE";; esac',
            "scontrol": ":"}.items():
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/bash\nprintf "%s " {name} "$@" >> {shlex.quote(str(log))}; '
                        f'echo >> {shlex.quote(str(log))}\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def submit(script, code):
        env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CODE": str(code),
               "SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "32", "SLURM_JOB_ID": "77",
               "SLURM_TMPDIR": str(tmp_path / "local disk")}
        done = subprocess.run(["bash"], input=script, text=True, env=env, timeout=20,
                              capture_output=True)
        calls = [c for c in log.read_text().splitlines() if c.startswith(("srun", "scontrol"))]
        return done.returncode, calls, done.stderr
    return submit


def test_the_script_runs_and_requeues_only_what_asked_for_it(cluster, tmp_path):
    data = tmp_path / "it's $HOME data.zip"
    data.write_bytes(b"zip")
    (tmp_path / "local disk").mkdir()
    script = launch.sbatch("demo", str(data), ["--name", "a b"])
    code, calls, err = cluster(script, 75)
    copy = tmp_path / "local disk" / data.name
    assert code == 75 and not err and copy.read_bytes() == b"zip"
    assert "--ntasks=2 --ntasks-per-node=1" in calls[0] and "launch --check" in calls[1]
    assert "--cpus-per-task=4 " in calls[2] and "--kill-on-bad-exit=1" in calls[2]
    assert f"-m refimpl.train --recipe demo --name a b --resume auto --data {copy}" in calls[2]
    assert calls[3] == "scontrol requeue 77 "
    for code in (0, 1, 2):
        got, calls, _ = cluster(script, code)
        assert got == code and sum("requeue" in call for call in calls) == 1


def test_a_folder_is_not_copied(cluster, tmp_path):
    code, calls, _ = cluster(launch.sbatch("goyal_256", str(tmp_path), []), 0)
    assert code == 0 and len(calls) == 2 and f"--data {tmp_path}" in calls[1]


# --- dry run ------------------------------------------------------------------------------------


def test_json_of_a_dry_run_holds_the_command():
    s, flags = parse(["--recipe", "goyal_8k", "--dry-run", "--json", "--epochs", "3"])
    said = json.loads(launch.describe(s, flags))
    assert said["command"] == "python -m refimpl.train --recipe goyal_8k --epochs 3"
    assert said["total_steps"] == 468


def test_a_dry_run_counts_the_data_it_is_given(tmp_path):
    for name in ("a/1.jpg", "a/2.jpg", "b/3.jpg", "b/4.jpg"):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    s, flags = parse(["--recipe", "goyal_256", "--data", str(tmp_path), "--dry-run", "--workers", "2",
                      "--n", "1", "--epochs", "2"])
    assert "4 training images, 2 epochs, 4 steps" in launch.describe(s, flags)


# --- real launches --------------------------------------------------------------------------------


@pytest.mark.parametrize("mpi", flavours())
def test_check_reports_and_adds_up(mpi):
    job = mpirun(mpi, 3, "-m", "refimpl.launch", "--check", env={"CUDA_VISIBLE_DEVICES": ""})
    assert job.returncode == 0, job.stderr
    library = {"mpich": "MPICH", "openmpi": "Open MPI"}.get(mpi, "")
    for text in (library, "ranks          3, in one world", "1 rows x 3 columns", "1 rows per host",
                 "3 ranks, 3 share memory", "CUDA-aware     not asked", "right on every rank"):
        assert text in job.stdout


def test_check_refuses_the_launcher_of_another_mpi():
    job = subprocess.run([sys.executable, "-m", "refimpl.launch", "--check"], cwd=ROOT, text=True,
                         env={**os.environ, "OMPI_COMM_WORLD_SIZE": "4"}, capture_output=True,
                         timeout=60)
    assert job.returncode == 2 and "each is rank 0 of 1" in job.stderr and not job.stdout

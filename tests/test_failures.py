"""What breaks, and how the job ends: under real mpirun, on every MPI, each with a time limit."""
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.mpi import ROOT, flavours, mpirun
from tests.pictures import SMALL, make_zip

MPIS = list(flavours())
LONG = ("--workers", "3", "--n", "2", "--epochs", "3000", "--warmup-epochs", "1",
        "--eval-every", "0", "--save-every", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_zip(tmp_path_factory.mktemp("data") / "data.zip")


def start(mpi, data, out, *more) -> subprocess.Popen:
    """A long run on 3 ranks; returns when its first checkpoint is there."""
    launcher, env = flavours()[mpi]
    argv = [*launcher, "-np", "3", sys.executable, "-m", "refimpl.train", *SMALL, *LONG, "--data",
            str(data), "--out", str(out), *more]
    job = subprocess.Popen(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, start_new_session=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT), **env})
    limit = time.monotonic() + 90
    while not list(out.glob("*/checkpoint.pt")) and job.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.1)
    return job


def ranks_of(job) -> list[int]:
    """Process ids of the ranks, by what they run; all are below the launcher's session."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getsid(int(entry)) != os.getsid(0):
                words = open(f"/proc/{entry}/cmdline").read().split("\0")
                folder = f"{job.args[job.args.index('--out') + 1]}"
                if words[1:3] == ["-m", "refimpl.train"] and folder in words:
                    found.append(int(entry))
        except OSError:
            pass
    return sorted(found)


def finish(job, seconds=60) -> tuple[int, str]:
    """Exit code and what was said; whatever is left is killed, and told about."""
    try:
        out, err = job.communicate(timeout=seconds)
        code = job.returncode
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, err = job.communicate()
        code = 124
    limit = time.monotonic() + 10
    while (left := ranks_of(job)) and time.monotonic() < limit:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes {left} were left behind\n{err}"
    return code, out + err


def told(fault: str, mpi: str, code: int, seconds: float) -> None:
    """A row for docs/failures.md: REFIMPL_FAILURES=FILE pytest tests/test_failures.py"""
    if file := os.environ.get("REFIMPL_FAILURES"):
        with open(file, "a") as out:
            out.write(json.dumps({"fault": fault, "mpi": mpi, "code": code,
                                  "seconds": round(seconds, 1)}) + "\n")


def intact(out) -> dict:
    (file,) = out.glob("*/checkpoint.pt")
    return torch.load(file, weights_only=True)


FAULTS = {
    "a rank is killed": lambda job: os.kill(ranks_of(job)[-1], signal.SIGKILL),
    "all ranks are killed": lambda job: [os.kill(pid, signal.SIGKILL) for pid in ranks_of(job)],
    "mpirun is killed": lambda job: os.kill(job.pid, signal.SIGKILL),
    "a rank stops responding": lambda job: os.kill(ranks_of(job)[-1], signal.SIGSTOP)}


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_job_ends_nothing_is_left_and_the_checkpoint_goes_on(fault, mpi, data, tmp_path):
    job = start(mpi, data, tmp_path, "--timeout", "4", "--allreduce", "ring")
    begin = time.monotonic()
    FAULTS[fault](job)
    code, said = finish(job)
    told(fault, mpi, code, time.monotonic() - begin)
    assert code not in (0, 124), said
    if fault == "a rank stops responding":
        assert "watchdog: rank" in said and "waits" in said, said
    step = intact(tmp_path)["step"]
    if fault == "a rank is killed":
        again = mpirun(mpi, 2, "-m", "refimpl.train", *SMALL, *LONG, "--data", str(data), "--out",
                       str(tmp_path), "--resume", "auto", "--max-steps", str(step + 3))
        assert again.returncode == 0 and f"at step {step}" in again.stdout, again.stderr


ASKED = {
    "SIGUSR1 to one rank": lambda job: os.kill(ranks_of(job)[-1], signal.SIGUSR1),
    "SIGTERM to one rank": lambda job: os.kill(ranks_of(job)[0], signal.SIGTERM),
    "SIGUSR1 to mpirun": lambda job: os.kill(job.pid, signal.SIGUSR1)}


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("fault", ASKED)
def test_a_stop_asked_for_saves_once_and_exits_75(fault, mpi, data, tmp_path):
    job = start(mpi, data, tmp_path)
    begin = time.monotonic()
    ASKED[fault](job)
    code, said = finish(job)
    told(fault, mpi, code, time.monotonic() - begin)
    assert code == 75 and "--resume auto" in said, (code, said)
    saved = intact(tmp_path)
    (log,) = tmp_path.glob("*/log.jsonl")
    assert saved["log"]["lines"] == len(log.read_text().splitlines())


def test_a_truncated_checkpoint_is_named_and_the_older_one_used(data, tmp_path):
    short = ("-m", "refimpl.train", *SMALL, *LONG, "--data", str(data), "--out", str(tmp_path))
    assert mpirun(MPIS[0], 2, *short, "--max-steps", "12").returncode == 0
    (file,) = tmp_path.glob("*/checkpoint.pt")
    whole = file.read_bytes()
    file.write_bytes(whole[:len(whole) // 2])
    job = mpirun(MPIS[0], 2, *short, "--max-steps", "13", "--resume", "auto")
    assert job.returncode == 0 and "is damaged" in job.stdout and "at step 6" in job.stdout
    for name in ("checkpoint.pt", "checkpoint-older.pt"):
        (file.parent / name).write_bytes(b"no checkpoint at all")
    job = mpirun(MPIS[0], 2, *short, "--resume", str(file))
    assert job.returncode == 2 and "nothing to resume from" in job.stderr
    assert "Traceback" not in job.stderr


def test_a_checkpoint_with_code_in_it_is_refused(data, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)
    torch.save({"format": "refimpl-checkpoint-1", "step": Evil()}, tmp_path / "evil.pt")
    job = mpirun(MPIS[0], 1, "-m", "refimpl.train", *SMALL, *LONG, "--data", str(data), "--out",
                 str(tmp_path / "out"), "--resume", str(tmp_path / "evil.pt"))
    assert job.returncode == 2 and "damaged" in job.stderr and not (tmp_path / "pwned").exists()


DIFFERENT = """
import os, sys
from mpi4py import MPI
from refimpl.train import main
sys.exit(main([*sys.argv[1:], *(["--base-lr", "0.2"] if MPI.COMM_WORLD.rank == 1 else [])]))
"""


def test_ranks_with_different_settings_are_told_who_differs(data, tmp_path):
    job = mpirun(MPIS[0], 3, "-c", DIFFERENT, *SMALL, *LONG, "--data", str(data), "--out",
                 str(tmp_path))
    assert job.returncode == 2 and "rank 1" in job.stderr and "0.2" in job.stderr, job.stderr
    assert "Traceback" not in job.stderr


FLIPPED = """
import sys, refimpl.run, refimpl.train
right = refimpl.run.Run.after_step
def wrong(run, moment, sums):
    if run.comm.rank == 1 and moment.step == 2:
        bits = run.model.fc.weight.data.view(-1).view(__import__('torch').int32)
        bits[3] ^= 1 << 7
    right(run, moment, sums)
refimpl.run.Run.after_step = wrong
sys.exit(refimpl.train.main(sys.argv[1:]))
"""


def test_a_flipped_bit_in_one_ranks_weights_is_found_and_the_rank_named(data, tmp_path):
    job = mpirun(MPIS[0], 3, "-c", FLIPPED, *SMALL, *LONG, "--data", str(data), "--out",
                 str(tmp_path), "--check-every", "1")
    assert job.returncode not in (0, 124) and "weights" in job.stderr and "rank 1" in job.stderr


FULL = """
import resource, signal, sys
from mpi4py import MPI
from refimpl.train import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_stops_with_the_reason_and_leaves_no_half_checkpoint(data, tmp_path):
    job = mpirun(MPIS[0], 2, "-c", FULL, *SMALL, *LONG, "--allreduce", "ring", "--data", str(data),
                 "--out", str(tmp_path), "--max-steps", "7")
    assert job.returncode == 1 and "File too large" in job.stderr, job.stderr
    assert not list(tmp_path.glob("*/checkpoint.pt"))
    assert json.loads(next(tmp_path.glob("*/log.jsonl")).read_text().splitlines()[0])

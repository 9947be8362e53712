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
    assert not list(tmp_path.glob("*/checkpoint.pt")) and "is whole" not in job.stderr
    assert json.loads(next(tmp_path.glob("*/log.jsonl")).read_text().splitlines()[0])


# programs that run the trainer with one thing changed on one rank
ON_RANK = """
import os, resource, signal, sys, time
import torch, refimpl.checkpoint, refimpl.evaluate, refimpl.model, refimpl.run, refimpl.train
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
{change}
sys.exit(refimpl.train.main(sys.argv[1:]))
"""
MEMORY = """
right = refimpl.run.Run.after_step
def full(run, moment, sums):
    right(run, moment, sums)
    if rank == 1 and moment.step == 8:
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 24),) * 2)
        {take}
refimpl.run.Run.after_step = full
"""
TAKE = ["torch.ones(1 << 26)", "bytearray(1 << 28)"]


@pytest.mark.parametrize("mpi,take", list(zip(MPIS, TAKE)))
def test_memory_that_runs_out_on_one_rank_ends_the_job_with_the_cure(mpi, take, data, tmp_path):
    job = program(mpi, 3, MEMORY.format(take=take), data, tmp_path, "--max-steps", "30",
                  told_as="memory runs out on a rank")
    assert job.returncode == 1 and "rank 1 of 3 failed" in job.stderr, job.stderr
    assert "out of memory: " in job.stderr and intact(tmp_path)["step"] == 6


def program(mpi, ranks, change, data, out, *more, told_as=""):
    """The short run, or what is left of it, under a changed trainer."""
    begin = time.monotonic()
    job = mpirun(mpi, ranks, "-c", ON_RANK.format(change=change), *SMALL, *LONG, "--data", str(data),
                 "--out", str(out), *more)
    if told_as:
        told(told_as, mpi, job.returncode, time.monotonic() - begin)
    assert not (left := left_behind(out)), f"processes {left} were left behind\n{job.stderr}"
    return job


def left_behind(out, seconds=10) -> list[str]:
    """Process ids of all that have the folder on their command line, and keep running so long."""
    limit, found = time.monotonic() + seconds, ["?"]
    while found and time.monotonic() < limit:
        time.sleep(0.1)
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                found += [entry] * (str(out) in open(f"/proc/{entry}/cmdline").read().split("\0"))
            except OSError:
                pass
    return found


DIFFER = {
    "code": "refimpl.run.device.code_digest = lambda: f'digest {rank // 2}'",
    "train": """
import dataclasses
right = refimpl.run.open_index
refimpl.run.open_index = lambda *args, **more: dataclasses.replace(
    right(*args, **more), digest=f"digest {rank // 2}")"""}


@pytest.mark.parametrize("mpi,what", list(zip(MPIS, DIFFER)))
def test_ranks_with_other_code_or_data_are_told_who_differs(mpi, what, data, tmp_path):
    job = program(mpi, 3, DIFFER[what], data, tmp_path, told_as=f"ranks with other {what}")
    assert job.returncode == 2 and f"differ in {what}: rank 2 has 'digest 1'" in job.stderr, job.stderr
    assert "Traceback" not in job.stderr


EXITS = """
right = refimpl.run.Run.after_step
def ends(run, moment, sums):
    right(run, moment, sums)
    if rank == 1 and moment.step == 8:
        {call}
refimpl.run.Run.after_step = ends
"""


@pytest.mark.slow
@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("call", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_leaves_early_ends_the_job(call, mpi, data, tmp_path):
    """os._exit leaves no Python behind that could tell: MPICH's launcher then ends the others, and
    may even say 0; what was done is in the log."""
    job = program(mpi, 3, EXITS.format(call=call), data, tmp_path, "--max-steps", "30", "--timeout", "3",
                  "--allreduce", "ring", told_as=f"a rank leaves: {call}")
    assert job.returncode != 124, job.stderr
    if call == "sys.exit(0)":
        assert job.returncode and "rank 1 of 3 failed" in job.stderr, job.stderr
    elif mpi == "openmpi":
        assert job.returncode and "process rank 1" in job.stdout + job.stderr, job.stderr
    assert intact(tmp_path)["step"] == 6


ALONE = """
from refimpl.collective import guard
right = refimpl.run.Run.after_step
def alone(run, moment, sums):
    right(run, moment, sums)
    if rank == 0 and moment.step == 8:
        guard.agree(run.comm, only="rank 0")
refimpl.run.Run.after_step = alone
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_a_collective_that_rank_0_enters_alone_is_told_by_who_waits_where(mpi, data, tmp_path):
    job = program(mpi, 3, ALONE, data, tmp_path, "--max-steps", "30", "--timeout", "3", "--allreduce",
                  "ring", told_as="rank 0 alone enters a collective")
    assert job.returncode not in (0, 124), job.stderr
    assert "rank 0 waits" in job.stderr and "'agreement'" in job.stderr, job.stderr
    assert "rank 1 waits" in job.stderr and "'reduce-scatter'" in job.stderr
    assert intact(tmp_path)["step"] == 6


SLOWED = """
right = refimpl.model.ResNet.forward
def slow(model, x):
    if rank == 1:
        time.sleep(0.1)
    return right(model, x)
refimpl.model.ResNet.forward = slow
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_a_slow_rank_is_named_and_the_log_has_the_spread(mpi, data, tmp_path):
    job = program(mpi, 3, SLOWED, data, tmp_path, "--max-steps", "12")
    assert job.returncode == 0 and "slow: rank 1 on " in job.stdout, job.stderr
    assert "slow: rank 0" not in job.stdout and "slow: rank 2" not in job.stdout, job.stdout
    (log,) = tmp_path.glob("*/log.jsonl")
    times = [json.loads(line)["times"] for line in log.read_text().splitlines()[1:]]
    assert all(t["worker_s"]["slow"] == [1] and t["worker_s"]["max"] > 0.1 for t in times)


# the process is gone at this moment of its second checkpoint, or validation
DEATHS = {
    "half of the file is written": """
right, calls = torch.save, []
def save(content, file):
    calls.append(0)
    right(content, file)
    if len(calls) == 2:
        file.truncate(file.tell() // 2)
        os.kill(os.getpid(), signal.SIGKILL)
refimpl.checkpoint.torch.save = save""",
    "the old file has its new name": """
right = os.replace
def replace(source, target):
    right(source, target)
    if str(target).endswith("checkpoint-older.pt"):
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace""",
    "a rank validates": """
right, calls = refimpl.evaluate.evaluate, []
def evaluate(run):
    calls.append(0)
    if len(calls) == 2 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return right(run)
refimpl.evaluate.evaluate = evaluate"""}
EXACT = ("--sum", "exact", "--eval-every", "1", "--max-steps", "20", "--workers", "3")


def result(out):
    """Weights, statistics and momentum as a digest; the log without times and machine."""
    (log,) = out.glob("*/log.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return intact(out)["digest"], [{k: v for k, v in line.items() if k != "times"} for line in lines
                                   if line["event"] == "epoch"]


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken")
    assert program(MPIS[0], 3, "", data, out, *EXACT).returncode == 0
    return result(out)


@pytest.mark.slow
@pytest.mark.parametrize("mpi,ranks", list(zip(MPIS, (3, 2))))
@pytest.mark.parametrize("death", DEATHS)
def test_a_run_killed_inside_a_save_or_a_validation_goes_on_to_the_same_end(
        death, mpi, ranks, data, tmp_path, unbroken):
    job = program(mpi, 3, DEATHS[death], data, tmp_path, *EXACT, told_as=f"killed while {death}")
    assert job.returncode not in (0, 124), job.stderr
    assert not list(tmp_path.glob("*/checkpoint.pt")) or intact(tmp_path)["step"] == 6
    again = program(mpi, ranks, "", data, tmp_path, *EXACT, "--resume", "auto")
    assert again.returncode == 0 and "at step 6" in again.stdout, again.stderr
    assert result(tmp_path) == unbroken


def test_a_run_writes_below_its_folder_only(data, tmp_path):
    here, out = tmp_path / "here", tmp_path / "out"
    here.mkdir()
    job = mpirun(MPIS[0], 2, "-m", "refimpl.train", *SMALL, *LONG, "--data", str(data), "--out", str(out),
                 "--max-steps", "7", cwd=here, env={"HOME": str(here), "MPLCONFIGDIR": str(here / "plots")})
    assert job.returncode == 0, job.stderr
    (run,) = out.iterdir()
    assert {file.name for file in run.iterdir()} == {
        "log.jsonl", "curves.png", "checkpoint.pt", "checkpoint-older.pt"}
    assert {file.name for file in here.iterdir()} <= {"plots"}  # matplotlib's list of fonts
    bad = mpirun(MPIS[0], 1, "-m", "refimpl.train", *SMALL, "--name", "../x", "--out", str(out))
    assert bad.returncode == 2 and len(list(tmp_path.iterdir())) == 2, bad.stderr


STALL = """
import importlib, sys, time
module, name = sys.argv.pop(1).split(":")
module, last = importlib.import_module(module), name.split(".")[-1]
for owner in name.split(".")[:-1]:
    module = getattr(module, owner)
right = getattr(module, last)
def stalled(*args, **options):
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        time.sleep(600)
    return right(*args, **options)
setattr(module, last, stalled)
import refimpl.train
sys.exit(refimpl.train.main(sys.argv[1:]))
"""
PLACES = {"refimpl.state:gather": "state", "refimpl.timeline:Timeline.__init__": "agreement",
          "refimpl.device:free_cores": "cores", "refimpl.device:one_node": "nodes",
          "refimpl.collective:Reducer.__init__": "new communicators",
          "refimpl.collective.window:empty": "shared memory"}


@pytest.mark.parametrize("place,phase", list(PLACES.items()))
def test_wherever_a_rank_stops_the_others_say_so_and_end(place, phase, data, tmp_path):
    mpi = MPIS[list(PLACES).index(place) % len(MPIS)]
    job = mpirun(mpi, 2, "-c", STALL, place, *SMALL, *LONG, "--data", str(data), "--out", str(tmp_path),
                 "--max-steps", "2", "--timeout", "2", "--threads", "0", "--allreduce", "torus", "--state",
                 str(tmp_path / "s"), "--timeline", str(tmp_path / "t"), timeout=60)
    assert job.returncode not in (0, 124), job.stderr
    assert f"in phase '{phase}'" in job.stderr and "watchdog: rank 0 waits" in job.stderr, job.stderr


ELSEWHERE = """
import os, sys, refimpl.train
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
sys.exit(refimpl.train.main(sys.argv[1:] + ["--dry-run"] * (rank == 2)))
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_never_starts_mpi_does_not_leave_the_others_waiting(mpi, tmp_path):
    job = mpirun(mpi, 3, "-c", ELSEWHERE, "--out", str(tmp_path), "--timeout", "1", timeout=60)
    assert job.returncode not in (0, 124), job.stderr
    seen_by_launcher = mpi == "openmpi" and "init" in job.stderr  # or not: who comes first
    assert seen_by_launcher or "in wait_for_all_ranks_to_start_mpi" in job.stderr, job.stderr
    assert not list(tmp_path.iterdir())

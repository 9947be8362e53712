"""The trainer as its users start it: what it leaves behind, how it refuses, how it fails."""
import json
import math
import re
import subprocess
import sys

import pytest
import torch

from tests.mpi import ROOT, flavours, mpirun
from tests.pictures import SMALL, make_zip

MPIS = list(flavours())
TRAIN = ("-m", "refimpl.train")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_zip(tmp_path_factory.mktemp("data") / "data.zip")


def small(data, out, *more: str) -> tuple[str, ...]:
    return (*TRAIN, *SMALL, "--data", str(data), "--out", str(out), "--workers", "3", "--n", "2",
            "--epochs", "2", "--warmup-epochs", "1", *more)


def alone(*command: str, timeout=60) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                          timeout=timeout)


@pytest.mark.parametrize("mpi", MPIS)
def test_a_run_leaves_its_log_picture_and_checkpoint(mpi, data, tmp_path):
    job = mpirun(mpi, 2, *small(data, tmp_path))
    assert job.returncode == 0, job.stderr
    (folder,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    start, *epochs = lines
    assert start["settings"]["workers"] == 3 and start["total_steps"] == 2 * (36 // 6)
    assert start["machine"]["ranks"] == 2 and start["machine"]["threads"] == 1
    assert [e["epoch"] for e in epochs] == [1, 2] and epochs[-1]["val_total"] == 12
    assert all(e["val_top1"] == e["val_correct"] / 12 for e in epochs)
    assert (folder / "curves.png").stat().st_size > 10_000
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 12 and saved["classes"] == ["class0", "class1", "class2"]
    assert {"conv1.weight", "bn1.running_var", "layer1.0.downsample.0.weight", "fc.bias"} <= set(
        saved["state_dict"])
    assert "val top-1" in job.stdout and job.stdout.count("epoch   1") == 1
    assert not job.stderr and len(re.findall("(?m)^epoch ", job.stdout)) == 2  # a log that grep can read


def test_where_no_bar_can_be_a_line_now_and_then_says_how_far_it_is(data, tmp_path):
    quiet = "import sys, refimpl.runlog, refimpl.train; refimpl.runlog.QUIET = 0; sys.exit(refimpl.train.main())"
    job = mpirun(MPIS[0], 2, "-c", quiet, *small(data, tmp_path, "--max-steps", "3")[2:])
    told = [line.partition(":")[0] for line in job.stderr.splitlines()]
    assert told == ["step 1 of 3", "step 2 of 3", "step 3 of 3"], job.stderr


def test_without_a_launcher_it_runs_as_one_rank(data, tmp_path):
    job = alone(*small(data, tmp_path, "--max-steps", "2", "--allreduce", "auto"))
    assert job.returncode == 0 and "1 rank" in job.stdout, job.stderr
    assert "window" in job.stdout  # what auto means on the CPUs of one node, said before the run


BAD = [
    (("--workes", "3"), "did you mean --workers"),
    (("--recipe", "goyal_8"), "did you mean goyal_8k"),
    (("--data", "/does/not/exist"), "/does/not/exist"),
    (("--n", "40"), "36 training images"),
    (("--grid", "3x3"), "choose one of"),
    (("--workers", "1"), "2 ranks for 1 workers"),
    (("--data", "", "--classes", "1000"), "give its images by --data"),
    (("--base-lr", "quick"), "expected a number"),
    (("--sum", "exact", "--wire", "float16"), "cannot go with"),
    (("--resume", "nowhere.pt"), "nowhere.pt is not there"),
    (("--trace", "/no/such/folder/t"), "folder that exists"),
    (("--out", "/proc/nothing"), "can be made"),
    (("--name", "../escape"), "names a folder"),
    (("--loss-scale", "3"), "a power of two"),
    (("--classes", "2"), "has 3"),
    (("--threads", "100000"), "below 1025"),
    (("--depth", "1,1,1,1", "--n", "1", "--image-size", "8"), "batch norm")]


@pytest.mark.parametrize("wrong,told", BAD, ids=[bad[0][0] for bad in BAD])
def test_bad_input_is_one_line_with_the_cure_and_code_2_on_every_rank(wrong, told, data, tmp_path):
    for mpi in MPIS if "--grid" in wrong else MPIS[:1]:
        job = mpirun(mpi, 2, *small(data, tmp_path, *wrong))
        ours = [line for line in job.stderr.splitlines() if line.startswith("refimpl.train:")]
        assert job.returncode == 2 and len(ours) == 1 and told in ours[0], job.stderr
        assert "Traceback" not in job.stderr and not list(tmp_path.iterdir())


def test_a_class_in_val_that_train_lacks_is_refused(tmp_path):
    import zipfile
    from tests.pictures import jpeg
    make_zip(tmp_path / "data.zip")
    with zipfile.ZipFile(tmp_path / "data.zip", "a") as archive:
        archive.writestr("val/stranger/1.jpg", jpeg(1, 1))
    job = mpirun(MPIS[0], 2, *small(tmp_path / "data.zip", tmp_path))
    assert job.returncode == 2 and "stranger" in job.stderr and "Traceback" not in job.stderr


RAISING = """
import sys, refimpl.run, refimpl.train
right = refimpl.run.Run.next_batch
def wrong(run):
    if run.comm.rank == run.comm.size - 1 and run.step == 3:
        raise RuntimeError("planted on one rank")
    return right(run)
refimpl.run.Run.next_batch = wrong
sys.exit(refimpl.train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(mpi, data, tmp_path):
    job = mpirun(mpi, 3, "-c", RAISING, *small(data, tmp_path)[2:], timeout=60)
    assert job.returncode == 1, (job.returncode, job.stderr)
    assert "rank 2 of 3 failed" in job.stderr and "planted on one rank" in job.stderr


def test_bad_input_on_one_rank_alone_ends_the_job(data, tmp_path):
    """A recipe file that is missing on one host, say."""
    code = ("import os, sys; from refimpl.train import main; rank = int(os.environ.get('PMI_RANK') or "
            "os.environ['OMPI_COMM_WORLD_RANK'])\n"
            "sys.exit(main(sys.argv[1:] + ['--recipe', '/no/such.toml'] * (rank == 1)))")
    for mpi in MPIS:
        job = mpirun(mpi, 2, "-c", code, *small(data, tmp_path)[2:])
        assert job.returncode == 2 and "rank 1: no recipe '/no/such.toml'" in job.stderr, job.stderr


def test_a_run_that_skips_every_step_is_no_success(data, tmp_path):
    job = mpirun(MPIS[0], 2, *small(data, tmp_path, "--precision", "fp16", "--loss-scale", str(2**30),
                                    "--max-steps", "3"))
    assert job.returncode == 1 and "nothing was learned" in job.stderr, job.stderr


def test_resume_auto_starts_a_first_run_and_never_goes_on_with_anothers(data, tmp_path):
    run = small(data, tmp_path, "--resume", "auto", "--max-steps", "2")
    for name, ranks in (("cut-other", 1), ("cut", 1), ("cut", 2)):
        job = mpirun(MPIS[0], ranks, *run, "--name", name)
        assert job.returncode == 0, job.stderr
    assert "nothing to do" in job.stdout and len(list(tmp_path.iterdir())) == 2
    changed = mpirun(MPIS[0], 1, *run, "--name", "cut", "--label-smoothing", "0.1")
    assert changed.returncode == 2 and "label_smoothing 0.0" in changed.stderr


def test_a_trace_keeps_the_steps_before_a_resume(data, tmp_path):
    run = small(data, tmp_path, "--resume", "auto", "--trace", str(tmp_path / "t"))
    assert mpirun(MPIS[0], 1, *run, "--max-steps", "3").returncode == 0
    whole = (tmp_path / "t").read_text()
    for reached, left in ((7, whole + '{"step": 3, "ep'), (8, None), (9, "newline")):
        if left == "newline":  # lost with the end of its block
            left = (tmp_path / "t").read_text()[:-1]
        if left:  # as a full disk leaves it
            (tmp_path / "t").write_text(left)
        assert mpirun(MPIS[0], 1, *run, "--max-steps", str(reached)).returncode == 0
        steps = [json.loads(line)["step"] for line in (tmp_path / "t").read_text().splitlines()]
        assert steps == list(range(reached))


FILES = ("--trace", "--state", "--timeline")
FOREIGN = b'{"step": 1, "loss": 2.1}\n'  # somebody's metrics


@pytest.mark.parametrize("setting", FILES)
def test_only_a_file_of_the_same_kind_is_written_over(setting, data, tmp_path):
    (tmp_path / "file").write_text("mine")
    run = small(data, tmp_path, setting, str(tmp_path / "file"), "--max-steps", "1")
    job = mpirun(MPIS[0], 2, *run)
    assert job.returncode == 2 and f"{setting} {tmp_path}/file: holds something else" in job.stderr
    assert (tmp_path / "file").read_text() == "mine"
    for old in (b"", None):  # as a run that was killed left it; the last run's own
        if old is not None:
            (tmp_path / "file").write_bytes(old)
        assert mpirun(MPIS[0], 2, *run).returncode == 0
        assert (tmp_path / "file").stat().st_size > 200
    whole = (tmp_path / "file").read_bytes()  # a run that writes nothing takes nothing away
    for more, code in ((("--resume", "auto"), 0), (("--resume", "auto", "--seed", "9"), 2),
                       (("--out", "/proc/nothing"), 2)):
        assert mpirun(MPIS[0], 2, *run, *more).returncode == code
        assert (tmp_path / "file").read_bytes() == whole
    (tmp_path / "file").write_bytes(FOREIGN)
    assert mpirun(MPIS[0], 2, *run).returncode == 2 and (tmp_path / "file").read_bytes() == FOREIGN


@pytest.mark.parametrize("setting", FILES)
def test_a_full_disk_is_told_with_path_and_cure(setting, data, tmp_path):
    job = mpirun(MPIS[0], 2, *small(data, tmp_path, setting, "/dev/full", "--max-steps", "2"))
    assert job.returncode == 1 and "Traceback" not in job.stderr, job.stderr
    assert "/dev/full could not be written on: No space left on device; make room" in job.stderr


SKIP = """
import sys, refimpl.optimizer, refimpl.train
right = refimpl.optimizer.LossScale.accept
def skip(self, sums, moment):
    return right(self, sums | {"overflow": sums["overflow"] + (moment.step < 6)}, moment)
refimpl.optimizer.LossScale.accept = skip
import refimpl.runlog
record = refimpl.runlog.RunLog.record
refimpl.runlog.RunLog.record = lambda self, moment, sums: record(
    self, moment, sums | {"overflow": sums["overflow"] + (moment.step < 6)})
sys.exit(refimpl.train.main())
"""


def test_an_epoch_of_skipped_steps_has_no_loss(data, tmp_path):
    job = mpirun(MPIS[0], 2, "-c", SKIP, *small(data, tmp_path, "--precision", "bf16", "--wire", "float16")[2:])
    assert job.returncode == 0, job.stderr
    (log,) = tmp_path.glob("*/log.jsonl")
    first, second = [line["loss"] for line in map(json.loads, log.read_text().splitlines()[1:])]
    assert math.isnan(first) and 0 < second < 9 and "train loss    nan" in job.stdout


def test_a_loss_that_is_not_finite_stops_all_ranks_with_code_1(data, tmp_path):
    job = mpirun(MPIS[0], 2, *small(data, tmp_path, "--base-lr", "1e9", "--warmup", "none"))
    assert job.returncode == 1 and "lower --base-lr" in job.stderr
    assert "Traceback" not in job.stderr


def weights(folder) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def comparable(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "times"} for line in lines
            if line["event"] == "epoch"]


CUT = """
import os, signal, sys, refimpl.checkpoint, refimpl.train
right = refimpl.checkpoint.save
def save_and_die(run):
    right(run)
    if run.step == 8 and run.comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
refimpl.checkpoint.save = save_and_die
sys.exit(refimpl.train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_a_run_killed_inside_an_epoch_and_resumed_equals_the_whole_run(mpi, data, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert mpirun(mpi, 2, *small(data, whole, "--save-steps", "2")).returncode == 0
    killed = mpirun(mpi, 2, "-c", CUT, *small(data, cut, "--save-steps", "2")[2:])
    assert killed.returncode not in (0, 124)
    job = mpirun(mpi, 2, *small(data, cut, "--save-steps", "2", "--resume", "auto"))
    assert job.returncode == 0 and "at step 8" in job.stdout, job.stderr
    (a,), (b,) = whole.iterdir(), cut.iterdir()
    assert weights(a)["digest"] == weights(b)["digest"] and weights(b)["step"] == 12
    assert comparable(a) == comparable(b) and len(comparable(a)) == 2

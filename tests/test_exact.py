"""--sum exact: the trained weights are the same bits however many ranks play the twelve workers."""
import torch

from tests.mpi import flavours, mpirun
from tests.pictures import SMALL, make_zip

PLAYS = [(1, "ring"), (2, "mpi"), (3, "torus"), (4, "torus"), (5, "halving_doubling"), (6, "ring"),
         (8, "halving_doubling"), (12, "torus")]


def played(out, data, mpi, ranks, algorithm, *more) -> dict:
    job = mpirun(mpi, ranks, "-m", "refimpl.train", *SMALL, "--data", str(data), "--out", str(out),
                 "--workers", "12", "--n", "2", "--epochs", "3", "--warmup-epochs", "1", "--sum",
                 "exact", "--allreduce", algorithm, "--trace", str(out) + ".jsonl", *more,
                 timeout=120)
    assert job.returncode == 0, job.stderr
    (file,) = out.glob("*/checkpoint.pt")
    return torch.load(file, weights_only=True)


def test_twelve_workers_give_the_same_bits_on_1_to_12_ranks_by_any_algorithm_and_mpi(tmp_path):
    data = make_zip(tmp_path / "data.zip")
    plays = [(mpi, *play) for i, mpi in enumerate(flavours()) for play in PLAYS[i and 3:i and 5 or 8]]
    digests, traces = {}, set()
    for mpi, ranks, algorithm in plays:
        out = tmp_path / f"{mpi}{ranks}"
        digests[mpi, ranks, algorithm] = played(out, data, mpi, ranks, algorithm)["digest"]
        traces.add((tmp_path / f"{mpi}{ranks}.jsonl").read_text())
    assert len(set(digests.values())) == 1, digests
    assert len(traces) == 1 and len(traces.pop().splitlines()) == 3


def test_a_resume_on_another_number_of_ranks_goes_on_exactly(tmp_path):
    data, mpi = make_zip(tmp_path / "data.zip"), next(iter(flavours()))
    whole = played(tmp_path / "whole", data, mpi, 2, "ring", "--workers", "6")
    cut = ("--workers", "6", "--max-steps", "4")
    assert played(tmp_path / "cut", data, mpi, 3, "ring", *cut)["step"] == 4  # inside an epoch
    again = played(tmp_path / "cut", data, mpi, 2, "torus", "--workers", "6", "--resume", "auto")
    assert again["digest"] == whole["digest"] and again["step"] == whole["step"] == 9

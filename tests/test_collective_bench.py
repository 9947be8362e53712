"""The benchmark's definitions by hand, and one short run of the program on each MPI."""
import itertools
import json

import pytest

from refimpl.bench.allreduce import parse, row, sizes, slowest
from refimpl.errors import UsageError
from tests.mpi import flavours, mpirun


@pytest.mark.parametrize("ranks, busbw", [(1, 0.0), (2, 2.0), (4, 3.0), (5, 3.2)])
def test_bandwidths_are_those_of_nccl_tests(ranks, busbw):
    got = row("ring", 4_000_000_000, ranks, [1.0, 2.0, 9.0])  # 4e9 bytes in 2 s: 2 GB/s
    assert (got["median_s"], got["min_s"], got["max_s"], got["n"]) == (2.0, 1.0, 9.0, 3)
    assert got["algbw"] == 2.0 and got["busbw"] == pytest.approx(busbw, rel=1e-15)


def test_sizes_and_grids_as_people_write_them():
    assert sizes("102228128") == [102228128] and sizes("64K") == [65536]
    assert sizes("4K:256K") == [4096, 32768, 262144]
    assert sizes("4K:128M")[-1] == 128 << 20
    assert parse(["--grid", "2x4"]).grid == (2, 4) and parse([]).grid is None
    for bad in ("4G:", "", "4K:5K:6K", "x"):
        with pytest.raises(UsageError):
            sizes(bad)
    with pytest.raises(UsageError):
        parse(["--grid", "2*4"])


@pytest.mark.ranks(1, 2, 3)
def test_the_time_is_that_of_the_slowest_rank(comm):
    ticks = itertools.count(0, 10 + comm.rank)  # a clock on which rank r needs 10 + r seconds
    assert slowest(comm, lambda: None, clock=lambda: next(ticks)) == 10 + comm.size - 1


@pytest.mark.parametrize("mpi", flavours())
def test_all_algorithms_beside_mpi_and_gloo(mpi, tmp_path):
    job = mpirun(mpi, 2, "-m", "refimpl.bench", "allreduce", "--sizes", "4K:32K", "--repeats", "2",
                 "--json", str(tmp_path / "rows"), "--plot", str(tmp_path / "plot.png"))
    assert job.returncode == 0, job.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(rows) == 16 and {r["algorithm"] for r in rows} >= {"ring", "window", "mpi", "gloo"}
    assert all(r["n"] == 2 and r["mpi"] and r["min_s"] <= r["median_s"] for r in rows)
    ours = {r["bytes"]: r["algorithm"] for r in sorted(rows, key=lambda r: -r["median_s"])
            if r["algorithm"] not in ("mpi", "gloo", "traffic")}  # the fastest stays
    proposal = job.stdout.splitlines()[-1]
    assert f"(2, 4096, '{ours[4096]}'), (2, 32768, '{ours[32768]}')" in proposal
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [
    ["--repeats", "0"], ["--warmup", "-1"], ["--json", "/nowhere/rows"], ["--plot", "/nowhere/p.png"],
    ["--plot", "picture.exe"], ["--sizes", "0"], ["--sizes", "5"], ["--sizes", "64K:1K"],
    ["--sizes", "999999999999M"], ["--sizes", "4K:" + "9" * 5000],
    ["--wire", "float16", "--algorithms", "mpi"]])
def test_what_cannot_be_measured_or_kept_is_refused_before_measuring(wrong):
    with pytest.raises(UsageError):
        parse(wrong)


@pytest.mark.parametrize("argv, words", [
    (["allreduce", "--grid", "2by4"], "refimpl.bench: argument --grid: '2by4': expected ROWSxCOLUMNS"),
    (["allreduce", "--sizes", "999999999999M"], "refimpl.bench: --sizes: 1048575999998951424 bytes"),
    (["allreduce", "--grid", "2x4"], "refimpl.bench: a grid of 2 x 4 does not hold 3 ranks"),
    (["step", "--repeats", "x"], "refimpl.bench: argument --repeats: "), (["rumour"], "usage: ")])
@pytest.mark.parametrize("mpi", flavours())
def test_a_wrong_word_is_told_once_and_all_ranks_end_with_code_2(mpi, argv, words):
    job = mpirun(mpi, 3, "-m", "refimpl.bench", *argv)
    assert job.returncode == 2 and job.stderr.count(words) == 1 and "Traceback" not in job.stderr


ALONE = """
import sys
from mpi4py import MPI
from refimpl.bench import __main__ as bench, allreduce
rank, what = MPI.COMM_WORLD.rank, sys.argv.pop(1)
right = allreduce.measure
def measure(comm, length, args):
    if rank == 1:
        raise MemoryError("planted")
    return right(comm, length, args)
if what == "raises":
    allreduce.measure = measure
sys.exit(bench.main(["allreduce", "--sizes", "4K", "--algorithms", "ring", "--timeout", "3",
                     *["--repeats", "2"] * (what == "differs" and rank == 1)]))
"""


@pytest.mark.parametrize("what, code, words", [("raises", 1, "planted"), ("differs", 2, "differ in arguments")])
@pytest.mark.parametrize("mpi", flavours())
def test_what_happens_on_one_rank_alone_ends_all(mpi, what, code, words):
    job = mpirun(mpi, 2, "-c", ALONE, what, timeout=60)
    assert job.returncode == code and job.stderr.count(words) == 1, job.stderr


def test_one_rank_has_no_busbw_to_draw(tmp_path):
    job = mpirun(next(iter(flavours())), 1, "-m", "refimpl.bench", "allreduce", "--sizes", "4K",
                 "--plot", str(tmp_path / "plot.png"))
    assert job.returncode == 2 and "start 2 ranks or more" in job.stderr and not [*tmp_path.iterdir()]

"""The oracle over real MPI: one-line tests, exit codes on every rank, and what real subjects do."""
import json

import pytest

from refimpl.errors import UsageError
from refimpl.oracle.check import check
from tests import oracle_subjects as subjects
from tests.mpi import flavours, mpirun

MPIS = list(flavours())


@pytest.mark.ranks(1, 2, 5)
def test_one_line_is_enough(comm):
    check(subjects.mpi, comm, level="exact")


@pytest.mark.ranks(1, 3)
def test_a_right_sum_meets_every_level_that_needs_no_order(comm):
    for level in ("agree", "exact", "bounded", "special"):
        for dtype in ("float32", "float64"):
            assert " 0 failed" in check(subjects.gathered, comm, level=level, dtype=dtype)
    order = "+".join(map(str, range(comm.size)))
    assert "ordered" in check(subjects.gathered, comm, level="ordered", order=order)
    check(subjects.mpi, comm, dtype="int64")


@pytest.mark.ranks(3)
def test_broken_ones_fail_alike_on_every_rank(comm):
    for f, level in [(subjects.passed_around, "agree"), (subjects.mean, "exact"),
                     (subjects.forgets_rank_0, "exact"), (subjects.through_float16, "bounded")]:
        with pytest.raises(AssertionError) as failure:
            check(f, comm, level=level)
        assert len(set(comm.allgather(str(failure.value)))) == 1
        assert "want" in str(failure.value) and " failed; " in str(failure.value)


@pytest.mark.ranks(2)
def test_what_raises_or_has_the_wrong_shape_cannot_be_told(comm):
    for f in (subjects.raises, lambda x, comm: x[:1], lambda x, comm: x.astype("f8")):
        with pytest.raises(UsageError):
            check(f, comm)


@pytest.mark.ranks(2)
def test_a_second_call_must_give_the_same_bits(comm):
    calls = []

    def moody(x, comm):
        calls.append(1)
        comm.Allreduce(subjects_in_place(), x)
        x *= 1 if len(calls) % 2 else 1 + 2 ** -20
    with pytest.raises(AssertionError, match="a second call gives other bits"):
        check(moody, comm)


def subjects_in_place():
    from mpi4py import MPI
    return MPI.IN_PLACE


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("argv,code,words", [
    (["check", "tests.oracle_subjects:mpi"], 0, "8 passed, 0 failed"),
    (["check", "tests.oracle_subjects:mean"], 1, "got"),
    (["check", "tests.oracle_subjects:raises"], 2, ""),
    (["self", "--order", "torus:3x1", "--wire", "bfloat16"], 0, "ordered (torus:3x1) 14"),
    (["self", "--order", "hierarchical:1:torus:1x3"], 0, "14 passed, 0 failed"),
    (["self", "--order", "halving_doubling", "--dtype", "bfloat16"], 0,
     "ordered (halving_doubling) 14"),
    (["self", "--level", "exact", "--dtype", "int32"], 0, "8 passed, 0 failed")])
def test_every_rank_ends_with_the_answer(mpi, argv, code, words):
    show = "import runpy, sys\ntry:\n runpy.run_module('refimpl.oracle', run_name='__main__')\n" \
           "except SystemExit as e:\n print(f'code={e.code}', flush=True)\n raise"
    job = mpirun(mpi, 3, "-c", show, *argv, timeout=60)
    assert job.stdout.count(f"code={code}") == 3, job.stdout + job.stderr
    assert words in job.stdout and job.returncode == code


@pytest.mark.parametrize("mpi", MPIS)
def test_one_rank_that_raises_ends_the_job_and_says_so(mpi):
    program = ("from mpi4py import MPI\nfrom refimpl.oracle.check import call, make\n"
               "def f(x, comm):\n"
               "    if comm.rank == 1: raise RuntimeError('I am ill')\n"
               "    comm.Barrier()\n"
               "call(f, MPI.COMM_WORLD, make(2)[1], patience=1)")
    job = mpirun(mpi, 2, "-c", program, timeout=60)
    assert job.returncode not in (0, 124) and "I am ill" in job.stdout + job.stderr


EXPECTED = {  # what is certain of these, whatever the version: words of the order
    "4": "ring, chunk c starts at rank c", "ring": "ring, chunk c starts at rank c + 1",
    "1": "from the right", "reduce_scatter_allgather": "(((0+1)+2)+(3+4))",
    "pickled": "halving_doubling", "gathered": "rank order, from the left",
    "gloo": "ring downwards, chunk c starts at rank c + 4", "passed_around": "an order per rank"}


def rows():
    """Without those that add as another one does."""
    alike = ("as it comes", "algorithm 2", "algorithm 3", "algorithm 5", "_doubling", "recexch")
    return [pytest.param(*row[1:], id=f"{row[1]}: {row[0]}") for row in subjects.SUBJECTS
            if row[1] in MPIS and not any(word in row[0] for word in alike)]


@pytest.mark.parametrize("mpi,name,env", rows())
def test_real_subjects_are_seen_as_the_table_says(mpi, name, env):
    if name == "gloo":
        pytest.importorskip("torch")
    job = mpirun(mpi, 5, "-m", "tests.oracle_subjects", name, env=env, timeout=100)
    assert job.returncode == 0, job.stdout + job.stderr
    seen = json.loads(job.stdout.strip().splitlines()[-1])
    chosen = next((value for key, value in env.items() if "ALGORITHM" in key.upper()), name)
    assert EXPECTED.get(chosen, "") in seen["order"], seen
    assert seen["agree"] == ("no" if name == "passed_around" else "yes")
    broken = {"passed_around": "the ranks disagree", "through_float16": "float16 on the wire",
              "mean": "the mean instead of the sum (sum/k)", "forgets_rank_0": "rank 0 never added"}
    assert seen["float32"] == broken.get(name, "right")
    if name == "gloo":
        assert seen["bfloat16"].startswith("right")
    elif name in ("mpi", "pickled", "gathered"):
        assert "bfloat16 added as 16-bit integers" in seen["bfloat16"]

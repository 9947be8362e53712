"""The oracle over real MPI: one-line tests, exit codes on every rank, and what real subjects do."""
import contextlib
import io
import json

import pytest

from refimpl.errors import UsageError
from refimpl.oracle.__main__ import main
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
        word = "rank 0 has" if f == subjects.passed_around else "want"  # it gives each rank other bits
        assert word in str(failure.value) and " failed; " in str(failure.value)


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


ANSWERS = [
    (["check", "tests.oracle_subjects:mpi"], 0,
     "10 passed, 0 failed; levels met: agree 2, exact 8"),
    (["self", "--order", "torus:3x1", "--wire", "bfloat16"], 0, "ordered (torus:3x1) 14"),
    (["self", "--order", "hierarchical:1:torus:1x3"], 0, "14 passed, 0 failed"),
    (["self", "--order", "halving_doubling", "--dtype", "bfloat16"], 0,
     "ordered (halving_doubling) 14"),
    (["self", "--level", "exact", "--dtype", "int32"], 0, "8 passed, 0 failed"),
    (["check", "tests.oracle_subjects:mean"], 1, "got"),
    (["check", "tests.oracle_subjects:raises"], 2, ""),
    (["identify", "tests.oracle_subjects:mean"], 1, "not a sum (ones on 3 ranks give 1)"),
    (["identify", "tests.oracle_subjects:gathered"], 0, "rank order, from the left")]


@pytest.mark.ranks(3)
def test_every_rank_ends_with_the_answer_and_one_says_it(comm):
    for argv, code, words in ANSWERS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
            assert main(argv) == code, argv
        assert words in said.getvalue() if comm.rank == 0 else not said.getvalue(), argv


@pytest.mark.parametrize("mpi", MPIS)
def test_the_job_ends_with_the_code(mpi):
    job = mpirun(mpi, 3, "-m", "refimpl.oracle", "check",
                 "tests.oracle_subjects:mean", timeout=60)
    assert job.returncode == 1 and job.stdout.count("0 passed") <= 1 and " failed; " in job.stdout


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("verb,name,words", [
    ("explain", "mpi", "explain: give a case file and results"), ("check", "rumour", "module:function")])
def test_what_cannot_be_told_is_said_once(mpi, verb, name, words):
    job = mpirun(mpi, 3, "-m", "refimpl.oracle", verb, f"tests.oracle_subjects:{name}", timeout=60)
    assert job.returncode == 2 and job.stderr.count(words) == 1, job.stderr


@pytest.mark.parametrize("mpi", MPIS)
def test_one_rank_that_raises_ends_the_job_and_says_so(mpi):
    program = ("from mpi4py import MPI\nfrom refimpl.oracle.check import call, make\n"
               "def f(x, comm):\n"
               "    if comm.rank == 1: raise RuntimeError('I am ill')\n"
               "    comm.Barrier()\n"
               "call(f, MPI.COMM_WORLD, make(2)[1], patience=1)")
    job = mpirun(mpi, 2, "-c", program, timeout=60)
    assert job.returncode not in (0, 124) and "I am ill" in job.stdout + job.stderr


EXPECTED = {  # what is certain of these, whatever the version
    "4": {"order": "ring, chunk c starts at rank c"}, "1": {"order": "from the right"},
    "6": {}, "ring": {"order": "ring, chunk c starts at rank c + 1"}, "tree": {},
    "reduce_scatter_allgather": {"order": "(((0+1)+2)+(3+4))"},
    "gloo": {"order": "ring downwards, chunk c starts at rank c + 2", "bfloat16": "right"},
    "pickled": {"order": "halving_doubling"}, "gathered": {"order": "rank order, from the left"},
    "passed_around": {"order": "an order per rank", "agree": "no",
                      "float32": "the ranks disagree"},
    "through_float16": {"float32": "float16 on the wire"},
    "mean": {"float32": "the mean instead of the sum (sum/k)"},
    "forgets_rank_0": {"float32": "rank 0 never added"}}
PICKLED = ("pickled", "gathered", "passed_around", "through_float16", "mean", "forgets_rank_0")


def launches():
    """(MPI, ranks, subjects, environment): those that need no setting share a launch; algorithms
    that add as another one does are left out."""
    chosen = [(mpi, 5, ("mpi",), env) for _, mpi, name, env in subjects.SUBJECTS if name == "mpi"
              and any("ALGORITHM" in key.upper() and env[key] in EXPECTED for key in env)]
    return [pytest.param(*row, id=f"{row[0]} {'+'.join(row[2])} {' '.join(row[3].values())}")
            for row in [*chosen, ("mpich", 5, PICKLED, {}), ("mpich", 3, ("gloo",), {})]
            if row[0] in MPIS]


@pytest.mark.parametrize("mpi,ranks,names,env", launches())
def test_real_subjects_are_seen_as_the_table_says(mpi, ranks, names, env):
    if "gloo" in names:
        pytest.importorskip("torch")
    job = mpirun(mpi, ranks, "-m", "tests.oracle_subjects", *names, env=env, timeout=100)
    assert job.returncode == 0, job.stdout + job.stderr
    for name, line in zip(names, job.stdout.strip().splitlines()[-len(names):], strict=True):
        chosen = next((value for key, value in env.items() if "ALGORITHM" in key.upper()), name)
        bfloat16 = "bfloat16 added as 16-bit integers" if name in (
            "mpi", "pickled", "gathered") else ""
        expected = {"order": "", "agree": "yes", "float32": "right", "bfloat16": bfloat16}
        for key, word in (expected | EXPECTED[chosen]).items():
            assert json.loads(line)[key].startswith(word) or key == "order" and word in line, line

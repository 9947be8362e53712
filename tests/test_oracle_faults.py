"""What a sceptical reader tried: results that must not pass, and questions that have no answer."""

import numpy as np
import pytest

from refimpl.oracle import spec
from refimpl.oracle.__main__ import main
from refimpl.oracle.cases import Case
from refimpl.oracle.check import report, examine
from refimpl.oracle.explain import explain
from refimpl.oracle.identify import identify, probes
from tests.mpi import ROOT, flavours, mpirun
from tests.test_oracle import refused, written
from tests.test_oracle_trainer import state, trace


def own_first(case):
    """Each rank adds its own value first: right sums that differ."""
    xs = [case.input(rank) for rank in range(case.ranks)]
    return [spec.tree(xs[r:] + xs[:r], "+".join(map(str, range(case.ranks))), case.dtype)
            for r in range(case.ranks)]


def test_exact_inputs_are_no_evidence_that_ranks_agree():
    for level in ("exact", "agree"):
        case = Case("float32", 6, 13, level, "census")
        verdict = examine(case, own_first(case))
        assert not verdict.wrong and "agree" not in report([verdict])
    case = Case("float32", 6, 13, "agree", "spread")
    assert examine(case, own_first(case)).wrong
    assert "levels met: agree 1" in report([examine(case, [case.want()] * 6)])


def test_the_quick_start_sees_ranks_that_disagree(tmp_path, capsys):
    main(["gen", "--family", "quick", "--ranks", "6"])
    case = written(tmp_path / "case.json", capsys.readouterr().out)
    lines = []
    for one in (("exact", "census"), ("bounded", "spread")):
        one = Case("float32", 6, 13, *one)
        lines += [x.astype(">f4").tobytes().hex(" ", 4) for x in own_first(one)]
    assert main(["check", case, written(tmp_path / "got.txt", "\n".join(lines))]) == 1
    assert "1 passed, 1 failed; levels met: exact 1" in capsys.readouterr().out
    assert main(["explain", case, str(tmp_path / "got.txt")]) == 1
    said = capsys.readouterr().out
    assert "the ranks disagree: each is within the bound" in said and "ambiguous" in said


@pytest.mark.parametrize("options,cure", [
    ("--family overflow", "--order"), ("--family overflow --level exact", "use ordered"),
    ("--family spread --level exact", "depends on the order"),
    ("--family spread --level special", "depends on the order"),
    ("--family special --level bounded", "not finite"), ("--family exact --ranks -1", "--ranks"),
    ("--family census --ranks 0", "--ranks"), ("--family sizes --ranks -2", "--ranks"),
    ("--family spread --dtype float64 --wire float16", "float32")])
def test_what_a_family_cannot_claim_is_refused_with_the_cure(options, cure, capsys):
    assert cure in refused(capsys, "gen", *options.split())


@pytest.mark.parametrize("level", ["exact", "special"])
def test_a_case_is_not_held_to_a_level_its_inputs_do_not_suit(level, tmp_path, capsys):
    main(["gen", "--family", "spread"])
    case = written(tmp_path / "case.json", capsys.readouterr().out)
    main(["expect", case])
    got = written(tmp_path / "got.txt", capsys.readouterr().out)
    assert "depends on the order" in refused(capsys, "check", case, got, "--level", level)


def test_inputs_into_a_folder_that_is_not_there(tmp_path, capsys):
    main(["gen", "--family", "exact"])
    case = written(tmp_path / "case.json", capsys.readouterr().out)
    assert "no such" in refused(capsys, "inputs", case, "--npy", str(tmp_path / "no/{rank}.npy"))


def test_bounded_results_are_explained_by_the_bound():
    case = Case("float32", 4, 13, "bounded", "spread")
    good = spec.by_order("3+2+1+0", [case.input(r) for r in range(4)])
    assert "right, within the bound" in explain(case, [good] * 4)[0]
    bad = good.copy()
    bad[5] += case.input(2)[5]
    lines = explain(case, [good, bad, good, good])
    assert "wrong on rank 1, right on ranks 0, 2-3" in lines[0]
    assert len(lines) == 2 and "elements 5-5" in lines[1] and "rank 2 added 2 times" in lines[1]


def test_zeros_are_not_a_sum():
    cases = probes(4, 2)
    assert "not a sum" in identify(cases, [[np.zeros(2, np.float32)] * 4 for _ in cases])[0]


@pytest.mark.parametrize("count", ["0", "-1"])
def test_identify_needs_an_element(count, capsys):
    assert "--count" in refused(capsys, "identify", "--program", "true", "--count", count)


# --- functions that exit ---------------------------------------------------------------------

SUBJECT = """
import sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1 and "import" in {where!r}:
    sys.exit(0)
def f(x, comm):
    if "all" in {where!r} or comm.rank == 1 and "call" in {where!r}:
        sys.exit(0)
    if "generator" in {where!r}:
        return (v for v in x)
    return comm.allreduce(x) if not "call" in {where!r} else x
if MPI.COMM_WORLD.rank == 1 and "missing" in {where!r}:
    del f
"""


@pytest.mark.parametrize("verb", ["check", "identify"])
@pytest.mark.parametrize("where", ["all", "import", "call", "missing", "generator", "syntax"])
def test_one_that_exits_or_is_missing_cannot_be_told(where, verb, tmp_path, monkeypatch):
    text = SUBJECT.format(where=where) if where != "syntax" else "def f(:\n"
    (tmp_path / "subject_that_exits.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    job = mpirun([*flavours()][0], 2, "-m", "refimpl.oracle", verb, "subject_that_exits:f",
                 timeout=40)
    assert job.returncode == 2, job.stdout + job.stderr
    assert "Traceback" not in job.stdout + job.stderr
    assert {"missing": "AttributeError", "generator": "object", "syntax": "SyntaxError"}.get(
        where, "SystemExit") in job.stderr


# --- trainers --------------------------------------------------------------------------------

def test_infinite_weights_are_not_close_but_equal_ones_are_equal(tmp_path, capsys):
    for value in (np.inf, np.nan):
        off = np.array([value, 1, 2], np.float32)
        a, b = state(tmp_path / "a"), state(tmp_path / "b", **{"weights_after/bn.bias": off})
        assert main(["state", a, b]) == 1 == main(["state", b, a])
        capsys.readouterr()
        assert main(["state", b, b]) == 0
        assert "same bits (T1)" in capsys.readouterr().out


def test_labels_are_equal_or_not(tmp_path, capsys):
    labels = np.arange(4) + 10 ** 7
    a, b = state(tmp_path / "a", labels=labels), state(tmp_path / "b", labels=labels + 1)
    assert main(["state", a, b]) == 1 and "4 of 4 differ" in capsys.readouterr().out


def test_a_state_without_its_tensors_is_refused(tmp_path, capsys):
    np.savez(tmp_path / "empty.npz")
    path = str(tmp_path / "empty.npz")
    assert "is missing" in refused(capsys, "state", path, path)
    with np.load(state(tmp_path / "a")) as file:
        for lost in ("gradient_sum/conv.weight", "loss", "labels"):
            np.savez(path, **{key: file[key] for key in file if key != lost})
            assert f"{lost} is missing" in refused(capsys, "state", path, path)
    np.savez(path)
    path = state(tmp_path / "c", n=np.ones(2, int), batch_norm=np.ones(2, bool))
    assert "single numbers" in refused(capsys, "state", path, path)


def test_a_nan_loss_equals_itself(tmp_path, capsys):
    a = trace(tmp_path / "a", loss=(2, "nan"))
    assert main(["diff", a, trace(tmp_path / "b", loss=(2, "nan"))]) == 0
    assert "(T1)" in capsys.readouterr().out
    assert main(["diff", a, trace(tmp_path / "b")]) == 1

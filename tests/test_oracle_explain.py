"""explain names each planted fault; identify names the order of a black box."""
import dataclasses
import shlex
import sys

import numpy as np
import pytest

from refimpl.errors import UsageError
from refimpl.oracle import spec
from refimpl.oracle.__main__ import main
from refimpl.oracle.cases import Case
from refimpl.oracle.explain import explain
from refimpl.oracle.identify import identify, probes
from tests import oracle_bugs as bugs
from tests.mpi import ROOT

CENSUS = Case("float32", 6, 13, "exact", "census")
EXACT = Case("float32", 6, 13, "exact", "exact")
PLACE = Case("float32", 6, 13, "exact", "place")
SPREAD = Case("float32", 6, 13, "ordered", "spread", order="ring")
HALF = Case("bfloat16", 4, 13, "exact", "exact")

FAULTS = [  # case, its wrong result, words that the explanation must hold
    (CENSUS, lambda c: bugs.ranks_added(c, [1, 1, 0, 1, 1, 1]),
     "elements 0-12", "rank 2 never added"),
    (EXACT, lambda c: bugs.ranks_added(c, [1, 1, 0, 1, 1, 1]),
     "elements 0-12", "rank 2 never added"),
    (CENSUS, lambda c: bugs.ranks_added(c, [2, 2, 1, 1, 1, 1]),
     "rank 0 added 2 times, rank 1 added 2 times"),
    (EXACT, lambda c: bugs.ranks_added(c, [2, 1, 1, 1, 1, 1]), "rank 0 added 2 times"),
    (EXACT, lambda c: bugs.ranks_added(c, [1, 2, 0, 1, 1, 1]),
     "rank 1 added 2 times, rank 2 never added"),
    (CENSUS, lambda c: bugs.ranks_added(c, [1, 2, 0, 1, 1, 1]),
     "rank 1 added 2 times, rank 2 never added"),
    (PLACE, lambda c: bugs.changed(c, bugs.swap), "chunks swapped"),
    (EXACT, lambda c: bugs.changed(c, bugs.reverse), "chunk 0 is reversed"),
    (EXACT, bugs.tail_dropped, "the tail was dropped: elements 12-12"),
    (CENSUS, bugs.tail_dropped, "the tail was dropped: elements 12-12"),
    (CENSUS, lambda c: bugs.ring(c, rounds=4), "a round is missing"),
    (EXACT, lambda c: bugs.ring(c, rounds=4), "a round is missing"),
    (CENSUS, lambda c: bugs.ring(c, gathers=4),
     "the ranks disagree", "the all-gather was cut short"),
    (EXACT, lambda c: bugs.ring(c, gathers=2), "a partial sum, of", "the all-gather was cut short"),
    (CENSUS, lambda c: bugs.ring(c, store=(1, 3)), "chunk 1)", "a partial sum was overwritten"),
    (EXACT, lambda c: bugs.ring(c, store=(0, 3)), "chunk 2)", "a partial sum was overwritten"),
    (CENSUS, lambda c: bugs.ring(c, untouched=4), "wrong on rank 4, right on ranks 0-3, 5",
     "rank 4: its own input, untouched"),
    (EXACT, bugs.mean, "the mean instead of the sum (sum/k)"),
    (SPREAD, bugs.mean_of_shares,
     "the mean instead of the sum ((x/k)sum)"),
    (EXACT, bugs.times_one_over_k,
     "the mean instead of the sum (sum*(1/k))"),
    (EXACT, bugs.through("float16"), "float16 on the wire"),
    (SPREAD, bugs.through("bfloat16"), "bfloat16 on the wire (ring)"),
    (SPREAD, lambda c: [x.astype(np.float16).astype(np.float32) for x in bugs.other_order(c)],
     "float16 on the wire: every value fits into 16 bits"),
    (SPREAD, bugs.own_order, "the ranks disagree"),
    (SPREAD, bugs.other_order, "right in another order: rank order, from the right"),
    (SPREAD, lambda c: bugs.right(dataclasses.replace(c, order="torus:2x3")),
     "right in another order: torus:2x3"),
    (HALF, bugs.as_integers(np.uint8), "bfloat16 added byte by byte"),
    (HALF, bugs.as_integers(np.uint16), "bfloat16 added as 16-bit integers"),
    (EXACT, lambda c: [np.zeros(13, np.float32)] * 6, "nothing but zeros"),
    (EXACT, lambda c: [np.full(13, 0.1, np.float32)] * 6, "not a sum of the inputs"),
    (EXACT, bugs.right, "right, bit for bit"),
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_planted_fault_is_named(number):
    case, bug, *words = FAULTS[number]
    text = "\n".join(explain(case, bug(case)))
    for word in words:
        assert word in text, text


def test_the_result_of_the_case_before_is_a_stale_buffer():
    before = dataclasses.replace(EXACT, seed=1).want()
    assert "stale buffer" in explain(EXACT, [before] * 6, before)[0]
    assert "stale" not in " ".join(explain(EXACT, [before] * 6, None))


def test_a_case_of_one_rank_and_of_no_elements_can_be_explained():
    one = Case("float32", 1, 3, "exact", "exact")
    assert "zeros" in explain(one, [np.zeros(3, np.float32)])[0]
    assert "right" in explain(dataclasses.replace(EXACT, count=0), [np.zeros(0, np.float32)] * 6)[0]


def box(order, ranks, count, dtype="float32", wire=None):
    """Results of a black box that adds in `order`."""
    cases = probes(ranks, count, dtype)
    return cases, [[spec.by_order(order, c.inputs, wire, dtype)] * ranks for c in cases]


@pytest.mark.parametrize("order,ranks,name", [
    ("ring", 6, "= ring, chunk c starts at rank c"), ("torus:2x3", 6, "torus:2x3"),
    ("torus:3x2", 6, "torus:3x2"), ("halving_doubling", 8, "halving_doubling"),
    ("halving_doubling", 7, "halving_doubling"), ("hierarchical:3", 9, "hierarchical:3"),
    ("0+1+2+3+4", 5, "rank order, from the left"), ("(4+(3+(2+(1+0))))", 5, "from the left"),
    ("((1+3)+0)+(2+4)", 5, "none of the orders known"), ("ring", 16, "ring")])
def test_the_order_of_a_black_box_is_named(order, ranks, name):
    lines = identify(*box(order, ranks, 2 * ranks))
    assert name in lines[-1], lines
    if order == "((1+3)+0)+(2+4)":
        assert lines[0] == "elements 0-9: (((1+3)+0)+(2+4))"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_the_order_shows_in_every_float(dtype):
    assert "torus:2x2" in identify(*box("torus:2x2", 4, 8, dtype))[-1]
    with pytest.raises(UsageError):
        probes(4, 8, "int32")


def test_the_trees_of_a_ring_are_printed_per_chunk():
    assert identify(*box("ring", 4, 4))[:4] == [
        "elements 0-0: (((0+1)+2)+3)", "elements 1-1: (((1+2)+3)+0)",
        "elements 2-2: (((2+3)+0)+1)", "elements 3-3: (((0+3)+1)+2)"]


def test_ranks_that_add_in_orders_of_their_own_are_told_apart():
    cases = probes(3, 2)
    lines = identify(cases, [bugs.own_order(case) for case in cases])
    assert "the ranks disagree" in lines[0] and "rank 1, elements 0-1: ((1+2)+0)" in lines


def test_a_wide_accumulator_or_nonsense_shows_no_tree():
    cases = probes(4, 2, "float16")
    assert "wider accumulator" in identify(cases, [bugs.wide_accumulator(c) for c in cases])[0]
    assert "no tree" in identify(cases, [[c.inputs[0] * np.float16(np.nan)] * 4 for c in cases])[0]


PROGRAM = """
import sys
import numpy as np
from refimpl.oracle.words import from_hex, to_hex
out, lines = open(sys.argv[2], "w"), []
for line in [*open(sys.argv[1]), "#"]:
    if line[0] != "#":
        lines.append(from_hex(line, "float32"))
    elif lines:
        total = lines[0]
        for x in lines[1:]:
            total = total + x
        out.write((to_hex(total, "float32") + "\\n") * len(lines))
        lines = []
"""


def test_the_order_of_a_program_is_found_through_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "mine.py").write_text(PROGRAM)
    command = shlex.join([sys.executable, str(tmp_path / "mine.py"), "in.txt", "got.txt"])
    assert main(["identify", "--program", command, "--ranks", "5", "--count", "3"]) == 0
    assert "rank order, from the left, for every element" in capsys.readouterr().out
    assert main(["identify", "--program", "false", "--ranks", "5"]) == 2
    assert main(["identify", "--program", "/no/such/program", "--ranks", "5"]) == 2

"""The transfer table says what the code does: by hand for the small ones, by spec for the rest."""
import subprocess
import sys

import numpy as np
import pytest

from refimpl.oracle import spec
from refimpl.simulate.trace import Trace

CASES = [("ring", n, None, None) for n in (1, 2, 3, 4, 7)] + [
    ("torus", 6, (2, 3), None), ("torus", 6, (3, 2), None), ("torus", 12, (3, 4), None),
    ("torus", 5, (1, 5), None), ("torus", 5, (5, 1), None)] + [
    ("halving_doubling", n, None, None) for n in (2, 4, 5, 6, 7, 8, 11, 16)] + [
    ("hierarchical", 6, None, 2), ("hierarchical", 7, None, 3), ("hierarchical", 8, None, 4)]


def test_the_table_of_a_ring_of_three_by_hand():
    assert Trace("ring", 3).table() == """\
ring, 3 ranks, 3 chunks
round 0: reduce-scatter 0
  rank 0 -> 1   chunk 0   0
  rank 1 -> 2   chunk 1   1
  rank 2 -> 0   chunk 2   2
round 1: reduce-scatter 1
  rank 0 -> 1   chunk 2   2+0
  rank 1 -> 2   chunk 0   0+1
  rank 2 -> 0   chunk 1   1+2
round 2: all-gather 0
  rank 0 -> 1   chunk 1   1+2+0
  rank 1 -> 2   chunk 2   2+0+1
  rank 2 -> 0   chunk 0   0+1+2
round 3: all-gather 1
  rank 0 -> 1   chunk 0   0+1+2
  rank 1 -> 2   chunk 1   1+2+0
  rank 2 -> 0   chunk 2   2+0+1
order of addition
  chunk 0   0+1+2
  chunk 1   1+2+0
  chunk 2   2+0+1"""


def test_halving_and_doubling_of_four_by_hand():
    trace = Trace("halving_doubling", 4)
    first = [(t.source, t.dest, t.elements, [str(s) for s in t.content])
             for t in trace.transfers if t.source == 0]
    assert first == [(0, 1, range(2, 4), ["0", "0"]), (0, 2, range(1, 2), ["0+1"]),
                     (0, 2, range(0, 1), ["(0+1)+(2+3)"]), (0, 1, range(0, 2), ["(0+1)+(2+3)"] * 2)]


@pytest.mark.parametrize("algorithm, ranks, shape, node", CASES)
def test_the_order_it_prints_is_the_order_of_the_spec(algorithm, ranks, shape, node):
    trace = Trace(algorithm, ranks, shape, node)
    name = {"torus": f"torus:{shape and shape[0]}x{shape and shape[1]}",
            "hierarchical": f"hierarchical:{node}"}.get(algorithm, algorithm)
    rng = np.random.default_rng(ranks)
    xs = list((rng.standard_normal((ranks, ranks)) * 10.0 ** rng.integers(-6, 6, (ranks, 1))
               ).astype(np.float32))
    wanted = spec.by_order(name, xs)
    for chunks, text in trace.orders():
        for c in chunks:
            assert spec.tree(xs, text)[c] == wanted[c], (c, text)


@pytest.mark.parametrize("algorithm, ranks, shape, node", CASES)
def test_a_rank_sends_one_message_at_a_time_and_has_what_it_sends(algorithm, ranks, shape, node):
    trace = Trace(algorithm, ranks, shape, node)
    rounds = {}
    for t in trace.transfers:
        assert t.source not in rounds.setdefault(t.when, [])
        rounds[t.when].append(t.source)
        assert [str(s) for s in t.content] == [
            str(trace.states[t.when][t.source][e]) for e in t.elements]
        assert not any(trace.states[t.when][t.source][e].spent for e in t.elements)
    assert all(len(s.ranks) == ranks == len(set(s.ranks)) and not s.spent
               for buffer in trace.states[-1] for s in buffer)


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "refimpl.simulate", *arguments],
                          capture_output=True, text=True, timeout=60)


def test_the_command_prints_and_draws(tmp_path):
    picture = tmp_path / "torus.png"
    done = command("trace", "--ranks", "6", "--algorithm", "torus", "--grid", "2x3",
                   "--plot", str(picture))
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.strip() == Trace("torus", 6, (2, 3)).table()
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("algorithm, words", [("torus", "a torus of 4 ranks, not of 6"),
                                              ("ring", "is for a torus; leave it out for ring")])
def test_a_grid_that_does_not_fit_is_one_line_and_code_2(algorithm, words):
    done = command("trace", "--ranks", "6", "--algorithm", algorithm, "--grid", "2x2")
    assert done.returncode == 2 and done.stderr == f"refimpl.simulate: --grid 2x2: {words}\n"


def test_without_a_command_it_lists_them():
    bare, asked = command(), command("--help")
    assert (bare.returncode, asked.returncode) == (2, 0) and not bare.stderr
    assert bare.stdout == asked.stdout and "print and draw who sends what to whom" in bare.stdout


@pytest.mark.parametrize("line", ["simulate trace --ranks 64", "oracle gen --family sizes --ranks 6",
                                  "train --dry-run --recipe goyal_8k --json"])
def test_a_reader_who_has_seen_enough_ends_it_without_a_traceback(line):
    job = subprocess.run(f"'{sys.executable}' -m refimpl.{line} | head -1", shell=True,
                         capture_output=True, text=True)
    assert job.stdout.count("\n") == 1 and not job.stderr

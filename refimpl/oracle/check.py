"""Compare results with what must come out, and say where they part."""
import collections
import re
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from refimpl.oracle.cases import BLOCK, Case, digest, need, not_sound, read_text
from refimpl.oracle.families import census_width
from refimpl.oracle.identify import one_line
from refimpl.oracle.spec import chunk
from refimpl.oracle.words import FLOATS, bound, from_hex, same, stored, to_hex, ulps, wide

MOST = 20  # mismatches in a report


class Verdict(NamedTuple):
    """`wrong` elements over all ranks; a line for each of the first of them, perhaps a remark."""
    case: Case
    wrong: int
    lines: list[str]


def examine(case: Case, got: Sequence) -> Verdict:
    """Hold got[rank] against the case's level; every level demands that the ranks agree."""
    wrong, lines, recipe = 0, [], case.inputs is None and case.expected
    if recipe and all(digest(x) == case.expected for x in got):
        return Verdict(case, 0, [])
    for start in range(0, case.count, BLOCK):
        stop = min(start + BLOCK, case.count)
        first, want = np.asarray(got[0][start:stop]), case.want(start, stop)
        for rank in range(case.ranks):
            mine = np.asarray(got[rank][start:stop])
            alike, loose = same(mine, first, case.dtype), case.level in ("agree", "bounded")
            right = (alike & (case.level == "agree" or near(case, mine)) if loose else
                     same(mine, want, case.dtype))
            wrong += len(bad := np.flatnonzero(~right))
            for i in bad[:MOST - len(lines)]:
                word, other = ("want", want) if alike[i] or not loose else ("rank 0 has", first)
                lines.append(f"case {case.id} rank {rank} {where(case, start + i)} "
                             f"got {to_hex(mine[i:i + 1], case.dtype)} "
                             f"{word} {to_hex(other[i:i + 1], case.dtype)} "
                             f"ulps {ulps(mine[i], other[i], case.dtype)}")
    need(wrong or not recipe, f"case {case.id}: its sha256 is not what its recipe gives")
    if wrong and case.level == "ordered" and case.dtype in FLOATS and all(
            same(got[0], x, case.dtype).all() and near(case, x).all() for x in got):
        lines.insert(0, f"case {case.id} is within the bound of any order: right, but not added as "
                        f"{case.order} says; `identify` tells the order")
    return Verdict(case, wrong, lines)


def near(case: Case, mine: np.ndarray) -> np.ndarray:
    """Per element: within the bound of any order of adding."""
    most = bound([case.input(rank) for rank in range(case.ranks)], case.dtype, case.wire)
    with np.errstate(invalid="ignore"):
        return np.abs(wide(mine, case.dtype) - case.nearest()) <= most


def where(case: Case, e: int) -> str:
    """Element, its chunk and the rank that finishes it, in the case's order (none: a ring's)."""
    def part(n: int, parts: int, i: int) -> int:
        return next(c for c in range(parts) if i < chunk(n, parts, c).stop)

    order, n, ranks = case.order or "ring", case.count, case.ranks
    c = owner = "-"
    if order == "ring":
        c = part(n, ranks, e)
        owner = (c - 1) % ranks
    elif match := re.fullmatch(r"torus:(\d+)x(\d+)", order):
        rows, columns = map(int, match.groups())
        j = part(n, columns, e)
        here = range(n)[chunk(n, columns, j)]
        i = part(len(here), rows, e - here.start)
        c, owner = f"{j}.{i}", (i - 1) % rows * columns + (j - 1) % columns
    elif order == "halving_doubling":
        c, here = 0, range(n)
        for step in range(ranks.bit_length() - 1):
            half = part(len(here), 2, e - here.start)
            c, here = c | half << step, here[chunk(len(here), 2, half)]
        owner = c
    return f"element {e} chunk {c} owner {owner}"


def report(verdicts: Sequence[Verdict]) -> str:
    """The first mismatches, then how many cases passed and how many met which level."""
    passed = [v.case for v in verdicts if not v.wrong]
    levels = collections.Counter(agree=0)  # equal whatever the order: says nothing of agreement
    for case in passed:
        levels["agree"] += case.level not in ("exact", "special") and (
            case.dtype not in FLOATS or case.ranks < 3 or not case.order_free())
        name = f"ordered ({case.order})" if case.level == "ordered" else case.level
        levels[name] += name != "agree"
    met = ", ".join(f"{name} {n}" for name, n in levels.items() if n) or "none"
    lines, wrong = [line for v in verdicts for line in v.lines], sum(v.wrong for v in verdicts)
    return "\n".join([*lines[:MOST], *[f"... the first of {wrong} wrong elements"][:wrong > MOST],
                      f"{len(passed)} passed, {len(verdicts) - len(passed)} failed; levels met: {met}"])


def read_results(cases: Sequence[Case], path: str) -> list[Sequence]:
    """got[case][rank], from the files that docs/oracle.md describes."""
    files = {}

    def read(case: Case, rank: int) -> np.ndarray:
        name = named(path, case, rank)
        if name.endswith(".npy"):
            try:
                return sized(case, np.load(name, mmap_mode="r" if case.count else None), "npy")
            except Exception as error:  # what NumPy raises for a bad header is anything
                raise not_sound(name, error) from None
        if name not in files:
            files[name] = [x for x in read_text(name).splitlines()[::-1] if not x.startswith("#")]
        need(files[name], f"{name}: ends in case {case.id}; it needs a line per rank and case")
        return sized(case, from_hex(files[name].pop(), case.dtype), name)

    got = [[read(case, rank) for rank in range(case.ranks)] for case in cases]
    for name, left in files.items():
        need(not left, f"{name}: too many lines, by {len(left)}")
    return got


def named(path: str, case: Case, rank: int) -> str:
    return path.replace("{case}", str(case.id)).replace("{rank}", str(rank))


def sized(case: Case, x: np.ndarray, source: str) -> np.ndarray:
    """x, or UsageError if its type or length is not the case's."""
    need(x.dtype == stored(case.dtype) and x.shape == (case.count,), f"{source}: {x.dtype} of shape "
         f"{x.shape}; case {case.id} needs {stored(case.dtype)} of shape ({case.count},)")
    return x


def make(ranks: int, level: str = "exact", dtype: str = "float32", **options) -> list[Case]:
    """Awkward lengths, inputs that can see; exact ones cannot see disagreement: spread besides."""
    names = ("exact",) if level == "exact" or dtype not in FLOATS else (
        ("special",) if level == "special" else ("spread", "cancel"))
    counts = sorted({0, 1, ranks - 1, ranks, ranks + 1, 13, 1009})
    made = [(name, n, level, options) for name in names for n in counts]
    if level == "exact":
        made += [("census", ranks + 1, level, options | {"seed": i})
                 for i in range(-(-ranks // census_width(dtype)))]
    if level in ("exact", "special") and dtype in FLOATS:
        made += [("spread", n, "agree", options) for n in (ranks + 1, 1009)]
    return [Case(dtype, ranks, n, claim, family, id=number, **rest)
            for number, (family, n, claim, rest) in enumerate(made, 1)]


def check(f: Callable, comm, level: str = "exact", dtype: str = "float32", **options) -> str:
    """Run f(buffer, comm), in place or returning the sum; options: order, wire, seed. The report,
    or an AssertionError with it, is the same on all ranks; UsageError if f cannot take a case."""
    cases = make(comm.Get_size(), level, dtype, **options)
    verdicts = [attempt(f, comm, case) for case in cases]
    if any(v.wrong for v in verdicts):
        raise AssertionError(report(verdicts))
    return report(verdicts)


def attempt(f: Callable, comm, case: Case) -> Verdict:
    """One case, called twice: the second call must give the same bits."""
    got, again = call(f, comm, case), call(f, comm, case)
    verdict = examine(case, got)
    changed = [r for r in range(case.ranks) if not same(got[r], again[r], case.dtype).all()]
    if changed and not verdict.wrong:
        return Verdict(case, len(changed), [
            f"case {case.id} rank {changed[0]}: a second call gives other bits"])
    return verdict


def call(f: Callable, comm, case: Case, patience: float = 10) -> list[np.ndarray]:
    """What every rank holds after f; an exception on some ranks only ends the job."""
    buffer, out, failure = case.input(comm.Get_rank()), None, ""
    try:
        out = f(buffer, comm)
        out = sized(case, np.array(buffer if out is None else out), "f")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: it would end this rank with its own code
        failure, trace = one_line(error), traceback.format_exc()
        timer = threading.Timer(patience, lambda: (  # the launcher needs a moment to pass it on
            print(trace, flush=True), threading.Event().wait(1), comm.Abort(2)))
        timer.start()
    results = comm.allgather((None if failure else out, failure))
    if failure:
        timer.cancel()
    for rank, (_, said) in enumerate(results):
        need(not said, f"rank {rank} raised {said}")
    return [out for out, _ in results]

"""In which order does a black box add? After FPRev (Xie, Gao, Wang and Xue, USENIX ATC 2025): put M
on one rank, -M on another, 1 elsewhere; the ones that survive were added after the two had met."""
import importlib
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from refimpl.oracle import spec
from refimpl.oracle.cases import Case, need
from refimpl.oracle.words import narrow, wide

HUGE = {"float16": 2.0 ** 15, "bfloat16": 2.0 ** 100, "float32": 2.0 ** 100, "float64": 2.0 ** 100}


def probes(ranks: int, count: int, dtype: str = "float32") -> list[Case]:
    """One case per pair of ranks; the last: ones on every rank."""
    need(2 <= ranks <= 16, f"identify: ranks: {ranks}; use 2 to 16")
    need(count > 0, f"identify: --count {count}; use 1 or more")
    need(dtype in HUGE, f"identify: {dtype} sums have no order; use {', '.join(HUGE)}")
    cases = []
    for number, pair in enumerate([*combinations(range(ranks), 2), ()]):
        column = np.ones(ranks)
        column[list(pair)] = [HUGE[dtype], -HUGE[dtype]][:len(pair)]
        inputs = [narrow(np.full(count, value), dtype) for value in column]
        cases.append(Case(dtype, ranks, count, "agree", id=number + 1, inputs=inputs))
    return cases


def identify(cases: Sequence[Case], got: Sequence[Sequence[np.ndarray]]) -> list[str]:
    """Lines that name the order: one of ours where all bits match, else a tree per range."""
    ranks, dtype = cases[0].ranks, cases[0].dtype
    if any(not np.array_equal(x, one[0], equal_nan=True) for one in got for x in one):
        return ["the ranks disagree: each adds in an order of its own", *(
            f"rank {r}, {line}" for r in range(ranks)
            for line in _trees([wide(one[r], dtype) for one in got], ranks))]
    names = [text for text, order in known(ranks).items() if all(
        np.array_equal(fold(order, case.inputs, dtype), one[0]) for case, one in zip(cases, got))]
    return [*_trees([wide(one[0], dtype) for one in got], ranks),
            f"= {', or '.join(names[:3])}" if names else "= none of the orders known here"]


def known(ranks: int) -> dict[str, str | tuple[int, int]]:
    """Description -> an order that spec knows, or (start, step) of a ring that turns otherwise."""
    left = "+".join(map(str, range(ranks)))
    return {"ring, chunk c starts at rank c": "ring",
        **{f"torus:{r}x{ranks // r}, a ring along each row, then along the column":
           f"torus:{r}x{ranks // r}" for r in range(2, ranks) if ranks % r == 0},
        "halving_doubling, with binary blocks": "halving_doubling",
        "rank order, from the left, for every element": left,
        "rank order, from the right, for every element": "+".join(left.split("+")[::-1]),
        **{f"hierarchical:{n}, a ring over nodes of {n} ranks": f"hierarchical:{n}"
           for n in range(2, ranks // 2 + 1)},
        **{f"ring, chunk c starts at rank c + {s}": (s, 1) for s in range(1, ranks)},
        **{f"ring downwards, chunk c starts at rank c + {s}": (s, -1) for s in range(ranks)}}


def fold(order: str | tuple[int, int], xs: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """The sum in an order from `known`."""
    if isinstance(order, str):
        return spec.by_order(order, xs, None, dtype)
    (start, step), n, ranks = order, len(xs[0]), len(xs)
    return np.concatenate([spec.tree([x[spec.chunk(n, ranks, c)] for x in xs],
        "+".join(str((c + start + step * i) % ranks) for i in range(ranks)), dtype)
        for c in range(ranks)])


def _trees(sums: list[np.ndarray], ranks: int) -> list[str]:
    """A line per range of elements with the same tree."""
    texts, count = [], len(sums[0])
    for e in range(count):
        meet = {pair: ranks - total[e] for pair, total in zip(combinations(range(ranks), 2), sums)}
        text = _tree(tuple(range(ranks)), meet)
        if sums[-1][e] != ranks:
            text = f"no tree: not a sum (ones on {ranks} ranks give {sums[-1][e]:g})"
        texts.append("no tree: a wider accumulator, a 16-bit wire that overflows, or not a sum"
                     if "?" in text else text)
    starts = [e for e in range(count) if e == 0 or texts[e] != texts[e - 1]]
    return [f"elements {a}-{b - 1}: {texts[a]}" for a, b in zip(starts, [*starts[1:], count])]


def _tree(group: tuple[int, ...], meet: dict) -> str:
    """Ranks that meet below the top of the group belong to one branch; largest branch first."""
    if len(group) == 1:
        return str(group[0])
    branches, left = [], group
    while left:
        branches.append(tuple(j for j in left if j == left[0] or meet[left[0], j] < len(group)))
        left = tuple(j for j in left if j not in branches[-1])
    if len(branches) == 1 or any(meet[a[0], b[0]] != len(group) for a, b in combinations(branches, 2)):
        return "?"
    branches.sort(key=lambda branch: (-len(branch), branch))
    return "(" + "+".join(_tree(branch, meet) for branch in branches) + ")"


def load_function(name: str, gather: Callable = lambda failure: [failure]) -> Callable:
    """The callable that `module:function` names; gather: comm.allgather, to fail on all ranks."""
    (module, _, function), f, failure = name.partition(":"), None, ""
    try:
        f = getattr(importlib.import_module(module), function)
        need(callable(f), "no function")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a module does while it is imported
        failure = f"{one_line(error)}; give module:function that Python can import from here"
    for said in gather(failure):
        need(not said, f"{name}: {said}")
    return f


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

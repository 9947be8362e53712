"""In which order does a black box add? After FPRev (Xie et al. 2025): put M on one rank, -M on another
and 1 elsewhere; the ones that survive were added after the two had met."""
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from refimpl.oracle import spec
from refimpl.oracle.cases import Case, need
from refimpl.oracle.words import narrow, wide

HUGE = {"float16": 2.0 ** 15, "bfloat16": 2.0 ** 100, "float32": 2.0 ** 100, "float64": 2.0 ** 100}


def probes(ranks: int, count: int, dtype: str = "float32") -> list[Case]:
    """One case per pair of ranks, then one that tells a wider accumulator."""
    need(2 <= ranks <= 16, f"identify: {ranks} ranks; use 2 to 16")
    need(dtype in HUGE, f"identify: {dtype} sums have no order; use {', '.join(HUGE)}")
    cases = []
    for number, (i, j) in enumerate(combinations(range(ranks), 2)):
        column = np.ones(ranks)
        column[i], column[j] = HUGE[dtype], -HUGE[dtype]
        inputs = [narrow(np.full(count, value), dtype) for value in column]
        cases.append(Case(dtype, ranks, count, "agree", id=number + 1, inputs=inputs))
    return cases


def identify(cases: Sequence[Case], got: Sequence[Sequence[np.ndarray]]) -> list[str]:
    """Lines that name the order: one of ours where all bits match, else a tree per range."""
    ranks, count, dtype = cases[0].ranks, cases[0].count, cases[0].dtype
    for rank in range(1, ranks):
        if any(not np.array_equal(one[rank], one[0], equal_nan=True) for one in got):
            return ["the ranks disagree: each adds in an order of its own", *(
                f"rank {r}, {line}" for r in range(ranks)
                for line in _trees([wide(one[r], dtype) for one in got], ranks, count))]
    lines = _trees([wide(one[0], dtype) for one in got], ranks, count)
    names = [text for order, text in known(ranks).items() if all(
        np.array_equal(spec.by_order(order, case.inputs, None, dtype), one[0])
        for case, one in zip(cases, got))]
    return lines + ([f"= {', or '.join(names)}"] if names else ["= none of the orders known here"])


def known(ranks: int) -> dict[str, str]:
    """Orders to compare with -> their description."""
    grids = [(r, ranks // r) for r in range(2, ranks) if ranks % r == 0]
    return {"ring": "ring, chunk c starts at rank c"} | {
        f"torus:{r}x{c}": f"torus:{r}x{c}, a ring along each row, then along the column"
        for r, c in grids} | {"halving_doubling": "halving_doubling, with binary blocks"} | {
        f"hierarchical:{n}": f"hierarchical:{n}, a ring over nodes of {n} ranks"
        for n in range(2, ranks)} | {
        "+".join(map(str, range(ranks))): "rank order, from the left, for every element",
        "+".join(map(str, reversed(range(ranks)))): "rank order, from the right, for every element"}


def _trees(sums: list[np.ndarray], ranks: int, count: int) -> list[str]:
    """A line per range of elements with the same tree."""
    pairs = list(combinations(range(ranks), 2))
    texts = []
    for e in range(count):
        meet = {}
        for (i, j), total in zip(pairs, sums):
            meet[i, j] = meet[j, i] = ranks - total[e]
        texts.append(_tree(tuple(range(ranks)), meet))
    starts = [e for e in range(count) if e == 0 or texts[e] != texts[e - 1]]
    return [f"elements {a}-{b - 1}: {texts[a]}" for a, b in zip(starts, [*starts[1:], count])]


def _tree(group: tuple[int, ...], meet: dict) -> str:
    """Ranks that meet below the top of the group belong to one branch; largest branch first."""
    if len(group) == 1:
        return str(group[0])
    branches, left = [], list(group)
    while left:
        branch = [j for j in left if j == left[0] or meet[left[0], j] < len(group)]
        branches.append(tuple(branch))
        left = [j for j in left if j not in branch]
    if len(branches) == 1 or any(meet[a[0], b[0]] != len(group) for a, b in combinations(branches, 2)):
        return "no tree: a wider accumulator, a 16-bit wire that overflows, or not a sum"
    branches.sort(key=lambda branch: (-len(branch), branch))
    return "(" + "+".join(_tree(branch, meet) for branch in branches) + ")"


def load_function(name: str) -> Callable:
    """The callable that `module:function` names."""
    import importlib
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        need(False, f"{name}: {error}; give module:function that Python can import from here")

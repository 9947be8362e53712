"""What every rank must hold after an allreduce: each algorithm as its order of addition.

No messages here. `xs` is a list of P one-dimensional arrays of equal length and type, xs[r] from
rank r; the result is a new array, the same for every rank, to the last bit.

    dtype   None: that of the arrays. "bfloat16": the arrays are uint16 words. A sum of two 16-bit
            floats is formed in float32 and rounded to 16 bits, at every addition.
    wire    None, or "float16" / "bfloat16" for float32 arrays: a partial sum is rounded to 16 bits
            each time it is sent, the receiver adds in float32, and the owner of a finished element
            rounds it too (also where there is only one rank), so that all ranks hold the same.
"""
import ast
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from refimpl.oracle.words import from_bfloat16, need, stored, to_bfloat16

Buffers = Sequence[np.ndarray]
QUIET = np.errstate(all="ignore")  # overflow and inf - inf are results here, not warnings


class Rules(NamedTuple):
    """How partial sums are added, and what one looks like after it was sent."""
    add: Callable
    sent: Callable


@QUIET
def ring(xs: Buffers, wire: str | None = None, dtype: str | None = None) -> np.ndarray:
    """Chunk c is ((x_c + x_c+1) + x_c+2) + ... over the ranks c, c+1, ... mod P."""
    return _ring(xs, _rules(xs, wire, dtype))


@QUIET
def torus(xs: Buffers, rows: int, columns: int, wire: str | None = None,
          dtype: str | None = None) -> np.ndarray:
    """Rank = row * columns + column: along a row, chunk j is folded as a ring's, from column j on;
    a ring along the column adds those sums (Mikami, 2D-Torus)."""
    need(min(rows, columns) > 0 and rows * columns == len(xs),
         f"torus {rows}x{columns} needs {rows * columns} ranks, not {len(xs)}")
    rules = _rules(xs, wire, dtype)

    def column(j: int) -> np.ndarray:
        parts = [x[chunk(len(x), columns, j)] for x in xs]
        across = [_turn(parts[r * columns:(r + 1) * columns], j, rules) for r in range(rows)]
        return _ring(across, rules)

    return np.concatenate([column(j) for j in range(columns)])


@QUIET
def halving_doubling(xs: Buffers, wire: str | None = None, dtype: str | None = None) -> np.ndarray:
    """Each element is the tree ((0+1)+(2+3))+((4+5)+(6+7)); with P not a power of two, that of each
    binary block (44 = 32 + 8 + 4): T(block 0) + (T(block 1) + T(block 2)) (Goyal, section 4)."""
    return _halving_doubling(xs, _rules(xs, wire, dtype))


@QUIET
def hierarchical(xs: Buffers, ranks_per_node: int, across: str = "ring",
                 wire: str | None = None, dtype: str | None = None) -> np.ndarray:
    """((x0+x1)+x2)+... inside each node, no 16-bit wire there; the node sums by `across`."""
    need(ranks_per_node > 0, f"ranks_per_node {ranks_per_node}: use 1 or more")
    add = _rules(xs, wire, dtype).add
    nodes = [xs[i:i + ranks_per_node] for i in range(0, len(xs), ranks_per_node)]
    return by_order(across, [_fold(node, add) for node in nodes], wire, dtype)


@QUIET
def tree(xs: Buffers, text: str, dtype: str | None = None) -> np.ndarray:
    """The order as written, every rank once: "((0+1)+2)+3"; without brackets, from the left."""
    rules, seen = _rules(xs, None, dtype), []

    def total(node):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return rules.add(total(node.left), total(node.right))
        seen.append(node.value)  # of anything but a number: AttributeError
        return xs[node.value]

    try:
        result = total(ast.parse(text.strip(), mode="eval").body).copy()
    except (SyntaxError, AttributeError, IndexError, TypeError, RecursionError, MemoryError):
        seen = []
    need(sorted(seen) == list(range(len(xs))),
         f"order {text[:60]!r}: write each rank from 0 to {len(xs) - 1} once, as ((0+1)+2)+3")
    return result


def by_order(order: str, xs: Buffers, wire: str | None = None,
             dtype: str | None = None) -> np.ndarray:
    """The fold that `order` names: ring, torus:2x3, halving_doubling, hierarchical:4,
    hierarchical:4:halving_doubling (4 ranks per node, then across) or a written tree."""
    if order in ("ring", "halving_doubling"):
        return (ring if order == "ring" else halving_doubling)(xs, wire, dtype)
    if match := re.fullmatch(r"torus:(\d{1,6})x(\d{1,6})", order):
        return torus(xs, int(match[1]), int(match[2]), wire, dtype)
    if match := re.fullmatch(r"hierarchical:(\d{1,6})(:ring|:halving_doubling|:torus:.*)?", order):
        return hierarchical(xs, int(match[1]), (match[2] or ":ring")[1:], wire, dtype)
    need(re.fullmatch(r"[\d+() ]+", order) and wire is None,
         f"order {order[:60]!r}: use ring, torus:RxC, halving_doubling, hierarchical:N, "
         "hierarchical:N:ACROSS or, without a wire, a tree as ((0+1)+2)+3")
    return tree(xs, order, dtype)


def chunk(n: int, parts: int, c: int) -> slice:
    """Part c of n elements: the first n % parts parts have one more than the others."""
    start = c * (n // parts) + min(c, n % parts)
    return slice(start, start + n // parts + (c < n % parts))


def _fold(values: Buffers, add: Callable, sent: Callable = lambda x: x) -> np.ndarray:
    total = values[0].copy()
    for value in values[1:]:
        total = add(sent(total), value)
    return total


def _turn(xs: Buffers, c: int, rules: Rules) -> np.ndarray:
    """The fold that starts at rank c and goes once round."""
    return _fold([*xs[c:], *xs[:c]], *rules)


def _ring(xs: Buffers, rules: Rules) -> np.ndarray:
    filled = max(1, min(len(xs), len(xs[0])))  # the chunks behind are empty
    parts = [[x[chunk(len(x), len(xs), c)] for x in xs] for c in range(filled)]
    return rules.sent(np.concatenate([_turn(part, c, rules) for c, part in enumerate(parts)]))


def _halving_doubling(xs: Buffers, rules: Rules) -> np.ndarray:
    sums, start = [], 0
    while start < len(xs):  # largest block first: the highest power of two in what is left
        size = 1 << (len(xs) - start).bit_length() - 1
        sums.append(_halve(xs[start:start + size], rules))
        start += size
    total = sums[-1]
    for block in reversed(sums[:-1]):
        total = rules.add(block, rules.sent(total))
    return rules.sent(total)


def _halve(xs: Buffers, rules: Rules) -> np.ndarray:
    """Neighbours add: the lower of a pair goes on with the first half, the upper with the rest."""
    if len(xs) == 1:
        return xs[0].copy()
    pairs, first, second = list(zip(xs[::2], xs[1::2])), *(chunk(len(xs[0]), 2, i) for i in (0, 1))
    return np.concatenate([
        _halve([rules.add(low[first], rules.sent(high[first])) for low, high in pairs], rules),
        _halve([rules.add(rules.sent(low[second]), high[second]) for low, high in pairs], rules)])


def _rules(xs: Buffers, wire: str | None, dtype: str | None) -> Rules:
    need(len(xs) and {(x.dtype, x.shape) for x in xs} == {(xs[0].dtype, (xs[0].size,))},
         "give one 1-D array per rank, all of one length and type")
    dtype = dtype or xs[0].dtype.name
    need(stored(dtype) == xs[0].dtype, f"{dtype} is held as {stored(dtype)}, not {xs[0].dtype}")
    need(wire is None or wire in ("float16", "bfloat16") and dtype == "float32",
         f"wire {wire!r} with {dtype}: use float16 or bfloat16, with float32")
    plus = np.add if dtype != "bfloat16" else (
        lambda a, b: to_bfloat16(from_bfloat16(a) + from_bfloat16(b)))
    return Rules(plus, {
        None: lambda x: x, "float16": lambda x: x.astype(np.float16).astype(np.float32),
        "bfloat16": lambda x: from_bfloat16(to_bfloat16(x))}[wire])

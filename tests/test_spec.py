"""spec against hand-written trees and against messages in rational arithmetic."""
from fractions import Fraction

import numpy as np
import pytest

from refimpl.errors import UsageError
from refimpl.oracle import spec, words

BITS = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149), "float64": (53, -1074)}
SIZES = (0, 1, 5, 13)


def rounded(x: Fraction, dtype: str) -> Fraction:
    """To nearest, ties to even, by the definition: no floating point in it."""
    if dtype not in BITS or not x:
        return x
    precision, smallest = BITS[dtype]
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - precision + 1, smallest)
    return round(x / unit) * unit  # Python rounds a Fraction's ties to even


class Exact:
    """Ranks with rational buffers, passing messages one at a time."""

    def __init__(self, xs, dtype, wire):
        self.rank = [[Fraction(v) for v in words.wide(x, dtype).tolist()] for x in xs]
        self.dtype, self.wire = dtype, wire

    def message(self, source, target, elements):
        """What `target` gets, added to what it has."""
        for e in elements:
            got = rounded(self.rank[source][e], self.wire)
            self.rank[target][e] = rounded(self.rank[target][e] + got, self.dtype)

    def finish(self, owner: dict):
        return [rounded(self.rank[owner[e]][e], self.wire) for e in sorted(owner)]


def parts(elements, count):
    """The chunk rule, dealt out one element at a time."""
    sizes = [0] * count
    for i in range(len(elements)):
        sizes[i % count] += 1
    starts = [sum(sizes[:i]) for i in range(count)]
    return [elements[s:s + size] for s, size in zip(starts, sizes)]


def ring_messages(exact, ranks, elements, owner):
    """Step s: rank i sends chunk i - s to its next one; at the end rank i owns chunk i + 1."""
    size, chunks = len(ranks), parts(elements, len(ranks))
    for step in range(size - 1):
        for i in range(size):
            chunk = chunks[(i - step) % size]
            exact.message(ranks[i], ranks[(i + 1) % size], chunk)
    owned = {ranks[i]: chunks[(i + 1) % size] for i in range(size)}
    owner.update({e: r for r, chunk in owned.items() for e in chunk})
    return owned


def by_messages(order, xs, dtype, wire):
    exact, owner, everything = Exact(xs, dtype, wire), {}, list(range(len(xs[0])))
    size = len(xs)
    if order == "ring":
        ring_messages(exact, range(size), everything, owner)
    elif order.startswith("torus"):
        rows, columns = map(int, order[6:].split("x"))
        owned = {}
        for r in range(rows):
            owned |= ring_messages(exact, [r * columns + c for c in range(columns)], everything, {})
        for c in range(columns):
            column = [r * columns + c for r in range(rows)]
            ring_messages(exact, column, owned[c], owner)
    else:
        binary_blocks(exact, size, everything, owner)
    return exact.finish(owner)


def binary_blocks(exact, size, everything, owner):
    blocks, start = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            blocks.append(range(start, start + 2 ** bit))
            start += 2 ** bit
    owners = []
    for block in blocks:
        mine = {r: everything for r in block}
        for step in range(len(block).bit_length() - 1):
            for r in block:
                other = block[0] + ((r - block[0]) ^ 2 ** step)
                if r < other:
                    mine[r], mine[other] = parts(mine[r], 2)
                    exact.message(other, r, mine[r])
                    exact.message(r, other, mine[other])
        owners.append({e: r for r, chunk in mine.items() for e in chunk})
    for small, large in reversed(list(zip(owners[1:], owners))):
        for e in everything:
            exact.message(small[e], large[e], [e])
    owner.update(owners[0])


def inputs(ranks, n, dtype, seed=0):
    """Scales over ten binary orders, so that order and rounding show."""
    rng = np.random.default_rng([seed, ranks, n])
    values = rng.standard_normal((ranks, n)) * 2.0 ** rng.integers(-5, 6, (ranks, n))
    return [words.narrow(v * 100 if "int" in dtype else v, dtype) for v in values]


def orders(ranks):
    grids = [(r, ranks // r) for r in range(1, ranks + 1) if ranks % r == 0]
    return ["ring", "halving_doubling", *(f"torus:{r}x{c}" for r, c in grids)]


@pytest.mark.parametrize("dtype,wire", [(d, None) for d in words.STORED] + [
    ("float32", "float16"), ("float32", "bfloat16")])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7, 8])
def test_every_order_equals_messages_in_rational_arithmetic(ranks, dtype, wire):
    for n in SIZES:
        xs = inputs(ranks, n, dtype)
        for order in orders(ranks):
            got = spec.by_order(order, xs, wire, dtype)
            want = by_messages(order, xs, dtype, wire)
            assert [Fraction(v) for v in words.wide(got, dtype).tolist()] == want, (order, n)


def trees(order, n, ranks):
    """The tree of every element, written by running the order on names instead of numbers."""
    names = [np.array([str(r)] * n, object) for r in range(ranks)]
    plus = np.frompyfunc(lambda a, b: f"({a}+{b})", 2, 1)
    rules = spec.Rules(plus, lambda x: x)
    return {"ring": spec._ring, "halving": spec._halving_doubling}[order](names, rules).tolist()


def test_the_contract_written_by_hand():
    assert trees("ring", 4, 3) == ["((0+1)+2)", "((0+1)+2)", "((1+2)+0)", "((2+0)+1)"]
    assert trees("halving", 1, 8) == ["(((0+1)+(2+3))+((4+5)+(6+7)))"]
    assert trees("halving", 2, 7) == ["(((0+1)+(2+3))+((4+5)+6))"] * 2
    blocks = trees("halving", 1, 44)[0]
    assert blocks.startswith("(" * 6 + "0+1)+(2+3))") and blocks.endswith("+((40+41)+(42+43))))")


def test_a_written_tree_is_the_order_it_says():
    xs = inputs(6, 13, "float32")
    folds = ["0+1+2", "(1+2)+0", "(2+0)+1"]
    assert np.array_equal(spec.ring(xs[:3]), np.concatenate([
        spec.tree(xs[:3], t)[spec.chunk(13, 3, c)] for c, t in enumerate(folds)]))
    grid = ["((0+1)+2)+((3+4)+5)", "((3+4)+5)+((0+1)+2)", "((1+2)+0)+((4+5)+3)",
            "((4+5)+3)+((1+2)+0)", "((2+0)+1)+((5+3)+4)", "((5+3)+4)+((2+0)+1)"]
    got, start = spec.torus(xs, 2, 3), 0
    for text, size in zip(grid, (3, 2, 2, 2, 2, 2)):  # 13 = 5 + 4 + 4 = (3+2) + (2+2) + (2+2)
        want = spec.tree(xs, text)
        assert np.array_equal(got[start:start + size], want[start:start + size]), text
        start += size
    for one in (spec.halving_doubling(xs), spec.by_order("((0+1)+(2+3))+(4+5)", xs)):
        assert np.array_equal(one, spec.tree(xs, "((0 + 1)+(2+3))+ (4+5)"))


@pytest.mark.parametrize("wire", [None, "float16", "bfloat16"])
def test_hierarchical_adds_in_local_order_then_across(wire):
    xs = inputs(7, 5, "float32")
    nodes = [(xs[0] + xs[1]) + xs[2], (xs[3] + xs[4]) + xs[5], xs[6]]
    for across, fold in (("ring", spec.ring), ("halving_doubling", spec.halving_doubling)):
        got = spec.hierarchical(xs, 3, across, wire)
        assert np.array_equal(got, fold(nodes, wire))
        assert np.array_equal(got, spec.by_order(f"hierarchical:3:{across}", xs, wire))


def test_known_sums_in_16_bits():
    ones = [np.array([1, 40000], np.float16)] * 2
    assert spec.ring(ones).tolist() == [2, np.inf]
    one = words.to_bfloat16(np.ones(1, np.float32))
    assert one.tolist() == [0x3F80]
    assert words.from_bfloat16(spec.ring([one] * 1024, dtype="bfloat16")).tolist() == [256]
    assert spec.ring([np.ones(1, np.float16)] * 4096).tolist() == [2048]


def test_bfloat16_rounds_to_even_and_keeps_nan():
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF, 0x80000000]
    got = words.to_bfloat16(np.array(bits, np.uint32).view(np.float32)).tolist()
    assert got == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFFFF, 0x8000]


def test_inputs_are_left_alone_and_never_returned():
    for order in ("ring", "halving_doubling", "torus:1x1", "hierarchical:1", "0"):
        x = np.ones(3, np.float32)
        spec.by_order(order, [x])[:] = 7
        assert x.tolist() == [1, 1, 1], order


@pytest.mark.parametrize("order", [
    "", "rong", "torus:2x2", "torus:0x3", "torus:3", "hierarchical:0", "0+1", "2+1+0+2", "0+1+2)",
    "(0+1+2", "0+1+3", "0 1+2", "0+1+2+", "()0+1+2", "0+(1+)2", "+0+1+2", "0(1)+2", "(" * 400,
    "0+" * 5000])
def test_an_order_that_makes_no_sense_is_refused(order):
    with pytest.raises(UsageError):
        spec.by_order(order, inputs(3, 4, "float32"))


def test_arguments_that_make_no_sense_are_refused():
    x = np.ones(3, np.float32)
    for xs, wire, dtype in [([], None, None), ([x, x[:2]], None, None), ([x], "float8", None),
                            ([x], None, "bfloat16"), ([x.astype(np.float64)], "float16", None),
                            ([x.reshape(1, 3)], None, None), ([x.astype(np.uint16)], None, None)]:
        with pytest.raises(UsageError):
            spec.ring(xs, wire, dtype)

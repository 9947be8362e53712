"""Planted bugs: a ring that passes messages, with faults to choose, and other ways to go wrong."""
import numpy as np

from refimpl.oracle import families, spec, words
from refimpl.oracle.words import FLOATS, narrow, wide

STORED = tuple(words.STORED)


def add(dtype):
    return spec._rules([np.zeros(1, words.stored(dtype))], None, dtype).add


def inputs(case):
    return [case.input(rank) for rank in range(case.ranks)]


def right(case):
    """What a correct implementation gives: the declared order, else a ring."""
    return [spec.by_order(case.order or "ring", inputs(case), case.wire, case.dtype)
            for _ in range(case.ranks)]


def ring(case, rounds=None, gathers=None, store=None, double=None, untouched=None):
    """A ring by messages. store / double: (round, rank) that overwrites / adds twice;
    rounds, gathers: how many of the two phases; untouched: a rank whose result is thrown away."""
    size, plus = case.ranks, add(case.dtype)
    xs = [case.input(r) for r in range(size)]
    parts = [spec.chunk(case.count, size, c) for c in range(size)]
    for step in range(size - 1 if rounds is None else rounds):
        sent = [xs[r][parts[(r - step) % size]].copy() for r in range(size)]
        for r in range(size):
            mine, got = parts[(r - 1 - step) % size], sent[r - 1]
            xs[r][mine] = got if (step, r) == store else plus(got, xs[r][mine])
            if (step, r) == double:
                xs[r][mine] = plus(got, xs[r][mine])
    for step in range(size - 1 if gathers is None else gathers):
        sent = [xs[r][parts[(r + 1 - step) % size]].copy() for r in range(size)]
        for r in range(size):
            xs[r][parts[(r - step) % size]] = sent[r - 1]
    if untouched is not None:
        xs[untouched] = case.input(untouched)
    return xs


def ranks_added(case, times):
    """The sum with rank r added times[r] times."""
    xs = [case.input(r) for r, t in enumerate(times) for _ in range(t)]
    total = xs[0]
    for x in xs[1:]:
        total = add(case.dtype)(total, x)
    return [total.copy() for _ in range(case.ranks)]


def changed(case, change):
    """The right result, changed alike on every rank."""
    out = right(case)
    for x in out:
        change(x, [spec.chunk(case.count, case.ranks, c) for c in range(case.ranks)])
    return out


def swap(x, parts):
    a, b = next((a, b) for a, b in zip(parts, parts[1:]) if a.stop - a.start == b.stop - b.start)
    x[a], x[b] = x[b].copy(), x[a].copy()


def reverse(x, parts):
    x[parts[0]] = x[parts[0]][::-1].copy()


def tail_dropped(case):
    out, kept = right(case), case.count - case.count % case.ranks
    for rank, x in enumerate(out):
        x[kept:] = case.input(rank)[kept:]
    return out


def mean(case):
    return [narrow(wide(x, case.dtype) / case.ranks, case.dtype) for x in right(case)]


def mean_of_shares(case):
    shares = [narrow(wide(x, case.dtype) / case.ranks, case.dtype) for x in inputs(case)]
    return [spec.ring(shares, dtype=case.dtype)] * case.ranks


def times_one_over_k(case):
    return [x * np.float32(1 / case.ranks) for x in right(case)]


def own_order(case):
    """Each rank adds what comes by, its own first."""
    xs = inputs(case)
    turned = [spec._fold(xs[r:] + xs[:r], add(case.dtype)) for r in range(case.ranks)]
    return turned


def other_order(case):
    """As a chain: from the last rank to the first."""
    xs = inputs(case)[::-1]
    return [spec._fold(xs, add(case.dtype))] * case.ranks


def through(narrower):
    def bug(case):
        xs = [case.input(r) for r in range(case.ranks)]
        if narrower in ("float16", "bfloat16") and case.dtype == "float32":
            return [spec.ring(xs, narrower)] * case.ranks
        with np.errstate(all="ignore"):
            total = sum(x.astype(narrower) for x in xs)
            return [total.astype(words.stored(case.dtype))] * case.ranks
    return bug


def wide_accumulator(case):
    with np.errstate(all="ignore"):
        total = sum(wide(case.input(r), case.dtype).astype(
            np.float64 if case.dtype == "float32" else np.float32) for r in range(case.ranks))
    return [narrow(total.astype(np.float64), case.dtype)] * case.ranks


def as_integers(unit):
    def bug(case):
        total = sum(case.input(r).view(unit) for r in range(case.ranks))
        return [total.view(np.uint16)] * case.ranks
    return bug


def on_result(change):
    """A correct sum whose values are spoilt by `change` of float64 values."""
    return lambda case: [narrow(change(wide(x, case.dtype), case), case.dtype) for x in right(case)]


def flush(x, case):
    smallest = families._limits(case.dtype)[1]
    return np.where(np.abs(x) < smallest, np.copysign(0, x), x)


def saturate(x, case):
    return np.where(np.isinf(x), np.copysign(families._limits(case.dtype)[0], x), x)


def owner_keeps(case):
    """On the wire, but the owner of an element keeps its 32 bits."""
    out = right(case)
    xs = [case.input(r) for r in range(case.ranks)]
    for c in range(case.ranks):
        part = spec.chunk(case.count, case.ranks, c)
        out[(c - 1) % case.ranks][part] = sum(x[part] for x in xs)
    return out


def added_in_16_bits(case):
    small = [narrow(case.input(r).astype(np.float64), case.wire) for r in range(case.ranks)]
    total = spec.by_order(case.order, small, dtype=case.wire)
    return [wide(total, case.wire).astype(np.float32)] * case.ranks


def stops_at(limit):
    """Sums the first elements only; a large case without making it twice."""
    def bug(case):
        n = case.count
        out = [np.zeros(n, np.float32), np.zeros(n, np.float32)]
        for start in range(0, n, 1 << 20):
            stop = min(start + (1 << 20), n)
            for rank, x in enumerate(out):
                x[start:stop] = (case.want(start, stop) if start < limit
                                 else case.input(rank, start, stop))
        return out
    return bug


def fewer_than_ranks(case):
    return [case.input(r) for r in range(case.ranks)] if case.count < case.ranks else right(case)


def padded(case):
    size = -(-max(case.count, 1) // case.ranks) * case.ranks
    return [np.resize(x, size) for x in right(case)]


def spoilt_by_the_last_call(case):
    from tests.oracle_vectors import suite
    before = next(c for c in suite("exact") if c.id == 20)
    return right(before)


# name: (flag, dtypes it can strike, bug)
BUGS = {
    "a round is missing": ("Census", STORED, lambda c: ring(c, rounds=c.ranks - 2)),
    "a partial sum is overwritten": ("Census", STORED, lambda c: ring(c, store=(0, 1))),
    "a chunk is added twice": ("Census", STORED, lambda c: ring(c, double=(0, 0))),
    "a rank is lost": ("Census", STORED, lambda c: ranks_added(c, [0] + [1] * (c.ranks - 1))),
    "one rank twice, another never": ("Census", STORED,
                                      lambda c: ranks_added(c, [2, 0] + [1] * (c.ranks - 2))),
    "one rank keeps its input": ("Census", STORED, lambda c: ring(c, untouched=c.ranks - 1)),
    "the all-gather is short": ("Gather", STORED, lambda c: ring(c, gathers=c.ranks - 2)),
    "chunks are swapped": ("Moved", STORED, lambda c: changed(c, swap)),
    "a chunk is reversed": ("Moved", STORED, lambda c: changed(c, reverse)),
    "the tail is dropped": ("Tail", STORED, tail_dropped),
    "short buffers are left alone": ("Short", STORED, fewer_than_ranks),
    "buffers are padded": ("Empty", STORED, padded),
    "the mean comes unasked": ("Mean", FLOATS, mean),
    "integers go through float32": ("Width", ("int32", "int64"), through("float32")),
    "int64 goes through float64": ("Width", ("int64",), through("float64")),
    "float64 goes through float32": ("Width", ("float64",), through("float32")),
    "float16 on the wire": ("Width", ("float32",), through("float16")),
    "bfloat16 on the wire": ("Width", ("float32",), through("bfloat16")),
    "float16 beyond the bound": ("Precision", ("float32",), through("float16")),
    "bfloat16 beyond the bound": ("Precision", ("float32",), through("bfloat16")),
    "float32 beyond the bound": ("Precision", ("float64",), through("float32")),
    "bfloat16 is added as bytes": ("Bits", ("bfloat16",), as_integers(np.uint8)),
    "bfloat16 is added as words": ("Bits", ("bfloat16",), as_integers(np.uint16)),
    "every rank adds in its own order": ("Agree", FLOATS, own_order),
    "another order": ("Order", FLOATS, other_order),
    "16-bit sums are kept in 32": ("Accumulator", ("float16", "bfloat16"), wide_accumulator),
    "an overflow is hidden by a wider sum": ("Overflow", ("float16", "float32"), wide_accumulator),
    "the sum starts from +0": ("Special", FLOATS, on_result(lambda x, case: x + 0.0)),
    "NaN is dropped": ("Special", FLOATS, on_result(lambda x, case: np.where(np.isnan(x), 0, x))),
    "subnormals are flushed": ("Special", FLOATS, on_result(flush)),
    "overflow saturates": ("Special", FLOATS, on_result(saturate)),
    "the owner keeps 32 bits": ("Wire", ("float32",), owner_keeps),
    "sums are formed in 16 bits": ("Wire", ("float32",), added_in_16_bits),
    "a float holds the count": ("Large", ("float32",), stops_at(1 << 24)),
    "the result is that of the call before": ("Stale", ("float32",), spoilt_by_the_last_call),
}

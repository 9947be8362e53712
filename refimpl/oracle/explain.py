"""Say in words what a wrong result looks like: recognised faults, each tested by planting it."""
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from refimpl.oracle import spec
from refimpl.oracle.cases import LOOSE, WIRES, Case
from refimpl.oracle.check import near
from refimpl.oracle.families import census_width
from refimpl.oracle.identify import fold, known
from refimpl.oracle.words import FLOATS, bound, narrow, same, wide


def explain(case: Case, got: Sequence[np.ndarray], before: np.ndarray | None = None) -> list[str]:
    """Lines for one small case; `before` is what the previous case had to give, if it fits."""
    want, lines, sums = case.want(), [], {}
    for rank, mine in enumerate(got):
        sums.setdefault(mine.tobytes(), []).append(rank)
    right = [_right(case, mine, want) for mine in got]
    good = [rank for rank in range(case.ranks) if right[rank].all()]
    free = len(good) == case.ranks and case.level in LOOSE
    if len(good) == case.ranks and (len(sums) == 1 or not free):
        return [f"right, {'within the bound' if free else 'bit for bit'}, on every rank"]
    if free:
        lines.append("the ranks disagree: each is within the bound; whose is meant is ambiguous")
    elif len(sums) > 1:
        wrong = [rank for rank in range(case.ranks) if rank not in good]
        lines.append(f"the ranks disagree: wrong on {_names(wrong)}, right on {_names(good)}")
    for ranks in (ranks for ranks in sums.values() if free or ranks[0] not in good):
        rank = ranks[0] if lines else None  # None: all ranks hold the same
        found = whole = _whole(case, got[ranks[0]], want, ranks[0], before)
        found = found or (["a sum in some order"] if free else _pieces(
            case, got[ranks[0]], want, right[ranks[0]], rank)) or ["wrong in no way known here"]
        lines += [f"{_names(ranks)}: {text}" for text in found]
        lines += ["ambiguous: several would give these bits"][:len(whole) // 2]
    if np.any(right, axis=0).all() and any(
            word in line for word in ("untouched", "a partial sum, of", "never added")
            for line in lines[1:]):
        lines.append("every element is right on some rank: the all-gather was cut short")
    return lines


def _right(case: Case, mine: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Per element, by the level's own test; agree has none: any sum within the bound will do."""
    equal = same(mine, want, case.dtype)
    return equal | near(case, mine) if case.level in LOOSE and case.dtype in FLOATS else equal


@np.errstate(all="ignore")
def _whole(case: Case, mine: np.ndarray, want: np.ndarray, rank: int, before) -> list[str]:
    """Faults that explain the whole buffer at once."""
    xs, dtype, k = [case.input(r) for r in range(case.ranks)], case.dtype, case.ranks
    guesses = {"its own input, untouched": xs[rank], "nothing but zeros": np.zeros_like(want)}
    if before is not None and before.shape == want.shape and before.dtype == want.dtype:
        guesses["the result of the case before: a stale buffer"] = before
    for text, order in known(k).items() if k > 1 and dtype in FLOATS else ():
        guesses[f"right in another order: {text}"] = fold(order, xs, dtype)
        for wire in WIRES if dtype == "float32" and str(order)[0].isalpha() else ():
            guesses[f"{wire} on the wire ({order})"] = spec.by_order(order, xs, wire)
    if dtype in FLOATS:
        total, shares = wide(want, dtype), [narrow(wide(x, dtype) / k, dtype) for x in xs]
        guesses |= {f"the mean instead of the sum ({how})": value for how, value in {
            "sum/k": narrow(total / k, dtype),
            "sum*(1/k)": narrow(total * np.float32(1 / k), dtype),
            "(x/k)sum": spec.ring(shares, dtype=dtype)}.items()}
    if dtype == "bfloat16":
        octets = sum(x.view(np.uint8) for x in xs)
        guesses |= {"bfloat16 added byte by byte, as integers": octets.view(np.uint16),
                    "bfloat16 added as 16-bit integers": sum(xs),
                    "bfloat16 added as 16-bit integers that saturate": np.minimum(
                        sum(x.astype(np.uint32) for x in xs), 0xFFFF).astype(np.uint16)}
    found = [text for text, guess in guesses.items() if same(mine, guess, dtype).all()]
    off = np.abs(wide(mine, dtype) - wide(want, dtype))
    for wire in WIRES if dtype == "float32" and not found else ():  # in an order not known here
        if np.array_equal(mine, spec.ring([mine], wire)) and (off <= bound(xs, dtype, wire)).all():
            found.append(f"{wire} on the wire: every value fits into 16 bits")
    return found[:3]


def _pieces(case: Case, mine: np.ndarray, want: np.ndarray, right: np.ndarray, rank: int | None) -> list[str]:
    """Faults of a range of elements: order within the buffer, or which ranks were added."""
    n, first = case.count, int(np.flatnonzero(~right)[0])
    if first and not right[first:].any() and n - first <= max(1, n % case.ranks) and (
            rank is not None and same(mine, case.input(rank), case.dtype)[first:].all()
            or not mine[first:].any()):
        return [f"the tail was dropped: elements {first}-{n - 1} were never summed"]
    parts, moved = [spec.chunk(n, case.ranks, c) for c in range(case.ranks)], []
    for c, part in enumerate(parts):
        if right[part].all():
            continue
        back = same(mine[part], want[part][::-1], case.dtype)
        moved += [f"chunk {c} is reversed"] if back.all() else []
        moved += [f"chunk {c} holds what belongs into chunk {d}: chunks swapped"
                  for d, other in enumerate(parts) if d != c and mine[part].size
                  and mine[part].shape == want[other].shape
                  and same(mine[part], want[other], case.dtype).all()][:1]
    return moved or _counted(case, mine, rank)


def _counted(case: Case, mine: np.ndarray, rank: int | None) -> list[str]:
    """Which ranks were added, how often, where."""
    (counts, ambiguous), n, ranks, lines = _counts(case, mine), case.count, case.ranks, []
    turned = set()
    for key, run in groupby(enumerate(counts), lambda pair: pair[1]):
        first, *_, last = [e for e, _ in run] * 2
        chunks = [c for c in range(ranks) if spec.chunk(n, ranks, c).start <= last
                  and first < spec.chunk(n, ranks, c).stop]
        if text := _contributions(key, ranks, rank):
            text += "; ambiguous, others fit as well" if ambiguous[first:last + 1].any() else ""
            lines.append(f"elements {first}-{last} (chunk {', '.join(map(str, chunks))}): {text}")
            turned.add(tuple(np.roll(key, -chunks[0])) if key and len(chunks) == 1 else None)
    if rank is None and len(lines) == min(n, ranks) > 1 and len(turned) == 1 and None not in turned:
        lines.append("the same in every chunk, turned by one rank: a round is missing")
    elif rank is None and len(lines) == 1 and (1,) * ranks in counts and any(
            word in lines[0] for word in ("never", "partial")):
        lines.append("there only: a partial sum was overwritten instead of added to, or never sent")
    return lines


def _counts(case: Case, mine: np.ndarray) -> tuple[list[tuple[int, ...] | None], np.ndarray]:
    """How often each rank is in each element (in octal, else by trial); where others fit too."""
    ranks, found, fits = case.ranks, [None] * case.count, np.zeros(case.count, int)
    xs, sums = [wide(case.input(r), case.dtype) for r in range(ranks)], wide(mine, case.dtype)
    if ranks <= census_width(case.dtype) and all((x == 8 ** r).all() for r, x in enumerate(xs)):
        return [tuple(int(v) >> 3 * r & 7 for r in range(ranks))
                if 0 <= v < 8 ** ranks and v % 1 == 0 else None for v in sums.tolist()], fits > 1
    loose = case.level in LOOSE and case.dtype in FLOATS
    off = 2 * bound([case.input(r) for r in range(ranks)], case.dtype, case.wire) if loose else 0
    ones, unit = np.ones(ranks, np.int64), np.eye(ranks, dtype=np.int64)
    trials = [ones, *(ones - u for u in unit), *(ones + u for u in unit),
              *(ones + a - b for a in unit for b in unit if a is not b),
              *(np.roll(np.arange(ranks) < size, start).astype(np.int64)
                for size in range(1, ranks - 1) for start in range(ranks))]
    for trial in reversed(trials):
        near_by = np.abs(sum(int(times) * x for times, x in zip(trial, xs)) - sums) <= off
        fits += near_by
        for e in np.flatnonzero(near_by):
            found[e] = tuple(trial.tolist())
    return found, fits > 1


def _contributions(key: tuple[int, ...] | None, ranks: int, rank: int | None) -> str:
    if key is None:
        return "not a sum of the inputs"
    if key == (1,) * ranks:
        return ""
    if rank is not None and sum(key) == key[rank] == 1:
        return "its own input, untouched"
    lost = [r for r, times in enumerate(key) if times == 0]
    said = [f"rank {r} added {times} times" for r, times in enumerate(key) if times > 1]
    if len(lost) > 1 and not said:
        return f"a partial sum, of {_names([r for r in range(ranks) if key[r]])} only"
    return ", ".join(said + [f"rank {r} never added" for r in lost])


def _names(ranks: list[int]) -> str:
    """rank 3; ranks 0-2, 5; no rank."""
    starts = [r for r in ranks if r - 1 not in ranks]
    ends = [r for r in ranks if r + 1 not in ranks]
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends))
    return f"rank{'s' if len(ranks) > 1 else ''} {text}" if ranks else "no rank"

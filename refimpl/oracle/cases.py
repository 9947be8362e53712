"""A case: P inputs, a level and what must come out; many of them in a JSON file."""
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable

import numpy as np

import refimpl
from refimpl.errors import UsageError
from refimpl.oracle import families, spec
from refimpl.oracle.words import FLOATS, from_hex, narrow, need, same, stored, to_hex, wide

SCHEMA = "refimpl-allreduce-1"
SHARED = ("op", "scale", "dtype", "ranks", "level", "order", "wire")  # what a group's cases share
WIRES = ("float16", "bfloat16")
LOOSE = ("agree", "bounded")  # more than one result is right
LEVELS = ("agree", "exact", "ordered", "bounded", "special")
INLINE, LARGEST, BLOCK = 1 << 16, 1 << 31, 1 << 20  # elements of all ranks; the last: of one
BAD_DATA = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


@dataclasses.dataclass(frozen=True)
class Case:
    """One allreduce. `inputs` is None for a large case: then family and seed make them."""
    dtype: str
    ranks: int
    count: int
    level: str
    family: str = ""
    seed: int = 0
    order: str | None = None
    wire: str | None = None
    id: int = 1
    flags: tuple[str, ...] = ()
    comment: str = ""
    inputs: list | None = None
    expected: str | None = None  # hex words as in the file, or the digest

    def __post_init__(self):
        need(self.level in LEVELS, f"level {self.level!r}: use one of {', '.join(LEVELS)}")
        for name, low, high in (("ranks", 1, 65536), ("seed", 0, 2 ** 63), ("id", 0, 2 ** 31),
                                ("count", 0, LARGEST)):
            value = getattr(self, name)
            need(type(value) is int and low <= value <= high, f"{name} {str(value)[:20]!r}: use a "
                 f"whole number from {low} to {high}")
        need(self.ranks * self.count <= (LARGEST if self.level == "exact" else BLOCK),
             f"level {self.level}: {self.ranks} x {self.count} elements are too many")
        need(self.level != "ordered" or self.order, "level ordered: say in which order (--order)")
        need(self.dtype in FLOATS or self.level in ("agree", "exact", "ordered"),
             f"level {self.level} is not for {self.dtype}")
        need(not self.wire or self.level in ("agree", "ordered", "bounded"),
             f"level {self.level} with wire {self.wire}: use agree, ordered or bounded")
        need(not self.wire or self.wire in WIRES and self.dtype == "float32",
             f"wire {self.wire!r} with {self.dtype}: use float16 or bfloat16, with float32")
        stored(self.dtype)
        trusted = self.inputs is None and self.family in ("census", "place", "exact")
        need(self.level not in ("exact", "special") or trusted or self.order_free(),
             f"level {self.level}: the sum of these inputs depends on the order: use ordered with "
             "--order or, where it is finite, bounded")
        need(self.level != "bounded" or np.isfinite(self.want()).all(),
             "level bounded: a sum of these inputs is not finite: use special, or ordered")

    def order_free(self) -> bool:
        """Do some very different orders of adding give the same bits?"""
        xs, ranks = [self.input(rank) for rank in range(self.ranks)], [*range(self.ranks)]
        turns = [ranks[::-1], *(ranks[turn:] + ranks[:turn] for turn in range(min(self.ranks, 8)))]
        sums = [spec.tree(xs, "+".join(map(str, turn)), self.dtype) for turn in turns]
        return all(same(x, self.want(), self.dtype).all() for x in sums)

    def input(self, rank: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """What `rank` brings, as a new array."""
        stop = self.count if stop is None else stop
        if self.inputs is not None:
            return self.inputs[rank][start:stop].copy()
        return families.values(self.family, self.dtype, self.ranks, self.seed, rank, start, stop)

    def want(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """What every rank must end with (bounded: the exact sum, rounded once)."""
        if self.level in ("ordered", "special"):
            xs = [self.input(rank) for rank in range(self.ranks)]
            return spec.by_order(self.order or "ring", xs, self.wire, self.dtype)[start:stop]
        if self.level in ("exact", "agree"):  # no partial sum rounds
            xs = (wide(self.input(rank, start, stop), self.dtype) for rank in range(self.ranks))
            return narrow(sum(xs, next(xs)), self.dtype)
        return narrow(self.nearest(), self.dtype)[start:stop]

    def nearest(self) -> np.ndarray:
        """The sum rounded once to float64."""
        xs = np.array([wide(self.input(rank), self.dtype) for rank in range(self.ranks)])
        if not np.isfinite(np.abs(xs).sum(0)).all():  # for which there is no bound
            return np.full(self.count, np.nan)
        return np.array([math.fsum(column) for column in xs.T.tolist()])


def digest(blocks: Iterable[np.ndarray] | np.ndarray) -> str:
    """SHA-256 of the little-endian bytes, of one array or of pieces."""
    sha = hashlib.sha256()
    for block in [blocks] if isinstance(blocks, np.ndarray) else blocks:
        sha.update(np.ascontiguousarray(block, block.dtype.newbyteorder("<")))
    return sha.hexdigest()


def not_sound(path: str, error: Exception) -> UsageError:
    """One short line about a file that is not what it should be."""
    what = f"missing {error}" if isinstance(error, KeyError) else str(error)
    return UsageError(f"{path}: {what[:200]}")


def read_text(path: str) -> str:
    """A file of at most 256 MiB."""
    try:
        need(os.path.getsize(path) <= 1 << 28, "larger than 256 MiB")
        with open(path, encoding="utf-8") as file:
            return file.read()
    except BAD_DATA as error:
        raise not_sound(path, error) from None


def dump(cases: Iterable[Case], notes: dict | None = None) -> str:
    """The JSON text of these cases: `out` is computed here and nowhere else."""
    cases, groups = list(cases), {}
    for case in cases:
        common = {key: getattr(case, key, "sum") for key in SHARED}
        test = {"id": case.id, "flags": list(case.flags), "comment": case.comment}
        if case.level != "exact" or case.ranks * case.count <= INLINE:
            test["in"] = [to_hex(case.input(rank), case.dtype) for rank in range(case.ranks)]
            if case.level != "agree":
                test["out"] = to_hex(case.want(), case.dtype)
        else:
            pieces = range(0, case.count, BLOCK)
            test |= {key: getattr(case, key) for key in ("family", "seed", "count")}
            test["sha256"] = digest(case.want(i, min(i + BLOCK, case.count)) for i in pieces)
        groups.setdefault(json.dumps(common), {k: v for k, v in common.items() if v} | {
            "tests": []})["tests"].append(test)
    flags = sorted({flag for case in cases for flag in case.flags})
    return json.dumps({"schema": SCHEMA, "generator": f"refimpl {refimpl.__version__}",
                       "cases": len(cases), "notes": {f: (notes or {}).get(f) for f in flags},
                       "groups": list(groups.values())}, indent=1)


def load(path: str) -> list[Case]:
    """The cases of a JSON file; UsageError if it is not sound, or expects what is not so."""
    text = read_text(path)
    try:
        data = json.loads(text)
        need(isinstance(data, dict) and data.get("schema") == SCHEMA, f"schema is not {SCHEMA}")
        cases = [_case(group, test) for group in data["groups"] for test in group["tests"]]
        need(cases and data["cases"] == len(cases) == len({case.id for case in cases}),
             f"{len(cases)} cases with ids of their own, but `cases` says {data['cases']!r}")
        return cases
    except BAD_DATA as error:
        raise not_sound(path, error) from None


def _case(group: dict, test: dict) -> Case:
    """One test of a file, checked against what its inputs give."""
    need(group["op"] == group["scale"] == "sum", "op and scale: only sum")
    common = {key: group[key] for key in SHARED[2:] if key in group}
    common |= {"id": test["id"], "flags": tuple(test["flags"]), "comment": test["comment"]}
    if "in" not in test:
        recipe = {key: test[key] for key in ("family", "seed", "count")}
        case = Case(**common, **recipe, expected=test["sha256"])
        case.input(0, 0, 0)
        return case
    inputs = [from_hex(words, group["dtype"]) for words in test["in"]]
    need(len(inputs) == group["ranks"] and len({len(x) for x in inputs}) == 1,
         f"case {test['id']}: `in` needs {group['ranks']} lines of equal length")
    case = Case(**common, count=len(inputs[0]), inputs=inputs, expected=test.get("out"))
    if case.level != "agree":
        out, want = from_hex(test["out"], case.dtype), case.want()
        need(len(out) == len(want) and same(out, want, case.dtype).all(),
             f"case {case.id}: `out` is not what its inputs give; was the file edited?")
    return case

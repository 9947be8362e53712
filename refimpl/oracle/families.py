"""Inputs that can see: each a pure function of (seed, rank, index), so every rank makes its own."""
import numpy as np

from refimpl.oracle.words import FLOATS, PRECISION, narrow, need, stored, wide

WIDTH = {**PRECISION, "int32": 31, "int64": 63}  # bits for integers that add without rounding


def census_width(dtype: str) -> int:
    """How many ranks one pass counts: three bits each."""
    return WIDTH[dtype] // 3


def census(dtype, ranks, seed, rank, index):
    """8^r from rank r, 0 from ranks of another pass (`seed`): read the sum in octal."""
    digit = rank - seed * census_width(dtype)
    value = 8 ** digit if 0 <= digit < census_width(dtype) else 0
    return np.full(index.shape, value, np.int64)


def place(dtype, ranks, seed, rank, index):
    """index mod a prime, plus rank: shows what lies where; sums stay exact."""
    room = ((1 << min(WIDTH[dtype], 24)) - ranks * ranks) // ranks
    prime = next((p for p in (8191, 509, 251, 127, 61, 31, 13, 7, 3) if p <= room), None)
    need(prime, f"{ranks} ranks do not fit into {dtype} exactly; use fewer")
    return (index % prime).astype(np.int64) + rank


def exact(dtype, ranks, seed, rank, index):
    """Integers up to 2^bits / P, times a power of two per element: sums are exact in any order."""
    top = (1 << WIDTH[dtype]) // ranks
    need(top, f"{ranks} ranks do not fit into {dtype} exactly; use fewer")
    draw = _random(seed, rank + 1, index)
    value = 1 + ((draw >> np.uint64(1)) % np.uint64(top - (dtype == "int64"))).astype(np.int64)
    value = np.where(draw & np.uint64(1), -value, value)
    return value * _power(dtype, _random(seed, 0, index)) if dtype in FLOATS else value


def spread(dtype, ranks, seed, rank, index):
    """Every value of its own size: order and rounding show."""
    draw = _random(seed, rank + 1, index)
    bits = 53 if dtype == "float64" else 24
    fraction = (draw >> np.uint64(64 - bits)).astype(np.float64) * 2.0 ** (1 - bits) - 1
    return fraction * _power("float16", draw)  # fits a float16 wire too


def cancel(dtype, ranks, seed, rank, index):
    """Ranks in pairs whose values all but cancel; the odd one out is as small as what is left."""
    value = wide(narrow(spread(dtype, ranks, seed, rank // 2, index), dtype), dtype)
    tiny = 2.0 ** (-2 * PRECISION[dtype] // 3)
    return -value * (1 + tiny) if rank % 2 else value if rank + 1 < ranks else value * tiny


def special(dtype, ranks, seed, rank, index):
    """Eight, in turn: inf; inf - inf; NaN; all -0; one -0; subnormals; overflow; a difference."""
    largest, normal, tiny = _limits(dtype)
    here, after = (rank == (index // 8 + i) % ranks for i in (0, 1))
    return np.choose(index % 8, [
        np.where(here, np.inf, 1), np.where(here, np.inf, np.where(after, -np.inf, 1)),
        np.where(here, np.nan, 1), np.full(index.shape, -0.0), np.where(here, -0.0, 0.0),
        np.full(index.shape, tiny), np.full(index.shape, largest), np.where(here, normal, -tiny)])


def overflow(dtype, ranks, seed, rank, index):
    """The largest number, its sign by rank: whether a partial sum overflows is up to the order."""
    return np.full(index.shape, _limits(dtype)[0] * (-1) ** ((rank + rank // 2) % 2))


FAMILIES = {f.__name__: f for f in (census, place, exact, spread, cancel, special, overflow)}


def values(family: str, dtype: str, ranks: int, seed: int, rank: int, start: int, stop: int):
    """Elements start..stop-1 of what `rank` brings."""
    need(family in FAMILIES, f"family {family!r}: use one of {', '.join(FAMILIES)}")
    need(dtype in FLOATS or family in ("census", "place", "exact"),
         f"family {family} is for floating point, not for {dtype}; use exact")
    made = FAMILIES[family](dtype, ranks, seed, rank, np.arange(start, stop, dtype=np.int64))
    return narrow(made.astype(np.float64), dtype) if dtype in FLOATS else made.astype(stored(dtype))


def _random(seed: int, stream: int, index: np.ndarray) -> np.ndarray:
    """64 random bits per index: splitmix64 at a place that (seed, stream) choose."""
    place = (seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03) % 2 ** 64
    z = (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(place)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _power(dtype: str, draw: np.ndarray) -> np.ndarray:
    low, high = (-10, 4) if dtype == "float16" else (-20, 20)  # room below and above
    return 2.0 ** (low + (draw % np.uint64(high - low + 1)).astype(np.int64))


def _limits(dtype: str) -> tuple[float, float, float]:
    """The largest number, the smallest normal and the smallest subnormal one."""
    lowest = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}[dtype]
    bits = PRECISION[dtype]
    return (2 - 2.0 ** (1 - bits)) * 2.0 ** (1 - lowest), 2.0 ** lowest, 2.0 ** (lowest + 1 - bits)

"""Numbers as words: dtypes by name, bfloat16 by shifts, big-endian hex, and the ruler in ulps."""
import numpy as np

from refimpl.errors import UsageError

STORED = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32,
          "float64": np.float64, "int32": np.int32, "int64": np.int64}  # bfloat16: its words
PRECISION = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}  # bits of the significand
FLOATS = tuple(PRECISION)


def need(condition: object, message: str) -> None:
    """UsageError unless `condition` holds."""
    if not condition:
        raise UsageError(message)


def stored(dtype: str) -> np.dtype:
    """The NumPy type that holds `dtype`; UsageError for a name that is not one of ours."""
    need(isinstance(dtype, str) and dtype in STORED, f"dtype {dtype!r}: use {', '.join(STORED)}")
    return np.dtype(STORED[dtype])


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 words (uint16), to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16  # wraps for NaN: replaced below
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bfloat16(words: np.ndarray) -> np.ndarray:
    """bfloat16 words (uint16) -> float32, exactly."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def wide(x: np.ndarray, dtype: str) -> np.ndarray:
    """The values of `x` as float64 (integers: unchanged)."""
    x = from_bfloat16(x) if dtype == "bfloat16" else x
    return x.astype(np.float64) if dtype in FLOATS else x


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values -> `dtype`, for values that float32 holds (bfloat16 goes through it)."""
    with np.errstate(all="ignore"):
        return to_bfloat16(x.astype(np.float32)) if dtype == "bfloat16" else x.astype(stored(dtype))


def to_hex(x: np.ndarray, dtype: str) -> str:
    """One word per element, the most significant digit first: 1.0 in float32 is 3f800000."""
    size = stored(dtype)
    return x.astype(size.newbyteorder(">")).tobytes().hex(" ", size.itemsize)


def from_hex(text: str, dtype: str) -> np.ndarray:
    """The inverse of to_hex; UsageError for what is not words of that dtype."""
    size = stored(dtype)
    try:
        if all(len(word) == 2 * size.itemsize for word in text.split()):
            return np.frombuffer(bytes.fromhex(text), size.newbyteorder(">")).astype(size)
    except ValueError:
        pass
    raise UsageError(f"{text[:40]!r}: {dtype} has words of {2 * size.itemsize} hex digits")


def same(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """Per element: equal bits, where any two NaN count as equal."""
    bits = f"u{stored(dtype).itemsize}"
    equal = np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)
    if dtype not in FLOATS:
        return equal
    with np.errstate(invalid="ignore"):  # a signalling NaN is converted here
        return equal | np.isnan(wide(a, dtype)) & np.isnan(wide(b, dtype))


def ulps(a: np.generic, b: np.generic, dtype: str) -> int:
    """How many numbers of that dtype lie between a and b, plus one (0: the same bits; -0 is +0)."""
    def position(x):
        bits = int(np.asarray(x).view(f"i{stored(dtype).itemsize}"))
        return -(bits + (1 << 8 * stored(dtype).itemsize - 1)) if bits < 0 and floats else bits
    floats = dtype in FLOATS
    return abs(position(a) - position(b))


def bound(xs, dtype: str, wire: str | None = None) -> np.ndarray:
    """Largest error of any order: ((1 + u)^(P - 1) - 1) * sum |x|, u the unit roundoff; a wire
    rounds by its own u per hop and at the end, and loses what float16 cannot hold."""
    ranks, total = len(xs), sum(np.abs(wide(x, dtype)) for x in xs)
    growth = (ranks - 1) * np.log1p(2.0 ** -PRECISION[dtype])
    growth += ranks * np.log1p(2.0 ** -PRECISION[wire]) if wire else 0.0
    tiny = ranks * 2.0 ** -53 * total  # what computing the bound itself may lose
    return np.expm1(growth) * total + tiny + (ranks * 2.0 ** -25 if wire == "float16" else 0.0)

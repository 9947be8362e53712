"""Numbers as words: dtypes by name, bfloat16 by shifts, big-endian hex, and the ruler in ulps."""
import numpy as np

from refimpl.errors import UsageError

STORED = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32,
          "float64": np.float64, "int32": np.int32, "int64": np.int64}  # bfloat16: its words
PRECISION = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}  # bits of the significand
FLOATS = tuple(PRECISION)


def stored(dtype: str) -> np.dtype:
    """The NumPy type that holds `dtype`; UsageError for a name that is not one of ours."""
    if not isinstance(dtype, str) or dtype not in STORED:
        raise UsageError(f"dtype {dtype!r}: use one of {', '.join(STORED)}")
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
    if dtype == "bfloat16":
        x = from_bfloat16(x)
    return x.astype(np.float64) if dtype in FLOATS else x


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values -> `dtype`, for values that float32 holds (bfloat16 goes through it)."""
    with np.errstate(all="ignore"):
        return to_bfloat16(x.astype(np.float32)) if dtype == "bfloat16" else x.astype(stored(dtype))

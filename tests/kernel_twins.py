"""What each kernel must compute, in NumPy: the slow obvious twin of kernels/*.cu.

16-bit types are given by name; bfloat16 lies in uint16 words. All arithmetic that the kernels do in
float32 is float32 here, operation by operation, so results are compared as bits.
"""
import numpy as np

F32 = np.float32
STORED = {"float16": np.float16, "bfloat16": np.uint16, "float32": F32, "float64": np.float64,
          "int32": np.int32, "int64": np.int64}


def widen(x, name):
    """Exact float32 values of a 16-bit array; other types stay."""
    if name == "bfloat16":
        return (x.astype(np.uint32) << 16).view(F32)
    return x.astype(F32) if name == "float16" else x


def narrow(x, name):
    """float32 rounded to `name`: nearest, ties to even."""
    if name != "bfloat16":
        return x.astype(STORED[name])
    bits = np.ascontiguousarray(x, F32).view(np.uint32)
    up = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16 | 0x40).astype(np.uint16), up)


def add(into, source, into_name, source_name):
    return narrow(widen(into, into_name) + widen(source, source_name), into_name)


def scaled(x, from_name, to_name, scale):
    return narrow(widen(x, from_name) * F32(scale), to_name)


def lars_norms(weights, gradients):
    """Sums of squares, [tensors, 2], float64: of weights and of gradients."""
    return np.array([[np.sum(x.astype(np.float64) ** 2) for x in pair]
                     for pair in zip(weights, gradients)])


def lars_ratio(form, w_norm, g_norm, decay, adapt, coefficient, eps):
    """The published definitions (papers: section on LARS variants), one tensor, Python floats."""
    if not adapt:
        return 1.0
    denominator = g_norm + decay * w_norm
    if form == "nnl":
        if w_norm < eps:
            return 1.0
        return coefficient * w_norm / (denominator + (eps if denominator < eps else 0))
    if w_norm == 0 or g_norm == 0:
        return 1.0
    return coefficient * w_norm / (denominator + eps)


def update(w, u, g, *, decay, ratio, inside, carry, momentum, nesterov, outside):
    """One tensor; returns new (weights, momentum). Scalars are rounded to float32 first."""
    a = (F32(inside) * F32(ratio)) * (g + F32(decay) * w)
    u = F32(carry) * u + a
    return w - F32(outside) * (a + F32(momentum) * u if nesterov else u), u


def images(x, mean, std, name, planar):
    """x uint8 (N, H, W, 3); mean and std as usual, of values in 0 .. 1."""
    scale, shift = image_constants(mean, std)
    y = narrow(x.astype(F32) * scale + shift, name)
    return np.ascontiguousarray(y.transpose(0, 3, 1, 2)) if planar else y


def image_constants(mean, std):
    mean, std = np.asarray(mean, np.float64), np.asarray(std, np.float64)
    return (1 / (255 * std)).astype(F32), (-mean / std).astype(F32)


def same(got, want, name):
    """Equal bits, except that any NaN equals any NaN."""
    got, want = np.asarray(got), np.asarray(want)
    nans = [np.isnan(widen(x, name)) if "float" in name else np.zeros(x.shape, bool)
            for x in (got, want)]
    words = {2: np.uint16, 4: np.uint32, 8: np.uint64}[STORED[name]().itemsize]
    equal = got.view(words) == want.view(words)
    return got.shape == want.shape and bool(np.all(equal | (nans[0] & nans[1])))


def samples(n, name, seed=0):
    """Values of many magnitudes; the special ones of the type first (as far as n allows)."""
    rng = np.random.default_rng([seed, n])
    if "int" in name:
        info = np.iinfo(STORED[name])
        x = rng.integers(info.min, info.max, n, STORED[name], endpoint=True)
        special = np.array([info.max, info.min, -1, 0, 1], x.dtype)
    elif name == "float64":
        x = rng.standard_normal(n) * 10.0 ** rng.integers(-300, 300, n)
        special = np.array([np.inf, -np.inf, np.nan, -0.0, 5e-324, 1.7e308])
    else:
        x = rng.standard_normal(n).astype(F32) * F32(2) ** rng.integers(-26, 16, n).astype(F32)
        special = np.array([np.inf, -np.inf, np.nan, -0.0, 2**-24, 2**-25, 65504, 65520, 2**-140,
                            1.0001 * 2**-25, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11,
                            1 + 3 * 2**-11], F32)
        with np.errstate(over="ignore"):
            x, special = narrow(x, name), narrow(special, name)
    x[:min(n, len(special))] = special[:n]
    return x

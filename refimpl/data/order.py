"""Who sees which sample when: pure functions of (seed, epoch, position)."""
import numpy as np


def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """One random permutation of the whole set per epoch (Goyal, section 3, remark 4): int64 [size].

    The ranks of raw PCG64 words, so that no NumPy release changes it.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def minibatch(order: np.ndarray, position: int, workers: int, n: int, worker: int) -> np.ndarray:
    """Sample ids int64 [n] of one worker; position counts samples since the epoch's start. The
    last samples of an epoch that fill no minibatch are dropped.

          position                                   position + workers * n
             |  worker 0  |  worker 1  |  ...  | worker k-1  |
    """
    start = position + worker * n
    assert position + workers * n <= len(order), (position, workers, n, len(order))
    return order[start:start + n]


def share(size: int, parts: int, part: int) -> range:
    """The range of `part`; the first size % parts have one more. Validation counts each once."""
    small, more = divmod(size, parts)
    start = part * small + min(part, more)
    return range(start, start + small + (part < more))

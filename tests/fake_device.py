"""A device array whose work runs late: it has CuPy's names as far as the collectives use them.

Memory is the host's, so MPI can read it through `__cuda_array_interface__`; but whatever is asked of
an array waits in the stream and happens only when the stream is synchronised.
"""
import sys
import types

import numpy as np

stream: list = []  # work not yet done, in order
synchronised = 0


class ndarray:
    """A one-dimensional array on the fake device."""

    def __init__(self, host):
        self.host = host
        self.dtype, self.size, self.nbytes = host.dtype, host.size, host.nbytes
        self.itemsize, self.ndim, self.shape = host.itemsize, host.ndim, host.shape
        self.flags, self.strides = host.flags, host.strides

    @property
    def __cuda_array_interface__(self):
        return {**self.host.__array_interface__, "version": 3, "stream": None}

    def __getitem__(self, index):
        return ndarray(self.host[index])

    def __setitem__(self, index, value):
        value = value.host if isinstance(value, ndarray) else value
        stream.append(lambda: self.host.__setitem__(index, value))

    def view(self, dtype):
        return ndarray(self.host.view(dtype))

    def astype(self, dtype):
        return _later(lambda a: a.astype(dtype), self, dtype=dtype)

    def __add__(self, other):
        return _later(np.add, self, other)

    def __rshift__(self, n):
        return _later(lambda a: a >> n, self)

    def __lshift__(self, n):
        return _later(lambda a: a << n, self)

    def __and__(self, other):
        return _later(np.bitwise_and, self, other)

    def __or__(self, other):
        return _later(np.bitwise_or, self, other)

    __radd__ = __add__

    def __gt__(self, other):
        return _later(np.greater, self, other, dtype=bool)


def _later(operation, *arguments, dtype=None):
    result = np.zeros(next(a.size for a in arguments if isinstance(a, ndarray)),
                      dtype or arguments[0].dtype)

    def work():
        result[...] = operation(*(a.host if isinstance(a, ndarray) else a for a in arguments))
    stream.append(work)
    return ndarray(result)


def add(a, b, out):
    stream.append(lambda: np.add(a.host, b.host, out=out.host))


def where(condition, a, b):
    return _later(np.where, condition, a, b, dtype=a.dtype)


def empty(length, dtype):
    return ndarray(np.zeros(length, dtype))


def asarray(host):
    """Host to device; from pinned memory it returns before it has read it."""
    result = np.zeros_like(host)
    stream.append(lambda: result.__setitem__(..., host))
    return ndarray(result)


def asnumpy(array, out):
    stream.append(lambda: out.__setitem__(..., array.host))


def _synchronise():
    global synchronised
    synchronised += 1
    while stream:
        stream.pop(0)()


cuda = types.SimpleNamespace(
    get_current_stream=lambda: types.SimpleNamespace(synchronize=_synchronise),
    alloc_pinned_memory=lambda nbytes: bytearray(nbytes))


def install():
    """Found by the name in front of the first dot, as cupy is."""
    ndarray.__module__ = "fake_device"
    sys.modules["fake_device"] = sys.modules[__name__]

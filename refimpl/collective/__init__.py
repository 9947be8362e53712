"""How the sum is made: one file per algorithm, `exchange` the one place where messages move.

    reduce = allreducer("torus", comm, shape=(2, 4))
    reduce(gradient)                        # in place, 1-D, NumPy or CuPy
    reduce(gradient, wire="float16")        # 16 bits on the way
    reduce(words, dtype="bfloat16")         # uint16 words
    reduce.free()                           # or: with allreducer(...) as reduce:
"""
import contextlib

import numpy

from ..errors import UsageError
from . import buffers, guard, halving_doubling, hierarchical, mpi, ring, torus, window
from .exchange import waiting
from .grid import Grid, default_shape, make_grid

__all__ = ["ALGORITHMS", "DTYPES", "Grid", "allreducer", "default_shape", "make_grid"]

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
_MODULES = {"ring": ring, "torus": torus, "halving_doubling": halving_doubling,
            "hierarchical": hierarchical, "window": window, "mpi": mpi}
ALGORITHMS = tuple(_MODULES)


class Reducer(contextlib.AbstractContextManager):
    """A function reduce(buffer, wire=None, dtype=None, name="") that sums in place over `comm`.

    Collective: it makes communicators of its own, so reducers of two threads do not meet. shape:
    (R, C) of the torus. ranks_per_node, across: of hierarchical. check: whether ranks compare every
    call ("always") or each kind of call once ("first"). Raises UsageError, alike on all ranks."""

    def __init__(self, algorithm: str, comm, shape: tuple[int, int] | None = None, *,
                 ranks_per_node: int | None = None, across: str = "ring", check: str = "always"):
        if algorithm not in ALGORITHMS:
            raise UsageError(f"algorithm {algorithm!r}: choose from {', '.join(ALGORITHMS)}")
        if check not in ("always", "first"):
            raise UsageError(f"check {check!r}: choose always or first")
        self.algorithm, self.check, self.calls, self._seen = algorithm, check, 0, set()
        with waiting("new communicators", comm):
            self.comm = self.place = comm.Dup()
            guard.agree(self.comm, algorithm=algorithm, grid=shape, ranks_per_node=ranks_per_node,
                        across=across, check=check)
            if algorithm == "torus":
                self.place = make_grid(self.comm, shape)
            elif algorithm == "hierarchical":
                self.place = hierarchical.make_nodes(self.comm, ranks_per_node, across, shape)

    def __call__(self, buffer, wire=None, dtype=None, name="") -> None:
        """Sum `buffer` over all ranks. name: which bucket this is, so that order is checked too."""
        problem = _problem(buffer, wire, dtype, self.algorithm)
        facts = {"layout": problem or "as it must be", "bucket": name,
                 "length": getattr(buffer, "size", "none"), "wire": wire,
                 "dtype": dtype or str(getattr(buffer, "dtype", "none")),
                 "place in shared memory": problem or window.place(buffer)}
        kind = str(facts)
        if self.check == "always" or kind not in self._seen:
            guard.agree(self.comm, call=self.calls, **facts)
            self._seen.add(kind)
        self.calls += 1
        if problem:
            raise UsageError(problem)
        with numpy.errstate(over="ignore", invalid="ignore"):  # an overflow is a result here
            _MODULES[self.algorithm].allreduce(buffer, self.place, wire)

    def empty(self, length: int, dtype: str = "float32"):
        """A buffer of this rank; in shared memory if the algorithm can use it."""
        dtype = numpy.dtype("uint16" if dtype == "bfloat16" else dtype)
        if self.algorithm in ("window", "torus", "hierarchical"):
            with waiting("shared memory", self.comm):
                return window.empty(self.comm, length, dtype)
        return numpy.empty(length, dtype)

    def free(self) -> None:
        """Collective: the communicators go, and the memory of every buffer that `empty` made."""
        window.free(self.comm)
        self.place.Free()
        if self.place is not self.comm:
            self.comm.Free()

    def __exit__(self, kind, *_):
        if kind is None:  # after an error the other ranks may not come
            self.free()


allreducer = Reducer  # the name to call it by: allreducer("ring", comm)(buffer)


def _problem(buffer, wire, dtype, algorithm) -> str:
    """What is wrong with this buffer, and the cure; empty if nothing is."""
    if not isinstance(buffer, numpy.ndarray) and not buffers.on_device(buffer):
        return f"a buffer must be a NumPy or CuPy array, not {type(buffer).__name__}"
    name = dtype or str(buffer.dtype)
    if name not in DTYPES or str(buffer.dtype) != ("uint16" if name == "bfloat16" else name):
        return (f"a buffer of {buffer.dtype} with dtype={dtype!r}: use one of {', '.join(DTYPES)} "
                "(bfloat16: uint16 words with dtype='bfloat16')")
    if buffer.ndim != 1 or not buffer.flags.c_contiguous:
        return (f"a buffer must be one-dimensional and contiguous, not of shape {buffer.shape} "
                f"with strides {buffer.strides}: reduce a contiguous copy and write it back")
    if not getattr(buffer.flags, "writeable", True):
        return "a buffer must be writeable: the sum is written in place"
    if wire is not None and (wire not in list(buffers.WIRES) or name != "float32"):
        return f"wire={wire!r} with {name}: a wire is float16 or bfloat16, for float32 buffers"
    if algorithm == "mpi" and (wire or name in buffers.WIRES):
        return (f"MPI's own Allreduce knows neither 16-bit types ({name}) nor wires ({wire}): take "
                "another algorithm, ring for instance")
    return ""

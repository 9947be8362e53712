"""The only place that knows a NumPy array from a device array, and the only place that adds.

A device array is known by `__cuda_array_interface__`; its module (cupy) is found from its type.
bfloat16 has no NumPy type: such a buffer is uint16 words, and uint16 always means bfloat16 here.
"""
import functools
import sys

import numpy

from .. import kernels
from .cuda_aware import mpi_reads_device_memory

WIRES = {"float16": numpy.dtype("float16"), "bfloat16": numpy.dtype("uint16")}


def chunk(buffer, parts: int, index: int):
    """View of chunk `index` mod `parts`: the first len % parts chunks are one element longer."""
    index %= parts
    short, longer = divmod(buffer.size, parts)
    start = index * short + min(index, longer)
    return buffer[start:start + short + (index < longer)]


def pieces(buffer, nbytes: int) -> list:
    """Views of at most `nbytes` bytes (or one element); an empty buffer is one piece."""
    if buffer.nbytes <= nbytes:
        return [buffer]
    step = max(1, nbytes // buffer.itemsize)
    return [buffer[low:low + step] for low in range(0, buffer.size, step)]


def on_device(array) -> bool:
    return type(array) is not numpy.ndarray and hasattr(array, "__cuda_array_interface__")


def module(array):
    """numpy, or the module that made a device array (cupy)."""
    return sys.modules[type(array).__module__.partition(".")[0]] if on_device(array) else numpy


def from_device(tensor):
    """The CuPy array that is the memory of a CUDA tensor; its device becomes CuPy's current one."""
    import cupy
    cupy.cuda.Device(tensor.device.index).use()
    return cupy.asarray(tensor)


def on_stream(pointer: int):
    """Context in which this thread's CuPy work goes to the CUDA stream at `pointer`."""
    import cupy
    return cupy.cuda.ExternalStream(pointer)


def synchronise(array) -> None:
    """Before MPI reads or writes device memory, the work queued on the current stream must end."""
    if on_device(array):
        module(array).cuda.get_current_stream().synchronize()


cuda_aware = functools.cache(mpi_reads_device_memory)  # MPI is asked at the first device buffer


def staged(array) -> bool:
    """Must this array travel through host memory, because MPI cannot read the device's?"""
    return on_device(array) and not cuda_aware()


def empty(like, length: int, dtype):
    """Scratch that MPI can read: beside `like`, or in pinned host memory if `like` is staged."""
    dtype, xp = numpy.dtype(dtype), module(like)
    if not staged(like):
        return xp.empty(length, dtype)
    pinned = xp.cuda.alloc_pinned_memory(max(1, length * dtype.itemsize))
    return numpy.frombuffer(pinned, dtype, length)


def add(into, received) -> None:
    """into += received; 16-bit values are widened exactly, 16-bit sums are rounded once."""
    if _kernel("add", (into, received)[:1 + (into.dtype != received.dtype)], into, received):
        return
    if into.dtype == numpy.uint16:
        to_bfloat16(_widened(into) + _widened(received), into)
    else:
        module(into).add(into, _widened(received), out=into)


def convert(into, values) -> None:
    """into = values: float32 to a 16-bit type, rounded to nearest even, or back, exactly."""
    to_wire = into.itemsize == 2
    if _kernel("wire_encode" if to_wire else "wire_decode",
               (into if to_wire else values,), into, values):
        return
    if into.dtype == numpy.uint16:
        to_bfloat16(values, into)
    else:
        into[...] = _widened(values)


def round_to(values, wire) -> None:
    """Replace float32 values by what a 16-bit wire leaves of them (no wire: nothing to do)."""
    for piece in pieces(values, 1 << 20) if wire else ():
        words = module(values).empty(piece.size, WIRES[wire])
        convert(words, piece)
        convert(piece, words)


def pack(values, out, wire) -> None:
    """Write `values` to the scratch `out` that MPI sends, as 16-bit words if there is a wire."""
    to_host = on_device(values) and not on_device(out)
    if wire:
        words = module(values).empty(values.size, out.dtype) if to_host else out
        convert(words, values)
        values = words
    if to_host:
        module(values).asnumpy(values, out=out)


def land(received, into, adding: bool) -> None:
    """Bring what lies in the scratch `received` into the buffer: added, or widened or copied."""
    if on_device(into) and not on_device(received):
        received = module(into).asarray(received)
    if adding:
        add(into, received)
    elif received.dtype != into.dtype:
        convert(into, received)
    else:
        into[...] = received


def _kernel(operation: str, typed, *arrays) -> bool:
    """Do it by kernels/*.cu where the arrays are CuPy's; the NumPy lines are the slow twins."""
    if not (on_device(arrays[0]) and hasattr(module(arrays[0]), "RawModule")):
        return False
    types = ("bfloat16" if array.dtype == numpy.uint16 else array.dtype.name for array in typed)
    kernels.elementwise(module(arrays[0]), "_".join((operation, *types)), arrays[0].size, *arrays)
    return True


def _widened(array):
    """bfloat16 words as float32; NumPy itself widens all other types."""
    if array.dtype != numpy.uint16:
        return array
    return (array.astype(numpy.uint32) << 16).view(numpy.float32)


def to_bfloat16(values, out) -> None:
    """float32 to bfloat16 words, to nearest even; a NaN stays a NaN (its quiet bit is set)."""
    bits = values.view(numpy.uint32)
    rounded = (bits + (numpy.uint32(0x7FFF) + ((bits >> 16) & numpy.uint32(1)))) >> 16
    nan = (bits & numpy.uint32(0x7FFFFFFF)) > numpy.uint32(0x7F800000)
    out[...] = module(values).where(nan, (bits >> 16) | numpy.uint32(0x40), rounded)

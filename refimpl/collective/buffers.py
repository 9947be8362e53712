"""The only place that knows a NumPy array from a device array, and the only place that adds.

A device array is known by `__cuda_array_interface__`; its module (cupy) is found from its type.

bfloat16 has no NumPy type: such a buffer is uint16 words, and uint16 always means bfloat16 here.
"""
import sys

import numpy

from .. import kernels

WIRES = {"float16": numpy.dtype("float16"), "bfloat16": numpy.dtype("uint16")}
cuda_aware = None  # None: ask MPI at the first device buffer; True or False: as told


def chunk(buffer, parts: int, index: int):
    """View of chunk `index` mod `parts`: the first len % parts chunks are one element longer."""
    index %= parts
    short, longer = divmod(buffer.size, parts)
    start = index * short + min(index, longer)
    return buffer[start:start + short + (index < longer)]


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


def staged(array) -> bool:
    """Must this array travel through host memory, because MPI cannot read the device's?"""
    global cuda_aware
    if not on_device(array):
        return False
    if cuda_aware is None:
        from .cuda_aware import mpi_reads_device_memory
        cuda_aware = mpi_reads_device_memory()
    return not cuda_aware


def empty(like, length: int, dtype):
    """Scratch that MPI can read: beside `like`, or in pinned host memory if `like` is staged."""
    dtype, xp = numpy.dtype(dtype), module(like)
    if not staged(like):
        return xp.empty(length, dtype)
    pinned = xp.cuda.alloc_pinned_memory(max(1, length * dtype.itemsize))
    return numpy.frombuffer(pinned, dtype, length)


def add(into, received) -> None:
    """into += received, both of one type; 16-bit types are added in float32 and rounded once."""
    if _kernel(f"add_{_name(into)}", into, received):
        return
    if into.dtype == numpy.uint16:
        to_bfloat16(from_bfloat16(into) + from_bfloat16(received), into)
    else:
        module(into).add(into, received, out=into)


def add_cast(into, received) -> None:
    """float32 into += 16-bit received: widened exactly, then one addition."""
    if not _kernel(f"add_float32_{_name(received)}", into, received):
        add(into, _widened(received))


def encode(words, values) -> None:
    """16-bit words = float32 values, rounded to nearest even."""
    if _kernel(f"wire_encode_{_name(words)}", words, values):
        return
    if words.dtype == numpy.uint16:
        to_bfloat16(values, words)
    else:
        words[...] = values.astype(words.dtype)


def decode(values, words) -> None:
    """float32 values = 16-bit words, exactly."""
    if not _kernel(f"wire_decode_{_name(words)}", values, words):
        values[...] = _widened(words)


def round_to(values, wire) -> None:
    """Replace float32 values by what a 16-bit wire leaves of them (no wire: nothing to do)."""
    step = 1 << 18  # scratch of 512 KB
    for low in range(0, values.size if wire else 0, step):
        some = values[low:low + step]
        words = module(values).empty(some.size, WIRES[wire])
        encode(words, some)
        decode(some, words)


def pack(values, out, wire) -> None:
    """Write `values` to the scratch `out` that MPI sends, as 16-bit words if there is a wire."""
    to_host = on_device(values) and not on_device(out)
    if wire:
        words = module(values).empty(values.size, out.dtype) if to_host else out
        encode(words, values)
        values = words
    if to_host:
        module(values).asnumpy(values, out=out)


def land(received, into, adding: bool, wire) -> None:
    """Bring what lies in the scratch `received` into the buffer: added or copied."""
    if on_device(into) and not on_device(received):
        received = module(into).asarray(received)
    if adding:
        (add_cast if wire else add)(into, received)
    elif wire:
        decode(into, received)
    else:
        into[...] = received


def _name(array) -> str:
    return "bfloat16" if array.dtype == numpy.uint16 else array.dtype.name


def _kernel(name: str, *arrays) -> bool:
    """Do it by kernels/*.cu where the arrays are CuPy's; the NumPy lines are the slow twins."""
    if not (on_device(arrays[0]) and hasattr(module(arrays[0]), "RawModule")):
        return False
    kernels.elementwise(module(arrays[0]), name, arrays[0].size, *arrays)
    return True


def _widened(words):
    return from_bfloat16(words) if words.dtype == numpy.uint16 else words.astype(numpy.float32)


def from_bfloat16(words):
    return (words.astype(numpy.uint32) << 16).view(numpy.float32)


def to_bfloat16(values, out) -> None:
    """float32 to bfloat16 words, to nearest even; a NaN stays a NaN (its quiet bit is set)."""
    bits = values.view(numpy.uint32)
    rounded = (bits + (numpy.uint32(0x7FFF) + ((bits >> 16) & numpy.uint32(1)))) >> 16
    nan = (bits & numpy.uint32(0x7FFFFFFF)) > numpy.uint32(0x7F800000)
    out[...] = module(values).where(nan, (bits >> 16) | numpy.uint32(0x40), rounded)

"""The only place that knows a NumPy array from a device array, and the only place that adds.

A device array is known by `__cuda_array_interface__`. CuPy is never imported here: whoever made the
array has imported it, so its module is found from the array's type.

bfloat16 has no NumPy type: such a buffer is uint16 words, and uint16 always means bfloat16 here.
"""
import os
import sys

import numpy

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
    if into.dtype == numpy.uint16:
        to_bfloat16(from_bfloat16(into) + from_bfloat16(received), into)
    else:
        module(into).add(into, received, out=into)


def add_cast(into, received) -> None:
    """float32 into += 16-bit received (uint16: bfloat16): widened first, so nothing is rounded."""
    add(into, widen(received))


def pack(values, out, wire) -> None:
    """Write `values` to the scratch `out`, rounded to the wire's 16 bits if there is a wire."""
    if wire == "bfloat16":
        target = out if on_device(out) == on_device(values) else module(values).empty(
            values.size, numpy.uint16)
        to_bfloat16(values, target)
        values = target
    elif wire:
        values = values.astype(WIRES[wire])
    if on_device(values) and not on_device(out):
        module(values).asnumpy(values, out=out)
    elif values is not out:
        out[...] = values


def land(received, into, adding: bool, wire) -> None:
    """Bring what lies in the scratch `received` into the buffer: added or copied."""
    if on_device(into) and not on_device(received):
        received = module(into).asarray(received)
    if adding:
        (add_cast if wire else add)(into, received)
    else:
        into[...] = widen(received) if wire else received


def round_to(values, wire) -> None:
    """Replace float32 values by what a 16-bit wire leaves of them (no wire: nothing to do)."""
    if wire:
        narrow = module(values).empty(values.size, WIRES[wire])
        pack(values, narrow, wire)
        values[...] = widen(narrow)


def widen(words):
    """16-bit words as float32, exactly."""
    return from_bfloat16(words) if words.dtype == numpy.uint16 else words.astype(numpy.float32)


def from_bfloat16(words):
    return (words.astype(numpy.uint32) << 16).view(numpy.float32)


def to_bfloat16(values, out) -> None:
    """float32 to bfloat16 words, to nearest even; a NaN stays a NaN (its quiet bit is set)."""
    bits = values.view(numpy.uint32)
    rounded = (bits + (numpy.uint32(0x7FFF) + ((bits >> 16) & numpy.uint32(1)))) >> 16
    nan = (bits & numpy.uint32(0x7FFFFFFF)) > numpy.uint32(0x7F800000)
    out[...] = module(values).where(nan, (bits >> 16) | numpy.uint32(0x40), rounded)

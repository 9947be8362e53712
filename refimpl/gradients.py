"""One flat buffer per rank: what the workers add up, and how it is summed over the ranks.

    | gradients, in reverse order of use | batch-norm updates | loss correct save stop overflow |
    |<- bucket ->|<- bucket ->| ...      |<-------- last bucket, never on a 16-bit wire ------->|

Every parameter's .grad is a view of it, so backward writes where the allreduce reads. The
workers of a rank add in worker order; the ranks add as the algorithm's order says (oracle/spec).
The loss carries 1/(kn) (Goyal, remark 3), so the sum over all workers is the gradient.
"""
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from refimpl.collective import buffers
from refimpl.model import batch_norms

# summed like the gradients, so that all ranks agree on them: two means, two wishes, a fault
TAIL = ("loss", "correct", "save", "stop", "overflow")
QUANTUM = 2.0**-48  # of --sum exact: float32 values above 2^-25 are exact
RANGE = 2.0**15  # |sum| below this fits int64 in units of the quantum
PIECE = 1 << 16  # values converted at a time on a CPU: what is read twice stays in the cache


def as_array(tensor: Tensor):
    """The tensor's memory as the collectives take it: a NumPy or, on a GPU, a CuPy array."""
    return tensor.numpy() if tensor.device.type == "cpu" else buffers.from_device(tensor)


@dataclass(frozen=True)
class Bucket:
    """Elements start:stop of the flat buffer, reduced together; `wire` names a 16-bit type."""
    start: int
    stop: int
    wire: str | None


def plan_buckets(sizes: Sequence[int], limit: int, tail: int, wire: str | None) -> list[Bucket]:
    """Neighbouring tensors of `sizes` together while they fit `limit` values; then the tail."""
    buckets, start, stop = [], 0, 0
    for size in sizes:
        if stop > start and stop + size - start > limit:
            buckets.append(Bucket(start, stop, wire))
            start = stop
        stop += size
    buckets.append(Bucket(start, stop, wire))
    return [*buckets, Bucket(stop, stop + tail, None)]


def shared(allreduce) -> Callable[[int, torch.dtype], Tensor]:
    """Gradients' `storage` on a CPU: zeros where the reducer likes them (a shared window)."""
    return lambda values, dtype: torch.from_numpy(
        allreduce.empty(values, str(dtype).removeprefix("torch."))).zero_()


class Gradients:
    """The flat buffer of `model`. Per step: clear, then per worker begin, backward, end; reduce.

    sum_ "exact" adds each worker's buffer as int64 in units of 2^-48, so that no order of
    adding can change the result. `storage(values, dtype)` may give the memory (a shared window).
    """

    def __init__(self, model: nn.Module, bucket_values: int = 1 << 62, wire: str | None = None,
                 sum_: str = "plain", storage: Callable[[int, torch.dtype], Tensor] | None = None) -> None:
        self.parameters = list(model.parameters())[::-1]
        device = self.parameters[0].device
        statistics = [(module, name) for module in batch_norms(model)
                      for name in ("running_mean", "running_var")]
        sizes = [p.numel() for p in self.parameters]
        self.values = sum(sizes)
        count = sum(getattr(*s).numel() for s in statistics)
        self.buckets = plan_buckets(sizes, bucket_values, count + len(TAIL), wire)
        total = self.values + count + len(TAIL)
        self.exact, self.piece = sum_ == "exact", PIECE if device.type == "cpu" else 1 << 24
        make = storage or (lambda n, dtype: torch.zeros(n, dtype=dtype, device=device))
        self.summed = make(total, torch.int64 if self.exact else torch.float32)
        self.flat = torch.zeros(total, device=device) if self.exact else self.summed
        self.updates = self.flat[self.values:self.values + count]
        self.tail = self.flat[-len(TAIL):]
        self.running = torch.zeros(count, device=device)  # the batch norms' buffers, as one
        self._bind(sizes, statistics)
        self.common = self.running.clone()  # what every worker starts its step from

    def _bind(self, sizes: list[int], statistics: list[tuple[nn.Module, str]]) -> None:
        """Make each .grad a view of flat, and each running statistic a view of running."""
        for p, piece in zip(self.parameters, self.flat[:self.values].split(sizes)):
            p.grad = piece.as_strided(p.shape, p.stride(), piece.storage_offset())
        start = 0
        for module, name in statistics:
            view = self.running[start:start + getattr(module, name).numel()]
            view.copy_(getattr(module, name))
            setattr(module, name, view)
            start += view.numel()

    def refresh(self) -> None:
        """Take the batch norms' present buffers as the common ones (after loading a file)."""
        self.common.copy_(self.running)

    def clear(self, workers: int, kn: int, idle: bool = False) -> None:
        """Start a step of `workers` workers and kn samples; idle: this rank plays none of them."""
        self.workers, self.kn, self.bad = workers, kn, 0  # bad: values out of range so far
        self.first, self.last = True, False  # of this rank's workers: is the next one, was the last begun?
        self.flat.zero_()
        if self.exact and idle:  # otherwise the first worker writes over what was there
            self.summed.zero_()

    def begin_worker(self, last: bool = False) -> None:
        """Every worker starts from the common running statistics. last: of this rank, this step."""
        self.running.copy_(self.common)
        self.converted, self.last = 0, last

    def end_worker(self, loss: Tensor, correct: Tensor) -> None:
        """Add this worker's batch-norm update / k, its loss (already / kn) and correct / kn."""
        self.updates.add_(self.running - self.common, alpha=1 / self.workers)
        self.tail[0] += loss.detach()
        self.tail[1] += correct / self.kn
        self.convert(len(self.flat))
        if self.exact:
            self.first, self.summed[-1] = False, self.bad  # the last of TAIL: overflow

    def convert(self, stop: int) -> None:
        """Exact sums: add this worker's values up to `stop` as integers; they are then zero again."""
        if not self.exact or self.converted == stop:
            return
        limit = RANGE / self.workers
        part = slice(self.converted, stop)
        for flat, summed in zip(self.flat[part].split(self.piece), self.summed[part].split(self.piece)):
            low, high = torch.aminmax(flat)
            if not (-limit < low and high < limit):  # out of range, or NaN
                outside = ~(flat.abs() < limit)
                self.bad = self.bad + outside.sum()
                flat.masked_fill_(outside, 0)
            flat.mul_(1 / QUANTUM).round_()  # a power of two: exact in float32
            summed.copy_(flat) if self.first else summed.add_(flat.long())
            flat.zero_()
        self.converted = stop

    def wish(self, name: str) -> None:
        """Tell all ranks, with this step's sum, that this one wants to "save" or "stop"."""
        self.summed[TAIL.index(name) - len(TAIL)] += 1

    def reduce(self, allreduce: Callable, scale: float = 1.0) -> dict[str, float]:
        """Sum every bucket over the ranks, one after another, after backward: the naive twin of
        `overlap.Overlap`. `allreduce(array, wire, name=)` sums in place. Returns the tail's sums."""
        for bucket in self.buckets:
            self.reduce_bucket(bucket, allreduce)
        return self.finish(scale)

    def reduce_bucket(self, bucket: Bucket, allreduce: Callable) -> None:
        allreduce(as_array(self.summed[bucket.start:bucket.stop]), bucket.wire,
                  name=f"{bucket.start}:{bucket.stop}")

    def finish(self, scale: float) -> dict[str, float]:
        """Sums to float32, loss scale off (a power of two); returns the tail by name.

        "overflow" is above 0 where any value was not finite or out of range, on all ranks alike.
        """
        self.running.copy_(self.common)
        if self.exact:
            for flat, summed in zip(self.flat.split(self.piece), self.summed.split(self.piece)):
                flat.copy_(summed).mul_(QUANTUM)
            self.tail[2:] = self.summed[2 - len(TAIL):]  # counts, not multiples of the quantum
        sums = dict(zip(TAIL, self.tail.tolist()))
        if self.exact and sums["overflow"]:
            sums["loss"] = math.nan  # what was out of range is not in it
        if not self.exact:
            ends = torch.stack(torch.aminmax(self.flat))  # NaN if any value is
            sums["overflow"] = float(not torch.isfinite(ends).all())
        if scale != 1.0:
            self.flat[:self.values].mul_(1 / scale)
        return sums

    def apply_statistics(self) -> None:
        """The mean of the workers' batch-norm updates becomes everybody's running statistics."""
        self.common.add_(self.updates)
        self.running.copy_(self.common)

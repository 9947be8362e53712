"""The allreduce behind backward: each bucket starts as soon as its last gradient is written.

    main thread     forward | backward ............................. | wait | update
    buckets ready                  0        1        2        3 (statistics: at the end)
    this thread                    | sum 0  | sum 1  | sum 2  | sum 3 |

One thread, one duplicated communicator, buckets in the same order on all ranks; the bits are those
of `Gradients.reduce`, which sums the same buckets after backward (Goyal et al. 2017, section 4).
"""
import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch

from refimpl.collective import buffers, exchange
from refimpl.gradients import Gradients

PAUSE = 2e-4  # seconds between looks: on a CPU, polling would take its core from backward


class Overlap:
    """`reduce(scale)` in place of `Gradients.reduce`; `allreduce` belongs to this thread alone."""

    def __init__(self, gradients: Gradients, allreduce: Callable) -> None:
        self.gradients, self.allreduce = gradients, allreduce
        self.bucket_of, start, number = {}, 0, 0
        for p in gradients.parameters:
            number += start >= gradients.buckets[number].stop
            self.bucket_of[p], start = number, start + p.numel()
            p.register_post_accumulate_grad_hook(self._written)
        self.device = gradients.flat.device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.waiting, self.done = queue.SimpleQueue(), queue.SimpleQueue()
        self._start_anew()
        threading.Thread(target=self._work, daemon=True, name="allreduce").start()

    def _start_anew(self) -> None:
        self.left = [0] * len(self.gradients.buckets)  # gradients still to be written
        for number in self.bucket_of.values():
            self.left[number] += 1
        self.sent = 0

    def _written(self, p: torch.Tensor) -> None:
        """Hook: backward has written p.grad; only the rank's last worker makes a bucket whole."""
        if self.gradients.last:
            self.left[self.bucket_of[p]] -= 1
            while self.sent < len(self.left) - 1 and not self.left[self.sent]:
                self._send()

    def _send(self) -> None:
        bucket = self.gradients.buckets[self.sent]
        if self.gradients.last:
            self.gradients.convert(bucket.stop)
        ready = torch.cuda.current_stream(self.device).record_event() if self.stream else None
        self.waiting.put((bucket, ready))
        self.sent += 1

    def _on_stream(self):
        """CuPy adds and copies on this thread's own stream, while backward goes on on another."""
        return buffers.on_stream(self.stream.cuda_stream) if self.stream else nullcontext()

    def _work(self) -> None:
        exchange.traffic().pause = PAUSE if self.stream is None else 0.0
        while True:
            bucket, ready = self.waiting.get()
            try:
                if self.stream:
                    self.stream.wait_event(ready)
                with self._on_stream():
                    self.gradients.reduce_bucket(bucket, self.allreduce)
                self.done.put(None)
            except BaseException as error:  # handed to the main thread, which knows what to do
                self.done.put(error)

    def reduce(self, scale: float = 1.0) -> dict[str, float]:
        """Send what is left (all, where this rank played no worker), wait for every bucket."""
        while self.sent < len(self.left):
            self._send()
        for _ in self.left:
            if (error := self.done.get()) is not None:
                raise error
        if self.stream:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._start_anew()
        return self.gradients.finish(scale)

"""--timeline FILE: a Chrome trace of the first steps; open it in Perfetto or chrome://tracing.

One process row per rank; thread 0 computes, thread 1 is the allreduce behind backward (if on).
"""
import json
import time
from collections.abc import Callable

from refimpl.collective import exchange
from refimpl.collective.guard import gather_text
from refimpl.ranks import cut, everywhere, writable, writing

STEPS = 20  # more would not fit a screen, nor a browser's memory at many ranks


class Timeline:
    """Spans of this rank: the run's clocks, and the messages of `collective.exchange`."""

    def __init__(self, comm, path: str) -> None:
        self.comm = comm
        self.file = everywhere(comm, lambda: writable(path, "--timeline", b'{"traceEvents')
                               if comm.rank == 0 else None)
        self.spans, self.messages = ([], []), ([], [])  # of the main thread, of the allreduce's
        with exchange.waiting("timeline", comm):
            comm.Barrier()
        self.zero, self.on = time.monotonic(), True  # hosts' clocks differ: all count from here

    def span(self, name: str, start: float, thread: int = 0) -> None:
        if self.on:
            self.spans[thread].append((name, start, time.monotonic()))

    def watched(self, allreduce: Callable, thread: int) -> Callable:
        """`allreduce` that leaves a span per bucket, and one per message, on `thread`'s row."""
        def reduce(array, wire, name):
            exchange.traffic().timeline = self.messages[thread] if self.on else None
            start = time.monotonic()
            allreduce(array, wire, name=name)
            self.span(f"bucket {name}, {array.size} values", start, thread)
        return reduce

    def event(self, name: str, start: float, end: float, thread: int, **about) -> dict:
        return {"name": name, "ph": "X", "pid": self.comm.rank, "tid": thread, "args": about,
                "ts": round(1e6 * (start - self.zero), 1), "dur": round(1e6 * (end - start), 1)}

    def write(self) -> None:
        """All ranks' events into one file on rank 0; recording stops."""
        self.on, events = False, []
        for thread, (spans, messages) in enumerate(zip(self.spans, self.messages)):
            events += [self.event(name, start, end, thread) for name, start, end in spans]
            events += [self.event(f"{phase} {turn}", start, end, thread, to=to, source=source,
                                  bytes=sent)
                       for phase, turn, to, source, sent, start, end in messages]
        texts = gather_text(self.comm, json.dumps(events))
        if self.comm.rank == 0:
            everything = [event for text in texts for event in json.loads(text)]
            text = json.dumps({"traceEvents": everything, "displayTimeUnit": "ms"})
            with writing(self.file.name), self.file:
                cut(self.file)
                self.file.write(text.encode())

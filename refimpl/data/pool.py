"""All cores for a list of jobs, in order, with little in flight and nothing left behind."""
import itertools
import multiprocessing
import os
import signal
import threading
from collections import abc, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool


def cores() -> int:
    return len(os.sched_getaffinity(0))


def end_with_parent(_=None) -> None:
    """End this process when its parent does, however that ends; a forkserver alone would not."""
    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


def _start():
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    end_with_parent()


def _each(function, items):
    return [function(item) for item in items]


def ordered(function: abc.Callable, items: abc.Iterable, processes: int, chunk: int = 16) -> abc.Iterator:
    """Yield function(item) in the order of items; both must pickle. Ctrl-C and close() stop it."""
    if processes == 0:
        yield from map(function, items)
        return
    items, waiting = iter(items), deque()
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("forkserver"), _start)
    try:
        while True:
            while len(waiting) < 3 * processes and (some := list(itertools.islice(items, chunk))):
                waiting.append(pool.submit(_each, function, some))
            if not waiting:
                return
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        for process in multiprocessing.active_children():
            process.kill()  # the pool's own SIGTERM is not heard, and it would wait for ever
        raise RuntimeError("a process died (out of memory, or an image crashed the decoder); "
                           "try with --processes 1 to see at which image") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

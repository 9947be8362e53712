"""Time each algorithm over message sizes: `mpirun -np N python -m refimpl.bench allreduce`.

As nccl-tests defines them: algbw = bytes / time, busbw = algbw * 2(n-1)/n, in GB/s = 1e9 bytes/s,
for every algorithm alike; the time is that of the slowest rank. K and M in sizes are 1024, 1024^2.
All algorithms take turns within each repetition, so that a busy machine harms them alike.
`traffic` is the bound in shared memory: every rank reads and writes as many bytes as the buffer has.
"""
import atexit
import contextlib
import json
import os
import platform
import re
import statistics
import time

import numpy

from ..collective import ALGORITHMS, allreducer
from ..collective.exchange import waiting
from ..collective.guard import Watchdog, agree
from ..config import GRID, PICTURE, Parser
from ..device import mpi_library, own_cores
from ..errors import UsageError
from ..ranks import everywhere, tell

COLUMNS = ("algorithm", "bytes", "ranks", "median_s", "min_s", "max_s", "n", "algbw", "busbw")


def main(argv: list[str]) -> None:
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    args = arguments(comm, parse, argv)
    if args.plot and comm.size == 1:
        raise UsageError(f"--plot {args.plot}: the busbw of one rank is 0; start 2 ranks or more")
    with Watchdog(args.timeout):
        rows = []
        for length in args.sizes:
            rows += measure(comm, length, args)
            if comm.rank == 0:
                show(rows[-len(args.algorithms):], header=len(rows) == len(args.algorithms))
    if comm.rank == 0:
        propose(rows)
        if args.json:
            with open(args.json, "a") as file:
                file.writelines(json.dumps({**row, **about()}) + "\n" for row in rows)
        if args.plot:
            plot(rows, args.plot)


def arguments(comm, parse, argv):
    """parse(argv), or UsageError on all ranks; also where these were not given the same."""
    with Watchdog(60):
        agree(comm, arguments=argv)
        return everywhere(comm, lambda: parse(argv))


def parse(argv):
    known = (*ALGORITHMS, "gloo", "traffic")
    parser = Parser(prog="refimpl.bench allreduce")
    parser.add_argument("--algorithms", nargs="+", default=list(known), choices=known)
    parser.add_argument("--sizes", default="4K:128M", help="bytes: 64K, or FROM:TO in steps of 8")
    parser.add_argument("--grid", type=GRID, metavar="RxC", help="of the torus")
    parser.add_argument("--ranks-per-node", type=int, help="of hierarchical; default: as they are")
    parser.add_argument("--wire", choices=("float16", "bfloat16"))
    parser.add_argument("--shared", action="store_true",
                        help="torus, hierarchical: buffers in shared memory, as in the trainer")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds before a hang is ended")
    parser.add_argument("--json", metavar="F", help="append a line per measurement")
    parser.add_argument("--plot", metavar="F", type=PICTURE, help="draw busbw over bytes (PNG, SVG or PDF)")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.warmup < 0:
        raise UsageError(f"--repeats {args.repeats} --warmup {args.warmup}: at least 1 and 0")
    if args.json and (not os.access(os.path.dirname(args.json) or ".", os.W_OK)
                      or os.path.isdir(args.json)):  # before anything is measured
        raise UsageError(f"--json {args.json}: cannot be written; give a file in a folder that exists")
    args.sizes = [size // 4 for size in sizes(args.sizes)]
    if args.wire:
        args.algorithms = [a for a in args.algorithms if a not in ("mpi", "gloo")]
        if not args.algorithms:
            raise UsageError("--wire: mpi and gloo have none; name another algorithm")
    most, memory = 4 * args.sizes[-1], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if most * (len(args.algorithms) + 3) > memory:  # their buffers, what fills them, what must come out
        raise UsageError(f"--sizes: {most} bytes, for each of --algorithms and 3 times more, do not fit into "
                         f"{memory} bytes of memory; give smaller sizes or fewer algorithms")
    return args


def sizes(text: str) -> list[int]:
    """Bytes: "102228128" or "64K" is one size, "4K:128M" is 4K, 32K, 256K, ... and 128M."""
    ends = [re.fullmatch(r"(\d{1,15})([KM]?)", part) for part in text.split(":")]
    if not all(ends) or len(ends) > 2:
        raise UsageError(f"--sizes {text!r}: write bytes as 64K, 102228128 or 4K:128M")
    unit = {"": 1, "K": 1 << 10, "M": 1 << 20}
    first, last = (int(end[1]) * unit[end[2]] for end in (ends[0], ends[-1]))
    if not 4 <= first <= last or first % 4 or last % 4:
        raise UsageError(f"--sizes {text!r}: whole float32 values, 4 bytes each, the smaller size first")
    steps = []
    while first < last:
        steps.append(first)
        first *= 8
    return [*steps, last]


def measure(comm, length: int, args) -> list[dict]:
    """Rows of all algorithms for one buffer of `length` float32 values."""
    with contextlib.ExitStack() as stack:
        reducers = {name: reducer(name, comm, length, args, stack) for name in args.algorithms}
        return [row(name, 4 * length, comm.size, t)
                for name, t in take_turns(comm, length, reducers, args).items()]


def take_turns(comm, length: int, reducers: dict, args) -> dict[str, list[float]]:
    """Seconds of every repetition; each call's sum is checked on every rank."""
    index = numpy.arange(length, dtype=numpy.int32) % 7
    mine, total = index + comm.rank, index * comm.size + comm.size * (comm.size - 1) // 2
    times: dict[str, list[float]] = {name: [] for name in reducers}
    for repeat in range(args.warmup + args.repeats):
        for name, (reduce, buffer) in reducers.items():
            buffer[:] = mine
            seconds = slowest(comm, lambda: reduce(buffer))
            if name != "traffic" and not (buffer == total).all():
                raise RuntimeError(f"rank {comm.rank}: {name} gave a wrong sum of {length} values")
            if repeat >= args.warmup:
                times[name].append(seconds)
    return times


def reducer(name: str, comm, length: int, args, stack):
    """(function that reduces in place, a buffer that suits it)."""
    if name == "gloo":
        return gloo(comm), numpy.empty(length, numpy.float32)
    options = {"ranks_per_node": args.ranks_per_node} if name == "hierarchical" else {}
    reduce = stack.enter_context(allreducer(
        "window" if name == "traffic" else name, comm, args.grid if name == "torus" else None,
        check="first", **options))
    shared = args.shared or name in ("window", "traffic")
    buffer = reduce.empty(length) if shared else numpy.empty(length, numpy.float32)
    if name == "traffic":
        return (lambda b: numpy.negative(b, out=b)), buffer
    return (lambda b: reduce(b, wire=args.wire)), buffer


def gloo(comm):
    """torch.distributed's allreduce; on one host over the loopback device."""
    import torch
    import torch.distributed as dist
    if not dist.is_initialized():
        torch.set_num_threads(1)
        store = None if comm.rank else dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        host, port = tell(comm, store and (platform.node(), store.port))
        if host == platform.node():
            host = "127.0.0.1"
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        client = store or dist.TCPStore(host, port, is_master=False)
        dist.init_process_group("gloo", store=client, rank=comm.rank, world_size=comm.size)
        atexit.register(dist.destroy_process_group)  # its threads must not outlive the interpreter
    return lambda buffer: dist.all_reduce(torch.from_numpy(buffer))


def slowest(comm, call, clock=time.perf_counter) -> float:
    """Seconds from a common start until the last rank is done."""
    from mpi4py import MPI
    with waiting("common start", comm):
        comm.Barrier()
    start = clock()
    call()
    seconds = numpy.array([clock() - start])
    with waiting("last rank", comm):
        comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return float(seconds[0])


def row(name: str, nbytes: int, ranks: int, times: list[float]) -> dict:
    """Bandwidths are those of the median, in GB/s."""
    median = statistics.median(times)
    algbw = nbytes / median / 1e9
    return dict(zip(COLUMNS, (name, nbytes, ranks, median, min(times), max(times), len(times),
                              algbw, algbw * 2 * (ranks - 1) / ranks)))


def show(rows: list[dict], header: bool) -> None:
    if header:
        print(f"{'algorithm':17}{'bytes':>11}{'ranks':>6}{'median ms':>11}{'min ms':>9}"
              f"{'max ms':>9}{'n':>4}{'algbw GB/s':>12}{'busbw GB/s':>12}")
    for r in rows:
        print(f"{r['algorithm']:17}{r['bytes']:11}{r['ranks']:6}{r['median_s'] * 1e3:11.3f}"
              f"{r['min_s'] * 1e3:9.3f}{r['max_s'] * 1e3:9.3f}{r['n']:4}{r['algbw']:12.3f}"
              f"{r['busbw']:12.3f}", flush=True)


def propose(rows: list[dict]) -> None:
    """Which of ours is the fastest, size by size, as lines of refimpl/choice.py."""
    ours = [r for r in rows if r["algorithm"] in ALGORITHMS and r["algorithm"] != "mpi"]
    best = {r["bytes"]: r for r in sorted(ours, key=lambda r: -r["median_s"])}
    lines = [f"({r['ranks']}, {nbytes}, {r['algorithm']!r})" for nbytes, r in sorted(best.items())]
    print("fastest of ours, as (ranks, bytes, algorithm):", ", ".join(lines))


def about() -> dict:
    """What a number needs beside it: MPI, machine and commit."""
    from ..runlog import commit
    return {"mpi": mpi_library(), "machine": f"{platform.machine()}, {len(own_cores())} cores",
            "commit": commit()}


def plot(rows: list[dict], path: str) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    for name in dict.fromkeys(r["algorithm"] for r in rows):
        mine = [r for r in rows if r["algorithm"] == name]
        pyplot.loglog([r["bytes"] for r in mine], [r["busbw"] for r in mine], "o-", label=name)
    pyplot.xlabel("bytes")
    pyplot.ylabel("busbw, GB/s")
    pyplot.title(f"allreduce, {rows[0]['ranks']} ranks, float32")
    pyplot.legend()
    pyplot.savefig(path)

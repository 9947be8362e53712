"""A training step beside its neighbours: `mpirun -np 2 python -m refimpl.bench step`.

    ours    train.train_step with its gradients, allreduce and update, as the trainer runs it
    behind  the same, each bucket's allreduce behind backward (--overlap on)
    ddp     torch's DistributedDataParallel over Gloo and torch's SGD: same model, data, settings
    exact   ours with --sum exact
    alone   ours without any communication: the bound

The programs take turns within each repetition, and ratios are formed within it, so that a busy
machine harms all alike. The time is the slowest rank's. Images are made once: no input is timed.
"""
import contextlib
import copy
import functools
import json
import resource
import statistics

import torch
from torch import nn

from .. import choice
from ..collective import allreducer
from ..collective.guard import Watchdog
from ..config import Parser
from ..device import one_node
from ..errors import UsageError
from ..gradients import Gradients, shared
from ..model import ResNet, initialise, undecayed
from ..optimizer import LossScale, Optimizer
from ..overlap import Overlap
from ..schedule import Moment
from ..train import train_step
from .allreduce import about, arguments, gloo, slowest

LR, MOMENTUM, DECAY = 0.1, 0.9, 1e-4
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Ours:
    """What `train_step` needs of a run, on fixed images; kind as above."""
    def __init__(self, kind: str, comm, model: nn.Module, images, labels, args, bf16: bool) -> None:
        self.comm, self.model, self.images, self.labels = comm, model, images, labels
        self.bf16 = bf16
        limit = int(args.bucket_mb * 1e6 or choice.bucket_bytes(comm.size)) // 4
        name = args.algorithm or choice.algorithm(comm.size, 4 * limit, args.one_node)
        allreduce = allreducer(name, comm, check="first")
        self.gradients = Gradients(model, limit, args.wire, "exact" if kind == "exact" else "plain",
                                   shared(allreduce))
        self.reduce = (Overlap(self.gradients, allreduce).reduce if kind == "behind" else
                       self.gradients.finish if kind == "alone" else
                       functools.partial(self.gradients.reduce, allreduce))
        self.optimizer = Optimizer(model, nesterov=True, weight_decay=DECAY)
        self.scale = LossScale(1.0, comm.size, False)
        self.loss = nn.CrossEntropyLoss(reduction="sum")
        kn = len(images) * comm.size
        self.moment = Moment(0, 0.0, 0, 0, 1, 0, comm.size, len(images), kn, LR, MOMENTUM)

    def workers(self, moment) -> range:
        return range(self.comm.rank, self.comm.rank + 1)

    def next_batch(self):
        return self.images, self.labels

    def wishes(self) -> list[str]:
        return []

    def autocast(self):
        return autocast(self.bf16)

    def clock(self, what: str):
        return contextlib.nullcontext()

    def step(self) -> None:
        train_step(self, self.moment)


class Ddp:
    """The same step as PyTorch's users write it."""

    def __init__(self, comm, model: nn.Module, images, labels, args, bf16: bool) -> None:
        gloo(comm)
        free = undecayed(model)
        groups = [{"params": [p for n, p in model.named_parameters() if (n in free) == plain],
                   "weight_decay": 0.0 if plain else DECAY} for plain in (False, True)]
        self.model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(groups, LR, MOMENTUM, nesterov=True)
        self.images, self.labels, self.bf16 = images, labels, bf16
        self.loss = nn.CrossEntropyLoss()

    def step(self) -> None:
        self.optimizer.zero_grad()
        with autocast(self.bf16):
            loss = self.loss(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()


def autocast(bf16: bool):
    return torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()


def main(argv: list[str]) -> None:
    from mpi4py import MPI
    comm, rows = MPI.COMM_WORLD, []
    args = arguments(comm, parse, argv)
    torch.set_num_threads(args.threads)
    args.one_node = one_node(comm)
    with Watchdog(args.timeout):
        for size, n in args.sizes:
            for precision in args.precision:
                for layout in args.layout:
                    rows += measure(comm, size, n, precision, layout, args)
                    if comm.rank == 0:
                        show(rows[-len(args.programs):], header=len(rows) == len(args.programs))
    if comm.rank == 0 and args.json:
        with open(args.json, "a") as file:
            file.writelines(json.dumps({**row, **about()}) + "\n" for row in rows)


def parse(argv):
    parser = Parser(prog="refimpl.bench step")
    programs = ("ours", "behind", "ddp", "exact", "alone")
    parser.add_argument("--programs", nargs="+", default=list(programs), choices=programs)
    parser.add_argument("--sizes", nargs="+", default=["64x32", "64x4", "224x8"], metavar="PXxN",
                        help="image side x samples per rank")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16"))
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--algorithm", help="default, as of --bucket-mb: choice.py")
    parser.add_argument("--wire", choices=("float16", "bfloat16"))
    parser.add_argument("--bucket-mb", type=float, default=0.0)
    parser.add_argument("--depth", default="3,4,6,3", help="blocks per stage")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per repetition")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--json", metavar="F", help="append a line per measurement")
    args = parser.parse_args(argv)
    try:
        args.sizes = [tuple(int(part) for part in text.split("x")) for text in args.sizes]
        assert all(len(size) == 2 for size in args.sizes)
    except (ValueError, AssertionError):
        raise UsageError("--sizes: write image side x samples, as 64x32") from None
    return args


def measure(comm, size: int, n: int, precision: str, layout: str, args) -> list[dict]:
    """A row per program; the first repetition is the warm-up and not counted."""
    torch.manual_seed(comm.rank)
    form, depth = LAYOUTS[layout], [int(part) for part in args.depth.split(",")]
    images = torch.randn(n, 3, size, size).contiguous(memory_format=form)
    labels = torch.randint(1000, (n,))
    model = initialise(ResNet(depth, args.width), 1).to(memory_format=form)
    bf16 = precision == "bf16"
    programs = {kind: Ddp(comm, copy.deepcopy(model), images, labels, args, bf16) if kind == "ddp"
                else Ours(kind, comm, copy.deepcopy(model), images, labels, args, bf16)
                for kind in args.programs}
    times: dict[str, list[float]] = {kind: [] for kind in programs}
    for _ in range(args.repeats + 1):
        for kind, program in programs.items():
            times[kind].append(slowest(comm, lambda: [program.step() for _ in range(args.steps)])
                               / args.steps)
    base = times.get("alone") or next(iter(times.values()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [row(kind, seconds[1:], base[1:], size, n, precision, layout, comm.size, peak)
            for kind, seconds in times.items()]


def row(kind, seconds, base, size, n, precision, layout, ranks, peak_mb) -> dict:
    ratios = [a / b for a, b in zip(seconds, base)]
    return {"program": kind, "px": size, "n": n, "precision": precision, "layout": layout,
            "ranks": ranks, "median_s": statistics.median(seconds), "min_s": min(seconds),
            "max_s": max(seconds), "repeats": len(seconds),
            "images_per_s": n * ranks / statistics.median(seconds),
            "to_bound": statistics.median(ratios), "to_bound_min": min(ratios),
            "to_bound_max": max(ratios), "peak_mb_all_programs": peak_mb}


def show(rows: list[dict], header: bool) -> None:
    if header:
        print(f"{'program':9}{'px':>4}{'n':>4} {'precision':10}{'layout':14}{'median s':>9}{'min':>8}"
              f"{'max':>8}{'images/s':>10}{'  of the bound (min ... max)'}")
    for r in rows:
        print(f"{r['program']:9}{r['px']:4}{r['n']:4} {r['precision']:10}{r['layout']:14}"
              f"{r['median_s']:9.3f}{r['min_s']:8.3f}{r['max_s']:8.3f}{r['images_per_s']:10.1f}"
              f"  {r['to_bound']:.3f} ({r['to_bound_min']:.3f} ... {r['to_bound_max']:.3f})",
              flush=True)

"""\
Says what an allreduce of given buffers must return, and checks yours, in any language, through
files: which rank, which element, and what probably went wrong. Finding nothing proves nothing.

  gen --family quick --ranks 6 --count 13 > case.json    make cases; more in refimpl/oracle/vectors
  inputs case.json > in.txt                              the inputs as text, or --npy 'x.{case}.{rank}.npy'
  expect case.json --order torus:2x3 > want.txt          what must come out, in the same format
  check case.json got.txt                                compare; also 'got.{rank}.npy'
  explain case.json got.txt                              say what a wrong result looks like
  identify --program "./mine in.txt got.txt" --ranks 6   print the order in which a program adds
  diff a.jsonl b.jsonl      two training traces (--agree: of the ranks of a run; --band: of seeds)
  state a.npz b.npz         two training steps with all tensors
under mpirun: check module:f, identify module:f    of f(buffer, comm), in place or returning the sum
  self --order torus:2x3                           of this project's own collectives
options [default]: --ranks [4], --count [13] elements on each, --seed [0], --dtype [float32]
  --family NAME    gen: census, place, exact, spread, cancel, special, overflow, quick or sizes
  --level NAME     agree, exact, ordered, bounded or special: the claim [gen: by family; f: exact]
  --order NAME     ring, torus:RxC, halving_doubling, hierarchical:N[:ACROSS] or ((0+1)+2)+3 [self: ring]
  --wire NAME      float16 or bfloat16: the type of the messages [none]

Exit code, on every rank: 0 conforms, 1 does not, 2 cannot tell (bad file, not supported).
"""
import argparse
import dataclasses
import itertools
import os
import shlex
import signal
import subprocess
import sys
import tempfile

import numpy as np

from refimpl.errors import UsageError
from refimpl.oracle import spec, trainer
from refimpl.oracle.cases import BLOCK, INLINE, LEVELS, WIRES, Case, dump, load, need
from refimpl.oracle.check import call, check, examine, named, read_results, report
from refimpl.oracle.explain import explain
from refimpl.oracle.families import FAMILIES, census_width
from refimpl.oracle.identify import identify, load_function, probes
from refimpl.oracle.words import STORED, to_hex

USAGE, FAMILY = __doc__, (*FAMILIES, "sizes", "quick")
LEVEL = {"spread": "bounded", "cancel": "bounded", "special": "special", "overflow": "ordered"}


def main(argv: list[str]) -> int:
    """Run one verb; returns the exit code."""
    if not argv or argv[0] == "help" or {"-h", "--help"} & {*argv}:
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        options = _arguments(argv)
        run, fewest, most = VERBS[options.verb]
        need(fewest <= len(options.paths) <= most,
             f"{options.verb}: {len(options.paths)} is a wrong number of paths; see --help")
        code, lines = run(options)
    except UsageError as error:
        MPI = sys.modules.get("mpi4py.MPI")  # where it runs all ranks raise alike, and end together
        if not MPI or MPI.COMM_WORLD.rank == 0:
            print(f"refimpl.oracle: {error}", file=sys.stderr, flush=True)
        return 2
    if lines:
        print("\n".join(lines), flush=True)
    return code


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("refimpl.oracle", add_help=False)
    parser.error = lambda message: need(False, f"{message}; see --help")
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("paths", nargs="*")
    for name, choices in {"family": FAMILY, "order": None, "npy": None, "program": None,
                          "dtype": STORED, "wire": WIRES, "level": LEVELS}.items():
        parser.add_argument(f"--{name}", choices=choices)
    for name, default in (("ranks", 4), ("count", 13), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--agree", action="store_true")
    parser.add_argument("--band", action="store_true")
    parser.set_defaults(dtype="float32")
    return parser.parse_intermixed_args(argv)


def _gen(options):
    family, ranks, counts, seeds = options.family, options.ranks, [options.count], [options.seed]
    need(family and ranks > 0, f"gen: --ranks above 0, and a --family: {', '.join(FAMILY)}")
    families = {"quick": ("census", "spread"), "sizes": ("exact",)}.get(family, (family,))
    if family == "sizes":
        counts = [0, 1, ranks - 1, ranks, ranks + 1, 1009, 25557032]
    if family == "census":
        seeds = range(-(-ranks // census_width(options.dtype)))
    rows = enumerate(itertools.product(families, seeds, counts), 1)
    return 0, [dump(Case(options.dtype, ranks, count, options.level or (
        "ordered" if options.order else LEVEL.get(name, "exact")), name, seed, options.order,
        options.wire, id=number) for number, (name, seed, count) in rows)]


def _cases(options) -> list[Case]:
    change = {"level": options.level} if options.level else {}
    if options.order or options.wire:
        change |= {"level": "ordered", "order": options.order or "ring", "wire": options.wire}
    return [dataclasses.replace(case, **change) for case in load(options.paths[0])]


def _inputs(options):
    """What the ranks bring, or (verb expect) what they must end with: as text, or in .npy files."""
    lines, expect = [], options.verb == "expect"
    for case in _cases(options):
        need(case.level != "agree" or not expect, "level agree expects nothing but agreement")
        xs = [case.want() if expect else case.input(rank) for rank in range(case.ranks)]
        if options.npy:
            for rank, x in enumerate(xs):
                name = named(options.npy, case, rank)
                need(os.path.isdir(os.path.dirname(name) or "."), f"--npy {name}: no such folder")
                np.save(name, x)
        else:
            lines += _text(case, xs)
    return 0, lines


def _text(case: Case, xs: list) -> list[str]:
    need(case.ranks * case.count <= BLOCK, f"case {case.id} is large: use --npy and check")
    return [f"# case {case.id} {case.dtype} ranks {case.ranks} count {case.count}",
            *(to_hex(x, case.dtype) for x in xs)]


def _check(options):
    if len(options.paths) == 1:
        return _run(options)
    cases = _cases(options)
    results = read_results(cases, options.paths[1])
    verdicts = [examine(case, got) for case, got in zip(cases, results)]
    code, lines, before = int(any(verdict.wrong for verdict in verdicts)), [], None
    for (case, wrong, _), got in zip(verdicts, results) if options.verb == "explain" else ():
        need(case.ranks * case.count <= INLINE, f"case {case.id} is too large here: use check")
        said = explain(case, got, before) if wrong else [f"conforms ({case.level})"]
        lines, before = lines + [f"case {case.id}: {line}" for line in said], case.want()
    return code, lines or [report(verdicts), *["`explain` in place of check says what it looks like"][:code]]


def _self(options):
    """Our own collectives, loaded by name like any stranger's."""
    from mpi4py.MPI import COMM_WORLD as comm
    order = options.order = options.order or "ring"
    spec.by_order(order, [np.zeros(1)] * comm.Get_size())  # refuses what is no order
    name, *more = order.split(":")
    extra = {"shape": tuple(map(int, more.pop().split("x")))} if "x" in order else {}
    if name == "hierarchical":
        extra |= {"ranks_per_node": int(more[0]), "across": (more[1:] or ["ring"])[0]}
    reduce = load_function("refimpl.collective:allreducer", comm.allgather)(name, comm, **extra)
    return _run(options, lambda x, _: reduce(x, wire=options.wire, dtype=options.dtype))


def _run(options, f=None):
    from mpi4py.MPI import COMM_WORLD as comm
    need(options.verb != "explain", "explain: give a case file and results; check takes a function")
    f = f or load_function(options.paths[0], comm.allgather)
    level = options.level or ("ordered" if options.order else "exact")
    try:
        code, said = 0, check(f, comm, level, options.dtype, order=options.order,
                              wire=options.wire, seed=options.seed)
    except AssertionError as error:
        code, said = 1, str(error)
    return code, [] if comm.Get_rank() else [said]


def _identify(options):
    need(options.program or options.paths, "identify: give module:function, or --program")
    rank, ranks = 0, options.ranks
    if not options.program:
        from mpi4py.MPI import COMM_WORLD as comm
        rank, ranks, f = comm.Get_rank(), comm.Get_size(), load_function(options.paths[0], comm.allgather)
    cases = probes(ranks, options.count, options.dtype)
    lines = identify(cases, _by_program(cases, options.program) if options.program else [
        call(f, comm, case) for case in cases])
    return int(any("not a sum (" in line or "disagree" in line for line in lines)), [] if rank else lines


def _by_program(cases: list[Case], command: str) -> list:
    """Run the command once; in.txt, got.txt and got (for got.RANK.txt) are temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: os.path.join(folder, name) for name in ("in.txt", "got.txt", "got")}
        with open(files["in.txt"], "w", encoding="ascii") as file:
            file.writelines(f"{line}\n" for case in cases for line in _text(case, case.inputs))
        try:
            argv = [files.get(word, word) for word in shlex.split(command)]
            job = subprocess.run(argv, check=False, stdout=2)
        except (OSError, ValueError) as error:
            raise UsageError(f"{command}: {error}") from None
        need(job.returncode == 0, f"{command}: exit code {job.returncode}")
        return read_results(cases, files["got.txt"] if os.path.exists(files["got.txt"]) else
                            files["got"] + ".{rank}.txt")


VERBS = {  # function, fewest and most paths
    "gen": (_gen, 0, 0), "inputs": (_inputs, 1, 1), "expect": (_inputs, 1, 1),
    "check": (_check, 1, 2), "explain": (_check, 1, 2), "identify": (_identify, 0, 1),
    "self": (_self, 0, 0),
    "diff": (lambda o: trainer.band(o.paths) if o.band else trainer.diff(o.paths, o.agree), 2, 99),
    "state": (lambda o: trainer.state(o.paths), 2, 2)}

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    sys.exit(main(sys.argv[1:]))

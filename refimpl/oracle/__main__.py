"""The command line: text in, text out, and the answer as exit code."""
import argparse
import dataclasses
import itertools
import os
import shlex
import subprocess
import sys
import tempfile

import numpy as np

from refimpl.errors import UsageError
from refimpl.oracle import spec, trainer
from refimpl.oracle.cases import BLOCK, INLINE, LEVELS, SCALES, Case, dump, load, need, notes, suite
from refimpl.oracle.check import call, check, examine, named, read_results, report
from refimpl.oracle.explain import explain
from refimpl.oracle.families import census_width
from refimpl.oracle.identify import identify, load_function, probes
from refimpl.oracle.words import STORED, to_hex

USAGE = """\
Given P input buffers it says what an allreduce must return, and how sure that is. It checks yours,
in any language, through files. If it finds nothing, that proves nothing; if it finds something, it
says which rank, which element and what probably went wrong.

  gen --family census --ranks 6 --count 13 > case.json   make a case (gen --vectors exact: ours)
  inputs case.json > in.txt                              the inputs as text, a line per rank
  expect case.json --order torus:2x3 > want.txt          what must come out, in the same format
  check case.json got.txt                                compare; also 'got.{rank}.npy'
  explain case.json got.txt                              say what a wrong result looks like
  identify --program "./mine in.txt got.txt" --ranks 6   print the order in which a program adds
  diff a.jsonl b.jsonl      two training traces (--agree: of the ranks of a run; --band: of seeds)
  state a.npz b.npz                                      two training steps with all tensors
under mpirun -np 6 python -m refimpl.oracle:
  check module:function     f(buffer, comm), in place or returning the sum
  identify module:function
  self --order torus:2x3    this project's own collectives

Exit code, on every rank: 0 conforms, 1 does not, 2 cannot tell (bad file, not supported).
"""

VERBS = {"gen": (0, 0), "inputs": (1, 1), "expect": (1, 1), "check": (1, 2), "explain": (2, 2),
         "identify": (0, 1), "self": (0, 0), "diff": (2, 99), "state": (2, 2)}  # how many paths


def main(argv: list[str]) -> int:
    """Run one verb; see USAGE."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        options = _arguments(argv)
        fewest, most = VERBS[options.verb]
        need(fewest <= len(options.paths) <= most,
             f"{options.verb}: {len(options.paths)} paths; without arguments it prints its usage")
        return globals()[f"_{options.verb}"](options)
    except UsageError as error:
        print(f"refimpl.oracle: {error}", file=sys.stderr)
        return 2


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("refimpl.oracle")
    parser.error = lambda message: need(False, f"{message}; without arguments it prints its usage")
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("paths", nargs="*")
    for name in ("family", "order", "vectors", "npy", "program"):
        parser.add_argument(f"--{name}")
    for name, default in (("ranks", 4), ("count", 13), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=STORED)
    parser.add_argument("--wire", choices=("float16", "bfloat16"))
    parser.add_argument("--level", choices=LEVELS)
    parser.add_argument("--scale", choices=SCALES, default="sum")
    for name in ("agree", "band"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_intermixed_args(argv)


def _gen(options) -> int:
    if options.vectors:
        print(dump(suite(options.vectors), notes()), end="")
        return 0
    family, ranks, counts, seeds = options.family, options.ranks, [options.count], [options.seed]
    level = options.level or ("ordered" if options.order else {
        "spread": "bounded", "cancel": "bounded", "special": "special"}.get(family, "exact"))
    if family == "sizes":
        counts, family = [0, 1, ranks - 1, ranks, ranks + 1, 1009, 25557032], "exact"
    if family == "census":
        seeds = range(-(-ranks // census_width(options.dtype)))
    print(dump([Case(options.dtype, ranks, count, level, family, seed, options.order, options.wire,
                     options.scale, id=number + 1)
                for number, (seed, count) in enumerate(itertools.product(seeds, counts))]), end="")
    return 0


def _cases(options) -> list[Case]:
    """The file's cases, with another order or level where one is asked for."""
    change = {"level": options.level} if options.level else {}
    if options.order or options.wire:
        change |= {"level": "ordered", "order": options.order or "ring", "wire": options.wire}
    return [dataclasses.replace(case, **change) for case in load(options.paths[0])]


def _inputs(options) -> int:
    for case in _cases(options):
        xs = [case.input(rank) for rank in range(case.ranks)]
        if not options.npy:
            print(_text(case, xs), end="")
            continue
        for rank, x in enumerate(xs):
            np.save(named(options.npy, case, rank), x)
    return 0


def _expect(options) -> int:
    for case in _cases(options):
        need(case.level != "agree", f"case {case.id}: level agree expects nothing but agreement")
        print(_text(case, [case.want()] * case.ranks), end="")
    return 0


def _text(case: Case, xs: list) -> str:
    need(case.ranks * case.count <= BLOCK, f"case {case.id} is large: use inputs --npy and check")
    head = f"# case {case.id} {case.dtype} ranks {case.ranks} count {case.count}\n"
    return head + "".join(to_hex(x, case.dtype) + "\n" for x in xs)


def _check(options) -> int:
    if len(options.paths) == 1:
        return _run(load_function(options.paths[0]), options)
    cases = _cases(options)
    verdicts = [examine(*pair) for pair in zip(cases, read_results(cases, options.paths[1]))]
    return _say(int(any(verdict.wrong for verdict in verdicts)), [report(verdicts)])


def _explain(options) -> int:
    cases, lines, wrong, before = _cases(options), [], 0, None
    for case, got in zip(cases, read_results(cases, options.paths[1])):
        need(case.ranks * case.count <= INLINE, f"case {case.id} is too large here: use check")
        bad = examine(case, got).wrong
        said = explain(case, got, before) if bad else [f"conforms ({case.level})"]
        lines += [f"case {case.id}: {line}" for line in said]
        wrong, before = wrong or bad, case.want()
    return _say(int(wrong > 0), lines)


def _say(code: int, lines: list[str], rank: int = 0) -> int:
    if rank == 0:
        print("\n".join(lines), flush=True)
    return code


def _world():
    from mpi4py import MPI
    return MPI.COMM_WORLD


def _run(f, options) -> int:
    """Check a function on all ranks; one of them prints."""
    level = options.level or ("ordered" if options.order else "exact")
    try:
        code, said = 0, check(f, _world(), level, options.dtype, order=options.order,
                              wire=options.wire, scale=options.scale, seed=options.seed)
    except AssertionError as error:
        code, said = 1, str(error)
    return _say(code, [said], _world().Get_rank())


def _self(options) -> int:
    """Our own collectives, loaded by name like any stranger's."""
    comm, extra, options.order = _world(), {}, options.order or "ring"
    spec.by_order(options.order, [np.zeros(1)] * comm.Get_size())  # refuses what is no order
    name, _, shape = options.order.partition(":")
    if name == "hierarchical":
        nodes, _, across = shape.partition(":")
        across, _, shape = (across or "ring").partition(":")
        extra |= {"ranks_per_node": int(nodes), "across": across}
    if shape:
        extra["shape"] = tuple(map(int, shape.split("x")))
    reduce = load_function("refimpl.collective:allreducer")(name, comm, **extra)
    return _run(lambda x, comm: reduce(x, wire=options.wire, dtype=options.dtype), options)


def _identify(options) -> int:
    if options.program:
        cases = probes(options.ranks, options.count, options.dtype)
        return _say(0, identify(cases, _by_program(cases, options.program)))
    need(options.paths, "identify: give module:function, or --program")
    comm, f = _world(), load_function(options.paths[0])
    cases = probes(comm.Get_size(), options.count, options.dtype)
    return _say(0, identify(cases, [call(f, comm, case) for case in cases]), comm.Get_rank())


def _by_program(cases: list[Case], command: str) -> list:
    """Run the command once; in.txt and got.txt in it stand for temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: os.path.join(folder, name) for name in ("in.txt", "got.txt")}
        with open(files["in.txt"], "w", encoding="ascii") as file:
            file.write("".join(_text(case, case.inputs) for case in cases))
        try:
            argv = [files.get(word, word) for word in shlex.split(command)]
            job = subprocess.run(argv, check=False, stdout=2)
        except (OSError, ValueError) as error:
            raise UsageError(f"{command}: {error}") from None
        need(job.returncode == 0, f"{command}: exit code {job.returncode}")
        return read_results(cases, files["got.txt"])


def _diff(options) -> int:
    compare = trainer.band if options.band else trainer.agree if options.agree else trainer.diff
    return _say(*compare(options.paths))


def _state(options) -> int:
    return _say(*trainer.state(options.paths))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The command line: text in, text out, and the answer as exit code."""
import argparse
import dataclasses
import os
import shlex
import subprocess
import sys
import tempfile

import numpy as np

from refimpl.errors import UsageError
from refimpl.oracle import trainer
from refimpl.oracle.cases import INLINE, LEVELS, SCALES, Case, dump, load, need, notes, suite
from refimpl.oracle.check import call, check, examine, make, named, read_results, summary
from refimpl.oracle.explain import explain
from refimpl.oracle.families import census_width
from refimpl.oracle.identify import identify, load_function, probes
from refimpl.oracle.words import to_hex

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
  diff a.jsonl b.jsonl                                   two training traces (--band: among seeds)
  state a.npz b.npz                                      two training steps with all tensors
under mpirun -np 6 python -m refimpl.oracle:
  check module:function     f(buffer, comm), in place or returning the sum
  identify module:function
  self --order torus:2x3    this project's own collectives

Exit code, on every rank: 0 conforms, 1 does not, 2 cannot tell (bad file, not supported).
"""


def main(argv: list[str]) -> int:
    """Run one verb; see USAGE."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        options = _arguments(argv)
        return globals()[f"_{options.verb}"](options)
    except UsageError as error:
        print(f"refimpl.oracle: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 2


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("refimpl.oracle")
    parser.error = lambda message: need(False, f"{message}; without arguments it prints its usage")
    parser.add_argument("verb", choices=("gen", "inputs", "expect", "check", "explain", "identify",
                                         "self", "diff", "state"))
    parser.add_argument("paths", nargs="*")
    for name in ("family", "order", "vectors", "npy", "program"):
        parser.add_argument(f"--{name}")
    for name, default in (("ranks", 4), ("count", 13), ("seed", 0), ("errors", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--wire", choices=("float16", "bfloat16"))
    parser.add_argument("--level", choices=LEVELS)
    parser.add_argument("--scale", choices=SCALES, default="sum")
    parser.add_argument("--nan-bits", action="store_true")
    parser.add_argument("--band", action="store_true")
    return parser.parse_intermixed_args(argv)


def _gen(options) -> int:
    print(dump(suite(options.vectors) if options.vectors else _make(options), notes()), end="")
    return 0


def _make(options) -> list[Case]:
    family, ranks, counts, seeds = options.family, options.ranks, [options.count], [options.seed]
    level = options.level or ("ordered" if options.order else {
        "spread": "bounded", "cancel": "bounded", "special": "special"}.get(family, "exact"))
    if family == "sizes":
        counts, family = [0, 1, ranks - 1, ranks, ranks + 1, 1009, 25557032], "exact"
    if family == "census":
        seeds = range(-(-ranks // census_width(options.dtype)))
    return [Case(options.dtype, ranks, count, level, family, seed, options.order, options.wire,
                 options.scale, id=number + 1)
            for number, (seed, count) in enumerate((s, n) for s in seeds for n in counts)]


def _cases(options) -> list[Case]:
    """The file's cases, with another order or level where one is asked for."""
    need(options.paths, f"{options.verb}: which case file?")
    change = {"level": options.level} if options.level else {}
    if options.order or options.wire:
        change |= {"level": "ordered", "order": options.order or "ring", "wire": options.wire}
    return [dataclasses.replace(case, **change) for case in load(options.paths[0])]


def _inputs(options) -> int:
    for case in _cases(options):
        xs = [case.input(rank) for rank in range(case.ranks)]
        if options.npy:
            for rank, x in enumerate(xs):
                np.save(named(options.npy, case, rank), x)
        else:
            print(_text(case, xs), end="")
    return 0


def _text(case: Case, xs: list) -> str:
    need(case.ranks * case.count <= INLINE, f"case {case.id} is large: use inputs --npy and check")
    return "".join([f"# case {case.id} {case.dtype} ranks {case.ranks} count {case.count}\n",
                    *(to_hex(x, case.dtype) + "\n" for x in xs)])


def _expect(options) -> int:
    for case in _cases(options):
        need(case.level != "agree", f"case {case.id}: level agree expects nothing but agreement")
        print(_text(case, [case.want()] * case.ranks), end="")
    return 0


def _check(options) -> int:
    if options.paths and _is_function(options.paths[0]):
        return _run(load_function(options.paths[0]), options)
    cases = _cases(options)
    need(len(options.paths) == 2, "check: give the case file and the results")
    verdicts = [examine(case, got, options.errors, options.nan_bits)
                for case, got in zip(cases, read_results(cases, options.paths[1]))]
    lines = [line for verdict in verdicts for line in verdict.lines]
    print("\n".join([*lines[:options.errors], summary(verdicts)]))
    return int(any(verdict.wrong for verdict in verdicts))


def _is_function(name: str) -> bool:
    return ":" in name and not os.path.exists(name)


def _world():
    from mpi4py import MPI
    return MPI.COMM_WORLD


def _run(f, options) -> int:
    comm = _world()
    level = options.level or ("ordered" if options.order else "exact")
    cases = [case for path in options.paths[1:] for case in load(path)]
    try:
        report, code = check(f, comm, level, options.dtype, order=options.order, wire=options.wire,
                             scale=options.scale, seed=options.seed, cases=cases), 0
    except AssertionError as error:
        report, code = str(error), 1
    if comm.Get_rank() == 0:
        print(report, flush=True)
    return code


def _self(options) -> int:
    """Our own collectives, loaded by name like any stranger's."""
    name, _, shape = (options.order or "ring").partition(":")
    extra = {}
    if name == "torus":
        extra["shape"] = tuple(int(size) for size in shape.split("x"))
    elif name == "hierarchical":
        nodes, _, across = shape.partition(":")
        extra |= {"ranks_per_node": int(nodes), "across": across or "ring"}
    reduce = load_function("refimpl.collective:allreducer")(name, _world(), **extra)
    options.order, options.paths = options.order or "ring", ["", *options.paths]
    return _run(lambda x, comm: reduce(x, wire=options.wire, dtype=options.dtype), options)


def _explain(options) -> int:
    cases, code, before = _cases(options), 0, None
    need(len(options.paths) == 2, "explain: give the case file and the results")
    for case, got in zip(cases, read_results(cases, options.paths[1])):
        if case.ranks * case.count > INLINE:
            print(f"case {case.id}: too large to explain; use check")
            continue
        if examine(case, got).wrong:
            code = 1
            print("\n".join(f"case {case.id}: {line}" for line in explain(case, got, before)))
        else:
            print(f"case {case.id}: conforms ({case.level})")
        before = case.want()
    return code


def _identify(options) -> int:
    if options.program:
        cases = probes(options.ranks, options.count, options.dtype)
        lines = identify(cases, _by_program(cases, options.program))
    else:
        need(options.paths, "identify: give module:function, or --program")
        comm, f = _world(), load_function(options.paths[0])
        cases = probes(comm.Get_size(), options.count, options.dtype)
        lines = identify(cases, [call(f, comm, case) for case in cases])
        if comm.Get_rank():
            return 0
    print("\n".join(lines))
    return 0


def _by_program(cases: list[Case], command: str) -> list:
    """Run the command once; in.txt and got.txt in it stand for temporary files."""
    argv = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        source, result = os.path.join(folder, "in.txt"), os.path.join(folder, "got.txt")
        with open(source, "w", encoding="ascii") as file:
            file.write("".join(_text(case, case.inputs) for case in cases))
        argv = [{"in.txt": source, "got.txt": result}.get(word, word) for word in argv]
        try:
            job = subprocess.run(argv, check=False, stdout=2)
        except OSError as error:
            raise UsageError(f"{command}: {error}") from None
        need(job.returncode == 0, f"{command}: exit code {job.returncode}")
        return read_results(cases, result)


def _diff(options) -> int:
    need(len(options.paths) == 2 or options.band, "diff: give two traces; --band: one and seeds")
    return _say(trainer.band(options.paths[0], options.paths[1:]) if options.band
                else trainer.diff(*options.paths))


def _state(options) -> int:
    need(len(options.paths) == 2, "state: give two .npz files")
    return _say(trainer.state(*options.paths))


def _say(answer: tuple[int, list[str]]) -> int:
    print("\n".join(answer[1]))
    return answer[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The trainer and the collectives on a GPU: what `./run.sh gpu-check` runs after the kernels.

    python -m tests.gpu_train [--device cpu]      (cpu: the same script, to see that it works)

Simulated ranks on device buffers against exact sums; then 2 and 4 ranks on one GPU, fp16 with an
automatic loss scale and a 16-bit wire, the allreduce after and behind backward: all ranks' weights
are compared after every step, and both modes must leave the same trace. Exit code 0: all right.
"""
import argparse
import pathlib
import re
import sys
import tempfile

import numpy

from refimpl.collective import halving_doubling, ring, torus
from refimpl.collective.grid import make_grid
from refimpl.simulate.world import run
from tests.mpi import flavours, mpirun

LENGTH = 1_000_003


def simulated(xp) -> list[str]:
    """Names of algorithms that gave a wrong sum on 8 simulated ranks with buffers of `xp`."""
    wrong = []

    def program(comm):
        for name, reduce, shape in (("ring", ring.allreduce, None),
                                    ("torus", torus.allreduce, (2, 4)),
                                    ("halving_doubling", halving_doubling.allreduce, None)):
            buffer = xp.arange(LENGTH).astype(numpy.float32) % 1021 + comm.rank
            want = 8 * (xp.arange(LENGTH).astype(numpy.float32) % 1021) + 28
            reduce(buffer, make_grid(comm, shape) if shape else comm)
            if not bool((buffer == want).all()):
                wrong.append(f"{name} on rank {comm.rank}")
    run(8, program)
    return wrong


def trained(mpi: str, ranks: int, overlap: str, device: str, out: pathlib.Path) -> tuple[str, str]:
    """(trace, the line of the epoch) of a short run; RuntimeError where it did not end well."""
    trace = out / f"{ranks}-{overlap}.jsonl"
    job = mpirun(mpi, ranks, "-m", "refimpl.train", "--device", device, "--workers", str(ranks),
                 "--n", "16", "--epochs", "1", "--warmup-epochs", "0.5", "--max-steps", "12",
                 "--precision", "fp16" if device == "cuda" else "bf16", "--wire", "float16",
                 "--loss-scale", "0", "--check-every", "1", "--overlap", overlap,
                 "--allreduce", "torus", "--bucket-mb", "0.5", "--out", str(out), "--trace",
                 str(trace), timeout=150)
    if job.returncode:
        raise RuntimeError(f"{ranks} ranks, overlap {overlap}: exit code {job.returncode}\n"
                           f"{job.stdout[-1000:]}\n{job.stderr[-3000:]}")
    return trace.read_text(), re.findall(r"epoch .*images/s.*", job.stdout)[-1]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    if args.device == "cuda":
        import cupy as xp
    else:
        xp = numpy
    wrong = simulated(xp)
    print(f"simulated  8 ranks, {xp.__name__} buffers, {LENGTH} values:",
          f"WRONG: {wrong}" if wrong else "ring, torus, halving_doubling right")
    mpi, failed = next(iter(flavours())), bool(wrong)
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            try:
                after, slow = trained(mpi, ranks, "off", args.device, pathlib.Path(folder))
                behind, fast = trained(mpi, ranks, "on", args.device, pathlib.Path(folder))
            except RuntimeError as error:
                print(f"training   FAILED: {error}")
                failed = True
                continue
        same = after == behind
        failed |= not same
        print(f"training   {ranks} ranks, weights equal on all ranks after each of "
              f"{len(after.splitlines())} steps; after and behind backward: "
              f"{'the same bits' if same else 'DIFFERENT BITS'}\n  off: {slow}\n  on:  {fast}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

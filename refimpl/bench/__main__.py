"""Dispatch to the one file that holds the named measurement."""
import importlib
import os
import sys
import traceback

from ..collective.exchange import waiting
from ..collective.guard import Watchdog
from ..device import rank_hint
from ..errors import UsageError

COMMANDS = {"allreduce": "time each algorithm over message sizes, beside MPI's own and Gloo",
            "input": "images/s of the input, beside torchvision's (needs torchvision)",
            "step": "time a training step beside torch's DDP and beside no communication"}


def main(argv: list[str]) -> int:
    told = "usage: python -m refimpl.bench COMMAND [--help]\n" + "\n".join(
        f"  {name:12}{what}" for name, what in COMMANDS.items())
    try:
        if argv and argv[0] in COMMANDS:
            return importlib.import_module(f"refimpl.bench.{argv[0]}").main(argv[1:]) or 0
    except UsageError as error:
        told = f"refimpl.bench: {error}"
    except Exception:  # this rank alone: the others would wait for ever
        traceback.print_exc()
        if argv[0] != "input":
            from mpi4py import MPI
            MPI.COMM_WORLD.Abort(1)
        return 1
    if not (rank := rank_hint(os.environ)):
        print(told, file=sys.stderr, flush=True)
    if rank is not None and argv[:1] != ["input"]:  # a launcher may end all when the first one leaves
        from mpi4py import MPI
        with Watchdog(60), waiting("the end", MPI.COMM_WORLD):
            MPI.COMM_WORLD.Barrier()
    return 0 if argv[:1] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Dispatch to the one file that holds the named measurement."""
import importlib
import sys

from ..errors import UsageError

COMMANDS = {"allreduce": "time each algorithm over message sizes, beside MPI's own and Gloo",
            "input": "images/s of the input, beside torchvision's (needs torchvision)",
            "step": "time a training step beside torch's DDP and beside no communication"}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print("usage: python -m refimpl.bench COMMAND [--help]\n" + "\n".join(
            f"  {name:12}{what}" for name, what in COMMANDS.items()), file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    try:
        return importlib.import_module(f"refimpl.bench.{argv[0]}").main(argv[1:]) or 0
    except UsageError as error:
        print(f"refimpl.bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

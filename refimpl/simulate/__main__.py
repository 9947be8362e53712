"""`python -m refimpl.simulate trace --ranks 4 --algorithm ring [--plot F.png]`"""
import argparse
import sys

from refimpl.errors import UsageError
from refimpl.simulate.trace import ALGORITHMS, Trace
from refimpl.simulate.world import RankFailed


def grid(text: str) -> tuple[int, int]:
    """34x64 -> (34, 64): rows x columns."""
    rows, columns = text.lower().split("x")
    return int(rows), int(columns)


def trace(settings) -> None:
    made = Trace(settings.algorithm, settings.ranks, settings.grid, settings.ranks_per_node)
    print(made.table())
    if settings.plot:
        from refimpl.simulate.draw import draw
        draw(made, settings.plot)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m refimpl.simulate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("trace", help="print and draw who sends what to whom")
    one.add_argument("--ranks", type=int, default=4)
    one.add_argument("--algorithm", choices=ALGORITHMS, default="ring")
    one.add_argument("--grid", type=grid, metavar="RxC")
    one.add_argument("--ranks-per-node", type=int, help="for hierarchical; default: two nodes")
    one.add_argument("--plot", metavar="F.png")
    one.set_defaults(run=trace)
    settings = parser.parse_args()
    try:
        settings.run(settings)
    except (UsageError, RankFailed) as error:
        if not isinstance(error.__cause__ or error, UsageError):
            raise
        print(error.__cause__ or error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

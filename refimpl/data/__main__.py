"""python -m refimpl.data pack|check: prepare images, and hear what a run would meet in them."""
import argparse
import sys

from refimpl.config import checked
from refimpl.data.pool import cores
from refimpl.errors import UsageError


COUNTS = checked(lambda text: tuple(map(int, text.split(","))) * (2 - text.count(",")),
                 lambda counts: len(counts) == 2 and min(counts) > 0, "TRAIN[,VAL], each from 1")
PROCESSES = checked(int, lambda count: 0 <= count < 1000, "a whole number from 0 (none) to 999")


def _progress(jobs, total):
    from tqdm import tqdm
    return tqdm(jobs, total=total, unit="image", unit_scale=True, disable=None)


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m refimpl.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="make the stored zip that training reads best")
    pack.add_argument("source", help="folder or stored zip with train/ and val/, ILSVRC, IDX files")
    pack.add_argument("out", metavar="OUT.zip")
    pack.add_argument("--short-side", type=int, metavar="N", help="shrink to that many pixels")
    pack.add_argument("--quality", type=int, default=90, help="of shrunk JPEGs (default 90)")
    pack.add_argument("--at-most", type=COUNTS, metavar="TRAIN[,VAL]", help="images of each class")
    pack.add_argument("--truth", metavar="FILE", help="classes of a flat val/")
    check = commands.add_parser("check", help="list what a run would meet")
    check.add_argument("path", help="folder or stored zip with train/ and val/")
    check.add_argument("--json", action="store_true", help="the whole report as JSON")
    for one in (pack, check):
        one.add_argument("--processes", type=PROCESSES, default=cores(), help="default: all cores")
    return parser.parse_args()


def main():
    a = _arguments()
    try:
        if a.command == "check":
            from refimpl.data.check import run
            return run(a.path, a.processes, a.json, _progress)
        from refimpl.data.pack import pack
        notes = pack(a.source, a.out, a.short_side, a.quality, a.at_most, a.truth, a.processes, _progress)
        print(*notes[:20], *[f"... and {len(notes) - 20} more"] * (len(notes) > 20), sep="\n",
              end="\n" * bool(notes), file=sys.stderr)
        print(f"{a.out}: written and read back")
        return 0
    except UsageError as error:
        print(f"refimpl.data: {error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"refimpl.data: {error}; mend that, then start it again to go on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("refimpl.data: stopped; start it again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

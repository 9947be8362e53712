"""Constants that make the model of an allreduce meet what `bench allreduce --json` measured.

    python docs/fit.py rows.jsonl ... --cluster two_cores      what the constants are, every row's error

A path may end in @4: rows of nodes with 4 ranks each. To predict with what was found, give it to
`python -m refimpl.simulate` as --set NAME=VALUE.
"""
import collections
import json
import sys

import numpy as np

from refimpl.config import Parser

from refimpl.collective.grid import default_shape
from refimpl.errors import UsageError
from refimpl.simulate.__main__ import CONSTANT
from refimpl.simulate.cost import WHOLE, Cluster
from refimpl.simulate.form import ALGORITHMS, closed_form

SHARED = ["inside.overhead", "inside.latency", "inside.bandwidth", "rank.add", "rank.turn",
          "rank.switch", "rank.huge"]  # what is to be found where ranks share memory


def read(paths: list[str], per_node: float) -> list[tuple[str, int, int, int, float]]:
    """(algorithm, ranks, of a node, bytes, seconds), the median of its quietest run."""
    cases = collections.defaultdict(list)
    try:
        for path in paths:
            name, _, many = path.partition("@")
            for row in map(json.loads, open(name)):
                if row["algorithm"] in (*ALGORITHMS, "window"):
                    node = int(min(float(many or per_node), row["ranks"]))
                    cases[row["algorithm"], row["ranks"], node, row["bytes"]].append(row["median_s"])
        made = [(*case, min(seconds)) for case, seconds in sorted(cases.items())]
        if not 0 < min((min(row[1:]) for row in made), default=0):
            raise ValueError("no rows of an algorithm here, or a number that is not above 0")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{' '.join(paths)}: not rows of bench allreduce: {error!r}") from None
    return made


def errors(cluster: Cluster, rows) -> np.ndarray:
    """log(model / measured) of every row."""
    return np.log([closed_form(cluster.but(node__ranks=node), algorithm, ranks, nbytes,
                               default_shape(ranks, node), "ring")["seconds"] / seconds
                   for algorithm, ranks, node, nbytes, seconds in rows])


def fit(cluster: Cluster, rows, constants) -> Cluster:
    """Least squares of the logarithms over those of the constants (Levenberg and Marquardt); an
    error above a tenth counts only in proportion to itself (Huber)."""
    at, damping, step = np.log([max(cluster[name], 1e-7) for name in constants]), 0.1, 0.01

    def off(logs):
        found = cluster.but(**dict(zip(constants, np.exp(logs).tolist())))
        error = errors(found, rows)
        size = np.maximum(abs(error), 1e-9)
        return error / size * np.where(size < 0.1, size, np.sqrt(np.maximum(0.2 * size - 0.01, 0)))
    here = off(at)
    for _ in range(30):
        slope = np.array([off(at + step * e) - here for e in np.eye(len(at))]) / step
        move = np.linalg.solve(slope @ slope.T + damping * np.eye(len(at)), -slope @ here)
        new = np.maximum(at + np.clip(move, -1, 1), np.log(1e-9))  # a nanosecond is none
        there, damping = off(new), 4 * damping
        if there @ there < here @ here:
            at, here, damping = new, there, damping / 12
    return cluster.but(**dict(zip(constants, np.exp(at).tolist())))


def report(cluster: Cluster, rows) -> str:
    off = np.expm1(errors(cluster, rows))
    return "".join(
        f"{a:18}{n:4} ranks, {p:2} a node{b:12} bytes: measured {t * 1e3:9.3f} ms, model {e:+7.1%}\n"
        for (a, n, p, b, t), e in zip(rows, off)) + (
            f"median |error| {np.median(abs(off)):.1%}, "
            f"{(abs(off) <= 0.25).sum()} of {len(off)} within 25 %")


def main() -> int:
    parser = Parser(prog="python docs/fit.py", description=__doc__.partition("\n")[0])
    parser.add_argument("measured", nargs="+", metavar="F.jsonl[@RANKS_PER_NODE]")
    parser.add_argument("--cluster", default="two_cores")
    parser.add_argument("--set", type=CONSTANT, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--constants", nargs="+", default=SHARED,
                        choices=sorted({*Cluster("abci")} - {*WHOLE}))
    try:
        settings = parser.parse_args()
        cluster = Cluster(settings.cluster, settings.set)
        rows = read(settings.measured, cluster["node.ranks"])
        cluster = fit(cluster, rows, settings.constants)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    print(*(f"{name} = {cluster[name]:.4g}" for name in settings.constants),
          report(cluster, rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

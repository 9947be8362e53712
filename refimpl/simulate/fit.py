"""Constants that make the closed form meet what `bench allreduce --json` measured."""
import collections
import json
import math
import statistics

from refimpl.collective.grid import default_shape
from refimpl.errors import UsageError
from refimpl.simulate.cost import ALGORITHMS, Cluster, closed_form


def read(paths: list[str]) -> list[tuple[str, int, int, float]]:
    """(algorithm, ranks, bytes, seconds), the median of the medians of all runs of that case."""
    cases = collections.defaultdict(list)
    try:
        for row in (json.loads(line) for path in paths for line in open(path)):
            if row["algorithm"] in ALGORITHMS:
                cases[row["algorithm"], row["ranks"], row["bytes"]].append(row["median_s"])
        made = [(*case, statistics.median(seconds)) for case, seconds in sorted(cases.items())]
        if not 0 < min((min(row[1:]) for row in made), default=0):
            raise ValueError("no rows of an algorithm here, or a number that is not above 0")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{' '.join(paths)}: not rows of bench allreduce: {error!r}") from None
    return made


def errors(cluster: Cluster, rows) -> list[float]:
    """log(model / measured) of every row."""
    return [math.log(closed_form(cluster, algorithm, ranks, nbytes, default_shape(
        ranks, cluster.per_node(ranks)), "ring")["seconds"] / seconds)
        for algorithm, ranks, nbytes, seconds in rows]


def fit(cluster: Cluster, rows, constants) -> Cluster:
    """Least squares of the logarithms: one constant after another up or down, by ever less."""
    best, factor = sum(e * e for e in errors(cluster, rows)), 2.0
    while factor > 1.005:
        tries = [cluster.but(**{name: max(cluster[name], 1e-7) * f})
                 for name in constants for f in (factor, 1 / factor)]
        score, nearer = min(((sum(e * e for e in errors(c, rows)), c) for c in tries),
                            key=lambda pair: pair[0])
        if score < best:
            best, cluster = score, nearer
        else:
            factor **= 0.5
    return cluster


def report(cluster: Cluster, rows) -> str:
    off = [math.exp(e) - 1 for e in errors(cluster, rows)]
    lines = [f"{a:18}{n:4} ranks{b:12} bytes: measured {t * 1e3:9.3f} ms, model {e:+7.1%}"
             for (a, n, b, t), e in zip(rows, off)]
    return "\n".join([*lines, f"median |error| {statistics.median(map(abs, off)):.1%}, "
                              f"{sum(abs(e) <= 0.25 for e in off)} of {len(off)} within 25 %"])

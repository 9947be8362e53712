"""A training step on a cluster: compute, the trainer's buckets, and what of them backward hides."""
import math

from refimpl.collective.grid import default_shape
from refimpl.simulate.cost import Cluster, closed_form

IMAGES, TAIL = 1_281_167, 53_120 + 4  # ImageNet's training set; batch norm's updates in float32


def layers() -> list[tuple[int, int]]:
    """(values, multiplications for one image) of ResNet-50's tensors, in order of use."""
    made = []

    def convolution(inputs, outputs, kernel, side):
        weights = inputs * outputs * kernel * kernel
        made.extend([(weights, weights * side * side), (outputs, 0), (outputs, 0)])
    convolution(3, 64, 7, 112)
    channels, side = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            before, side = side, side // 2 if stage and not block else side
            convolution(channels, inner, 1, before)
            convolution(inner, inner, 3, side)
            convolution(inner, 4 * inner, 1, side)
            if not block:
                convolution(channels, 4 * inner, 1, side)
            channels = 4 * inner
    return made + [(2048 * 1000, 2048 * 1000), (1000, 0)]


def buckets(limit: float) -> list[tuple[int, float]]:
    """(values, share of backward that must be over) in the trainer's plan: neighbours in reverse
    order of use together while they fit `limit` values (gradients.plan_buckets)."""
    made, total, done = [], sum(work for _, work in layers()), 0
    for values, work in reversed(layers()):
        done += work
        if made and made[-1][0] + values <= limit:
            values += made.pop()[0]
        made.append((values, done / total))
    return made


def step(cluster: Cluster, ranks: int, plan: dict) -> dict:
    """Seconds of a step and its parts. plan: n, algorithm, shape, across, wire (bytes)."""
    compute = plan.get("n", 32) * cluster["compute.per_image"]
    if ranks > 1:  # everyone waits for the slowest of `ranks` normal deviates
        compute *= 1 + cluster["compute.spread"] * math.sqrt(2 * math.log(ranks))
    backward, overlap = compute * cluster["compute.backward"], cluster["compute.overlap"]
    shape, clock, spent = plan.get("shape"), 0.0, 0.0
    if not shape or math.prod(shape) != ranks:  # the recipe's grid is for its own number of ranks
        shape = default_shape(ranks)
    parts = [(values * plan["wire"], share) for values, share in buckets(cluster["compute.bucket"])]
    parts = [*parts, (4 * TAIL, 1.0)] if ranks > 1 else []
    took = {nbytes: cluster["compute.per_bucket"] + closed_form(
        cluster, plan["algorithm"], ranks, nbytes, shape, plan.get("across", "ring"))["seconds"]
        for nbytes in {nbytes for nbytes, _ in parts}}
    for nbytes, share in parts:
        ready = compute - overlap * backward * (1 - share)
        clock, spent = max(clock, ready) + took[nbytes], spent + took[nbytes]
    seconds = max(compute, clock)
    return {"seconds": seconds, "compute": compute, "allreduce": spent,
            "hidden": 1 - (seconds - compute) / spent if spent else 1.0,
            "images_per_s": ranks * plan.get("n", 32) / seconds}


def efficiency(cluster: Cluster, ranks: int, base: int, plan: dict) -> float:
    """Throughput of a rank among `ranks` over that of one among `base`."""
    return step(cluster, base, plan)["seconds"] / step(cluster, ranks, plan)["seconds"]


def published(entry: dict, cluster: Cluster) -> float:
    """The model's answer for the figure that a table of published.toml states."""
    ranks, plan = entry["ranks"], entry["plan"]
    if entry["quantity"] == "ring_over_halving_doubling":
        return step(cluster, ranks, {**plan, "across": "ring"})["allreduce"] / step(
            cluster, ranks, plan)["allreduce"]
    found = efficiency(cluster, ranks, entry["base"], plan)
    return found if entry["quantity"] == "efficiency" else 1 / found


def interval(cluster: Cluster, quantity) -> tuple[float, float, float, str, float]:
    """(low, middle, high) of quantity(cluster) over the unpublished constants' ranges, and the
    constant that alone moves it most, with how far.

    The ends are sought one constant after another, the strongest first, twice round.
    """
    alone = {name: [quantity(cluster.but(**{name: b})) for b in bounds]
             for name, bounds in cluster.ranges.items()}
    moves = {name: max(pair) - min(pair) for name, pair in alone.items()}
    order, ends = sorted(moves, key=moves.get, reverse=True), []
    for choose in (min, max):
        at, end = cluster, quantity(cluster)
        for name in order + order:
            end, bound = choose((quantity(at.but(**{name: b})), b) for b in cluster.ranges[name])
            at = at.but(**{name: bound})
        ends.append(end)
    return ends[0], quantity(cluster), ends[1], order[0], moves[order[0]]

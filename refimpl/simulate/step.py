"""A training step on a cluster: compute, the trainer's buckets, and what of them backward hides."""
import functools
import math

from refimpl.collective.grid import default_shape
from refimpl.simulate.cost import Cluster
from refimpl.simulate.form import closed_form

IMAGES, RESNET50 = 1_281_167, ((3, 4, 6, 3), 64, 224)  # ImageNet; depth, width, side of an image


@functools.cache
def layers(depth=RESNET50[0], width=64, side=224) -> list[tuple[int, int]]:
    """(values, multiplications for one image) of the network's tensors, in order of use."""
    made, channels = [], width

    def convolution(inputs, outputs, kernel, side):
        weights = inputs * outputs * kernel * kernel
        made.extend([(weights, weights * side * side), (outputs, 0), (outputs, 0)])
    large = side >= 100  # the stem that model.py calls "imagenet"
    convolution(3, width, 7 if large else 3, side // 2)
    side //= 4 if large else 2
    for stage, blocks in enumerate(depth):
        inner = width << stage
        for block in range(blocks):
            before, side = side, side // 2 if stage and not block else side
            convolution(channels, inner, 1, before)
            convolution(inner, inner, 3, side)
            convolution(inner, 4 * inner, 1, side)
            if not block:
                convolution(channels, 4 * inner, 1, side)
            channels = 4 * inner
    return made + [(channels * 1000, channels * 1000), (1000, 0)]


def buckets(limit: float, net=RESNET50) -> list[tuple[int, float]]:
    """(values, share of backward that must be over) in the trainer's plan: neighbours in reverse
    order of use together while they fit `limit` values (gradients.plan_buckets)."""
    made, total, done = [], sum(work for _, work in layers(*net)), 0
    for values, work in reversed(layers(*net)):
        done += work
        if made and made[-1][0] + values <= limit:
            values += made.pop()[0]
        made.append((values, done / total))
    return made


def tail(net=RESNET50) -> int:
    """Values reduced behind backward: batch norm's updates, as many as its parameters, and 5."""
    return sum(values for values, work in layers(*net)[:-1] if not work) + 5


def step(cluster: Cluster, ranks: int, plan: dict) -> dict:
    """Seconds of a step and its parts. plan: n, algorithm, shape, across, wire (bytes), net."""
    n, net, shape = plan.get("n", 32), plan.get("net", RESNET50), plan.get("shape")
    compute = n * cluster["compute.per_image"]
    compute *= sum(w for _, w in layers(*net)) / sum(w for _, w in layers())  # as fast each
    # everyone waits for the slowest of `ranks` normal deviates
    compute *= 1 + cluster["compute.spread"] * math.sqrt(2 * math.log(ranks))
    backward, clock, spent = compute * cluster["compute.backward"], 0.0, 0.0
    if not shape or math.prod(shape) != ranks:  # the recipe's grid is for its own number of ranks
        shape = default_shape(ranks, cluster.per_node(ranks))
    parts = [(values * plan["wire"], share) for values, share in buckets(
        cluster["compute.bucket"], net)] + [(4 * tail(net), 1.0)] if ranks > 1 else []
    took = {nbytes: cluster["compute.per_bucket"] + closed_form(
        cluster, plan["algorithm"], ranks, nbytes, shape, plan.get("across", "ring"))["seconds"]
        for nbytes in {nbytes for nbytes, _ in parts}}
    for nbytes, share in parts:
        ready = compute - cluster["compute.overlap"] * backward * (1 - share)
        clock, spent = max(clock, ready) + took[nbytes], spent + took[nbytes]
    seconds = max(compute, clock)
    return {"seconds": seconds, "compute": compute, "allreduce": spent,
            "hidden": max(0.0, 1 - (seconds - compute) / spent) if spent else 1.0,
            "images_per_s": ranks * n / seconds}


def efficiency(cluster: Cluster, ranks: int, base: int, plan: dict) -> float:
    """Throughput of a rank among `ranks` over that of one among `base`."""
    return step(cluster, base, plan)["seconds"] / step(cluster, ranks, plan)["seconds"]


def published(entry: dict, cluster: Cluster) -> float:
    """The model's answer for the figure that a table of published.toml states."""
    ranks, plan = entry["ranks"], entry["plan"]
    if entry["quantity"] == "ring_over_halving_doubling":
        ring, halving = (step(cluster, ranks, {**plan, "across": across})["allreduce"]
                         for across in ("ring", plan["across"]))
        return ring / halving
    found = efficiency(cluster, ranks, entry["base"], plan)
    return found if entry["quantity"] == "efficiency" else 1 / found


def interval(cluster: Cluster, quantity) -> tuple[float, float, float, str, float]:
    """(low, middle, high) of quantity(cluster) over the unpublished constants' ranges, and the
    constant that alone moves it most, with how far. The ends are sought one constant after
    another, the strongest first, twice round."""
    if not cluster.ranges:
        return *[quantity(cluster)] * 3, "nothing", 0.0
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
    most = order[0] if moves[order[0]] else "nothing"
    return ends[0], quantity(cluster), ends[1], most, moves[order[0]]

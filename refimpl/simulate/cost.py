"""What a message costs on a cluster: as clocks of simulated ranks, and in closed form.

    one message    latency + overhead + bytes / bandwidth, on a channel that is free; then the add
    channels       ranks of a node share its cards (between) or copy engines (inside), out and in
    leaf           messages between leaves share an uplink: all cards' bandwidth / oversubscription
    segments       beyond exchange.SEGMENT, one segment is added while the next is under way
"""
import collections
import copy
import pathlib

import numpy as np

from refimpl.collective import exchange
from refimpl.collective.grid import default_shape
from refimpl.config import tomllib
from refimpl.errors import UsageError
from refimpl.simulate.world import run

ALGORITHMS = ("ring", "torus", "halving_doubling", "hierarchical")
LINKS = ("inside", "between")
WHOLE = ("node.ranks", "node.per_leaf", "inside.channels", "between.channels")
FREE = ("latency", "overhead", "backward", "overlap", "spread", "bucket", "on_channel")  # may be 0
COPIES = ("all-gather", "doubling", "blocks down", "broadcast")  # phases that add nothing
FOLDER = pathlib.Path(__file__).parent / "clusters"


class Cluster(dict):
    """Constants by dotted name, in bytes and seconds; `ranges`: low, high of the unpublished."""
    def __init__(self, name: str, changes=()):
        names = sorted(path.stem for path in FOLDER.glob("*.toml"))
        if name not in names:
            raise UsageError(f"cluster {name!r}: choose from {', '.join(names)}")
        super().__init__()
        self.name, self.ranges = name, {}
        tables = tomllib.loads((FOLDER / f"{name}.toml").read_text())
        for table, entries in tables.items():
            for key, entry in entries.items() if isinstance(entries, dict) else ():
                if "value" not in entry:
                    low, high = self.ranges[f"{table}.{key}"] = entry["low"], entry["high"]
                    entry["value"] = (low * high) ** 0.5 if low > 0 else (low + high) / 2
                self[f"{table}.{key}"] = entry["value"]
        self.setdefault("rank.on_channel", 0)
        if unknown := set(dict(changes)) - set(self):
            raise UsageError(f"no constant {', '.join(unknown)}: choose from {', '.join(self)}")
        for key, value in dict(changes).items():
            least = 1 if key in WHOLE else 0 if key.endswith(FREE) else 1e-12
            if not least <= value <= 1e15 or key in WHOLE and value % 1:
                raise UsageError(f"{key}={value:g}: from {least:g} to 1e15, whole for a count")
        self.update(changes)

    def per_node(self, ranks: int) -> int:
        return int(min(self["node.ranks"], ranks))

    def but(self, **changes) -> "Cluster":
        """The same with other values; double underscores stand for dots."""
        other = copy.copy(self)
        other.update({k.replace("__", "."): v for k, v in changes.items()})
        return other


class Cost:
    """The cost model of `run(..., cost=)`: links are served in the order of asking."""

    def __init__(self, cluster: Cluster, ranks: int):
        self.place = Place(cluster, ranks)
        self.node, self.leaf = self.place.node.tolist(), self.place.leaf.tolist()
        self.channel = {link: self.place.channel[link].tolist() for link in LINKS}
        self.free: dict[tuple, float] = {}  # link and direction -> clock when it is free

    def transfer(self, s, d, nbytes, now, phase):
        """(clock when sent, clock when received, seconds to add it) of a message from s to d."""
        place, free = self.place, self.free
        link = "inside" if self.node[s] == self.node[d] else "between"
        line = place.overhead[link] + nbytes / place.rate[link]
        add = 0.0 if phase.endswith(COPIES) else nbytes * place.per_byte
        path = [((link, "out", self.channel[link][s]), line),
                ((link, "in", self.channel[link][d]), line)]
        if link in place.adding:
            path[1], add = (path[1][0], line + add), 0.0
        if self.leaf[s] != self.leaf[d]:
            path[1:1] = [((way, self.leaf[r]), nbytes / place.uplink)
                         for way, r in (("up", s), ("down", d))]
        for resource, seconds in path:  # each is free for others as soon as the message is through
            now = max(now, free.get(resource, 0.0))
            free[resource] = now + seconds
        end = now + seconds + place.latency[link]
        return end, end, add


class Place:
    """Where ranks sit, and what the links there can do."""

    def __init__(self, cluster: Cluster, ranks: int):
        r, per_node = np.arange(ranks), cluster.per_node(ranks)
        self.node = r // per_node
        self.leaf = (self.node // cluster["node.per_leaf"]).astype(int)
        self.channel, self.rate, self.latency, self.overhead = {}, {}, {}, {}
        for link in LINKS:
            many = int(min(cluster[f"{link}.channels"], per_node))
            self.channel[link] = self.node * many + r % per_node * many // per_node
            self.rate[link] = cluster[f"{link}.bandwidth"] * cluster.get(f"{link}.efficiency", 1)
            self.latency[link] = cluster[f"{link}.latency"]
            self.overhead[link] = cluster[f"{link}.overhead"]
        self.uplink = (self.rate["between"] * cluster["between.channels"]
                       * cluster["node.per_leaf"] / cluster["node.oversubscription"])
        self.per_byte = 1 / cluster["rank.add"]
        self.adding = ("inside",) if cluster["rank.on_channel"] else ()  # who copies, adds

    def round(self, source, dest, nbytes, adds) -> tuple[float, str]:
        """Seconds until the last of these simultaneous messages is added, and the busiest link."""
        apart = self.node[source] != self.node[dest]
        leaves = self.leaf[source] != self.leaf[dest]
        pieces, found = max(1, -(-int(nbytes) // exchange.segment(int(nbytes)))), []
        piece = nbytes / pieces
        for link, mask in zip(LINKS, (~apart, apart)):
            if not mask.any():
                continue
            one = self.overhead[link] + piece / self.rate[link]
            add = adds * piece * self.per_byte
            if link in self.adding:
                one, add = one + add, 0.0
            alone = self.latency[link] + one + add
            line, name = _most(self.channel[link], source[mask], dest[mask]) * one, link
            if link == "between" and leaves.any():
                line, name = max((line, name), (_most(
                    self.leaf, source[leaves], dest[leaves]) * piece / self.uplink, "uplink"))
            # on a shared link the others' messages hide latency and add: the longer one counts
            found.append((max(line, alone) + (pieces - 1) * max(line, add, alone / 2), name))
        return max(found)


def _most(place, source, dest) -> int:
    """Messages that the fullest place sends or receives."""
    return max(np.bincount(place[end]).max() for end in (source, dest))


def rounds(algorithm: str, ranks: int, nbytes: float, shape=None, per_node=1,
           across="halving_doubling"):
    """(times, source ranks, their destinations, bytes, adds?) of every kind of round."""
    r = np.arange(ranks)
    if algorithm == "ring":
        return [(ranks - 1, r, (r + 1) % ranks, nbytes / ranks, adds) for adds in (True, False)]
    if algorithm == "torus":
        (rows, columns), down = shape, (r + shape[1]) % ranks
        right = r - r % columns + (r + 1) % columns
        return [(columns - 1, r, right, nbytes / columns, True),
                *((rows - 1, r, down, nbytes / ranks, adds) for adds in (True, False)),
                (columns - 1, r, right, nbytes / columns, False)]
    if algorithm == "halving_doubling":
        return _binary_blocks(ranks, nbytes)
    leaders = r[::per_node]
    pieces, hops = max(1, -(-int(nbytes) // exchange.SEGMENT)), min(per_node, ranks) - 1
    chain = r[:-1][r[:-1] % per_node < min(hops, pieces)]  # links at work at the same time
    inside = [(pieces + hops - 1, chain, chain + 1, nbytes / pieces, adds)
              for adds in (True, False)] if hops else []
    middle = [(times, leaders[s], leaders[d], b, adds) for times, s, d, b, adds in rounds(
        across, len(leaders), nbytes, default_shape(len(leaders)))]
    return inside[:1] + middle + inside[1:]


def _binary_blocks(ranks, nbytes):
    """Rounds of the slowest way: sums climb while larger blocks still halve, results come down
    while larger blocks already double, so what a smaller block does meanwhile costs nothing."""
    sizes = [1 << bit for bit in reversed(range(ranks.bit_length())) if ranks >> bit & 1]
    r, start, between = np.arange(sizes[0]), sizes[0], []
    steps = [(1, r, r ^ 1 << s, nbytes / 2 ** (s + 1)) for s in range(sizes[0].bit_length() - 1)]
    if len(sizes) > 1:
        child = np.arange(start, start + sizes[1])
        between = [(sizes[0] // sizes[1], child, child - sizes[0], nbytes / sizes[0])]
    return [*((*step, True) for step in steps + between),
            *((*step, False) for step in between + steps[::-1])]


def closed_form(cluster: Cluster, algorithm: str, ranks: int, nbytes: float, shape=None,
                across="halving_doubling") -> dict:
    """Seconds, messages of a rank, bytes by link class over all ranks, and the busiest class."""
    place, seconds, messages, share = Place(cluster, ranks), 0.0, 0, collections.Counter()
    moved = collections.Counter(inside=0.0, between=0.0, uplink=0.0)
    for times, source, dest, size, adds in rounds(
            algorithm, ranks, nbytes, shape, cluster.per_node(ranks), across):
        if not (times and len(source)):
            continue
        took, link = place.round(source, dest, size, adds)
        seconds, messages = seconds + times * took, messages + times
        share[link] += times * took
        apart = (place.node[source] != place.node[dest]).sum()
        moved["between"] += times * size * apart
        moved["inside"] += times * size * (len(source) - apart)
        moved["uplink"] += times * size * (place.leaf[source] != place.leaf[dest]).sum()
    return {"seconds": seconds, "rounds": messages, **moved,
            "busiest": max(share, key=share.get, default="none")}


def simulated(cluster: Cluster, algorithm: str, ranks: int, nbytes: float, shape=None,
              across="halving_doubling") -> list[float]:
    """Seconds of every rank, the algorithm run on clocks; an element stands for many bytes."""
    from refimpl.collective import allreducer
    elements = ranks * max(1, round(nbytes / ranks / (exchange.SEGMENT // 4)))
    magnify = nbytes / (4 * elements)
    options = {"ranks_per_node": cluster.per_node(ranks),
               "across": across} if algorithm == "hierarchical" else {}

    def program(comm):
        reduce = allreducer(algorithm, comm, shape if algorithm == "torus" else None, **options)
        comm.Barrier()
        before = comm.me.clock
        reduce(np.zeros(elements, np.float32))
        return comm.me.clock - before
    kept = exchange.SEGMENT
    exchange.SEGMENT = max(4, round(kept / magnify))  # the same segments, in bytes of the model
    try:
        return run(ranks, program, cost=Cost(cluster, ranks), magnify=magnify).results
    finally:
        exchange.SEGMENT = kept

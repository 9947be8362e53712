"""What a message costs on a cluster: as clocks of simulated ranks, and in closed form.

    one message    latency + overhead + bytes / bandwidth, on a channel that is free; then the add
    channels       ranks of a node share its cards (between) or copy engines (inside), out and in
    leaf           messages between leaves share an uplink: all cards' bandwidth / oversubscription
    segments       one segment is added while the next is under way
    cores          where ranks share a machine's cores, these do overhead, copy and add; to begin
                   takes a turn for each rank beside oneself on a core, each message a switch
    burst          a token bucket lets bytes through at once that it saved up while nobody sent
"""
import copy
import math
import pathlib

import numpy as np

from refimpl.collective import exchange
from refimpl.config import tomllib
from refimpl.errors import UsageError

LINKS = ("inside", "between")
WHOLE = ("node.ranks", "node.per_leaf", "inside.channels", "between.channels", "rank.cores")
DEFAULTS = {"rank.cores": 0, "rank.turn": 0, "rank.switch": 0, "rank.huge": 1, "between.burst": 0}
FREE = ("latency", "overhead", "backward", "overlap", "spread", "bucket", "cores", "turn", "switch",
        "burst")  # may be 0
COPIES = ("all-gather", "doubling", "blocks down", "broadcast")  # phases that add nothing
HUGE = 1 << 22  # bytes from which on NumPy asks for huge pages
FOLDER = pathlib.Path(__file__).parent / "clusters"


class Cluster(dict):
    """Constants by dotted name, in bytes and seconds; `ranges`: low, high of the unpublished."""
    def __init__(self, name: str, changes=()):
        if name not in (names := sorted(path.stem for path in FOLDER.glob("*.toml"))):
            raise UsageError(f"cluster {name!r}: choose from {', '.join(names)}")
        super().__init__(DEFAULTS)
        self.name, self.ranges = name, {}
        title, *tables = tomllib.loads((FOLDER / f"{name}.toml").read_text()).items()
        for key, entry in ((f"{t}.{k}", entry) for t, table in tables for k, entry in table.items()):
            if "value" not in entry:
                low, high = self.ranges[key] = entry["low"], entry["high"]
                entry["value"] = (low * high) ** 0.5 if low > 0 else (low + high) / 2
            self[key] = entry["value"]
        for key, value in dict(changes).items():
            if key not in self:
                raise UsageError(f"no constant {key}: choose from {', '.join(self)}")
            least = 0 if key.endswith(FREE) else 1 if key in WHOLE else 1e-12
            if not least <= value <= 1e15 or key in WHOLE and value % 1:
                raise UsageError(f"{key}={value:g}: from {least:g} to 1e15, whole for a count")
            self[key] = value
            self.ranges.pop(key, None)  # what is given is known

    def per_node(self, ranks: int) -> int:
        return int(min(self["node.ranks"], ranks))

    def but(self, **changes) -> "Cluster":
        """The same with other values; double underscores stand for dots."""
        other = copy.copy(self)
        return other.update({k.replace("__", "."): v for k, v in changes.items()}) or other


class Cost:
    """The cost model of `run(..., cost=)`: links are served in the order of asking."""

    def __init__(self, place: "Place"):
        self.place, self.core = place, place.core.tolist()
        self.node, self.leaf = place.node.tolist(), place.leaf.tolist()
        self.channel = {link: place.channel[link].tolist() for link in LINKS}
        self.free: dict[tuple, float] = {}  # link and direction -> clock when it is free
        self.notes: dict[int, tuple] = {}  # rank -> that of its last message

    def transfer(self, s, d, nbytes, now, note):
        """(clock when sent, clock when received, seconds to add it) of a message from s to d;
        note: what exchange notes for the watchdog, the same for all segments of one call."""
        place, free = self.place, self.free
        link = "inside" if self.node[s] == self.node[d] else "between"
        line, over, late = nbytes / place.rate[link], place.overhead[link], place.latency[link]
        phase = note[1] if note else ""  # a sum comes to the leader whole
        add = (0.0 if phase.endswith(COPIES) or phase == "node reduce" and d < s else
               nbytes * place.per_byte)
        if place.cores:  # the receiver's does everything but the wire; segments wake nobody again
            if self.notes.get(s) == note:
                over = late = 0.0
            self.notes[s] = note
            core, busy = ("core", self.core[d]), over + add + line * (link == "inside")
            now = free[core] = max(now, free.get(core, 0.0)) + busy
            add = over = 0.0
        path = [] if place.cores and link == "inside" else [
            ((link, "out", self.channel[link][s]), over + line),
            ((link, "in", self.channel[link][d]), over + line)]
        if self.leaf[s] != self.leaf[d]:
            path[1:1] = [((way, self.leaf[r]), nbytes / place.uplink)
                         for way, r in (("up", s), ("down", d))]
        end = now
        for resource, seconds in path:  # each is free for others as soon as the message is through
            end = free[resource] = seconds + max(
                free.get(resource, -place.credit), now - place.slack)
            now = max(now, end - seconds)
        end = max(now, end) + late
        return end, end, add


class Place:
    """Where ranks sit, and what the links there can do to a buffer of `nbytes`."""

    def __init__(self, cluster: Cluster, ranks: int, nbytes: float = 0):
        r, per_node = np.arange(ranks), cluster.per_node(ranks)
        self.node = r // per_node
        self.leaf = (self.node // cluster["node.per_leaf"]).astype(int)
        self.cores = int(min(cluster["rank.cores"], ranks))
        self.core, crowd = r * self.cores // ranks, ranks / (self.cores or ranks)  # ranks on a core
        fast = cluster["rank.huge"] if nbytes >= HUGE else 1
        self.channel, self.rate, self.latency, self.overhead = {}, {}, {}, {}
        for link in LINKS:
            many = int(min(cluster[f"{link}.channels"], per_node))
            self.channel[link] = self.node * many + r % per_node * many // per_node
            self.rate[link] = cluster[f"{link}.bandwidth"] * cluster.get(f"{link}.efficiency", fast)
            self.latency[link] = cluster[f"{link}.latency"]
            self.overhead[link] = cluster[f"{link}.overhead"] + cluster["rank.switch"] * (crowd - 1)
        self.uplink = (self.rate["between"] * cluster["between.channels"]
                       * cluster["node.per_leaf"] / cluster["node.oversubscription"])
        self.per_byte = 1 / (cluster["rank.add"] * fast)
        self.start, link = cluster["rank.turn"] * (crowd - 1), LINKS[int(self.node[-1] > 0)]
        self.barrier = math.ceil(math.log2(ranks)) * (
            self.latency[link] + crowd * cluster[f"{link}.overhead"])
        self.slack = cluster["between.burst"] / self.rate["between"]  # seconds, of a full bucket,
        self.credit = min(self.slack, self.start + self.barrier)  # and what a barrier lets it save

    def round(self, source, dest, nbytes, adds) -> tuple[float, float, str]:
        """Seconds until the last of these simultaneous messages is added, seconds that a token
        bucket's wire needs beside that, and the busiest link; adds: the share that is added."""
        apart, leaves = (at[source] != at[dest] for at in (self.node, self.leaf))
        masks = [(link, mask) for link, mask in zip(LINKS, (~apart, apart)) if mask.any()]
        if self.cores:
            return self._on_cores(source, dest, nbytes, adds, masks)
        pieces, found = segments(nbytes), []
        for link, mask in masks:
            one = self.overhead[link] + nbytes / pieces / self.rate[link]
            add = (adds > 0) * nbytes / pieces * self.per_byte
            alone = self.latency[link] + one + add
            line, name = _most(self.channel[link], source[mask], dest[mask]) * one, link
            if link == "between" and leaves.any():
                line, name = max((line, name), (_most(
                    self.leaf, source[leaves], dest[leaves]) * nbytes / pieces / self.uplink, "uplink"))
            # on a shared link the others' messages hide latency and add: the longer one counts;
            busy = max(line, add)  # two segments are under way: the third waits for the first
            found.append((max((pieces - 1) * busy + max(line, alone),
                              (pieces + 1) // 2 * alone + (pieces + 1) % 2 * busy), 0.0, name))
        return max(found)

    def _on_cores(self, source, dest, nbytes, adds, masks):
        seconds = max(self.latency[link] for link, _ in masks)
        for link, mask in masks:
            wire = nbytes / self.rate[link]
            busy = self.overhead[link] + adds * nbytes * self.per_byte + wire * (link == "inside")
            seconds += np.bincount(self.core[dest[mask]]).max() * busy
        wire *= (link == "between") * _most(self.channel[link], source[mask], dest[mask])
        return (seconds, wire, link) if self.slack else (seconds + wire, 0.0, link)


def segments(nbytes: float) -> int:
    """Into how many messages `exchange` cuts so many bytes."""
    return max(1, -(-int(nbytes) // exchange.segment(int(nbytes))))


def _most(place, source, dest) -> int:
    """Messages that the fullest place sends or receives."""
    return max(np.bincount(place[end]).max() for end in (source, dest))

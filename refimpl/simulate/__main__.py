"""Collectives on simulated ranks: what they do (trace) and how long they take on a cluster."""
import argparse
import json
import math
import pathlib
import sys

from refimpl.collective.grid import default_shape
from refimpl.errors import UsageError
from refimpl.simulate import step as steps
from refimpl.simulate.cost import Cluster, closed_form, simulated, tomllib
from refimpl.simulate.trace import ALGORITHMS, Trace
from refimpl.simulate.world import RankFailed

MOST = 1_500_000  # messages that are simulated one by one; above, the closed form answers alone


def grid(text: str) -> tuple[int, int]:
    """34x64 -> (34, 64): rows x columns."""
    rows, columns = text.lower().split("x")
    return int(rows), int(columns)


def size(text: str) -> float:
    """51M -> 51e6 bytes."""
    return float(text.rstrip("kKMG")) * {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1)


def constant(text: str) -> tuple[str, float]:
    """between.latency=5e-6"""
    name, value = text.split("=")
    return name, float(value)


def cluster_of(settings, default="abci") -> Cluster:
    cluster, changes = Cluster(settings.cluster or default), dict(settings.set or ())
    unknown = set(changes) - set(cluster)
    if unknown:
        raise UsageError(f"no constant {', '.join(unknown)}: choose from {', '.join(cluster)}")
    return Cluster(cluster.name, changes)


def trace(settings) -> None:
    made = Trace(settings.algorithm, settings.ranks, settings.grid, settings.ranks_per_node)
    print(made.table())
    if settings.plot:
        from refimpl.simulate.draw import draw
        draw(made, settings.plot)


def allreduce(settings) -> None:
    cluster, ranks, nbytes = cluster_of(settings), settings.ranks, settings.bytes
    node = int(min(cluster["node.ranks"], ranks))
    shape = settings.grid or default_shape(ranks, node)
    if math.prod(shape) != ranks:
        raise UsageError(f"--grid {shape[0]}x{shape[1]} does not hold {ranks} ranks")
    names = ALGORITHMS if settings.algorithms == ["all"] else settings.algorithms
    print(f"{cluster.name}, {ranks} ranks, {nbytes:.4g} bytes, torus {shape[0]}x{shape[1]}\n"
          f"{'':18}{'simulated':>12}{'closed form':>13}{'rounds':>8}   MB between ranks: "
          f"{'in nodes':>9}{'nodes':>9}{'leaves':>9}   busiest")
    for name in names:
        form = closed_form(cluster, name, ranks, nbytes, shape, settings.across)
        few = form["rounds"] * ranks <= MOST and not settings.closed_form
        ran = max(simulated(cluster, name, ranks, nbytes, shape if name == "torus" else None,
                            settings.across).results) if few else math.nan
        print(f"{name:18}{f'{ran * 1e3:9.3f} ms' if few else 'not run':>12}"
              f"{form['seconds'] * 1e3:10.3f} ms{form['rounds']:8}   {'':18}"
              f"{form['inside'] / 1e6:9.0f}{form['between'] / 1e6:9.0f}{form['uplink'] / 1e6:9.0f}"
              f"   {form['busiest']}")
    if settings.plot:
        from refimpl.simulate.draw import curves
        at = [2.0 ** e for e in range(10, 31)]
        curves({name: [(b, closed_form(cluster, name, ranks, b, shape, settings.across)["seconds"])
                       for b in at] for name in names}, "bytes", "seconds", settings.plot,
               f"allreduce on {ranks} ranks of {cluster.name} (closed form)")


def recipe_plans(settings):
    """The recipe, its cluster, and (until epoch, ranks, plan) of each band."""
    from refimpl.config import load_recipe
    from refimpl.settings import Settings
    recipe = load_recipe(settings.recipe)
    s = Settings(**recipe.values)
    hardware = {k: v["value"] for k, v in recipe.hardware.items()}
    cluster = cluster_of(settings, {4: "abci", 8: "bigbasin"}.get(hardware.get("per_node"), "h100"))
    wire = settings.wire or s.wire
    plan = {"algorithm": settings.algorithm or (
                "hierarchical" if s.allreduce == "auto" else s.allreduce),
            "across": s.across, "wire": 4 if wire == "none" else 2,
            "shape": settings.grid or ("grid" in hardware and grid(hardware["grid"])) or None}
    return recipe, s, cluster, [(b.until_epoch, b.workers, {**plan, "n": b.n})
                                for b in s.in_bands()]


def step(settings) -> None:
    recipe, _, cluster, bands = recipe_plans(settings)
    print(f"{recipe.name} on {cluster.name}: middle of the unknown constants, [low, high]")
    totals, begun = [0.0, 0.0, 0.0], 0
    for until, ranks, plan in bands:
        ranks = settings.ranks or ranks
        at = steps.step(cluster, ranks, plan)
        base = int(cluster["node.ranks"])
        low, _, high, most, _ = steps.interval(
            cluster, lambda c: steps.step(c, ranks, plan)["seconds"])
        print(f"epochs {begun}-{until}: {ranks} ranks x {plan['n']}: "
              f"{at['seconds'] * 1e3:.1f} ms a step [{low * 1e3:.1f}, {high * 1e3:.1f}; mostly "
              f"{most}], allreduce {at['allreduce'] * 1e3:.1f} ms of which "
              f"{at['hidden']:.0%} hidden, {at['images_per_s']:,.0f} images/s, efficiency "
              f"{steps.efficiency(cluster, ranks, base, plan):.1%} against {base}")
        count = math.ceil(steps.IMAGES / (ranks * plan["n"])) * (until - begun)
        totals = [t + count * s for t, s in zip(totals, (low, at["seconds"], high))]
        begun = until
    print(f"whole recipe: {totals[1]:.0f} s [{totals[0]:.0f}, {totals[2]:.0f}], training steps "
          f"alone; published: {recipe.published.get('time', {}).get('value', '-')}")


def scaling(settings) -> None:
    recipe, _, cluster, bands = recipe_plans(settings)
    first, last = (int(x) for x in settings.range.split(":"))
    plan, base, rows, ranks = {**bands[-1][2], "n": 32}, int(cluster["node.ranks"]), [], first
    while ranks <= last:
        rows.append((ranks, *steps.interval(
            cluster, lambda c: steps.efficiency(c, ranks, base, plan))[:3]))
        print(f"{ranks:6} ranks  efficiency {rows[-1][2]:6.1%} [{rows[-1][1]:6.1%},"
              f" {rows[-1][3]:6.1%}]")
        ranks *= 2
    if settings.plot:
        from refimpl.simulate.draw import curves
        points = [(e["ranks"], e["published"]) for e in published_figures().values()
                  if e["cluster"] == cluster.name and e["quantity"] == "efficiency"]
        curves({name: [(r[0], r[i]) for r in rows] for i, name in ((3, "best end of all ranges"),
                (2, "middle"), (1, "worst end"))} | {"published": points}, "GPUs",
               "efficiency", settings.plot, f"{recipe.name} on {cluster.name}", ylog=False)


def published_figures() -> dict:
    return tomllib.loads((pathlib.Path(__file__).parent / "published.toml").read_text())


def papers(settings) -> None:
    print(f"{'':54}published   low  middle    high           moved most by")
    for entry in published_figures().values():
        low, middle, high, most, by = steps.interval(
            Cluster(entry["cluster"]), lambda c: steps.published(
                entry["quantity"], c, entry["ranks"], entry["base"], entry["plan"]))
        print(f"{entry['claim']:54}{entry['published']:9.3f}{low:8.3f}{middle:8.3f}{high:8.3f}  "
              f"{'inside ' if low <= entry['published'] <= high else 'OUTSIDE'}  {most} ({by:.3f})")


def fit(settings) -> None:
    """Constants that make the closed form meet measurements (rows of `bench allreduce --json`)."""
    cluster = cluster_of(settings, "two_cores")
    rows = [r for r in map(json.loads, open(settings.measured)) if r["algorithm"] in ALGORITHMS]

    def errors(c):
        return [math.log(closed_form(c, r["algorithm"], r["ranks"], r["bytes"], default_shape(
            r["ranks"], int(min(c["node.ranks"], r["ranks"]))), "ring")["seconds"] / r["median_s"])
            for r in rows]
    best, factor = sum(e * e for e in errors(cluster)), 2.0
    while factor > 1.005:
        tries = [cluster.but(**{name: max(cluster[name], 1e-7) * f})
                 for name in settings.constants for f in (factor, 1 / factor)]
        score, trial = min(((sum(e * e for e in errors(t)), i) for i, t in enumerate(tries)))
        best, cluster, factor = ((score, tries[trial], factor) if score < best
                                 else (best, cluster, factor ** 0.5))
    for name in settings.constants:
        print(f"{name} = {cluster[name]:.4g}")
    off = [math.exp(e) - 1 for e in errors(cluster)]
    for r, e in zip(rows, off):
        print(f"{r['algorithm']:18}{r['ranks']:4} ranks{r['bytes']:12} bytes: measured "
              f"{r['median_s'] * 1e3:9.3f} ms, model {100 * e:+6.1f} %")
    print(f"median |error| {sorted(map(abs, off))[len(off) // 2]:.1%}, "
          f"{sum(abs(e) <= 0.25 for e in off)} of {len(off)} within 25 %")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m refimpl.simulate", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def command(function, text, *options):
        one = commands.add_parser(function.__name__, help=text)
        one.set_defaults(run=function)
        for name, *rest in options:
            one.add_argument(name, **(rest[0] if rest else {}))
    common = (("--cluster",), ("--set", {"type": constant, "action": "append",
               "metavar": "NAME=VALUE", "help": "change a constant"}))
    layout = (("--grid", {"type": grid, "metavar": "RxC"}), ("--plot", {"metavar": "F.png"}))
    recipe = (("--recipe", {"default": "mikami_v1_224s"}), ("--wire",), ("--algorithm",))
    command(trace, "print and draw who sends what to whom", *layout,
            ("--ranks", {"type": int, "default": 4}),
            ("--algorithm", {"choices": ALGORITHMS, "default": "ring"}),
            ("--ranks-per-node", {"type": int, "help": "hierarchical; default: two nodes"}))
    command(allreduce, "time on a cluster, simulated and in closed form", *common, *layout,
            ("--closed-form", {"action": "store_true", "help": "simulate nothing"}),
            ("--ranks", {"type": int, "required": True}), ("--bytes", {"type": size,
             "default": 51e6}), ("--across", {"default": "halving_doubling"}),
            ("--algorithms", {"nargs": "+", "choices": (*ALGORITHMS, "all"), "default": ["all"]}))
    command(step, "a recipe's step and whole time", *common, *layout[:1], *recipe,
            ("--ranks", {"type": int}))
    command(scaling, "efficiency over ranks", *common, *layout, *recipe,
            ("--ranks", {"dest": "range", "default": "4:4096", "metavar": "FIRST:LAST"}))
    command(papers, "published figures beside the model's intervals")
    command(fit, "constants from measurements", *common, ("measured", {"metavar": "F.jsonl"}),
            ("--constants", {"nargs": "+", "default": ["inside.overhead", "inside.bandwidth",
                                                       "rank.add"]}))
    return top


def main() -> int:
    try:
        settings = parser().parse_args()
        settings.run(settings)
    except (UsageError, RankFailed) as error:
        if not isinstance(error.__cause__ or error, UsageError):
            raise
        print(error.__cause__ or error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

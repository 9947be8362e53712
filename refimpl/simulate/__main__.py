"""Collectives on simulated ranks: what they do (trace) and how long they take on a cluster."""
import argparse
import math
import pathlib
import sys

from refimpl.collective.grid import default_shape
from refimpl.errors import UsageError
from refimpl.simulate import step as steps
from refimpl.simulate.cost import ALGORITHMS, Cluster, closed_form, simulated, tomllib
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


def trace(settings) -> None:
    from refimpl.simulate.trace import Trace
    made = Trace(settings.algorithm, settings.ranks, settings.grid, settings.ranks_per_node)
    print(made.table())
    if settings.plot:
        from refimpl.simulate.draw import draw
        draw(made, settings.plot)


def allreduce(settings) -> None:
    cluster, ranks, nbytes = (Cluster(settings.cluster or "abci", settings.set), settings.ranks,
                              settings.bytes)
    shape = settings.grid or default_shape(ranks, cluster.per_node(ranks))
    if math.prod(shape) != ranks:
        raise UsageError(f"--grid {shape[0]}x{shape[1]} does not hold {ranks} ranks")
    names = ALGORITHMS if settings.algorithms == ["all"] else settings.algorithms
    print(f"{cluster.name}, {ranks} ranks, {nbytes:.4g} bytes, torus {shape[0]}x{shape[1]}\n"
          f"{'':18}{'simulated':>12}{'closed form':>13}{'rounds':>8}   MB between ranks: "
          f"{'in nodes':>9}{'nodes':>9}{'leaves':>9}   busiest")
    for name in names:
        form = closed_form(cluster, name, ranks, nbytes, shape, settings.across)
        ran = "not run"
        if form["rounds"] * ranks <= MOST and not settings.closed_form:
            at = simulated(cluster, name, ranks, nbytes, shape, settings.across)
            ran = f"{max(at) * 1e3:.3f} ms"
        print(f"{name:18}{ran:>12}{form['seconds'] * 1e3:10.3f} ms{form['rounds']:8}   {'':18}"
              f"{form['inside'] / 1e6:9.0f}{form['between'] / 1e6:9.0f}{form['uplink'] / 1e6:9.0f}"
              f"   {form['busiest']}")
    if settings.plot:
        from refimpl.simulate.draw import curves
        curves({name: [(b, closed_form(cluster, name, ranks, b, shape, settings.across)["seconds"])
                       for b in (2.0 ** e for e in range(10, 31))] for name in names},
               "bytes", "seconds", settings.plot, f"{ranks} ranks of {cluster.name} (closed form)")


def recipe_plans(settings):
    """The recipe, its cluster, and (until epoch, ranks, plan) of each band."""
    from refimpl.config import load_recipe
    from refimpl.settings import Settings
    recipe = load_recipe(settings.recipe)
    s = Settings(**recipe.values)
    hardware = {k: v["value"] for k, v in recipe.hardware.items()}
    usual = {4: "abci", 8: "bigbasin"}.get(hardware.get("per_node"), "h100")
    plan = {"algorithm": settings.algorithm or (
                "hierarchical" if s.allreduce == "auto" else s.allreduce), "across": s.across,
            "wire": 4 if (settings.wire or s.wire) == "none" else 2,
            "shape": settings.grid or ("grid" in hardware and grid(hardware["grid"])) or None}
    return (recipe, Cluster(settings.cluster or usual, settings.set),
            [(b.until_epoch, b.workers, {**plan, "n": b.n}) for b in s.in_bands()])


def step(settings) -> None:
    recipe, cluster, bands = recipe_plans(settings)
    print(f"{recipe.name} on {cluster.name}: middle of the unknown constants, [low, high]")
    totals, begun, base = [0.0, 0.0, 0.0], 0, int(cluster["node.ranks"])
    for until, ranks, plan in bands:
        ranks = settings.ranks or ranks
        at = steps.step(cluster, ranks, plan)
        *times, most, _ = steps.interval(cluster, lambda c: steps.step(c, ranks, plan)["seconds"])
        print(f"epochs {begun}-{until}: {ranks} ranks x {plan['n']}: {times[1] * 1e3:.1f} ms a "
              f"step [{times[0] * 1e3:.1f}, {times[2] * 1e3:.1f}; mostly {most}], allreduce "
              f"{at['allreduce'] * 1e3:.1f} ms of which {at['hidden']:.0%} hidden, "
              f"{at['images_per_s']:,.0f} images/s, efficiency "
              f"{steps.efficiency(cluster, ranks, base, plan):.1%} against {base}")
        count = math.ceil(steps.IMAGES / (ranks * plan["n"])) * (until - begun)
        totals, begun = [t + count * s for t, s in zip(totals, times)], until
    print(f"whole recipe: {totals[1]:.0f} s [{totals[0]:.0f}, {totals[2]:.0f}], training steps "
          f"alone; published: {recipe.published.get('time', {}).get('value', '-')}")


def scaling(settings) -> None:
    recipe, cluster, bands = recipe_plans(settings)
    ranks, last = (int(x) for x in settings.range.split(":"))
    plan, base, rows = {**bands[-1][2], "n": 32}, int(cluster["node.ranks"]), []
    while ranks <= last:
        low, middle, high, *_ = steps.interval(
            cluster, lambda c: steps.efficiency(c, ranks, base, plan))
        rows.append((ranks, low, middle, high))
        print(f"{ranks:6} ranks  efficiency {middle:6.1%} [{low:6.1%}, {high:6.1%}]")
        ranks *= 2
    if settings.plot:
        from refimpl.simulate.draw import curves
        lines = {name: [(r[0], r[i]) for r in rows] for i, name in (
            (3, "best end of all ranges"), (2, "middle"), (1, "worst end"))}
        lines["published"] = [(e["ranks"], e["published"]) for e in published_figures()
                              if e["cluster"] == cluster.name and e["quantity"] == "efficiency"]
        curves(lines, "GPUs", "efficiency", settings.plot, f"{recipe.name} on {cluster.name}",
               ylog=False)


def published_figures() -> list[dict]:
    path = pathlib.Path(__file__).parent / "published.toml"
    return list(tomllib.loads(path.read_text()).values())


def papers(settings) -> None:
    print(f"{'':54}published   low  middle    high           moved most by")
    for entry in published_figures():
        low, middle, high, most, by = steps.interval(
            Cluster(entry["cluster"]), lambda c: steps.published(entry, c))
        print(f"{entry['claim']:54}{entry['published']:9.3f}{low:8.3f}{middle:8.3f}{high:8.3f}  "
              f"{'inside ' if low <= entry['published'] <= high else 'OUTSIDE'}  {most} ({by:.3f})")


def fit(settings) -> None:
    from refimpl.simulate.fit import fit, read, report
    rows = read(settings.measured)
    cluster = fit(Cluster(settings.cluster or "two_cores", settings.set), rows, settings.constants)
    for name in settings.constants:
        print(f"{name} = {cluster[name]:.4g}")
    print(report(cluster, rows))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m refimpl.simulate", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def command(function, text, *options):
        one = commands.add_parser(function.__name__, help=text)
        one.set_defaults(run=function)
        for name, *rest in options:
            one.add_argument(name, **(rest[0] if rest else {}))
    common = (("--cluster",), ("--set", {"type": constant, "action": "append", "default": [],
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
    command(fit, "constants from measurements", *common, ("measured", {"nargs": "+",
            "metavar": "F.jsonl"}), ("--constants", {"nargs": "+", "default": [
                "inside.overhead", "inside.bandwidth", "rank.add"]}))
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

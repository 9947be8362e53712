"""What --dry-run and --list-recipes print: schedule, published result, how sure each value is."""
import dataclasses
import math

from refimpl.config import TAGS, Recipe, load_recipe, recipe_names
from refimpl.schedule import Schedule
from refimpl.settings import FIELDS, RUN, SPEED, CHECKS, Settings

MOST = 1000  # epochs that are laid out
LONGEST = 40  # rows of a table of epochs that a person reads


def recipe_list() -> str:
    """A line per recipe: name, k x n, epochs, title."""
    recipes = [load_recipe(name) for name in recipe_names()]
    sizes = [" -> ".join(str(b.kn) for b in Settings(**r.values).in_bands()) for r in recipes]
    return _table([("recipe", "kn", "")] + [(r.name, size, r.title)
                                            for r, size in zip(recipes, sizes, strict=True)])


def plan(s: Settings, images: int) -> dict:
    """Everything a dry run says, for programs; raises UsageError as Schedule does."""
    recipe, schedule = load_recipe(s.recipe), Schedule(s, images)
    return {"recipe": s.recipe, "title": recipe.title, "notes": recipe.notes.strip(),
            "images": images, "total_steps": schedule.total_steps,
            "bands": [_band(s, recipe, schedule, stage) for stage in schedule.stages],
            "epochs": [_epoch(schedule, epoch) for epoch in range(min(s.epochs, MOST))],
            "epochs_left_out": max(0, s.epochs - MOST),
            "hardware": recipe.hardware, "published": recipe.published,
            "settings": dict(_settings(s, recipe))}


def _band(s, recipe: Recipe, schedule: Schedule, stage) -> dict:
    gpus = min(recipe.machine.get("gpus", stage.workers), stage.workers)
    per_node = recipe.machine.get("per_node")
    return {**dataclasses.asdict(stage), "steps": stage.until_step - stage.first_step,
            "lr_first": schedule.lr(stage.first_step), "lr_last": schedule.lr(stage.until_step - 1),
            "gpus": gpus if per_node else None,
            "nodes": math.ceil(gpus / per_node) if per_node else None,
            "grid": grid_of(s, recipe) if s.allreduce in ("auto", "torus") else None}


def grid_of(s: Settings, recipe: Recipe) -> str | None:
    """The grid given, the published one, or the default for its GPUs; None: not known yet."""
    known = recipe.machine
    if s.grid != "auto" or "gpus" not in known:
        return s.grid if s.grid != "auto" else None
    from refimpl.collective.grid import default_shape
    return known.get("grid") or "x".join(map(str, default_shape(known["gpus"], known.get("per_node"))))


def _epoch(schedule: Schedule, epoch: int) -> dict:
    first = schedule.at(schedule.first_step(epoch))
    return {"epoch": epoch, "first_step": first.step, "steps": first.steps_per_epoch,
            "workers": first.workers, "kn": first.kn, "lr_first": first.lr,
            "lr_last": schedule.lr(first.step + first.steps_per_epoch - 1),
            "momentum": first.momentum}


def _settings(s: Settings, recipe: Recipe):
    for name, f in FIELDS.items():
        value = getattr(s, name)
        tag, where = recipe.provenance.get(name, ("default", ""))
        if value != recipe.values.get(name, f.default):
            tag, where = "given", "on the command line"
        if name == "recipe" or tag == "default" and (
                value in ((), "") or f.metadata["group"] in (RUN, SPEED, CHECKS)):
            continue
        if isinstance(value, tuple):
            value = " ".join(map(str, value)) if name == "bands" else list(value)
        yield name, {"value": value, "tag": tag, "where": where}


def text(s: Settings, images: int) -> str:
    """The plan as tables; the epochs only where few rows say it (equal neighbours are one row)."""
    p = plan(s, images)
    parts = [f"{p['recipe']}: {p['title']}",
             f"{images} training images, {s.epochs} epochs, {p['total_steps']} steps", p["notes"]]
    parts.append(_table([_BANDS] + [
        (f"{b['first_epoch']}-{b['until_epoch'] - 1}", b["steps"], b["steps_per_epoch"],
         b["workers"], b["n"], b["kn"], f"{b['lr_first']:.6g} ... {b['lr_last']:.6g}",
         f"{b['momentum']:g}", b["grid"] or "-", b["gpus"] or "-", b["nodes"] or "-") for b in p["bands"]]))
    rows = _merged(p["epochs"])
    if 0 < len(rows) <= LONGEST:
        parts.append(_table([("epoch", "first step", "steps", "kn", "rate: first", "last")] + rows))
        if p["epochs_left_out"]:
            parts.append(f"(the first {MOST} epochs; {p['epochs_left_out']} more are left out)")
    known = {name: e for name, e in p["settings"].items() if e["tag"] != "default"}
    for title, entries in (("published", p["published"]), ("machine", p["hardware"]),
                           ("setting", known)):
        parts.append(_table([(title, "value", "how sure", "where")] + [
            (name, _shown(e), e["tag"], e["where"]) for name, e in entries.items()]))
    parts.append("the recipe is silent, so default: " + ", ".join(
        f"{name} {e['value']}" for name, e in p["settings"].items() if name not in known))
    parts.append("; ".join(f"{tag}: {meaning}" for tag, meaning in TAGS.items()))
    return "\n\n".join(part for part in parts if part)


_BANDS = ("epochs", "steps", "per epoch", "workers", "n", "kn", "rate: first ... last step",
          "momentum", "grid", "GPUs", "nodes")


def _merged(epochs: list[dict]) -> list[tuple]:
    rows, last = [], None
    for e in epochs:
        rate = (e["kn"], e["lr_first"], e["lr_last"])
        if rate == last and e["lr_first"] == e["lr_last"]:
            rows[-1] = (f"{rows[-1][0].split('-')[0]}-{e['epoch']}", *rows[-1][1:2],
                        rows[-1][2] + e["steps"], *rows[-1][3:])
        else:
            rows.append((str(e["epoch"]), e["first_step"], e["steps"], e["kn"],
                         f"{e['lr_first']:.6g}", f"{e['lr_last']:.6g}"))
        last = rate
    return rows


def _shown(entry: dict) -> str:
    spread = f" +-{entry['spread']}" if "spread" in entry else ""
    return f"{entry['value']}{spread}"


def _table(rows: list[tuple]) -> str:
    if len(rows) == 1:
        return ""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)

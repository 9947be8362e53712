"""The papers' findings on Fashion-MNIST: 12 recipes, 5 seeds, two cores, about 47 minutes.

    python docs/miniature.py run --data mini.zip    # what docs/results.jsonl lacks; can go on later
    python docs/miniature.py show                   # the table, and the plots into docs/pictures/

Fixed before the first run, from one timed pilot with seed 100 (results in docs/story.md):
 * 8,200 training and 2,000 validation images, the first 820 and 200 of each class: an epoch takes
   2.6 s on two idle cores, 18 epochs 47 s, so that 60 runs take about 47 minutes;
 * Goyal's 90 epochs, his decay and his warm-up divided by five; his 0.1 per 256, not the best here;
 * sizes 256 to 4096; Goyal's rules are compared at 1024, the largest that holds, Mikami's at 4096
   (first meant: Goyal's at 2048; its first run, seed 1, did not hold, so they were moved);
 * error: 100 % - median of validation top-1 over the last 3 epochs (Goyal: 5 of 90); seeds 1 to 5.
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

from refimpl.config import load_recipe

DOCS = pathlib.Path(__file__).resolve().parent
LAST, SEEDS = 3, 5
PLAYED = "--threads 1 --loaders 0 --channels-last --overlap off --save-every 0 --timeout 3600"
STUDY = {  # recipe: (label, the paper's counterpart: a recipe with its published result, or words)
    "mini_256": ("256, the baseline", "goyal_256"),
    "mini_512": ("512, linear, gradual", "goyal_4k"),
    "mini_1k": ("1024, linear, gradual", "goyal_8k"),
    "mini_2k": ("2048, linear, gradual", "goyal_16k"),
    "mini_4k": ("4096, linear, gradual", "goyal_32k"),
    "mini_1k_warmup_none": ("1024, no warm-up", "goyal_8k_warmup_none"),
    "mini_1k_warmup_constant": ("1024, constant warm-up", "goyal_8k_warmup_constant"),
    "mini_1k_lr_sqrt": ("1024, square-root rule", "goyal_8k_lr_sqrt"),
    "mini_1k_lr_fixed": ("1024, fixed rate", "goyal_8k_lr_fixed"),
    "mini_4k_poly": ("4096, momentum SGD, polynomial", "none printed"),
    "mini_4k_lars": ("4096, LARS, polynomial", "none read"),
    "mini_4k_lars_control": ("1024, 2048, 4096: LARS, control", "mikami_v1_224s")}
SIZES = {"mini_256": 256, "mini_512": 512, "mini_1k": 1024, "mini_2k": 2048, "mini_4k": 4096}
PANELS = (("minibatch (figure 3)", ("mini_1k", "mini_2k", "mini_4k")),
          ("warm-up (table 1)", ("mini_1k", "mini_1k_warmup_constant", "mini_1k_warmup_none")),
          ("rate (table 2a)", ("mini_1k", "mini_1k_lr_sqrt", "mini_1k_lr_fixed")),
          ("LARS and control, 4096", ("mini_4k_lars_control", "mini_4k_lars", "mini_4k_poly")))


def run(results, data, seeds, trainer):
    """Every run that `results` lacks, one seed of all recipes after the other."""
    done, took = {(line["recipe"], line["seed"]) for line in read(results)}, []
    todo = [(r, s) for s in range(1, seeds + 1) for r in STUDY if (r, s) not in done]
    for number, (recipe, seed) in enumerate(todo, 1):
        start, line = time.monotonic(), train(recipe, seed, data, trainer)
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        took.append(time.monotonic() - start)
        left = (len(todo) - number) * statistics.mean(took[-len(STUDY):]) / 60
        told = line["diverged"] or f"error {error(line):.1f} %"
        print(f"[{number}/{len(todo)}] {recipe} seed {seed}: {told}, {took[-1]:.0f} s; "
              f"about {left:.0f} min left", file=sys.stderr, flush=True)


def train(recipe, seed, data, trainer):
    """One run of the trainer, as its user starts it; what its log says as one short line."""
    launcher = pathlib.Path(sys.executable).with_name("mpirun")
    with tempfile.TemporaryDirectory() as out:
        command = [str(launcher) if launcher.exists() else "mpirun", "-np", "2", sys.executable,
                   "-m", "refimpl.train", "--recipe", recipe, "--seed", str(seed), "--data", data,
                   "--out", out, *trainer.split()]
        job = subprocess.run(command, capture_output=True, text=True)
        logs = list(pathlib.Path(out).glob("*/log.jsonl"))
        told = re.search(r"refimpl\.train: (.*not finite.*)", job.stderr)
        if job.returncode and not (told and logs):
            sys.exit(f"{' '.join(command)}\nended with {job.returncode}:\n{job.stderr[-3000:]}")
        head, *epochs = [e for e in read(logs[0]) if e["event"] in ("start", "epoch")]
    return {"recipe": recipe, "seed": seed, "steps": head["total_steps"],
            "diverged": told[1].partition(";")[0] if job.returncode else None,
            "val_total": epochs[-1]["val_total"] if epochs else 0,
            "val_correct": [e["val_correct"] for e in epochs],
            "train_top1": [round(e["top1"], 4) for e in epochs],
            "loss": [float(f"{e['loss']:.4g}") for e in epochs], "settings": trainer,
            **{key: head["machine"][key] for key in ("commit", "refimpl", "python", "torch", "mpi",
                                                     "ranks", "threads", "cpu")}}


def read(path):
    return [json.loads(x) for x in path.open(encoding="utf-8")] if path.exists() else []


def error(line):
    """Percent: of the median over the last epochs."""
    return 100 - 100 * statistics.median(line["val_correct"][-LAST:]) / line["val_total"]


def spread(values):
    """(mean, sample standard deviation; 0 of a single value)."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def kept(lines):
    """The runs that did not diverge."""
    return [x for x in lines if not x["diverged"]]


def label(recipe, lines):
    """With n where it is not 5, and with how many of them diverged."""
    lost = len(lines) - len(kept(lines))
    return (STUDY[recipe][0] + f" (n = {len(lines)})" * (len(lines) < SEEDS)
            + f" ({lost} of {len(lines)} diverged)" * (lost > 0))


def published(name):
    """The paper's own error, as its recipe in refimpl/recipes has it."""
    if " " in name:
        return name
    (kind, entry), *_ = load_recipe(name).published.items()  # Goyal's error, Mikami's accuracy
    value = entry["value"] if kind == "top1_error" else 100 - entry["value"]
    std = f" ±{entry['spread']:.2f}" if "spread" in entry else ""
    return f"{value:.2f}{std} (`{name}`)"


def table(runs):
    """Markdown: our errors, of validation and of training, beside the paper's own."""
    rows = ["| minibatch, rule | steps | error, % | training error, % | the paper's error, % |",
            "|---|---|---|---|---|"]
    for recipe, lines in runs.items():
        cells = [[error(x) for x in kept(lines)],
                 [100 - 100 * statistics.median(x["train_top1"][-LAST:]) for x in kept(lines)]]
        cells = [("-", "{:.1f}", "{:.1f} ±{:.1f}")[min(len(v), 2)].format(*spread(v or [0]))
                 for v in cells]
        cells = [label(recipe, lines), str(lines[0]["steps"] if lines else "-"), *cells]
        rows.append(f"| {' | '.join(cells)} | {published(STUDY[recipe][1])} |")
    return "\n".join(rows)


def plot_error(runs, axes):
    """Goyal's figure 1: error against minibatch, mean and twice the standard deviation."""
    found = {r: spread(list(map(error, kept(lines)))) for r, lines in runs.items() if kept(lines)}
    sizes = [r for r in SIZES if r in found]
    means, bars = [found[r][0] for r in sizes], [2 * found[r][1] for r in sizes]
    for mean, bar in zip(means[:1], bars):
        axes.axhspan(mean - bar, mean + bar, color="0.88")
    axes.errorbar([SIZES[r] for r in sizes], means, bars, color="0", marker="o", capsize=4,
                  label="\n".join(label(r, runs[r]) for r in SIZES))
    others = [r for r in found if r not in SIZES]
    for r, marker, shift in zip(others, "sD^v<>P", (1.06, 0.94, 1.12, 0.89, 1.06, 0.94, 0.89)):
        axes.errorbar((1024 if "_1k_" in r else 4096) * shift, found[r][0], 2 * found[r][1], ls="",
                      color="0.35", marker=marker, mfc="white", capsize=3, label=label(r, runs[r]))
    axes.set(xscale="log", xlabel="minibatch kn", ylabel="validation error, %")
    axes.set_xticks(list(SIZES.values()), list(SIZES.values()))
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="upper left")


def plot_curves(runs, axes, title, recipes):
    """Goyal's figures 2 and 3: training error by epoch; mean, and a band of one deviation."""
    styles = ("-", "", "0.6"), ("-", "o", "0.0"), ("--", "s", "0.35"), (":", "^", "0.1")
    for recipe, (dashes, marker, grey) in zip(("mini_256", *recipes), styles):
        columns = zip(*(x["train_top1"] for x in kept(runs[recipe])))
        points = [spread([100 - 100 * v for v in column]) for column in columns]
        x, low, high = range(1, len(points) + 1), *([m + s * d for m, d in points] for s in (-1, 1))
        axes.plot(x, [m for m, _ in points], dashes, marker=marker, color=grey, ms=4,
                  lw=1.3 if marker else 4, label=label(recipe, runs[recipe]))
        axes.fill_between(x, low, high, color=grey, alpha=0.15, lw=0)
    axes.set(title=title, xlabel="epoch", ylabel="training error, %", xticks=range(0, 19, 3),
             ylim=(30, 125), yticks=range(40, 101, 20))
    axes.legend(fontsize=8)


def pictures(runs, folder):
    """miniature_error.png and miniature_curves.png in `folder`."""
    from matplotlib.figure import Figure
    one, four = (Figure(figsize=size, layout="constrained") for size in ((7, 5), (10, 8)))
    plot_error(runs, one.subplots())
    for axes, (title, recipes) in zip(four.subplots(2, 2, sharey=True).flat, PANELS):
        plot_curves(runs, axes, title, recipes)
    for figure, name in ((one, "error"), (four, "curves")):
        figure.savefig(folder / f"miniature_{name}.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.replace("%", "%%"))
    parser.add_argument("command", choices=("run", "show"))
    parser.add_argument("--results", type=pathlib.Path, default=DOCS / "results.jsonl")
    parser.add_argument("--data", default="mini.zip", help="run: the packed images")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--trainer", default=PLAYED, help="run: further settings, in one word")
    parser.add_argument("--pictures", type=pathlib.Path, default=DOCS / "pictures")
    a = parser.parse_args()
    if a.command == "run":
        return run(a.results, a.data, a.seeds, a.trainer)
    lines = {(line["recipe"], line["seed"]): line for line in read(a.results)}.values()
    runs = {recipe: [line for line in lines if line["recipe"] == recipe] for recipe in STUDY}
    print(table(runs))
    pictures(runs, a.pictures)


if __name__ == "__main__":
    main()

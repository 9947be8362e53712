"""The papers' findings on Fashion-MNIST: 11 recipes, 5 seeds, two cores, about 45 minutes.

    python docs/miniature.py run --data mini.zip    # what docs/results.jsonl lacks; go on at any time
    python docs/miniature.py show                   # the table, and the plots into docs/pictures/

Fixed before the first run, from one timed pilot with seed 100 (results in docs/story.md):
 * 8,200 training and 2,000 validation images, the first 820 and 200 of each class: an epoch takes
   2.6 s on two idle cores, 18 epochs 47 s, so that 55 runs take about 43 minutes;
 * Goyal's 90 epochs, his decay and his warm-up divided by five; his 0.1 per 256, not the best here;
 * sizes 256, 1024, 2048, 4096; Goyal's rules are compared at 2048, Mikami's at 4096;
 * error = 100 % - median of validation top-1 over the last 3 epochs (Goyal: 5 of 90); mean and
   sample standard deviation over seeds 1 to 5.
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

DOCS = pathlib.Path(__file__).resolve().parent
LAST, SEEDS = 3, 5
PLAYED = "--threads 1 --loaders 0 --channels-last --overlap off --save-every 0 --timeout 3600"
STUDY = {  # recipe: (label, the paper's counterpart: a recipe with its published result, or words)
    "mini_256": ("256, the baseline", "goyal_256"),
    "mini_1k": ("1024, linear, gradual", "goyal_4k"),
    "mini_2k": ("2048, linear, gradual", "goyal_8k"),
    "mini_4k": ("4096, linear, gradual", "goyal_16k"),
    "mini_2k_warmup_none": ("2048, no warm-up", "goyal_8k_warmup_none"),
    "mini_2k_warmup_constant": ("2048, constant warm-up", "goyal_8k_warmup_constant"),
    "mini_2k_lr_sqrt": ("2048, square-root rule", "goyal_8k_lr_sqrt"),
    "mini_2k_lr_fixed": ("2048, fixed rate", "goyal_8k_lr_fixed"),
    "mini_4k_poly": ("4096, momentum SGD, polynomial", "none printed"),
    "mini_4k_lars": ("4096, LARS, polynomial", "none read"),
    "mini_4k_lars_control": ("1024, 2048, 4096: LARS, control", "mikami_v1_224s")}
SIZES = {"mini_256": 256, "mini_1k": 1024, "mini_2k": 2048, "mini_4k": 4096}
PANELS = (("minibatch (figure 3)", ("mini_1k", "mini_2k", "mini_4k")),
          ("warm-up at 2048 (table 1)", ("mini_2k", "mini_2k_warmup_constant", "mini_2k_warmup_none")),
          ("rate at 2048 (table 2a)", ("mini_2k", "mini_2k_lr_sqrt", "mini_2k_lr_fixed")),
          ("LARS, control at 4096", ("mini_4k_lars_control", "mini_4k_lars", "mini_4k_poly")))


# --- run ----------------------------------------------------------------------------------------

def run(results, data, ranks, seeds, trainer):
    """Every run that `results` lacks, one seed of all recipes after the other."""
    done = {(line["recipe"], line["seed"]) for line in read(results)}
    todo = [(r, s) for s in range(1, seeds + 1) for r in STUDY if (r, s) not in done]
    took = []
    for number, (recipe, seed) in enumerate(todo, 1):
        start = time.monotonic()
        line = train(recipe, seed, data, ranks, trainer)
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        took.append(time.monotonic() - start)
        left = (len(todo) - number) * statistics.mean(took[-len(STUDY):]) / 60
        told = line["diverged"] or f"error {error(line):.1f} %"
        print(f"[{number}/{len(todo)}] {recipe} seed {seed}: {told}, {took[-1]:.0f} s; "
              f"about {left:.0f} min left", file=sys.stderr, flush=True)


def train(recipe, seed, data, ranks, trainer):
    """One run of the trainer, as its user starts it; what its log says as one short line."""
    launcher = pathlib.Path(sys.executable).with_name("mpirun")
    with tempfile.TemporaryDirectory() as out:
        command = [str(launcher) if launcher.exists() else "mpirun", "-np", str(ranks),
                   sys.executable, "-m", "refimpl.train", "--recipe", recipe, "--seed", str(seed),
                   "--data", str(data), "--out", out, *trainer.split()]
        job = subprocess.run(command, capture_output=True, text=True, errors="replace",
                             stdin=subprocess.DEVNULL)
        logs = list(pathlib.Path(out).glob("*/log.jsonl"))
        told = re.search(r"refimpl\.train: (.*not finite.*)", job.stderr)
        if job.returncode and not (told and logs):
            sys.exit(f"{' '.join(command)}\nended with code {job.returncode}:\n{job.stderr[-3000:]}")
        head, *epochs = [e for e in read(logs[0]) if e["event"] in ("start", "epoch")]
    machine, total = head["machine"], 0
    if epochs:
        total = epochs[-1]["val_total"]
    return {"recipe": recipe, "seed": seed, "steps": head["total_steps"],
            "diverged": told[1].partition(";")[0] if job.returncode else None,
            "val_total": total, "val_correct": [e["val_correct"] for e in epochs],
            "train_top1": [round(e["top1"], 4) for e in epochs],
            "loss": [float(f"{e['loss']:.4g}") for e in epochs], "settings": trainer,
            **{key: machine[key] for key in ("commit", "refimpl", "python", "torch", "mpi", "ranks",
                                             "threads", "cpu")}}


def read(path):
    return [json.loads(x) for x in pathlib.Path(path).read_text("utf-8").splitlines() if x.strip()] \
        if pathlib.Path(path).exists() else []


# --- show ---------------------------------------------------------------------------------------

def error(line):
    """Percent: of the median over the last epochs."""
    return 100 - 100 * statistics.median(line["val_correct"][-LAST:]) / line["val_total"]


def spread(values):
    """(mean, sample standard deviation; 0 of a single value)."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def gathered(results):
    """recipe -> its lines, in the study's order; a (recipe, seed) counts once."""
    lines = {(x["recipe"], x["seed"]): x for x in read(results)}.values()
    return {r: [x for x in lines if x["recipe"] == r] for r in STUDY}


def published(name):
    """The paper's own error, as its recipe in refimpl/recipes has it."""
    from refimpl.config import load_recipe
    if " " in name:
        return name
    entry = load_recipe(name).published
    if "top1_error" in entry:
        return f"{entry['top1_error']['value']:.2f} ±{entry['top1_error']['spread']:.2f} ({name})"
    return f"{100 - entry['top1_accuracy']['value']:.2f} ({name})"


def label(recipe, lines):
    """With n where it is not 5, and with how many of them diverged."""
    name = STUDY[recipe][0] + (f" (n = {len(lines)})" if len(lines) < SEEDS else "")
    lost = sum(bool(x["diverged"]) for x in lines)
    return name + (f" ({lost} of {len(lines)} diverged)" if lost else "")


def table(runs):
    """Markdown: our error beside the paper's, each with its distance from the baseline of its own."""
    rows = ["| minibatch, rule | steps | error, % | training error, % | the paper's error, % |",
            "|---|---|---|---|---|"]
    for recipe, lines in runs.items():
        kept = [x for x in lines if not x["diverged"]]
        cells = ["-", "-"]
        if kept:
            cells = ["{:.1f} ±{:.1f}".format(*spread(v)) for v in (
                [error(x) for x in kept],
                [100 - 100 * statistics.median(x["train_top1"][-LAST:]) for x in kept])]
        steps = lines[0]["steps"] if lines else "-"
        rows.append(f"| {label(recipe, lines)} | {steps} | {cells[0]} | {cells[1]} | "
                    f"{published(STUDY[recipe][1])} |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, prog="python docs/miniature.py",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="all runs that the results lack")
    runs.add_argument("--data", required=True, help="the packed images")
    runs.add_argument("--ranks", type=int, default=2)
    runs.add_argument("--seeds", type=int, default=SEEDS)
    runs.add_argument("--trainer", default=PLAYED, help="further settings, in one word")
    shows = commands.add_parser("show", help="print the table")
    for command in (runs, shows):
        command.add_argument("--results", default=DOCS / "results.jsonl")
    a = parser.parse_args()
    if a.command == "run":
        return run(a.results, a.data, a.ranks, a.seeds, a.trainer)
    print(table(gathered(a.results)))


if __name__ == "__main__":
    main()

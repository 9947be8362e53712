"""Pictures of runs: python -m refimpl.plot RUN/log.jsonl [MORE...] OUT.png"""
import json
import pathlib
import sys


def curves(log: pathlib.Path, picture: pathlib.Path, *more: pathlib.Path) -> None:
    """Loss, top-1, learning rate and minibatch against epoch, read from log.jsonl files."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    for number, file in enumerate((log, *more)):
        lines = [json.loads(line) for line in open(file)]
        epochs = [line for line in lines if line["event"] == "epoch"]
        label = file.parent.name if more else None
        x = [line["epoch"] for line in epochs]
        scored = [line for line in epochs if "val_top1" in line]
        style = dict(color=f"C{number}", marker="." if len(x) < 40 else None)
        for axis, name, times in ((axes[0, 0], "loss", 1), (axes[0, 1], "top1", 100)):
            axis.plot(x, [times * e[name] for e in epochs], label=label or "training", **style)
            axis.plot([e["epoch"] for e in scored], [times * e[f"val_{name}"] for e in scored], "--",
                      label=None if label else "validation", color=f"C{number}")
        axes[1, 0].plot(x, [e["lr"] for e in epochs], **style)
        axes[1, 1].step(x, [e["kn"] for e in epochs], where="mid", **style)
    figure.suptitle("" if more else log.absolute().parent.name)
    names = ("loss", "top-1 (%)", "learning rate", "minibatch kn")
    for axis, name in zip(axes.flat, names):
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0, 0].legend()
    for axis in axes[1]:
        axis.set_xlabel("epoch")
    figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    first, *others, out = map(pathlib.Path, sys.argv[1:])
    curves(first, out, *others)

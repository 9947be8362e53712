"""What a run tells: a line per epoch, a progress bar on a terminal, and runs/<name>-<time>/ on rank 0.

log.jsonl: the first line says what ran; then a line per epoch. Everything that may differ between
two equal runs stands in "times" or "machine", so the rest can be compared.
"""
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time

import numpy as np
import torch
from tqdm import tqdm

from refimpl import __version__, config, plot
from refimpl.checkpoint import run_name
from refimpl.collective.exchange import waiting
from refimpl.collective.guard import gather_text
from refimpl.device import mpi_library
from refimpl.errors import UsageError
from refimpl.ranks import cut, writable, writing


QUIET = 30  # seconds without a word where there is no terminal for a bar, as below mpirun
SLOW = 1.5  # times the median of all ranks: such a rank is named
OWN = ("waiting for data", "forward", "backward", "update")  # what a rank does without the others


class RunLog:
    """Rank 0 writes and prints; the other ranks only keep the clocks."""

    def __init__(self, run, resumed: dict | None = None) -> None:
        self.run, self.first = run, run.comm.rank == 0
        self.clocks, self.since, self.played = {}, time.perf_counter(), 0
        self.lines, self.replaced, self.steps, self.samples = 0, 0, 0, 0
        self.sums = {"loss": 0.0, "correct": 0.0}
        vars(self).update(resumed["log"] if resumed else {})
        self.trace = self._trace(run.settings.trace) if self.first and run.settings.trace else None
        if self.first:
            try:
                self._go_on(resumed) if resumed else self._start()
            except OSError as error:
                raise UsageError(f"--out {run.settings.out}: {error}; give a folder that can be made "
                                 "and written") from None
            if self.trace:
                cut(self.trace)  # what lies behind the kept lines
            print(self._greeting(), flush=True)
            for note in (*run.train_images.notes, *run.val_images.notes):
                print(note, file=sys.stderr, flush=True)
        self.bar = tqdm(total=run.schedule.total_steps, initial=run.step, unit="step", leave=False,
                        disable=None if self.first else True, mininterval=0.5, dynamic_ncols=True)
        self.said = time.perf_counter()

    def state(self) -> dict:
        """What a resumed run goes on counting from, inside an epoch too."""
        return {name: getattr(self, name)
                for name in ("lines", "replaced", "steps", "sums")}

    def _start(self) -> None:
        """A new folder; two runs in one second get two."""
        stamp = f"{run_name(self.run.settings)}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in itertools.count():
            self.folder = pathlib.Path(self.run.settings.out) / (
                stamp + (f"-{number}" if number else ""))
            try:
                self.folder.mkdir(parents=True)
                break
            except FileExistsError:
                if not self.folder.is_dir():
                    raise
        self._begin("start")

    def _go_on(self, resumed: dict) -> None:
        """The resumed run's folder; its log is cut to what the checkpoint knew, and says so."""
        self.folder = pathlib.Path(resumed["folder"])
        log = self.folder / "log.jsonl"
        if log.exists():
            os.truncate(log, sum(map(len, log.read_bytes().splitlines(keepends=True)[:self.lines])))
        self._begin("resume")
        print(f"resumed {self.folder} at step {self.run.step}{resumed['note']}")

    def _trace(self, path: str):
        """The trace file; of an older one the whole lines before this run's first step are kept."""
        old, kept = b"", []
        with contextlib.suppress(OSError):  # `writable` says why
            old = pathlib.Path(path).read_bytes() if os.path.isfile(path) else b""
        for line in old.splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError):  # the last one may be torn
                kept += [line + b"\n"] if json.loads(line)["step"] < self.run.step else []
        file = writable(path, "--trace", b'"lr": "0x')
        with writing(path):  # over the same bytes: a full disk takes nothing away
            file.write(b"".join(kept))
            file.flush()
        return file

    def _begin(self, event: str) -> None:
        """The line that says what runs from here on, and on what."""
        run = self.run
        grid = getattr(run.allreduce.place, "rows", None)
        self.header = {
            "event": event, "step": run.step, "command": config.command(run.settings),
            "settings": dataclasses.asdict(run.settings),
            "images": len(run.train_images), "classes": list(run.train_images.classes),
            "total_steps": run.schedule.total_steps,
            "buckets": [[b.start, b.stop, b.wire] for b in run.gradients.buckets],
            "machine": {
                "refimpl": __version__, "commit": commit(), "python": platform.python_version(),
                "torch": torch.__version__, "mpi": mpi_library(),
                "ranks": run.comm.size, "algorithm": run.allreduce.algorithm,
                "grid": f"{grid}x{run.allreduce.place.columns}" if grid else None,
                "threads": run.threads, "cpu": torch.backends.cpu.get_cpu_capability(),
                "device": str(run.device), "host": platform.node()}}
        self._write(self.header)

    def _greeting(self) -> str:
        run, m = self.run, self.header["machine"]
        parameters = sum(p.numel() for p in run.model.parameters())
        return (f"{self.header['command']}\n"
                f"{len(run.train_images)} training and {len(run.val_images)} validation images, "
                f"{run.classes} classes; {parameters:,} parameters\n"
                f"{run.comm.size} rank{'s' * (run.comm.size > 1)} ({m['mpi']}), {m['algorithm']}"
                f"{' ' + m['grid'] if m['grid'] else ''}, {m['threads']} thread(s) per rank, "
                f"{m['device']}; {self.folder}")

    # --- during a run -----------------------------------------------------------------------

    def add_seconds(self, what: str, seconds: float) -> None:
        self.clocks[what] = self.clocks.get(what, 0.0) + seconds

    def record(self, moment, sums: dict[str, float]) -> None:
        """One step: its sums join the epoch's means, unless it was skipped for an overflow."""
        self.samples += moment.kn
        self.played += len(self.run.workers(moment))
        if not sums["overflow"]:
            self.steps += 1
            for name in self.sums:
                self.sums[name] += sums[name]
        text = f"epoch {moment.epoch:.1f} loss {sums['loss']:.3f}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()
        if self.first and self.bar.disable and time.perf_counter() > self.said + QUIET:
            print(f"step {moment.step + 1} of {self.bar.total}: {text}", file=sys.stderr, flush=True)
            self.said = time.perf_counter()
        if self.trace:
            with writing(self.trace.name):
                self.trace.write(json.dumps(self.run.trace_line(moment, sums)).encode() + b"\n")
                self.trace.flush()

    def epoch(self, moment, result) -> None:
        """The epoch's line, printed and written; the clocks start anew."""
        seconds = time.perf_counter() - self.since
        training = max(1e-9, seconds - self.clocks.get("validation", 0.0))
        steps = self.steps or math.nan  # all skipped: no loss, not none
        line = {"event": "epoch", "epoch": moment.epoch_index + 1, "step": moment.step + 1,
                "kn": moment.kn, "workers": moment.workers, "lr": moment.lr,
                "momentum": moment.momentum, "loss": self.sums["loss"] / steps,
                "top1": self.sums["correct"] / steps, "loss_scale": self.run.scale.value,
                "skipped": self.run.scale.skipped, "replaced": self.replaced}
        if result:
            line |= {"val_top1": result.top1, "val_correct": result.correct,
                     "val_total": result.total, "val_loss": result.loss}
        share = {name: value / training for name, value in self.clocks.items()}
        line["times"] = {"seconds": seconds, "images_per_s": self.samples / training,
                         "allreduce_share": share.get("allreduce", 0.0),
                         "data_share": share.get("waiting for data", 0.0)}
        line["times"]["worker_s"], slow = self._spread()
        if self.first:
            self._write(line)
            self.bar.write("\n".join([self._readable(line), *slow]))
            sys.stdout.flush()
        self.clocks, self.sums, self.played = {}, {"loss": 0.0, "correct": 0.0}, 0
        self.steps = self.samples = 0
        self.since = self.said = time.perf_counter()

    def _spread(self) -> tuple[dict, list[str]]:
        """Seconds that each rank took per worker's minibatch, without waiting for the others: least,
        median and most, and a line for each of the slowest ranks."""
        comm, times = self.run.comm, np.empty(self.run.comm.size)
        own = sum(self.clocks.get(what, 0.0) for what in OWN)
        with waiting("times of the epoch", comm):
            comm.Allgather(np.array([own / self.played if self.played else np.nan]), times)
        low, median, high = np.nanquantile(times, (0, 0.5, 1)).tolist()
        slow = [int(rank) for rank in np.argsort(-times) if times[rank] > SLOW * median]
        hosts = gather_text(comm, platform.node()) if slow else []  # all ranks see the same times
        return {"min": low, "median": median, "max": high, "slow": slow}, [
            f"slow: rank {rank} on {hosts[rank]} takes {times[rank]:.3g} s for a worker's minibatch, "
            f"the median rank {median:.3g} s; the others wait for it" for rank in slow[:5]]

    def _readable(self, line: dict) -> str:
        times = line["times"]
        top1 = f"{100 * line['val_top1']:5.1f} %" if "val_top1" in line else "   -   "
        return (f"epoch {line['epoch']:3d}  kn {line['kn']:5d}  lr {line['lr']:<8.4g} "
                f"train loss {line['loss']:6.3f}  val top-1 {top1}  "
                f"{times['images_per_s']:7.0f} images/s  allreduce {100 * times['allreduce_share']:4.1f} %")

    def close(self, message: str = "") -> None:
        """End of the run: the picture, and where everything lies."""
        self.bar.close()
        if self.first:
            with writing(self.folder / "curves.png"):
                plot.curves(self.folder / "log.jsonl", self.folder / "curves.png")
            if self.trace:
                self.trace.close()
            print(message or f"done: {self.folder}/ has log.jsonl, curves.png and checkpoint.pt",
                  flush=True)

    def _write(self, line: dict) -> None:
        log = self.folder / "log.jsonl"
        with writing(log), open(log, "a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines += 1


def commit() -> str:
    """The checkout's commit, with + where files differ from it; empty outside a checkout."""
    root = pathlib.Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    ask = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""

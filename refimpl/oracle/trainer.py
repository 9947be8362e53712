"""Two training runs: the first step, and the first thing in it, where they part."""
import json
import math
import zipfile

import numpy as np

from refimpl.oracle.cases import BAD_DATA, need, not_sound, read_text

CAUSES = {"samples": "the data: other samples, or in another order", "lr": "the learning rate",
          "loss": "the forward pass: same samples, same weights before, another loss",
          "gradient": "the gradient: backward pass, sum or scale",
          "weights": "the update: same gradient and learning rate, other weights after"}
STATE = (("images", "the data"), ("labels", "the data"), ("weights_before/", "the first weights"),
         ("loss", "the forward pass"), ("gradient_local/", "the backward pass, before any sum"),
         ("gradient_sum/", "the sum or its scale"), ("lr", "the learning rate"),
         ("weights_after/", "the update"))
TOLERANCE = 2e-6  # of the largest value of a tensor: ten times what N x n against 1 x Nn showed


def read_trace(path: str) -> dict[int, dict]:
    """step -> its record, from JSON lines; UsageError for what is not a trace."""
    text = read_text(path)
    try:
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
        for record in records:
            record["loss"] = float.fromhex(record["loss"])
            record["lr"] = float.fromhex(record["lr"])
            need(type(record["step"]) is int, f"step {str(record['step'])[:20]!r} is not a number")
            need(all(isinstance(record[key], str) for key in ("gradient", "weights", "samples")),
                 f"step {record['step']}: digests are strings")
        steps = {record["step"]: record for record in records}
        need(steps and len(steps) == len(records), "no steps, or a step twice")
        return steps
    except BAD_DATA as error:
        raise not_sound(path, error) from None


def diff(ours: str, theirs: str) -> tuple[int, list[str]]:
    """Exit code and lines: 0 where all common steps have the same bits (level T1)."""
    a, b = read_trace(ours), read_trace(theirs)
    common = sorted(a.keys() & b.keys())
    need(common, f"{ours} and {theirs} have no step in common")
    refuse_batch_norm(a[common[0]], b[common[0]])
    for step in common:
        for key, cause in CAUSES.items():
            if a[step][key] != b[step][key]:
                return 1, [f"step {step}: {key} parts first: {a[step][key]} against {b[step][key]}",
                           f"look at {cause}"]
    lines = [f"{len(common)} steps, {common[0]} to {common[-1]}, with the same bits (T1)"]
    if a.keys() != b.keys():
        lines.append(f"not compared: {len(a.keys() ^ b.keys())} steps that only one of them has")
    return 0, lines


def band(mine: str, references: list[str]) -> tuple[int, list[str]]:
    """Level T3: is the loss where that of at least five other seeds is? At most 5 % of the steps
    may lie outside the mean -+ 4 standard deviations of a new run."""
    need(len(references) >= 5, f"a band needs at least 5 seeds, not {len(references)}")
    run, seeds = read_trace(mine), [read_trace(path) for path in references]
    steps = sorted(set(run).intersection(*seeds))
    need(steps, "the traces have no step in common")
    loss = np.array([[seed[step]["loss"] for step in steps] for seed in seeds])
    width = 4 * loss.std(0, ddof=1) * math.sqrt(1 + 1 / len(seeds))
    off = np.abs(np.array([run[step]["loss"] for step in steps]) - loss.mean(0))
    outside = [step for step, far in zip(steps, ~(off <= width)) if far]
    text = f"{len(outside)} of {len(steps)} steps outside the band of {len(seeds)} seeds (T3)"
    return int(len(outside) > len(steps) / 20), [text, *(f"first: step {s}" for s in outside[:1])]


def state(ours: str, theirs: str) -> tuple[int, list[str]]:
    """Exit code and lines for two .npz of one step: same bits (T1), within TOLERANCE (T2), not."""
    a, b = _npz(ours), _npz(theirs)
    need(a.keys() == b.keys(), f"only one of the files has {sorted(a.keys() ^ b.keys())[:5]}")
    refuse_batch_norm(a, b)
    if a.get("ranks", 0) != b.get("ranks", 0):  # other parts of the same sum
        a, b = ({k: v for k, v in x.items() if not k.startswith("gradient_local/")} for x in (a, b))
    equal, lines = True, []
    for prefix, cause in STATE:
        for key in (k for k in a if k == prefix or prefix[-1] == "/" and k.startswith(prefix)):
            need(a[key].shape == b[key].shape and a[key].dtype == b[key].dtype,
                 f"{key}: {a[key].dtype} {a[key].shape} against {b[key].dtype} {b[key].shape}")
            equal &= a[key].tobytes() == b[key].tobytes()
            x, y = (v[key].astype(np.float64) for v in (a, b))
            off = float(np.max(np.abs(x - y), initial=0))
            scale = float(np.max(np.abs(x), initial=0))
            if not off <= TOLERANCE * scale:
                lines.append(f"{key}: off by {off:.3g}, largest value {scale:.3g}")
        if lines:
            return 1, [*lines[:20], f"first apart here: look at {cause}"]
    return 0, ["same bits (T1)" if equal else f"within {TOLERANCE:g} of each tensor's size (T2)"]


def refuse_batch_norm(a: dict, b: dict) -> None:
    """Statistics are per worker (Goyal, section 2.3): another n is another function, not a bug."""
    if bool(a.get("batch_norm")) and "n" in a and "n" in b:
        need(int(a["n"]) == int(b["n"]), f"batch norm over n = {a['n']} and n = {b['n']} samples "
             "per worker: different functions by design; compare equal n, or without batch norm")


def _npz(path: str) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:
            need(sum(info.file_size for info in archive.infolist()) <= 1 << 28, "over 256 MiB")
            for name in archive.namelist():  # a shape that its data cannot fill is not allocated
                with archive.open(name) as file:
                    np.lib.format.read_magic(file)
                    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                    need(math.prod(shape) * dtype.itemsize <= 1 << 28, f"{name}: shape {shape}")
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except Exception as error:  # what zipfile and NumPy raise for a bad file is anything
        raise not_sound(path, error) from None

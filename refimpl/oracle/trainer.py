"""Two training runs: the first step, and the first thing in it, where they part."""
import json
import math

import numpy as np

from refimpl.oracle.cases import BAD_DATA, need, not_sound, read_text

CAUSES = {"samples": "the data: other samples, or in another order", "lr": "the learning rate",
          "loss": "the forward pass, or over what its mean is formed: same samples and weights",
          "gradient": "the gradient: backward pass, sum or scale",
          "weights": "the update: same gradient and learning rate, other weights after"}
AGREE = {"gradient": "the sum: was it made, on all ranks, before the update?",
         "weights": "the first weights, then the update: the ranks' gradients are the same"}
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
            record |= {key: float.fromhex(record[key]) for key in ("loss", "lr")}
            need(type(record["step"]) is int, f"step {str(record['step'])[:20]!r} is not a number")
            need(all(isinstance(record[key], str) for key in ("gradient", "weights", "samples")),
                 f"step {record['step']}: digests are strings")
        steps = {record["step"]: record for record in records}
        need(steps and len(steps) == len(records), "no steps, or a step twice")
        return steps
    except BAD_DATA as error:
        raise not_sound(path, error) from None


def read_common(paths: list[str]) -> tuple[list[dict], list[int]]:
    """The traces, and the steps that all of them have."""
    traces = [read_trace(path) for path in paths]
    steps = sorted(set(traces[0]).intersection(*traces))
    need(steps, f"{', '.join(paths)} have no step in common")
    return traces, steps


def diff(paths: list[str], agree: bool = False) -> tuple[int, list[str]]:
    """Exit code and lines: 0 where all common steps have the same bits (T1).

    agree (T0): the traces are those of the ranks of one run; what ranks must share is compared.
    """
    traces, steps = read_common(paths)
    for step in steps:
        for key, cause in (AGREE if agree else CAUSES).items():
            for path, trace in zip(paths, traces):
                refuse_batch_norm(traces[0][step], trace[step])
                if trace[step][key] != traces[0][step][key]:
                    return 1, [f"step {step}: {key} parts first: {traces[0][step][key]} in "
                               f"{paths[0]}, {trace[step][key]} in {path}", f"look at {cause}"]
    level = f"all {len(paths)} ranks agree (T0)" if agree else "with the same bits (T1)"
    alone = len(set().union(*traces)) - len(steps)
    return 0, [f"{len(steps)} steps, {steps[0]} to {steps[-1]}, {level}",
               *[f"not compared: {alone} steps that not all of them have"][:alone]]


def band(paths: list[str]) -> tuple[int, list[str]]:
    """Level T3: is the first one's loss where that of at least five other seeds is? At most 5 % of
    the steps may lie outside the mean -+ 4 standard deviations of a new run."""
    need(len(paths) > 5, f"a band needs at least 5 seeds, not {len(paths) - 1}")
    traces, steps = read_common(paths)
    mine, *seeds = np.array([[trace[step]["loss"] for step in steps] for trace in traces])
    width = 4 * np.std(seeds, 0, ddof=1) * math.sqrt(1 + 1 / len(seeds))
    inside = np.abs(mine - np.mean(seeds, 0)) <= width
    outside = [step for step, right in zip(steps, inside) if not right]
    text = f"{len(outside)} of {len(steps)} steps outside the band of {len(seeds)} seeds (T3)"
    return int(len(outside) > len(steps) / 20), [text, *(f"first: step {s}" for s in outside[:1])]


def state(paths: list[str]) -> tuple[int, list[str]]:
    """Exit code and lines for two .npz of one step: same bits (T1), within TOLERANCE (T2), not."""
    a, b = map(_npz, paths)
    need(a.keys() == b.keys(), f"only one of the files has {sorted(a.keys() ^ b.keys())[:5]}")
    refuse_batch_norm(a, b)
    equal, skip, notes = True, None, []
    if a.get("ranks", 0) != b.get("ranks", 0):
        skip = "gradient_local/"
        notes = [f"not compared: {skip}*, parts of the sum on {a['ranks']} and {b['ranks']} ranks"]
    for prefix, cause in STATE:
        lines = []
        for key in (k for k in a if k == prefix or prefix[-1] == "/" and k.startswith(prefix)):
            if prefix != skip:
                need(a[key].shape == b[key].shape and a[key].dtype == b[key].dtype,
                     f"{key}: {a[key].dtype} {a[key].shape} against {b[key].dtype} {b[key].shape}")
                equal &= a[key].tobytes() == b[key].tobytes()
                lines += _apart(key, a, b)
        if lines:
            return 1, [*lines[:20], f"first apart here: look at {cause}", *notes]
    text = "same bits (T1)" if equal else f"within {TOLERANCE:g} of each tensor's size (T2)"
    return 0, [text, *notes]


def _apart(key: str, a: dict, b: dict) -> list[str]:
    """A line if the tensors differ by more than they may; of new weights, the change counts."""
    before = a.get(key.replace("weights_after", "weights_before"), a[key])
    need(before.shape == a[key].shape, f"{key} has another shape than the weights before")
    x, y, old = (v.astype(np.float64) for v in (a[key], b[key], before))
    off, scale, change = (float(np.max(np.abs(v), initial=0)) for v in (x - y, x, x - old))
    if off <= (TOLERANCE * change + 2.0 ** -23 * scale if change else TOLERANCE * scale):
        return []
    return [f"{key}: off by {off:.3g}, largest {'change' if change else 'value'} "
            f"{change or scale:.3g}"]


def refuse_batch_norm(a: dict, b: dict) -> None:
    """Statistics are per worker (Goyal, section 2.3): another n is another function, not a bug."""
    if bool(a.get("batch_norm")) and "n" in a and "n" in b:
        need(int(a["n"]) == int(b["n"]), f"batch norm over n = {a['n']} and n = {b['n']} samples "
             "per worker: different functions by design; compare equal n, or without batch norm")


def _npz(path: str) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            need(all(file[key].dtype.kind in "biuf" for key in file), "not all of it is numbers")
            return dict(file)
    except Exception as error:  # what zipfile and NumPy raise for a bad file is anything
        raise not_sound(path, error) from None

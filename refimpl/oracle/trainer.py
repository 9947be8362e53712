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
            need(all(type(record.get(key, 0)) is int for key in ("step", "n")),
                 f"step {str(record['step'])[:20]!r}: step and n are whole numbers")
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
    """Exit code and lines: 0 where all have the same steps with the same bits (T1);
    agree (T0): what the ranks of one run must share."""
    traces, steps = read_common(paths)
    for step in steps:
        for key, cause in (AGREE if agree else CAUSES).items():
            for path, trace in zip(paths, traces):
                refuse_batch_norm(traces[0][step], trace[step])
                if str(trace[step][key]) != str(traces[0][step][key]):  # NaN is NaN, -0 not +0
                    return 1, [f"step {step}: {key} parts first: {traces[0][step][key]} in "
                               f"{paths[0]}, {trace[step][key]} in {path}", f"look at {cause}"]
    level = f"all {len(paths)} ranks agree (T0)" if agree else "with the same bits (T1)"
    alone = sorted(set().union(*traces) - set(steps))
    return int(bool(alone)), [f"{len(steps)} step{'s'[:len(steps) - 1]}, {steps[0]} to {steps[-1]}, {level}",
        *[f"not all have step {s} (such steps: {len(alone)}): one run is shorter" for s in alone[:1]]]


def band(paths: list[str]) -> tuple[int, list[str]]:
    """T3: at most 5 % of the first one's losses lie outside the mean -+ 4 s of the other seeds."""
    need(len(paths) > 5, f"a band needs at least 5 seeds, not {len(paths) - 1}")
    traces, steps = read_common(paths)
    mine, *seeds = np.array([[trace[step]["loss"] for step in steps] for trace in traces])
    width = 4 * np.std(seeds, 0, ddof=1) * math.sqrt(1 + 1 / len(seeds))
    outside = [s for s, right in zip(steps, np.abs(mine - np.mean(seeds, 0)) <= width) if not right]
    text = f"{len(outside)} of {len(steps)} steps outside the band of {len(seeds)} seeds (T3)"
    return int(len(outside) > len(steps) / 20), [text, *(f"first: step {s}" for s in outside[:1])]


def state(paths: list[str]) -> tuple[int, list[str]]:
    """Exit code and lines for two .npz of one step: same bits (T1), within TOLERANCE (T2), not."""
    a, b = map(_npz, paths)
    need(a.keys() == b.keys(), f"only one of the files has {sorted(a.keys() ^ b.keys())[:5]}")
    refuse_batch_norm(a, b)
    equal, skip = True, "gradient_local/" if a.get("ranks", 0) != b.get("ranks", 0) else ""
    notes = [f"not compared: {skip}*, of {a['ranks']} and {b['ranks']} ranks"] if skip else []
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
    return 0, ["same bits (T1)" if equal else f"within {TOLERANCE:g} of each size (T2)", *notes]


def _apart(key: str, a: dict, b: dict) -> list[str]:
    """A line if the tensors differ by more than they may; of new weights, the change counts."""
    if a[key].tobytes() == b[key].tobytes():  # NaN and infinity too
        return []
    if a[key].dtype.kind != "f":
        return [f"{key}: {np.sum(a[key] != b[key])} of {a[key].size} differ"]
    before = a.get(key.replace("weights_after", "weights_before"), a[key])
    need(before.shape == a[key].shape, f"{key} has another shape than the weights before")
    x, y, old = (v.astype(np.float64) for v in (a[key], b[key], before))
    with np.errstate(invalid="ignore"):
        off, scale, change = (float(np.max(np.abs(v), initial=0)) for v in (x - y, x, x - old))
    limit = TOLERANCE * change + 2.0 ** -23 * scale if change else TOLERANCE * scale
    of = f"{'change' if change else 'value'} {change or scale:.3g}"
    return [] if off <= limit < math.inf else [f"{key}: off by {off:.3g}, largest {of}"]


def refuse_batch_norm(a: dict, b: dict) -> None:
    """Statistics are per worker (Goyal, section 2.3): another n is another function, not a bug."""
    if bool(a.get("batch_norm")) and "n" in a and "n" in b:
        need(int(a["n"]) == int(b["n"]), f"batch norm over n = {a['n']} and n = {b['n']} samples "
             "per worker: different functions by design; compare equal n, or without batch norm")


def _npz(path: str) -> dict[str, np.ndarray]:
    try:
        with np.lib.npyio.NpzFile(path) as file:  # of nothing but a zip; nothing pickled
            found = dict(file)
        need(all(x.dtype.kind in "biuf" for x in found.values()), "not all of it is numbers")
        need(all(np.size(found.get(key, 0)) == 1 for key in ("n", "ranks", "batch_norm")),
             "n, ranks and batch_norm are single numbers")
        names = {key.partition("/")[2] for key in found if "/" in key}
        for key in (p + name for p, _ in STATE for name in (names or "?" if "/" in p else [""])):
            need(key in found, f"{key} is missing")
        return found
    except Exception as error:  # what zipfile and NumPy raise for a bad file is anything
        raise not_sound(path, f"give an .npz as refimpl.train --state writes: {error}") from None

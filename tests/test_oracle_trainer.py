"""Traces and states of training runs, made up here: where two runs part first."""
import io
import json
import zipfile

import numpy as np
import pytest

from refimpl.oracle.__main__ import main
from tests.test_oracle import npy, refused


def trace(path, steps=5, seed=0, **changes):
    """A trace file; changes: key -> (step from which on it differs)."""
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(steps):
        record = {"step": step, "epoch": step / 10, "lr": (0.1).hex(), "n": 32, "batch_norm": True,
                  "loss": float(2 - 0.1 * step + 0.01 * bool(seed) * rng.standard_normal()).hex()}
        record |= {key: f"{key}{step}" for key in ("gradient", "weights", "samples")}
        for key, (first, value) in changes.items():
            if step >= first:
                record[key] = value
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    return str(path)


def test_equal_traces_conform(tmp_path, capsys):
    a, b = trace(tmp_path / "a"), trace(tmp_path / "b", steps=4)
    assert main(["diff", a, a]) == 0
    assert "5 steps, 0 to 4, with the same bits (T1)" in capsys.readouterr().out
    assert main(["diff", a, b]) == 1
    assert "not all have step 4 (such steps: 1): one run is shorter" in capsys.readouterr().out
    assert main(["diff", *[trace(tmp_path / "a", steps=1)] * 2]) == 0
    assert "1 step, 0 to 0" in capsys.readouterr().out


@pytest.mark.parametrize("key,value,words", [
    ("samples", "x", "the data"), ("lr", (0.2).hex(), "the learning rate"),
    ("loss", (9.0).hex(), "the forward pass"), ("gradient", "x", "the gradient"),
    ("weights", "x", "the update")])
def test_the_first_step_and_what_parted_first_are_named(key, value, words, tmp_path, capsys):
    later = {other: (3, "y") for other in ("samples", "gradient", "weights")}
    a, b = trace(tmp_path / "a"), trace(tmp_path / "b", **(later | {key: (2, value)}))
    assert main(["diff", a, b]) == 1
    said = capsys.readouterr().out
    assert f"step 2: {key} parts first" in said and f"look at {words}" in said


def test_within_a_step_the_cause_comes_before_its_effects(tmp_path, capsys):
    a = trace(tmp_path / "a")
    all_of_them = {key: (2, "x") for key in ("samples", "gradient", "weights")}
    b = trace(tmp_path / "b", loss=(2, "0x1p3"), **all_of_them)
    assert main(["diff", a, b]) == 1
    assert "step 2: samples parts first" in capsys.readouterr().out


def test_batch_norm_over_other_n_is_refused_with_the_reason(tmp_path, capsys):
    a, b = trace(tmp_path / "a"), trace(tmp_path / "b", n=(0, 16))
    assert "different functions by design" in refused(capsys, "diff", a, b)
    for path in (a, b):  # without batch norm nothing is refused
        text = open(path).read().replace('"batch_norm": true', '"batch_norm": false')
        open(path, "w").write(text)
    assert main(["diff", a, b]) == 0


def test_a_band_of_five_seeds_takes_a_sixth_and_not_a_stranger(tmp_path, capsys):
    seeds = [trace(tmp_path / f"s{i}", 40, i) for i in range(1, 6)]
    assert main(["diff", "--band", trace(tmp_path / "good", 40, 9), *seeds]) == 0
    assert "steps outside the band of 5 seeds (T3)" in capsys.readouterr().out
    for loss in ("0x1p4", "nan", "0x1p-3"):  # too high, lost, too good
        bad = trace(tmp_path / "bad", 40, 9, loss=(20, loss))
        assert main(["diff", "--band", bad, *seeds]) == 1
    capsys.readouterr()
    refused(capsys, "diff", "--band", seeds[0], *seeds[1:])


@pytest.mark.parametrize("text", [
    "", "{", "7\n", "[]\n", '{"step": 1}\n', "\x00", "[" * 99999,
    '{"step": "1", "lr": "0x1p0", "loss": "0x1p0", "gradient": "", "weights": "", "samples": ""}\n',
    '{"step": 1, "lr": "0x1p9999", "loss": "0x1p0", "gradient": "", "weights": "", "samples": ""}',
    '{"step": 1, "lr": 0.1, "loss": "0x1p0", "gradient": "", "weights": "", "samples": ""}\n',
    '{"step": 1, "lr": "0x1p0", "loss": "0x1p0", "gradient": 1, "weights": "", "samples": ""}\n'])
def test_what_is_no_trace_gives_one_line_and_code_2(text, tmp_path, capsys):
    (tmp_path / "b").write_text(text)
    refused(capsys, "diff", trace(tmp_path / "a"), str(tmp_path / "b"))
    refused(capsys, "diff", str(tmp_path / "b"), trace(tmp_path / "a"))


def state(path, change=None, **extra):
    rng = np.random.default_rng(0)
    tensors = {"images": rng.standard_normal((4, 3, 8, 8), np.float32), "labels": np.arange(4),
               "loss": np.float32(2.3), "lr": np.float64(0.1),
               "weights_before/conv.weight": rng.standard_normal(30, np.float32),
               "gradient_local/conv.weight": rng.standard_normal(30, np.float32),
               "gradient_sum/conv.weight": rng.standard_normal(30, np.float32),
               "weights_after/conv.weight": rng.standard_normal(30, np.float32),
               **{f"{part}/bn.bias": np.zeros(3, np.float32) for part in (
                   "weights_before", "gradient_local", "gradient_sum", "weights_after")}} | extra
    if change:
        key, factor = change
        tensors[key] = tensors[key] * tensors[key].dtype.type(factor)
    np.savez(path, **tensors)
    return f"{path}.npz" if not str(path).endswith(".npz") else str(path)


def test_equal_states_conform_and_close_ones_within_a_tolerance(tmp_path, capsys):
    a = state(tmp_path / "a")
    assert main(["state", a, state(tmp_path / "b")]) == 0
    assert "same bits (T1)" in capsys.readouterr().out
    assert main(["state", a, state(tmp_path / "b", ("gradient_sum/conv.weight", 1 + 5e-7))]) == 0
    assert "(T2)" in capsys.readouterr().out


@pytest.mark.parametrize("key,factor,words", [
    ("lr", 2, "the learning rate"), ("weights_before/conv.weight", 2, "the first weights"),
    ("images", 2, "the data"), ("labels", 2, "the data"), ("loss", 1.01, "the forward pass"),
    ("gradient_local/conv.weight", 1.001, "before any sum"),
    ("gradient_sum/conv.weight", 0.5, "its scale"),
    ("weights_after/conv.weight", np.nan, "the update"),
    ("weights_after/conv.weight", 1.00001, "the update")])
def test_the_first_tensor_that_parts_is_named(key, factor, words, tmp_path, capsys):
    assert main(["state", state(tmp_path / "a"), state(tmp_path / "b", (key, factor))]) == 1
    said = capsys.readouterr().out
    assert said.startswith(key) and words in said


def test_states_of_other_rank_counts_are_compared_but_for_the_ranks_own_parts(tmp_path, capsys):
    parts = {n: np.ones((n, 30), np.float32) / n for n in (1, 2)}
    a, b = (state(tmp_path / str(n), ranks=n, **{"gradient_local/conv.weight": parts[n]})
            for n in (1, 2))
    assert main(["state", a, b]) == 0
    assert "same bits (T1)" in capsys.readouterr().out


def test_states_that_cannot_be_compared_are_refused(tmp_path, capsys):
    a = state(tmp_path / "a")
    assert "extra" in refused(capsys, "state", a, state(tmp_path / "b", extra=np.zeros(1)))
    refused(capsys, "state", a, state(tmp_path / "b", images=np.zeros((2, 3, 8, 8), np.float32)))
    a, b = (state(tmp_path / str(n), n=n, batch_norm=True) for n in (2, 4))
    assert "different functions by design" in refused(capsys, "state", a, b)


def zipped(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


@pytest.mark.parametrize("content", [
    b"", b"PK\x03\x04", b"x" * 99, zipped(images=b"no array"),
    zipped(images=npy("(1000000000000,)")),
    zipped(images=npy("(1,)", "|O", b"x" * 8)), zipped(images=npy("(-5,)")),
    zipped(images=npy("(1,"))])
def test_what_is_no_state_gives_one_line_and_code_2(content, tmp_path, capsys):
    (tmp_path / "b.npz").write_bytes(content)
    said = refused(capsys, "state", state(tmp_path / "a"), str(tmp_path / "b.npz"))
    assert "b.npz: give an .npz as refimpl.train --state writes: " in said
    assert content[:2] == b"PK" or "not a zip file" in said

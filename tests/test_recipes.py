"""The published runs: numbers by hand from the papers' tables, and what a bad recipe is told."""
import json

import pytest

from refimpl import dryrun
from refimpl.config import TAGS, load_recipe, parse, recipe_names
from refimpl.errors import UsageError
from refimpl.schedule import Schedule
from refimpl.settings import FIELDS, SAMPLE, Settings

GOYAL = {  # recipe: (k, kn, rate after warm-up, warm-up, top-1 error, spread); tables 1, 2a, 2b, figure 3
    "goyal_64": (2, 64, 0.025, "none", None, None),
    "goyal_128": (4, 128, 0.05, "none", 23.49, 0.12),
    "goyal_256": (8, 256, 0.1, "none", 23.60, 0.12),
    "goyal_512": (16, 512, 0.2, "gradual", 23.48, 0.09),
    "goyal_1k": (32, 1024, 0.4, "gradual", 23.53, 0.08),
    "goyal_2k": (64, 2048, 0.8, "gradual", 23.49, 0.11),
    "goyal_4k": (128, 4096, 1.6, "gradual", 23.56, 0.12),
    "goyal_8k": (256, 8192, 3.2, "gradual", 23.74, 0.09),
    "goyal_11k": (352, 11264, 4.4, "gradual", None, None),
    "goyal_16k": (512, 16384, 6.4, "gradual", 24.79, 0.27),
    "goyal_32k": (1024, 32768, 12.8, "gradual", 27.55, 0.28),
    "goyal_64k": (2048, 65536, 25.6, "gradual", 33.96, 0.80),
    "goyal_8k_warmup_none": (256, 8192, 3.2, "none", 24.84, 0.37),
    "goyal_8k_warmup_constant": (256, 8192, 3.2, "constant", 25.88, 0.56),
    "goyal_256_lr_half": (8, 256, 0.05, "none", 23.92, 0.10),
    "goyal_256_lr_double": (8, 256, 0.2, "none", 23.68, 0.09),
    "goyal_8k_lr_half": (256, 8192, 1.6, "gradual", 24.27, 0.08),
    "goyal_8k_lr_double": (256, 8192, 6.4, "gradual", 24.05, 0.18),
    "goyal_8k_lr_fixed": (256, 8192, 0.1, "gradual", 41.67, 0.10),
    "goyal_8k_lr_sqrt": (256, 8192, 0.5656854, "gradual", 26.22, 0.03),
    "goyal_256_gamma1": (8, 256, 0.1, "none", 23.84, 0.18),
    "goyal_8k_gamma1": (256, 8192, 3.2, "gradual", 24.11, 0.07)}
MIKAMI = {"mikami_v1_224s": (2176, [16, 32]), "mikami_v1_119k": (2176, [16, 32, 40, 56]),
          "mikami_v1_136k": (2176, [16, 32, 48, 64]), "mikami_v2_122s": (3456, [16])}


def settings(name: str) -> Settings:
    return parse(["--recipe", name])[0]


def test_the_list_is_complete():
    assert {n for n in recipe_names() if n.startswith("goyal")} == set(GOYAL)
    assert {n for n in recipe_names() if n.startswith("mikami")} == set(MIKAMI)


@pytest.mark.parametrize("name", GOYAL)
def test_goyal(name):
    k, kn, rate, warmup, error, spread = GOYAL[name]
    s, recipe = settings(name), load_recipe(name)
    stage, = Schedule(s, s.images).stages
    assert (s.workers, s.n, stage.kn, s.warmup, s.epochs) == (k, 32, kn, warmup, 90)
    assert stage.reference_lr == pytest.approx(rate, rel=1e-7)
    assert (s.momentum, s.weight_decay, s.nesterov, s.decay_epochs) == (0.9, 1e-4, True, (30, 60, 80))
    assert s.gamma_zero == ("gamma1" not in name)
    entry = recipe.published.get("top1_error", {"value": None, "spread": None})
    assert (entry["value"], entry["spread"]) == (error, spread)
    assert "assumed" not in {tag for tag, _ in recipe.provenance.values()}


@pytest.mark.parametrize("name", MIKAMI)
def test_mikami_calls_nothing_read_and_what_is_recalled_assumed(name):
    workers, sizes = MIKAMI[name]
    s, recipe = settings(name), load_recipe(name)
    assert [(band.workers, band.n) for band in s.in_bands()] == [(workers, n) for n in sizes]
    entries = [tag for tag, _ in recipe.provenance.values()] + [
        e["tag"] for e in (*recipe.published.values(), *recipe.hardware.values())]
    assert "read" not in entries
    for unread in ("bands", "base_lr", "decay", "decay_power", "lars_coefficient", "lars_eps",
                   "weight_decay", "batch_norm", "wire", "momentum"):
        assert recipe.provenance[unread][0] == "assumed", unread


def test_mikami_headlines():
    v1, v2 = (load_recipe(n).published for n in ("mikami_v1_224s", "mikami_v2_122s"))
    assert (v1["top1_accuracy"]["value"], v1["time"]["value"]) == (75.03, "224 s")
    assert (v2["time"]["value"], v2["time"]["tag"]) == ("122 s", "secondary")
    assert v2["top1_accuracy"]["tag"] == "assumed"


@pytest.mark.parametrize("name", recipe_names())
def test_every_value_has_a_source(name):
    recipe = load_recipe(name)
    assert recipe.title and set(recipe.values) == set(recipe.provenance) <= set(FIELDS)
    for tag, where in recipe.provenance.values():
        assert tag in TAGS and (where or tag == "ours")
    if name.startswith(("goyal", "mikami")):  # whatever shapes the result is said, not defaulted
        science = {"workers", "n", "epochs", "base_lr", "lr_rule", "warmup", "decay", "optimizer",
                   "momentum", "nesterov", "weight_decay", "label_smoothing", "gamma_zero", "depth"}
        assert science - {"n", *recipe.values} == set()


@pytest.mark.parametrize("name", [n for n in recipe_names() if n.startswith(("goyal", "mikami"))])
def test_a_dry_run_needs_no_data_and_shows_the_published_result(name):
    s = settings(name)
    text, plan = dryrun.text(s, s.images), json.loads(json.dumps(dryrun.plan(s, s.images)))
    for entry in load_recipe(name).published.values():
        assert f"{entry['value']}" in text
    assert str(plan["total_steps"]) in text and len(plan["epochs"]) == 90
    assert sum(band["steps"] for band in plan["bands"]) == plan["total_steps"]
    assert plan["settings"]["workers"] == {"value": s.workers, "tag": load_recipe(
        name).provenance["workers"][0], "where": load_recipe(name).provenance["workers"][1]}


def test_a_dry_run_shows_bands_grid_nodes_and_what_the_command_line_changed():
    s, _ = parse(["--recipe", "mikami_v1_224s", "--label-smoothing", "0.1"])
    first, second = dryrun.plan(s, s.images)["bands"]
    assert (first["grid"], first["gpus"], first["nodes"]) == ("34x64", 2176, 544)
    assert (first["lr_first"], first["momentum"], second["kn"]) == (0.1, 0.9, 69632)
    assert dryrun.plan(s, s.images)["settings"]["label_smoothing"]["tag"] == "given"
    goyal, = dryrun.plan(settings("goyal_8k"), 1_281_167)["bands"]
    assert (goyal["gpus"], goyal["nodes"], goyal["grid"]) == (256, 32, None)
    assert (goyal["lr_first"], goyal["lr_last"]) == (0.1, pytest.approx(0.0032))


def test_epochs_that_do_not_differ_share_a_row():
    text = dryrun.text(settings("goyal_8k"), 1_281_167)
    assert "\n5-29   780         3900   8192  3.2" in text and "\n80-89  12480" in text


def test_the_list_names_every_recipe():
    lines = dryrun.recipe_list().splitlines()
    assert [line.split()[0] for line in lines[1:]] == recipe_names()


@pytest.mark.parametrize("text, message", [
    ("wrkers = {value = 3, tag = 'ours', where = ''}", "wrkers.*did you mean workers"),
    ("workers = 3", "workers needs .* tag"),
    ("workers = {value = 3, where = ''}", "workers needs .* tag"),
    ("workers = {value = 3, tag = 'sure', where = ''}", "workers needs .* tag"),
    ("workers = {value = 3, tag = ['read'], where = ''}", "workers needs .* tag"),
    ("workers = {value = 3, tag = 'read'}", "workers needs .* tag"),
    ("workers = {value = 3.5, tag = 'ours', where = ''}", "workers 3.5: expected a whole number"),
    ("workers = {value = true, tag = 'ours', where = ''}", "workers True: expected a whole number"),
    ("warmup = {value = 'gradually', tag = 'ours', where = ''}", "did you mean gradual"),
    ("depth = {value = [3, 4.5], tag = 'ours', where = ''}", "depth"),
    ("bands = {value = [{until_epoch = 3}], tag = 'ours', where = ''}", "bands.*expected UNTIL"),
    ("bands = {value = [3], tag = 'ours', where = ''}", "bands.*expected UNTIL"),
    ("bands = {value = 3, tag = 'ours', where = ''}", "bands.*expected UNTIL"),
    ("base = 'goyal_9k'", "goyal_9k.*did you mean goyal_"),
    ("base = 3", "base must be text"),
    ("published = 3", "published must be a table"),
    ("[published]\ntime = '1 hour'", "time needs"),
    ("[hardware]\ngpus = {value = 0, tag = 'read', where = ''}", "gpus 0: 1 GPU or more"),
    ("base = 'self.toml'", "leads back to itself"),
    ("base = 'other.toml'", "leads back to itself"),
    ("workers = ", "not TOML"), ("a = " + "[" * 5000, "not TOML"), ("\x00", "not TOML")])
def test_a_bad_recipe_is_refused_with_the_cure(tmp_path, text, message):
    (tmp_path / "self.toml").write_text(text)
    (tmp_path / "other.toml").write_text("base = 'self.toml'")
    with pytest.raises(UsageError, match=f"(?s){message}"):
        load_recipe(str(tmp_path / "self.toml"))


def test_not_text_is_refused(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    for name in (str(tmp_path / "x.toml"), str(tmp_path / "missing.toml"), "x" * 5000, "a\0b"):
        with pytest.raises(UsageError, match="recipe"):
            load_recipe(name)


def test_a_recipe_of_ones_own_by_path_over_a_base(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("base = 'goyal_8k'\nepochs = {value = 3, tag = 'ours', where = 'quick'}")
    s = settings(str(path))
    assert (s.epochs, s.workers, s.warmup_lr) == (3, 256, 0.1)
    assert load_recipe(str(path)).published == {}  # a changed run has no published result


def test_the_sample_is_found_where_no_data_is_given():
    assert Settings().source.startswith(str(SAMPLE)) and Settings(data="x").source == "x"

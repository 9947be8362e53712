"""Defaults, recipe, command line, in this order; and one clear sentence for everything else."""
import dataclasses
import json
import random
import shlex
import string

import pytest

from refimpl import choice
from refimpl.collective import ALGORITHMS
from refimpl.config import RECIPES, command, load_recipe, parse
from refimpl.errors import UsageError
from refimpl.settings import FIELDS, Band, Settings, convert, option


def test_the_command_line_lies_over_the_recipe_over_the_defaults():
    s, flags = parse(["--recipe", "goyal_8k", "--momentum", "0.8", "--no-nesterov"])
    assert (s.momentum, s.nesterov, s.workers, s.seed) == (0.8, False, 256, 1)
    assert not (flags.dry_run or flags.json or flags.list_recipes)
    assert parse(["--dry-run", "--json"])[1].dry_run and parse([])[0].recipe == "demo"


def test_every_kind_of_value_has_its_type():
    s, _ = parse(["--epochs", "20", "--base-lr", "1", "--decay-epochs", "3,6", "--wire", "float16",
                  "--bands", "5:12x4 20:12x8:m=0.95:lr=0.2"])
    assert (s.epochs, s.base_lr, s.decay_epochs, s.wire) == (20, 1.0, (3, 6), "float16")
    assert type(s.base_lr) is float and s.bands == (Band(5, 12, 4), Band(20, 12, 8, 0.95, 0.2))
    assert (s.workers, s.n) == (12, 4)


@pytest.mark.parametrize("argv, message", [
    ("--epchs 3", "--epchs .did you mean --epochs"),
    ("--epochs", "--epochs: expected one argument"),
    ("--epochs x", "--epochs 'x': expected a whole number"),
    ("--epochs 0", "--epochs 0: at least 1"),
    ("--epochs 99999999999", "below 2147483648"),
    ("--momentum nan", "--momentum nan"), ("--momentum 1", "--momentum 1.0.*below 1"),
    ("--base-lr inf", "--base-lr inf"), ("--base-lr 1e999", "--base-lr inf"),
    ("--allreduce rnig", "did you mean ring"), ("--recipe dmo", "did you mean demo"),
    ("--grid 3", "--grid 3: expected ROWSxCOLUMNS"), ("--grid 0x3", "--grid 0x3"),
    ("--sum exact --wire float16", "--sum exact cannot go with --wire float16"),
    ("--trace x --state ./x", "one file for two"), ("--data x --trace x", "one file for two"),
    ("--bands 3:1x", "expected UNTIL"), ("--bands 3:1x2:m=1.5", "expected UNTIL"),
    ("--bands 5:1x2 --epochs 9", "must rise to --epochs 9"),
    ("--epochs 9 --bands '5:1x2 3:1x2 9:1x1'", "must rise"),
    ("--recipe mikami_v1_224s --workers 3", "sets its minibatch in bands"),
    ("--image-size 300 --val-short-side 256", "--val-short-side 256: below --image-size 300"),
    ("--decay polynomial --epochs 3 --warmup gradual --warmup-epochs 3", "below --epochs 3"),
    ("stray", "unknown stray")])
def test_bad_input_is_one_sentence_with_the_value(argv, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse(shlex.split(argv))
    assert "\n" not in str(caught.value)


def test_bands_are_cut_where_the_run_ends():
    s, _ = parse(["--recipe", "mikami_v1_224s", "--epochs", "7"])
    assert [(b.until_epoch, b.n) for b in s.bands] == [(5, 16), (7, 32)]
    assert len(parse(["--recipe", "mikami_v1_224s", "--epochs", "5", "--decay", "none"])[0]
               .bands) == 1
    assert len(parse(["--recipe", "mikami_v1_224s", "--epochs", "6", "--bands", "5:4x2 90:4x8"])[0]
               .bands) == 2


def test_a_run_prints_itself_back():
    assert command(parse(["--recipe", "goyal_8k"])[0]) == (
        "python -m refimpl.train --recipe goyal_8k")
    for argv in (["--data", "/a b/it's.zip", "--no-nesterov", "--channels-last"],
                 ["--recipe", "mikami_v1_119k", "--epochs", "50", "--seed", "9"],
                 ["--bands", "3:2x2:m=0.5 90:4x2:lr=1e-05", "--decay-epochs", "", "--epochs", "12"],
                 ["--base-lr", "0.30000000000000004", "--lars-eps", "1e-9", "--name", "--x"[2:]]):
        s = parse(argv)[0]
        assert parse(shlex.split(command(s))[3:])[0] == s, command(s)


def test_settings_survive_json():
    s = parse(["--recipe", "mikami_v1_136k"])[0]
    stored = json.loads(json.dumps(dataclasses.asdict(s)))
    assert Settings(**{name: convert(name, value) for name, value in stored.items()}) == s


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and max(map(len, text.splitlines())) <= 100
    for name, field in FIELDS.items():
        assert option(name) in text and field.metadata["help"].split()[0] in text


def test_random_command_lines_end_in_settings_or_one_sentence():
    draw = random.Random(0)
    words = [*map(option, FIELDS), "--dry-run", "-1", "", "3", "0.5", "nan", "1e400", "auto", "ring",
             "5:1x2", "9" * 5000, "goyal_8k", "²", "2x²", "--no-nesterov", "--", "-", "{}", "a\0b"]
    accepted = 0
    for _ in range(1500):
        argv = draw.choices(words, k=draw.randrange(1, 6))
        try:
            accepted += isinstance(parse(argv)[0], Settings)
        except UsageError as error:
            assert "\n" not in str(error)[:200]
    assert accepted > 10


def test_random_damage_to_recipes_ends_in_settings_or_one_sentence(tmp_path):
    draw, path, accepted = random.Random(1), tmp_path / "x.toml", 0
    texts = [p.read_text() for p in sorted(RECIPES.glob("*.toml"))]
    for _ in range(700):
        text = list(draw.choice(texts))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(text))
            text[at:at + draw.choice((0, 1, 5))] = draw.choice(
                (*string.printable, "", "-1", "1e999", "[]", "{}", "true", "9" * 30))
        path.write_text("".join(text))
        try:
            accepted += bool(load_recipe(str(path)))
            parse(["--recipe", str(path)])
        except UsageError:
            pass
    assert accepted > 100


def test_auto_is_a_fixed_table_by_ranks_and_bytes():
    assert choice.algorithm(4, 8_000_000, one_cpu_node=True) == "window"
    assert choice.algorithm(2176, 8_000_000, one_cpu_node=False) == "torus"  # Mikami's
    assert choice.algorithm(2176, 1 << 20, one_cpu_node=False) == "halving_doubling"
    assert choice.bucket_bytes(256) == 8_000_000 < choice.bucket_bytes(257) == 16_000_000
    for lines in (choice.BETWEEN_NODES, choice.ONE_CPU_NODE):
        assert {name for *_, name in lines} <= set(ALGORITHMS)
        assert lines[-1][:2] == (choice.ANY, choice.ANY)  # there is always an answer

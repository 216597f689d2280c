"""From TOML to a checked config, and back."""

from __future__ import annotations

import tomllib

import msgspec
import pytest

from asyncrl.config.load import dump_config, load_config, parse_config, validated
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError


def test_a_dumped_config_reads_back_as_itself():
    config = parse_config({
        "model": {"kind": "scratch", "warm_start": {"steps": 3}},
        "reward": {"functions": [{"kind": "format_check", "pattern": "a+"}]},
    })
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_set_lays_values_over_the_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[learner]\nlearning_rate = 1e-6\n")
    config = load_config(file, ["learner.learning_rate=5e-4", "name=mine", "buffer.max_staleness = 7"])
    assert (config.learner.learning_rate, config.name, config.buffer.max_staleness) == (5e-4, "mine", 7)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"buffer": {"max_stalenes": 1}}, "max_stalenes"),
        ({"buffer": {"max_staleness": -1}}, "max_staleness"),
        ({"model": {"kind": "imaginary"}}, "imaginary"),
        ({"generate": {"sampling": {"max_new_tokens": 512}}}, "max_sequence_tokens"),
        ({"packing": {"tokens_per_row": 16}}, "tokens_per_row"),
        ({"model": {"kind": "scratch", "hidden_size": 30, "num_heads": 4}}, "multiple of"),
        ({"model": {"kind": "scratch", "max_positions": 8}}, "max_positions"),
        ({"buffer": {"min_group_members": 9}, "algorithm": {"group_size": 4}}, "group_size"),
        ({"reward": {"functions": []}}, "at least one reward"),
    ],
)
def test_what_cannot_be_is_refused_by_name(raw, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


def test_a_config_built_in_python_is_checked_too():
    config = msgspec.structs.replace(RunConfig(), num_steps=0)
    with pytest.raises(ConfigError, match="num_steps"):
        validated(config)


@pytest.mark.parametrize("override", ["novalue", "=3", "a..b=1", "name.first=1"])
def test_a_malformed_set_is_refused(override, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('name = "x"\n')
    with pytest.raises(ConfigError):
        load_config(file, [override])


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read config"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(tmp_path / "broken.toml")

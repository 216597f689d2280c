"""`asyncrl.configs`: every struct of a config, and its JSON schema."""

import json
import tomllib
from pathlib import Path

import msgspec
import pytest

from asyncrl import configs
from tests.unit.config.test_load import structs_below

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


STRUCTS = {kind.cls.__name__: kind.cls for kind in structs_below(msgspec.inspect.type_info(configs.RunConfig))}


def test_every_struct_that_a_config_can_hold_is_exported():
    assert len(STRUCTS) > 60
    assert all(getattr(configs, name) is struct for name, struct in STRUCTS.items())


def test_the_schema_is_json_and_has_every_field_of_every_struct():
    schema = json.loads(json.dumps(configs.json_schema(), allow_nan=False))
    for name, struct in STRUCTS.items():
        fields = {field.encode_name for field in msgspec.structs.fields(struct)}
        assert set(schema["$defs"][name]["properties"]) - {"kind"} == fields - {"kind"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_are_of_the_schema_and_a_misspelt_field_is_not(path):
    jsonschema = pytest.importorskip("jsonschema")
    raw = tomllib.loads(path.read_text())
    jsonschema.validate(raw, configs.json_schema())
    with pytest.raises(jsonschema.ValidationError, match="max_stalenes"):
        jsonschema.validate(raw | {"buffer": {"max_stalenes": 1}}, configs.json_schema())

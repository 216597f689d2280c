"""From TOML to a checked config, and back."""

import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from asyncrl import configs
from asyncrl.algorithms.auto import applied
from asyncrl.config.algorithm import AlgorithmConfig, KLConfig, MaskedGeometric, MaskedToken, TruncatedSequence, Veto
from asyncrl.config.algorithm_table import doubts_about_algorithm
from asyncrl.config.check import doubts_about
from asyncrl.config.generate import GenerateConfig, SamplingConfig
from asyncrl.config.load import dump_config, load_config, parse_config, resolve_config
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError


def below(kind):
    """The types that a type holds directly."""
    one = (getattr(kind, name, None) for name in ("item_type", "value_type", "type"))
    return [*getattr(kind, "types", ()), *getattr(kind, "item_types", ()), *filter(None, one)]


def structs_below(kind, seen=None):
    """Every config struct under a type, each once."""
    seen = {} if seen is None else seen
    if isinstance(kind, msgspec.inspect.StructType):
        if kind.cls in seen:
            return []
        seen[kind.cls] = kind
        for field in kind.fields:
            structs_below(field.type, seen)
    for each in below(kind):
        structs_below(each, seen)
    return list(seen.values())


KINDS = structs_below(msgspec.inspect.type_info(RunConfig))


def test_what_is_free_is_still_free_once_written_and_read(tmp_path):
    raw = {"algorithm": {"advantage": "gae", "kl": {"cap": math.inf}, "critic": {"value_clip": math.inf}}}
    file = tmp_path / "config.toml"
    file.write_text(dump_config(parse_config(raw)))
    read = load_config(file).algorithm
    assert (read.kl.cap, read.critic.value_clip) == (math.inf, math.inf)


def test_a_field_that_may_be_none_is_none_by_default_as_toml_cannot_say_it():
    optional = [
        (kind.cls.__name__, field.name, field.default)
        for kind in KINDS
        for field in kind.fields
        if isinstance(field.type, msgspec.inspect.UnionType)
        and any(isinstance(member, msgspec.inspect.NoneType) for member in field.type.types)
    ]
    assert len(optional) > 5
    assert [entry for entry in optional if entry[2] is not None] == []


def numbers_below(kind):
    """Every int and float in a field's type."""
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return [kind]
    return [number for each in below(kind) if not isinstance(each, msgspec.inspect.StructType) for number in numbers_below(each)]


def test_every_number_has_bounds_and_a_float_without_an_upper_one_says_that_inf_lifts_it():
    free = []
    for kind in KINDS:
        for field in kind.fields:
            for number in numbers_below(field.type):
                least = number.ge if number.ge is not None else number.gt
                if (least is None or number.le is None) and number.lt is None and field.name not in {"low", "high"}:
                    free.append(f"{kind.cls.__name__}.{field.name}")
    assert sorted(set(free)) == [
        "AlgorithmConfig.clip_high", "AlgorithmConfig.dual_clip", "AlgorithmConfig.max_ratio", "AlgorithmConfig.vtrace_c",
        "AlgorithmConfig.vtrace_rho", "CriticConfig.value_clip", "KLConfig.cap", "ReasoningGymTask.family_options",
        "TruncatedGeometric.cap", "TruncatedSequence.cap", "TruncatedToken.cap", "VLLMEngineConfig.arguments",
    ]  # fmt: skip


@pytest.mark.parametrize("given", [
    "generate.num_workers=1000000", "learner.ranks=99999", "algorithm.group_size=100000000000", "learner.learning_rate=1e400",
    "learner.learning_rate=nan", "transport.max_message_bytes=1", "supervision.stall_timeout_s=inf",
    "num_steps=100000000000000000000000", "reward.concurrency=1000000", "learner.weight_decay=1e300",
    *(f"learner.device={device!r}" for device in ("tpu", "", "cuda:", "cuda:x", "cuda:-1", "CUDA")),
    "inference.device='tpu'", "generate.engine={kind='transformers', device='tpu'}",
])  # fmt: skip
def test_numbers_that_no_run_can_hold_and_devices_that_are_none_are_refused_by_name(given):
    with pytest.raises(ConfigError, match=rf"^--set {given}: Expected `((int|float)` (>=|>|<=) |str` matching regex)"):
        resolve_config({}, [given])


@pytest.mark.parametrize(("overrides", "said"), [
    (["num_steps=abc"], "--set num_steps=abc: Expected"),
    (["seed=1", "buffer.max_stalenes=1"], "--set buffer.max_stalenes=1: "),
    (["generate.engine.kind=trnsformers"], "--set generate.engine.kind=trnsformers: "),
    ({"buffer.max_staleness": -1}, "buffer.max_staleness = -1: "),
    ("seed=3", "overrides must be a list or a dict, ['seed=3']; got a text"),
    (["name.first=1"], "--set name.first=1: name is not a table"),
    *(([given], f"--set takes a.b=value, got '{given}'") for given in ("novalue", "=3", "a..b=1")),
])  # fmt: skip
def test_a_wrong_override_is_named_as_it_was_given(overrides, said):
    with pytest.raises(ConfigError) as refused:
        resolve_config({"name": "x"}, overrides)
    assert str(refused.value).startswith(said)


def test_overrides_go_over_every_form_of_config_and_one_built_in_python_is_checked_too(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("seed = 3\n[generate]\nnum_workers = 2\n")
    raw = {"seed": 3, "generate": {"num_workers": 2}}
    for config in (file, str(file), raw, RunConfig(seed=3, generate=GenerateConfig(num_workers=2))):
        for overrides in (["generate.num_workers=5"], {"generate.num_workers": 5}):
            resolved = resolve_config(config, overrides)
            assert (resolved.seed, resolved.generate.num_workers) == (3, 5)
    assert raw == {"seed": 3, "generate": {"num_workers": 2}}, "what was given is left as it is"
    resolved = resolve_config(RunConfig(), {"algorithm.kl.coefficient": 0.5, "learner.lora.rank": 4})  # tables that it has not
    assert (resolved.algorithm.kl.coefficient, resolved.learner.lora.rank) == (0.5, 4)
    with pytest.raises(ConfigError, match="num_steps"):
        resolve_config(RunConfig(num_steps=0))


@pytest.mark.parametrize("nothing", ["none", "null"])
def test_what_may_be_left_out_is_unset_by_none(nothing):
    set_before = {"learner": {"lora": {"rank": 4}}, "algorithm": {"kind": "policy", "kl": {"target": 0.1}}}
    config = resolve_config(set_before, [f"learner.lora={nothing}", f"algorithm.kl.target={nothing}", f"name={nothing}"])
    assert (config.learner.lora, config.algorithm.kl, config.name) == (None, KLConfig(), nothing)
    with pytest.raises(ConfigError, match=f"--set learner={nothing}: "):
        resolve_config(set_before, [f"learner={nothing}"])


KIND_CHANGES = [
    ({"generate": {"engine": {"kind": "transformers", "num_threads": 2}}}, "generate.engine", "fake", {"num_slots": 3}),
    ({"broadcast": {"medium": {"kind": "files", "folder": "weights"}}}, "broadcast.medium", "auto", {}),
    ({"task": {"kind": "addition", "digits": 3}}, "task", "python", {"path": "a:b"}),
    ({"model": {"kind": "scratch", "hidden_size": 64}}, "model", "pretrained", {"path": "m"}),
    ({"launch": {"kind": "local", "elastic": {}}}, "launch", "ray", {"strategy": "SPREAD"}),
]


@pytest.mark.parametrize(("raw", "place", "kind", "more"), KIND_CHANGES)
def test_another_kind_replaces_a_table_of_which_there_are_several_kinds_whatever_the_order_of_the_overrides(
    raw, place, kind, more
):
    overrides = [f"{place}.{field}={value}" for field, value in {**more, "kind": kind}.items()]
    expected = {"kind": kind, **more}
    for part in reversed(place.split(".")):
        expected = {part: expected}
    for ordered in (overrides, overrides[::-1]):
        assert resolve_config(raw, ordered) == parse_config(expected)
    assert resolve_config(parse_config(raw), {f"{place}.{field}": value for field, value in {"kind": kind, **more}.items()}) == (
        parse_config(expected)
    )


def test_the_same_kind_and_a_kind_of_one_struct_keep_the_table():
    raw = {"generate": {"engine": {"kind": "transformers", "num_threads": 2}}, "algorithm": {"kind": "auto", "clip_low": 0.1}}
    kept = resolve_config(raw, ["generate.engine.kind=transformers", "algorithm.kind=policy"])
    assert (kept.generate.engine.num_threads, kept.algorithm.clip_low) == (2, 0.1)


@pytest.mark.parametrize("name", ["reward.equal", '"reward.equal"', "'reward.equal'"])
def test_the_name_of_an_alarm_may_be_in_quotes_as_in_toml(name):
    assert resolve_config({}, [f"observe.alarms.{name}=off"]).observe.alarms == {"reward.equal": "off"}
    with pytest.raises(ConfigError, match=f"^--set observe.alarms.{name}=of: Invalid enum value 'of'"):
        resolve_config({}, [f"observe.alarms.{name}=of"])


def test_what_drops_the_quickstart_s_dual_clip_is_said_and_works():
    with pytest.raises(ConfigError, match=r"a preset whose \[algorithm\] has `kind`, or --set '(algorithm=\{.*\})'") as refused:
        load_config("quickstart", ["algorithm.loss=gmpo"])
    override = str(refused.value).split("'")[-2]
    assert load_config("quickstart", [override]).algorithm == AlgorithmConfig(kind="policy", loss="gmpo")


def test_a_missing_or_broken_file_is_named(tmp_path):
    (tmp_path / "broken.toml").write_text("a = = 1")
    (tmp_path / "latin.toml").write_bytes('name = "caf\xe9"'.encode("latin-1"))
    latin = r"latin\.toml is not UTF-8 text: .* at byte 11"
    for name, said in {"none": "cannot read config", "broken": "is not TOML", "latin": latin}.items():
        with pytest.raises(ConfigError, match=said):
            load_config(tmp_path / f"{name}.toml")


def test_what_auto_does_not_read_and_no_recipe_is_about_is_warned_of():
    auto = parse_config({"algorithm": {"kind": "auto", "proximal": "behaviour", "denominator": "kept"}}).algorithm
    proximal, denominator = doubts_about_algorithm(auto)
    assert "algorithm.proximal = 'behaviour' is not read" in proximal
    assert f"always takes {applied(auto, 'near').proximal!r}" in proximal
    assert f"always takes {applied(auto, 'near').denominator!r}" in denominator
    for plain in (AlgorithmConfig(proximal="behaviour"), AlgorithmConfig(kind="auto")):
        assert doubts_about_algorithm(plain) == []


@pytest.mark.parametrize(("algorithm", "named"), [
    (AlgorithmConfig(kind="auto"), None),
    (AlgorithmConfig(loss="ppo_clip", corrections=(MaskedToken(), Veto())), None),
    (AlgorithmConfig(loss="ppo_clip", corrections=(TruncatedSequence(), MaskedGeometric())), "tis_sequence, masked_geometric"),
    (AlgorithmConfig(loss="vespo", corrections=()), "vespo"),
])  # fmt: skip
@pytest.mark.parametrize("sampling", [SamplingConfig(top_p=0.95), SamplingConfig(top_k=20)])
def test_filtered_samples_are_warned_of_by_name_where_ratios_are_taken_over_sequences(algorithm, named, sampling):
    (doubt,) = doubts_about_algorithm(algorithm, sampling)
    assert "ratios are under 1" in doubt
    assert (f"and {named} may drop" in doubt) if named else "may drop" not in doubt
    assert doubts_about_algorithm(algorithm, SamplingConfig()) == []
    assert doubts_about_algorithm(AlgorithmConfig(kind="dpo"), sampling) == []


@pytest.mark.parametrize(("loss", "corrections", "is_blind"), [
    ("gspo", (), True), ("gspo", (MaskedToken(),), False), ("decoupled_ppo", (), False), ("topr", (), False),
    ("my.py:f", (), False),
])  # fmt: skip
def test_a_loss_that_does_not_see_how_old_data_is_is_warned_of_where_it_may_be_old(loss, corrections, is_blind):
    algorithm = AlgorithmConfig(kind="policy", loss=loss, corrections=corrections)
    doubts = doubts_about_algorithm(algorithm, max_staleness=2)
    assert ["does not see how old data is, and buffer.max_staleness is 2" in doubt for doubt in doubts] == [True] * is_blind
    assert doubts_about_algorithm(algorithm, max_staleness=1) == []
    assert doubts_about_algorithm(msgspec.structs.replace(algorithm, proximal="behaviour"), max_staleness=2) == []


@pytest.mark.parametrize(("set_to", "is_read"), [
    ({"loss": "reinforce", "clip_low": 0.1}, False), ({"loss": "gspo", "clip_low": 0.1}, True), ({"clip_high": 0.3}, True),
    ({"loss": "cispo", "clip_high": 0.3}, False), ({"loss": "cispo", "max_ratio": 3.0}, True), ({"max_ratio": 3.0}, False),
    ({"loss": "my.py:f", "tau_positive": 2.0}, True), ({"kind": "dpo", "clip_low": 0.1}, False),
])  # fmt: skip
def test_a_bound_that_the_loss_does_not_read_is_warned_of(set_to, is_read):
    (field,) = set_to.keys() - {"loss", "kind"}
    doubts = doubts_about_algorithm(AlgorithmConfig(**{"kind": "policy", **set_to}))
    assert [f"algorithm.{field} = {set_to[field]} is not read" in doubt for doubt in doubts] == [True] * (not is_read)


@pytest.mark.parametrize(("table", "field", "least"), [
    ({"algorithm": {"advantage": "gae", "critic": {"warmup_steps": 19}}}, "algorithm.critic.warmup_steps", 20),
    ({"learner": {"minibatches": 8}}, "learner.minibatches", 9), ({"learner": {"warmup_steps": 20}}, "learner.warmup_steps", 21),
])  # fmt: skip
def test_settings_that_train_nothing_or_less_than_was_asked_are_warned_of(table, field, least):
    config = resolve_config({"num_steps": 20, **table}, {"algorithm.groups_per_step": 8})
    assert doubts_about(config) == []
    (doubt,) = doubts_about(resolve_config(config, {field: least}))
    assert f"{field} ({least})" in doubt
    assert doubts_about(resolve_config(config, {field: least, "learner.kind": "external"})) == []


def test_the_kind_of_algorithm_that_is_left_out_is_policy_where_one_of_its_parts_is_named():
    assert resolve_config({}).algorithm.kind == resolve_config({"algorithm": {"clip_low": 0.1}}).algorithm.kind == "auto"
    for part in ({"loss": "decoupled_ppo"}, {"corrections": [{"kind": "tis_token"}]}, {"proximal": "behaviour"}):
        assert resolve_config({"algorithm": part}).algorithm.kind == "policy"
    assert resolve_config({}, {"algorithm.loss": "decoupled_ppo"}).algorithm.kind == "policy"
    assert (AlgorithmConfig().kind, AlgorithmConfig(loss="gspo").kind) == ("auto", "policy")
    resolved = resolve_config({})
    with pytest.raises(ConfigError, match=r"set algorithm\.kind = 'policy'"):
        resolve_config(resolved, {"algorithm.loss": "gspo"})
    assert resolve_config(resolved, {"algorithm.loss": "gspo", "algorithm.kind": "policy"}).algorithm.loss == "gspo"


def test_threads_may_be_the_first_to_load_a_config_all_at_once():
    code = """
from concurrent.futures import ThreadPoolExecutor
from asyncrl.config.load import load_config
with ThreadPoolExecutor(3) as pool:
    assert len(list(pool.map(load_config, ["quickstart"] * 3))) == 3
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_struct_is_exported_and_in_the_schema_which_shipped_configs_are_of_and_a_misspelt_field_is_not():
    assert len(KINDS) > 60
    schema = json.loads(json.dumps(configs.json_schema(), allow_nan=False))
    for kind in KINDS:
        assert getattr(configs, name := kind.cls.__name__) is kind.cls
        fields = {field.encode_name for field in kind.fields}
        assert set(schema["$defs"][name]["properties"]) - {"kind"} == fields - {"kind"}
    jsonschema = pytest.importorskip("jsonschema")
    for path in (Path(__file__).parents[3] / "configs").glob("*.toml"):
        jsonschema.validate(raw := tomllib.loads(path.read_text()), schema)
        with pytest.raises(jsonschema.ValidationError, match="max_stalenes"):
            jsonschema.validate(raw | {"buffer": {"max_stalenes": 1}}, schema)

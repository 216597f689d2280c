"""Benchmarks say what was measured against what was asked for."""

import pytest

from asyncrl import cli
from asyncrl.errors import ConfigError
from benchmarks.harness import interleaved, ratio, run_benchmark


def test_a_result_has_the_agreed_form_and_a_ratio_holds_at_its_goal_in_either_direction():
    result = run_benchmark("packing", rounds=1)
    assert (result["bench"], set(result)) == ("packing", {"bench", "figures", "ratios"})
    assert {frozenset(row) for row in result["ratios"].values()} == {frozenset({"value", "goal", "holds"})}
    assert ratio(0.33, 0.33).holds
    assert not ratio(0.32, 0.33).holds
    assert ratio(4.0, 4.0, at_least=False).holds
    assert not ratio(4.1, 4.0, at_least=False).holds


def test_sides_are_measured_in_turns_after_a_warm_up_and_medians_taken():
    order, figures = [], {"a": iter([99.0, 1.0, 5.0, 2.0]), "b": iter([99.0, 10.0, 30.0, 20.0])}
    sides = {name: lambda name=name: order.append(name) or next(figures[name]) for name in figures}
    assert interleaved(sides, rounds=3, warmup=1) == {"a": 2.0, "b": 20.0}
    assert order == ["a", "b"] * 4


@pytest.mark.parametrize(("name", "options", "said"), [
    ("nonsense", {}, "no benchmark 'nonsense'; there are transport, ledger, broadcast, engine, pipeline"),
    ("packing", {"engine": "vllm"}, "benchmark 'packing' takes no --engine"),
    ("broadcast", {"media": "shared_memory, carrier_pigeon"}, "carrier_pigeon"),
    ("engine", {"engine": "abacus"}, "measures 'transformers' and 'vllm', not 'abacus'"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_with_what_can(name, options, said):
    with pytest.raises(ConfigError, match=said):
        run_benchmark(name, **options)


def test_without_a_checkout_it_says_where_benchmarks_are(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "asyncrl" / "cli.py"))
    with pytest.raises(ConfigError, match="benchmarks are in a checkout of the repository, not in the wheel"):
        cli.bench("packing")

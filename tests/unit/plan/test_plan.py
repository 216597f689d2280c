import dataclasses
import json

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.models.memory import ModelShape, shape_of_json
from asyncrl.plan.planner import advice, cache_bytes, engine_speed, gpu_memory, plan
from asyncrl.plan.report import plan_text, plan_values
from asyncrl.plan.spec import GIB, NAMED, Question, ask, find_model, parse_cluster
from asyncrl.plan.validate import planned_peak_bytes

SEVEN = find_model("7B")


def question(**fields) -> Question:
    return Question(**{"model": SEVEN, "cluster": parse_cluster("8xH100"), **fields})


def ppo_on_one_card(**fields) -> Question:
    usual = {"critic": SEVEN, "reward_model": SEVEN, "has_reference": True, "algorithm": "ppo", "placement": "colocated"}
    return question(**({"cluster": parse_cluster("H100")} | usual | fields))


@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_are_those_that_transformers_counts(tmp_path, is_tied):
    config = LlamaConfig(
        hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, vocab_size=301,
        tie_word_embeddings=is_tied,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert find_model(str(tmp_path)).parameters == sum(tensor.numel() for tensor in LlamaForCausalLM(config).parameters())


@pytest.mark.parametrize(("name", "billions", "active"), [("llama-3-70b", 70.6, 69.5), ("qwen3-235b-a22b", 235.1, 21.6)])
def test_named_models_have_their_published_sizes(name, billions, active):
    assert NAMED[name].parameters / 1e9 == pytest.approx(billions, abs=0.06)
    assert NAMED[name].active_parameters / 1e9 == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize("size", [None, [64, 64]])
def test_a_shape_without_one_hidden_size_is_refused(size):
    with pytest.raises(ConfigError, match="x has no 'hidden_size'"):
        shape_of_json({"hidden_size": size, "num_attention_heads": 1}, "x")


def test_the_shape_of_a_gpt_2_is_read_by_its_own_names():
    given = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": None, "vocab_size": 99, "tie_word_embeddings": True}
    shape = shape_of_json(given, "gpt2")
    assert (shape.hidden, shape.layers, shape.heads, shape.intermediate, shape.vocabulary) == (48, 2, 4, 192, 99)


def test_a_critic_without_ppo_and_a_number_too_small_for_a_model_are_refused():
    with pytest.raises(ConfigError, match="algorithm 'grpo' has no critic: leave out critic '7B', or set algorithm ppo"):
        ask("7B", "8xH100", critic="7B")
    with pytest.raises(ConfigError, match=r"must be at least 0\.02B, got '0B'"):
        find_model("0B")
    assert find_model("0.02B").parameters == pytest.approx(2e7, rel=0.01)


def test_an_engine_has_as_many_gpus_as_its_heads_can_be_divided_by():
    made = plan(question(model=dataclasses.replace(NAMED["llama-3-70b"], heads=66), cluster=parse_cluster("32xA100-40")))
    assert made.tensor_parallel == 2, "with 64 heads an engine has 4"


def test_what_is_no_model_is_answered_with_what_is(tmp_path):
    with pytest.raises(ConfigError, match=r"llama-3-70b.*7B.*config.json"):
        find_model("gpt-5")
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        shape_of_json({"hidden_size": 1, "num_attention_heads": 1}, "x")


def test_7b_ppo_fits_on_80_with_lora_and_small_models():
    small = {"critic": None, "algorithm": "grpo", "reward_model": find_model("1B"), "lora_rank": 64, "optimizer": "adamw_8bit"}
    made = plan(ppo_on_one_card(**small))
    assert made.fits
    assert made.memory[0].phases["inference"]["reference"] == 0


def test_70b_on_64_h100_fits_and_the_halves_balance():
    made = plan(question(model=NAMED["llama-3-70b"], cluster=parse_cluster("64xH100"), has_reference=True))
    assert made.fits
    assert made.num_generation_gpus + made.num_training_gpus == 64
    assert made.tensor_parallel >= 4, "141 GB of weights do not fit on two cards beside a cache"
    assert 0.5 < made.generation_s / made.training_s < 2
    assert made.sync_s == pytest.approx(made.question.version_bytes / 40e9, rel=0.01)


@pytest.mark.parametrize(("gpus", "fields", "why"), [
    ("16xH100", {"num_generation_gpus": 6},
     "no run can use this split: 10 GPUs train, and the learner is on one machine, which has 8"),
    ("16xH100", {}, ""),
    ("8xH100", {"placement": "hybrid"}, "no run can use this split: placement hybrid is for one GPU, and 8 train"),
    ("8xH100", {"placement": "async_hybrid"}, ""),
])  # fmt: skip
def test_a_split_that_no_run_can_use_is_named(gpus, fields, why):
    made = plan(question(model=NAMED["qwen2.5-32b"], cluster=parse_cluster(gpus), lora_rank=32, **fields))
    assert made.why_not_run == plan_values(made)["why_not_run"] == why
    assert (f"\n\nfits\n{why}\n" if why else "\n\nfits\n\n") in plan_text(made)


def test_state_is_divided_over_the_training_gpus_and_moves_to_the_host():
    one = gpu_memory(question(placement="colocated", offload_optimizer=True), 1, 1)[0]
    eight = gpu_memory(question(placement="colocated", offload_optimizer=True), 1, 8)[0]
    assert eight.phases["train"]["policy gradients"] == one.phases["train"]["policy gradients"] / 8
    assert "policy moments" not in one.phases["train"]
    assert one.host["policy moments"] == 8 * SEVEN.parameters


def test_checkpointing_leaves_of_each_layer_its_input_and_of_one_all():
    model = ModelShape(64, 10, 4, 4, 16, 256, 128)
    kept, all_of_it = (planned_peak_bytes(model, 4096, checkpointing=checkpointing) for checkpointing in (True, False))
    # A layer's values: two norms of 3, attention of 5, feed-forward of 4 widths; checkpointed, nine layers keep 1 of them.
    layer = 4 * 4096 * (2 * 3 * 64 + 5 * 64 + 4 * 256)
    assert all_of_it - kept == 9 * layer - 10 * 4 * 4096 * 64


def test_hybrid_holds_the_weights_once():
    (colocated,) = gpu_memory(question(placement="colocated"), 1, 1)
    (hybrid,) = gpu_memory(question(placement="hybrid"), 1, 1)
    assert "engine weights" not in hybrid.phases["rollout"]
    assert hybrid.phases["rollout"]["policy weights"] == colocated.phases["rollout"]["engine weights"]


def test_the_cache_gets_what_all_else_that_is_there_leaves():
    apart = question(model=NAMED["qwen2.5-7b"], has_reference=True, response_tokens=7000)
    beside_training = dataclasses.replace(apart, placement="async_hybrid")
    assert [round(cache_bytes(one, 1) / 1e9) for one in (apart, beside_training)] == [54, 24]
    assert engine_speed(beside_training, 1).batch < engine_speed(apart, 1).batch
    on_one = {num: gpu_memory(beside_training, 1, num)[0].phases["train"].get("weight versions to fetch") for num in (1, 8)}
    assert on_one == {1: 2 * beside_training.version_bytes, 8: None}


def test_what_does_not_fit_is_said_in_words_and_values_with_advice_that_is_true():
    made = plan(ppo_on_one_card())
    assert not made.fits
    text, values = plan_text(made), json.loads(json.dumps(plan_values(made)))
    assert "DOES NOT FIT" in text
    assert values["fits"] is False
    assert f"{values['peak_gib']['all']:.1f}" in text
    assert values["memory_gib"]["all"]["train"]["policy moments"] * GIB == pytest.approx(8 * SEVEN.parameters)
    assert all(line in text for line in values["advice"])
    assert any("LoRA" in line for line in values["advice"])
    assert not any("8 GPUs" in line for line in values["advice"]), "colocated is for one GPU, and there is other advice"
    assert plan(ppo_on_one_card(cluster=parse_cluster("8xH100"))).fits
    assert plan(ppo_on_one_card(offload_optimizer=True, critic=None)).fits
    assert advice(plan(question())) == []
    all_chosen = plan(question(model=find_model("70B"), placement="colocated", num_generation_gpus=8))
    assert "64 GPUs of this kind instead of 8" in advice(all_chosen), "disaggregated, which leaves none to train, is no error"


@pytest.mark.parametrize(("cluster", "override", "said"), [
    ("8xTPU", "", "H100"), ("0xH100", "", "64xH100"), ("99999999999xH100", "", "at most 65536"), ("H100", "", "at least 2 GPUs"),
    ("8xH100", "dollars_per_hour=nan", "takes a finite number"), ("8xH100", "optimizer=sgd", "adamw_8bit"),
    ("8xH100", "rank=2", "lora_rank"), ("8xH100", "lora_rank=many", "takes int"),
    ("8xH100", "max_sequence_tokens=100", "max_sequence_tokens"), ("8xH100", "tokens_per_row=4096", "tokens_per_row"),
    *(("8xH100", f"{name}=0", f"{name} must be at least 1, got 0") for name in ("groups_per_step", "gpus_per_node")),
    *(("8xH100", f"{name}=-1", f"{name} must be at least 0, got -1") for name in ("lora_rank", "max_staleness")),
    ("8xH100", "memory_share=0", "memory_share must be above 0 and at most 1, got 0"),
    ("8xH100", "num_generation_gpus=8", "under 8"), ("8xH100", "tensor_parallel=8", "cannot be divided with tensor_parallel = 8"),
    ("8xH100", "tensor_parallel=3", "must divide the model's .* heads, got 3"),
    ("8xH100", "dollars_per_hour=-1", "dollars_per_hour must be at least 0, got -1"),
])  # fmt: skip
def test_what_cannot_be_is_answered_with_what_can(cluster, override, said):
    with pytest.raises(ConfigError, match=said):
        plan(ask("7B", cluster, overrides=[override] if override else []))

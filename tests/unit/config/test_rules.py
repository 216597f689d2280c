"""What may be in a config and what its parts ask of each other: each rule once, by what it says to write instead."""

from typing import Any

import pytest

from asyncrl.config.load import faults_beside, parse_config, take_values
from asyncrl.config.reward import AnswerMatchReward, FormatCheckReward, RewardConfig, reward_names
from asyncrl.errors import ConfigError
from tests.builders import laid_over

VLLM = {"kind": "vllm", "device": "cuda", "max_sequence_tokens": 512}
FAKE = {"kind": "fake"}
SHARED = {"medium": {"kind": "shared_storage"}}
VTRACE = {"advantage": "vtrace", "critic": {}}
REJECTION = {"kind": "rejection", "measure": "k3"}

ALGORITHMS: list[tuple[dict[str, Any], str]] = [
    ({"loss": "grop"}, "algorithm.loss must be one of .* as module:function, got 'grop'"),
    ({"advantage": ":own"}, "algorithm.advantage must be one of .* as module:function, got ':own'"),
    ({"loss": "my.module:my-function"}, "algorithm.loss must be one of .* got 'my.module:my-function'"),
    ({"corrections": [{"kind": "python", "path": "own"}]}, r"module:function or file\.py:function, got 'own'"),
    ({"advantage": "gae"}, "needs a critic"),
    ({"advantage": "grpo", "critic": {}}, "no use for a critic"),
    ({"group_size": 1}, "group_size must be at least 2"),
    ({"advantage": "reward", "group_size": 1, "dynamic_sampling": True}, "dynamic_sampling drops groups"),
    ({"kl": {"where": "reward"}}, r"kl.where = 'loss'"),
    ({"advantage": "reinforce_pp", "kl": {"where": "reward", "gradient": "k2"}}, "a KL in the reward has no gradient"),
    ({"advantage": "gae", "critic": {"kind": "head", "path": "m"}}, "'head' sits on the policy"),
    ({"reference": {"where": "worker"}}, "nothing reads a reference"),
    ({"kind": "auto", "loss": "gspo"}, "not read algorithm.loss: drop it, or set algorithm.kind"),
    ({"kind": "dpo", "group_size": 1}, "makes pairs"),
    ({"kind": "dpo", "critic": {}}, "no use for algorithm.critic"),
    ({"kind": "dpo", "kl": {}}, "no use for algorithm.kl"),
    ({"kind": "dpo", "log_ratio_penalty": 0.1}, "makes no use of algorithm.log_ratio_penalty: drop it"),
    ({"kind": "dpo", "preference": {"loss": "hinge", "label_smoothing": 0.1}}, "hinge has none"),
    ({"kind": "dpo", "preference": {"pairs": "threshold", "chosen_at_least": 0.0, "rejected_at_most": 1.0}}, "must be over"),
    ({"corrections": [{"kind": "tis_token"}, {"kind": "icepop"}]}, "keep one"),
    ({"corrections": [{"kind": "tis_geometric"}, {"kind": "rejection", "high": 2.0, "weight": "token"}]}, "keep one"),
    ({"loss": "vespo"}, "'vespo' has its importance weight inside"),
    (VTRACE | {"kind": "policy"}, "'tis_token' would count it twice"),
    (VTRACE | {"kind": "auto"}, "kind = 'policy'"),
    (VTRACE | {"loss": "aipo", "corrections": []}, "'aipo' would count it twice"),
    (VTRACE | {"loss": "decoupled_ppo", "corrections": []}, "'decoupled_ppo' would count it twice"),
    (VTRACE | {"loss": "gspo", "proximal": "loglinear", "corrections": []}, "'loglinear' the ratio .*set algorithm.proximal"),
    ({"loss": "reinforce", "corrections": [], "dual_clip": 3.0}, "'reinforce' does not clip: take one"),
    ({"loss": "dro"}, "needs algorithm.log_ratio_penalty over 0: half the method's beta"),
    ({"aggregation": "seq-mean-token-sum-norm"}, "'seq-mean-token-sum-norm' divides by algorithm.aggregation_constant"),
    ({"aggregation_constant": 100}, r"aggregation_constant \(100\) is read with"),
    ({"proximal": "behaviour", "corrections": [{"kind": "m2po_mask"}]}, "would drop nothing: set algorithm.proximal"),
    ({"loss": "cispo", "proximal": "behaviour", "corrections": [{"kind": "m2po_clip"}]}, "or the correction 'm2po_mask'"),
    ({"corrections": [{"kind": "m2po_clip"}]}, "set algorithm.proximal = 'behaviour'"),
    ({"corrections": [{"kind": "icepop", "low": 2.0, "high": 0.5}]}, r"low \(2.0\) must be under high"),
    ({"corrections": [{"kind": "tis_token", "cap": 1.0, "floor": 2.0}]}, "floor 2.0 over cap 1.0"),
    ({"corrections": [{"kind": "tis_token", "cap": 0.28}]}, r"lets rho be in \[0, 0.28\], and .* is not stale is 1"),
    ({"corrections": [{"kind": "masked_geometric", "low": 1.001, "high": 1.01}]}, r"masked_geometric .* in \[1.001, 1.01\]"),
    ({"corrections": [{"kind": "veto", "threshold": 2.0}]}, r"\[2, inf\]"),
    ({"corrections": [{"kind": "rejection"}]}, "drops nothing without bounds: set low, high or both"),
    ({"corrections": [REJECTION | {"low": 0.1}]}, r"lets k3 be in \[0.1, inf\].* is 0"),
    ({"corrections": [REJECTION | {"level": "geometric", "high": 1.0}]}, "set measure = 'ratio'"),
]  # fmt: skip


@pytest.mark.parametrize("correction", [
    {"kind": "python", "path": "own.py:weigh"}, {"kind": "tis_token", "cap": 1.0}, {"kind": "icepop", "low": 1.0, "high": 2.0},
    {"kind": "rejection", "level": "max", "measure": "binary_kl", "high": 0.05},
])  # fmt: skip
def test_an_algorithm_at_the_edge_of_a_rule_is_taken(correction):
    parse_config({"algorithm": {"corrections": [correction], "whiten": "samples"}})


NO_MODEL = {"learner__fake_step_s": 0.0, "generate__engine": FAKE}
BESIDE = {"placement__kind": "async_hybrid"}
ON_GPU_1 = {"kind": "transformers", "device": "cuda:1"}
COLOCATED, HYBRID = ({"placement__kind": kind, "buffer__max_staleness": 1} for kind in ("colocated", "hybrid"))
RULES: list[tuple[dict[str, Any], str]] = [
    ({"generate__sampling__max_new_tokens": 512}, "max_sequence_tokens"),
    ({"packing__tokens_per_row": 16}, "tokens_per_row"),
    ({"model": {"kind": "scratch", "hidden_size": 30, "num_heads": 4}}, "multiple of"),
    ({"model": {"kind": "scratch", "max_positions": 8}}, "max_positions"),
    ({"model": {"kind": "scratch", "max_positions": 8}, "generate__engine": VLLM}, r"must be at most model.max_positions \(8\)"),
    ({"generate__engine": VLLM | {"device": "cpu", "sleep": True}}, "sleep needs a GPU and generate.engine.device is 'cpu'"),
    ({"buffer__min_group_members": 9, "algorithm__group_size": 4}, "group_size"),
    ({"generate__engine": VLLM, "generate__sampling__temperature": 0.005},
     r"^generate.sampling.temperature \(0.005\) must be at least 0.01, the lowest that vLLM samples at"),
    ({"generate__engine": VLLM, "eval__temperature": 0.001}, r"^eval.temperature \(0.001\) must be .* may be 0 \(greedy\) too"),
    ({"generate__sampling__stop_token_ids": [3, -1]}, r"stop_token_ids\[1\]"),
    ({"reward__functions": []}, "at least one reward"),
    ({"reward__functions": [{"kind": "preference"}]}, r"'preference' judges the answers of task.kind = 'preferences'"),
    ({"reward__functions": [{"kind": "answer_match", "tolerance": 0.1}]}, "tolerance is read with mode = 'numeric' only"),
    ({"reward__functions": [{"kind": "overlong", "max_tokens": 10, "buffer_tokens": 11}]}, r"must be at most max_tokens \(10\)"),
    ({"reward__functions": [{"kind": "overlong", "max_tokens": 65, "buffer_tokens": 8}]}, r"\(65\) must be at most .* \(64\)"),
    ({"learner__kind": "external", "generate__num_workers": 0, "eval": {"at_start": False, "at_end": False},
      "inference__reward_models": [{"name": "judge", "path": "m"}]}, r"set model.kind = 'pretrained' and model.path"),
    ({"reward__functions": [{"kind": "answer_match"}] * 2, "inference__reward_models": [{"name": "answer_match_2", "path": "m"}]},
     "the name 'answer_match_2' is the name of one of reward.functions"),
    # the learner
    ({"learner__optimizer": "paged_adamw_8bit"}, r"pages on CUDA only and learner.device is 'cpu': take 'adamw_8bit'"),
    ({"learner": {"optimizer": "paged_adamw_8bit", "device": "cuda", "offload_optimizer": True}}, "offload_optimizer = false"),
    ({"learner__logprobs": "fused"}, r"runs on CUDA only and learner.device is 'cpu': set 'chunked'"),
    ({"learner__compile": True}, r"learner.compile is for CUDA and learner.device is 'cpu': set it to false"),
    (NO_MODEL | {"generate__engine": {"kind": "transformers"}}, "needs one: set 'fake'"),
    (NO_MODEL | {"learner__ranks": 2}, "learner.ranks = 1"),
    (NO_MODEL | {"learner__fake_step_s": -1.0}, "fake_step_s"),
    (NO_MODEL | {"learner__kind": "external"}, "has no learner process"),
    (NO_MODEL | COLOCATED | {"buffer__max_staleness": 0}, "set 'disaggregated'"),
    # placements
    (COLOCATED | {"learner__kind": "external"}, "learner.kind 'external'"),
    (COLOCATED | {"learner__ranks": 2, "learner__device": "cuda"}, "one device and learner.ranks = 2 .* has 2"),
    (COLOCATED | {"generate__in_flight_updates": False}, "generate.in_flight_updates = true"),
    (COLOCATED | {"buffer__max_staleness": 2}, "set 0 .* or 1"),
    (COLOCATED | {"generate__engine": VLLM}, "generate.engine.sleep = true"),
    (COLOCATED | {"learner__device": "cuda"}, "set both to the same"),
    (COLOCATED | {"broadcast": SHARED}, 'only placement.kind "hybrid"'),
    (HYBRID | {"learner__ranks": 2}, "no rank with all of them: set learner.ranks = 1"),
    (HYBRID | {"generate__engine": FAKE}, '"transformers", or placement.kind = '),
    (HYBRID | {"learner__dtype": "bfloat16"}, "set both to the same"),
    (HYBRID | {"learner__lora": {}}, "leave out learner.lora"),
    (HYBRID | {"broadcast__medium__kind": "files"}, 'set "shared_storage"'),
    (HYBRID | {"broadcast": {**SHARED, "delta": {}}}, "leave out broadcast.delta"),
    (BESIDE | {"learner__device": "cuda"}, r"engine.device 'cpu' uses no GPU, learner.device is 'cuda': make them the same"),
    (BESIDE | {"learner__device": "cuda:0", "generate__engine": ON_GPU_1}, r"'cuda:1' uses GPU 1, learner.device is 'cuda:0'"),
    (BESIDE | {"learner__device": "cuda:1", "generate__engine": VLLM}, r"'cuda' uses GPU 0, learner.device is 'cuda:1'"),
    # the medium of the weights
    ({"broadcast": {"medium": {"kind": "gloo"}, "delta": {}}}, "needs a copy .* 'gloo' .* take shared_memory, files or zeromq"),
    ({"broadcast__medium": {"kind": "gloo", "host": "0.0.0.0"}}, "is told to every generator and names no machine"),
    ({"broadcast__medium": {"kind": "nccl", "host": "::"}}, "is told to every generator and names no machine"),
    ({"broadcast__medium__kind": "cuda_ipc", "generate__engine": VLLM}, "sends from a GPU and learner.device is 'cpu'"),
    ({"broadcast__medium__kind": "nccl", "learner__device": "cuda"}, "sends to a GPU and generate.engine.device is 'cpu'"),
    ({"broadcast__medium__kind": "nccl", "learner__device": "cuda", "generate__engine": FAKE}, "kind 'fake' has none"),
    ({"broadcast__medium__kind": "cuda_ipc", "learner__device": "cuda:1", "generate__engine": VLLM}, "the same GPU; .* GPU 0"),
    ({"broadcast__medium__kind": "nccl", "learner__device": "cuda", "generate__engine": VLLM}, "different GPUs; .* GPU 0"),
    ({"broadcast__medium__kind": "nccl", "learner__device": "cuda:1", "generate__engine": VLLM}, "takes one generator a GPU"),
    # Ray
    ({"launch": {"kind": "ray", "address": "ray://head:10001"}}, "Ray's client"),
    ({"launch": {"kind": "ray"}, "transport": {"kind": "tcp", "host": "0.0.0.0"}}, "transport.host '0.0.0.0' is told to every"),
    (COLOCATED | {"launch__kind": "ray"}, "launch"),
    ({"launch__kind": "ray", "learner__device": "cuda:1"}, "from 0"),
    ({"launch": {"kind": "ray", "learner": {"num_gpus": 0}}, "learner__device": "cuda"}, "launch.learner.num_gpus is 0"),
    ({"launch": {"kind": "local", "elastic": {"min_generators": 3}}}, "must lie between"),
    # names, numbers and addresses
    ({"buffer__max_stalenes": 1}, "unknown field `max_stalenes` .*; known are .*max_staleness"),
    ({"buffer__max_staleness": -1}, "max_staleness"),
    ({"learner__lora": {"rank": 0}}, "rank"),
    ({"task__kind": "additon"}, "known are addition, reasoning_gym, jsonl"),
    ({"algorithm__aggregation": "token_mean"}, "known are .*token-mean"),
    ({"generate__engine": {"kind": "fake", "slots": 3}}, "known are .*num_slots"),
    *(({"observe__webhook": url}, r"observe\.webhook") for url in ("ftp://a/b", "file:///etc/passwd", "http://", "x")),
    *(({"name": name}, "^name ") for name in ("", ".", "..", "../x", "a/b", "/x", "a\0b", " x", "x\n", "n" * 300)),
]  # fmt: skip


OFFLINE: dict[str, Any] = {
    "task": {"kind": "preferences", "path": "p.jsonl"}, "model__kind": "scratch", "model__max_positions": 64,
    "generate__engine": {"kind": "replay", "max_sequence_tokens": 64}, "generate__sampling__max_new_tokens": 8,
    "reward__functions": [{"kind": "preference"}], "algorithm__kind": "dpo", "algorithm__group_size": 2,
    "packing__tokens_per_row": 128, "eval__at_start": False, "eval__at_end": False,
}  # fmt: skip


WITH_OFFLINE: list[tuple[dict[str, Any], str]] = [
    ({"packing__tokens_per_row": 127}, r"packing.tokens_per_row \(127\) must be at least 128"),
    ({"buffer__policy": "mask"}, "buffer.policy = 'mask' cuts old tokens"), ({"task": {"kind": "addition"}}, "go together"),
    ({"algorithm__kind": "policy"}, "set algorithm.kind = 'dpo'"), ({"eval__at_end": True}, "eval.at_end = false"),
    ({"algorithm__group_size": 4}, r"algorithm.group_size = 2 \(is 4\)"),
    ({"generate__sampling__temperature": 0.7}, "must be 1 with generate.engine.kind = 'replay'"),
    ({"model__max_positions": 32}, r"must be at most model.max_positions \(32\)"),
]  # fmt: skip
ELASTIC = {"kind": "local", "elastic": {"min_generators": 1, "max_generators": 4}}
TWO = "http://127.0.0.1:8000, http://localhost:8001"


def served(server, changes):
    return {"generate__engine": {"kind": "vllm_server", **server}, "generate__num_workers": 1} | changes


SERVERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "is empty"), ({"url": "http://gpu-1:8000"}, {}, "shared_folder"),
    *(({"url": wrong}, {}, "no server's address") for wrong in ("127.0.0.1:8000", "http://127.0.0.1:port", "http://127.0.0.1:80/v1")),
    ({"url": "http://127.0.0.1:8000,http://127.0.0.1:8000/"}, {"generate__num_workers": 2}, "1 servers for .* = 2"),
    *(({"url": url}, {"launch": ELASTIC}, "max_generators is 4: name as many") for url in ("http://127.0.0.1:8000", TWO)),
    ({"url": TWO}, {"generate__sampling__temperature": 0.005}, "the lowest that vLLM samples at"),
    ({"url": TWO}, {"learner__lora": {"rank": 4}}, "lora"),
    ({"url": TWO}, {"model": {"kind": "scratch", "fp32_head": True}}, "fp32_head"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "said"), [
    *RULES, *(({"algorithm": algorithm}, said) for algorithm, said in ALGORITHMS),
    *((OFFLINE | changes, said) for changes, said in WITH_OFFLINE),
    *((served(server, changes), said) for server, changes, said in SERVERS),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_with_field_and_value_and_what_to_write_instead(settings, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(laid_over({}, settings))
    config, faults, gone = take_values(laid_over({}, settings))
    faults += faults_beside(config, gone)
    assert [fault for fault in faults if fault.given is None or (fault.field == "config" and "null" not in fault.allowed)] == []


@pytest.mark.parametrize("engine", [VLLM, {"kind": "vllm_server", "url": "http://127.0.0.1:8000"}])
def test_hybrid_with_vllm_is_refused_for_the_engine_alone(engine):
    with pytest.raises(ConfigError) as refused:
        parse_config(laid_over({}, HYBRID | {"generate__engine": engine, "learner__device": "cuda", "generate__num_workers": 1}))
    lines = str(refused.value)
    assert 'set "transformers", or placement.kind = "colocated"' in lines
    assert "sleep" not in lines
    assert "set generate.engine.kind = 'vllm'" not in lines


def test_a_greedy_evaluation_with_vllm_is_taken():
    parse_config(laid_over({}, {"generate__engine": VLLM, "generate__sampling__temperature": 0.01, "eval__temperature": 0.0}))


TOGETHER = {
    "learner__compile": True, "learner__logprobs": "fused", "packing__tokens_per_row": 16, "name": "a/b", "num_steps": "x",
    "buffer__max_stalenes": 1, "buffer__max_staleness": -1, "generate__num_workers": 1,
    "generate__engine": {"kind": "vllm_server", "url": "http://[x"},
    "reward__functions": [{"kind": "no"}, {"kind": "answer_match"}, {"kind": "nor"}],
}  # fmt: skip


def test_all_faults_come_at_once_but_those_that_follow_from_another():
    with pytest.raises(ConfigError) as refused:
        parse_config(laid_over({}, TOGETHER))
    expected = [
        "unknown field `max_stalenes`", "$.buffer.max_staleness`", "'no' - at `$.reward.functions[0]", "$.reward.functions[2]",
        "$.num_steps`", "learner.logprobs = 'fused'", "learner.compile is", "name 'a/b'", "packing.tokens_per_row (16)",
        "'http://[x' is no server's address",
    ]  # fmt: skip
    lines = str(refused.value).split("\n")
    assert [one for one in expected if sum(one in line for line in lines) != 1] == []
    assert len(lines) == len(expected), lines
    wrong = {"learner": {"compile": True, "device": "tpu"}, "task": {"kind": "preferences", "path": 5}}
    with pytest.raises(ConfigError) as refused:
        parse_config(wrong)  # whether a learner on a device that is none compiles, and what replays the task, is not known
    assert [line.rpartition("$.")[2] for line in str(refused.value).split("\n")] == ["learner.device`", "task.path`"]


@pytest.mark.parametrize(("server", "changes"), [
    ({"url": TWO}, {"generate__num_workers": 2}), ({"url": "https://gpu-1:8000", "shared_folder": "/mnt/weights"}, {}),
    ({"url": "http://gpu-1:8000"}, {"broadcast__medium__kind": "nccl", "learner__device": "cuda"}),
])  # fmt: skip
def test_a_vllm_server_that_the_weights_reach_is_taken(server, changes):
    parse_config(laid_over({}, served(server, changes)))


@pytest.mark.parametrize(
    "engine", [VLLM, {**VLLM, "tensor_parallel": 2}, {**VLLM, "device": "auto"}, FAKE, {**ON_GPU_1, "device": "cuda"}]
)
def test_generation_on_the_gpu_of_the_learner_may_go_on_beside_training(engine):
    parse_config(laid_over({}, BESIDE | {"learner__device": "cuda:0", "generate__engine": engine}))


@pytest.mark.parametrize(("learner", "engine", "told", "expected"), [
    ("float32", "float32", {}, 0.05), ("bfloat16", "float32", {}, 1.0), ("float32", "bfloat16", {}, 1.0),
    ("auto", "float32", {}, 1.0), ("bfloat16", "bfloat16", {"probe_tolerance": 0.0}, 0.0),
])  # fmt: skip
def test_how_far_apart_a_probe_may_be_follows_the_number_formats_of_learner_and_engine(learner, engine, told, expected):
    generate = {"engine": {"kind": "transformers", "dtype": engine}}
    assert parse_config({"learner": {"dtype": learner}, "generate": generate, "broadcast": told}).probe_tolerance == expected


def test_names_of_rewards_default_to_the_kind_with_a_number_where_it_repeats_or_is_given():
    own, other = AnswerMatchReward(name="mine"), FormatCheckReward(pattern=".*")
    functions = (AnswerMatchReward(), other, AnswerMatchReward(), own)
    assert reward_names(RewardConfig(functions=functions)) == ("answer_match", "format_check", "answer_match_2", "mine")
    functions = (AnswerMatchReward(), AnswerMatchReward(name="answer_match"))
    assert reward_names(RewardConfig(functions=functions)) == ("answer_match_2", "answer_match")

"""The policy as it is made and opened, its adapters, and its reference: apart from it, or the policy without its adapters."""

import contextlib
import json
import os

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from asyncrl.config.algorithm import AlgorithmConfig, CriticConfig, KLConfig, ReferenceConfig
from asyncrl.config.generate import GenerateConfig, TransformersEngineConfig
from asyncrl.config.learner import LearnerConfig, LoRAConfig, PretrainedModel, ScratchModel, WarmStart
from asyncrl.config.run import AdditionTask, RunConfig
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.inference.models import ReferenceModel
from asyncrl.learner.checkpoint import build_train_state, load_or_make, save_shards
from asyncrl.learner.model.policy import (
    build_scratch,
    made_ready,
    open_model,
    open_policy,
    open_tokenizer,
    publishable_tensors,
    run_row,
    save_adapters,
    save_model,
)
from asyncrl.learner.model.sft_warmup import tokenise, warm_start
from asyncrl.learner.step.microbatch import prepare
from asyncrl.learner.step.train_step import train_step
from asyncrl.models.adapters import adapters_off
from asyncrl.models.attention import PACKED_ATTENTION
from asyncrl.tasks.registry import build_task

SMALL = ScratchModel(hidden_size=32, num_layers=1, num_heads=2, max_positions=32)
ALPHABET = "0123456789+="
TINY = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip


def test_a_saved_scratch_model_opens_with_plain_transformers(kit, tmp_path):
    model, tokenizer = build_scratch(SMALL, ALPHABET, seed=3)
    save_model(made_ready(model, LearnerConfig()), tokenizer, tmp_path)
    opened, reopened = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert opened.config._attn_implementation != PACKED_ATTENTION
    assert reopened("1+2=")["input_ids"] == tokenizer("1+2=")["input_ids"]
    assert reopened.decode([*reopened("1+2=")["input_ids"], 1], skip_special_tokens=True) == "1+2="
    assert (reopened.eos_token, reopened.pad_token, reopened.bos_token) == ("<eos>", "<pad>", None)
    assert opened.generation_config.eos_token_id == reopened.eos_token_id
    assert kit.same(model.parameters(), opened.parameters())


def test_a_model_that_scales_its_logits_is_refused():
    sizes = {"vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = CohereConfig(**sizes, logit_scale=0.25)
    with pytest.raises(ConfigError, match='"cohere" cannot be trained'):
        made_ready(CohereForCausalLM(config), LearnerConfig())


def test_a_pretrained_folder_becomes_the_run_s_model(kit, tmp_path):
    model, tokenizer = build_scratch(SMALL, ALPHABET, seed=5)
    (tmp_path / "source").mkdir()
    save_model(model, tokenizer, tmp_path / "source")
    config = RunConfig(model=PretrainedModel(path=str(tmp_path / "source")))
    initial = load_or_make(config, tmp_path / "run", list, "")
    assert kit.same(model.parameters(), initial.train_state.model.parameters())
    assert open_tokenizer(tmp_path / "run" / "model")("1+2=")["input_ids"] == tokenizer("1+2=")["input_ids"]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_symlink()
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize("lost", ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_a_policy_or_reference_without_all_its_weights_is_refused_and_a_critic_needs_no_head(tmp_path, lost):
    """Transformers fills in random ones."""
    model, tokenizer = build_scratch(msgspec.structs.replace(SMALL, tie_embeddings=False), ALPHABET, seed=0)
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
        save_model(model, tokenizer, tmp_path / name)
    weights = load_file(tmp_path / "part" / "model.safetensors")
    weights.pop(lost)
    save_file(weights, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    whole, part = tmp_path / "whole", tmp_path / "part"
    reference = AlgorithmConfig(kl=KLConfig(), reference=ReferenceConfig(path=str(part)))
    critic = AlgorithmConfig(advantage="gae", critic=CriticConfig(path=str(part)))
    refusal = f"{part} has no weights for {lost}"
    with pytest.raises(ConfigError, match=rf"run/model has no weights for {lost} \(1 in all\)"):
        load_or_make(RunConfig(model=PretrainedModel(path=str(part))), tmp_path / "run", list, "")
    with pytest.raises(ConfigError, match=refusal):
        build_train_state(RunConfig(algorithm=reference), whole)
    with pytest.raises(ConfigError, match=refusal):
        ReferenceModel(part, dtype="float32", device="cpu", fp32_head=False, trust_remote_code=False)
    with contextlib.nullcontext() if lost == "lm_head.weight" else pytest.raises(ConfigError, match=refusal):
        build_train_state(RunConfig(algorithm=critic), whole)


@pytest.mark.parametrize("make", [
    lambda: LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True)),
    lambda: GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16)),
    lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**TINY, **EXPERTS)),
    lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**TINY)),
])  # fmt: skip
@pytest.mark.parametrize("shard_bytes", [1 << 30, 1200])
def test_parameters_alone_are_a_whole_model_in_shards_that_are_written_as_they_become_whole(kit, tmp_path, make, shard_bytes):
    """As checkpoints of several ranks have them: tied weights once, and here no buffers, but named as one process writes them.

    A larger tensor has a shard of its own.
    """
    model = made_ready(make(), LearnerConfig())
    build_scratch(SMALL, ALPHABET, seed=0)[1].save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    parameters = dict(model.named_parameters())
    save_shards(model, ((name, tensor.detach()) for name, tensor in parameters.items()), parameters, tmp_path, shard_bytes)
    assert (len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2) == (shard_bytes == 1200)
    assert kit.same(open_model(tmp_path, LearnerConfig()).parameters(), parameters.values())
    written = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    if shard_bytes == 1200:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    model.save_pretrained(tmp_path / "whole")
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert written.keys() == expected.keys() - dict(model.named_buffers()).keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())


def test_sequences_whose_positions_depend_on_others_beside_them_are_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = LlamaForCausalLM(LlamaConfig(**TINY, max_position_embeddings=16, rope_parameters=rope))
    save_model(model, build_scratch(SMALL, ALPHABET, seed=0)[1], tmp_path)

    def config(longest):
        return RunConfig(generate=GenerateConfig(engine=TransformersEngineConfig(max_sequence_tokens=longest)))

    open_policy(config(16), tmp_path)
    with pytest.raises(ConfigError, match=r"max_sequence_tokens is 17; beyond 16 tokens .* set it to at most 16"):
        open_policy(config(17), tmp_path)


def test_a_lower_precision_leaves_rotary_frequencies_as_transformers_has_them(tmp_path):
    model, tokenizer = build_scratch(SMALL, ALPHABET, seed=0)
    save_model(model, tokenizer, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    plain.set_attn_implementation(PACKED_ATTENTION)
    ours, ids = open_model(tmp_path, LearnerConfig(dtype="bfloat16")), torch.arange(12)[None]
    assert ours.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, plain(ids).logits)


def test_a_warm_start_ends_at_the_accuracy_it_was_asked_for_and_repeats_bit_for_bit(kit):
    task, weights = build_task(AdditionTask(digits=1, held_out=20), 0), []
    config = WarmStart(steps=200, batch_size=16, learning_rate=5e-3, until_accuracy=0.2)
    for _ in range(2):
        model, tokenizer = build_scratch(ScratchModel(hidden_size=32, num_layers=1, num_heads=2), task.alphabet, 0)
        examples = tokenise(task.worked_examples, tokenizer)
        metrics = warm_start(made_ready(model, LearnerConfig()), examples, config, LearnerConfig(), 0)
        assert metrics["warm_start/steps"] < 200
        assert 0.2 <= metrics["warm_start/accuracy"] < 0.4
        weights.append(list(model.parameters()))
    assert kit.same(*weights)


LETTERS = "abcdefghijklmnopqrstu"
"""As many tokens, with padding and end, as the kit's vocabulary."""


def penalised(reference=None, seed=0, **learner):
    """A run with a penalty, and so a reference."""
    algorithm = AlgorithmConfig(kl=KLConfig(coefficient=0.1), reference=reference or ReferenceConfig())
    return RunConfig(
        model=ScratchModel(hidden_size=32, num_layers=1, num_heads=2), algorithm=algorithm, seed=seed,
        learner=LearnerConfig(learning_rate=1e-2, warmup_steps=0, **learner),
    )  # fmt: skip


def test_the_reference_is_the_run_s_initial_model_unless_a_path_says_otherwise(kit, tmp_path):
    for seed in (0, 5):
        load_or_make(penalised(seed=seed), tmp_path / str(seed), list, LETTERS)
    elsewhere = penalised(ReferenceConfig(path=str(tmp_path / "5" / "model")))
    ours, away = (build_train_state(config, tmp_path / "0" / "model") for config in (penalised(), elsewhere))
    (row,) = prepare(kit.batch(kit.samples())).rows
    own = run_row(ours.model, row, temperature=1.0, chunk_tokens=64).logprobs
    assert torch.equal(ours.reference.logprobs(row, 1.0), own.detach())
    assert (away.reference.logprobs(row, 1.0) - own).abs().max() > 1e-3


def test_with_adapters_the_reference_is_the_policy_without_them(kit, tmp_path):
    config = penalised(lora=LoRAConfig(rank=4))
    train_state = load_or_make(config, tmp_path, list, LETTERS).train_state
    assert not train_state.reference.is_own_model
    (row,) = prepare(kit.batch(kit.samples())).rows
    before = train_state.reference.logprobs(row, 1.0)
    for step in range(3):
        train_step(train_state, kit.batch(kit.samples(), step=step), config)
    assert torch.equal(train_state.reference.logprobs(row, 1.0), before)
    now = run_row(train_state.model, row, temperature=1.0, chunk_tokens=64).logprobs
    assert (now - before).abs().max() > 1e-4


def test_a_batch_where_one_row_lacks_them_asks_the_learner_s_own(kit):
    """Rows of all ranks decide alike, or ranks that share a reference would call it unequally often."""
    config = kit.config({"kl": KLConfig()})
    samples = kit.samples()
    for sample in samples:
        sample["reference"] = sample["logprobs"]
    batch = kit.batch(samples, 40)
    short = (msgspec.structs.replace(batch.rows[0], reference_logprobs=b""), *batch.rows[1:])
    train_state = kit.train_state(kit.model(), config)
    train_step(train_state, batch, config)
    with pytest.raises(LearnerError, match="needs log-probabilities of the reference"):
        train_step(train_state, msgspec.structs.replace(batch, rows=short, step=1), config)


def test_a_learner_with_a_reference_takes_that_and_not_what_a_batch_of_before_brings(kit):
    config, samples, found = kit.config({"kl": KLConfig()}), kit.samples(), []
    for brings in (False, True):
        for sample in samples if brings else ():
            sample["reference"] = sample["logprobs"]
        train_state = kit.train_state(kit.model(), config, reference=kit.model(1))
        found.append(train_step(train_state, kit.batch(samples), config).metrics["kl/penalty_mean"])
    assert found[0] == found[1]


def test_dropout_is_switched_off():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    made_ready(model, LearnerConfig())
    ids = torch.arange(8)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def with_adapters(**learner):
    return RunConfig(learner=LearnerConfig(lora=LoRAConfig(rank=4), learning_rate=1e-2, warmup_steps=0, **learner))


@pytest.fixture
def base(tmp_path):
    model, tokenizer = build_scratch(ScratchModel(hidden_size=32, num_layers=2, num_heads=4, max_positions=64), LETTERS, 0)
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    save_model(model, tokenizer, folder)
    return folder


def trained(kit, base, config):
    """Return the folder's policy after two steps, and what it was made of before."""
    policy = open_policy(config, base)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    train_state = kit.train_state(policy, config)
    for step in range(2):
        train_step(train_state, kit.batch(kit.samples(seed=step), step=step), config)
    return policy, before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_trains_the_adapters_and_leaves_the_base_as_it_was(kit, base, dtype):
    policy, before = trained(kit, base, with_adapters(dtype=dtype))
    changed = {name for name, parameter in policy.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == set(publishable_tensors(policy))
    plain, ids = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)), torch.arange(12)[None]
    plain.set_attn_implementation(policy.config._attn_implementation)
    with torch.no_grad(), adapters_off(policy):
        assert torch.equal(policy(ids).logits, plain(ids).logits)


def test_a_checkpoint_opens_as_the_trained_policy_even_after_the_run_has_moved(kit, base):
    policy, _ = trained(kit, base, with_adapters())
    checkpoint = base.parent / "checkpoints" / "step-2"
    checkpoint.mkdir(parents=True)
    save_adapters(policy, checkpoint)
    open_tokenizer(base).save_pretrained(checkpoint)
    assert (checkpoint / "model.safetensors").is_symlink()
    assert os.path.getsize(checkpoint / "adapter_model.safetensors") < os.path.getsize(base / "model.safetensors")
    moved = base.parent.rename(base.parent.parent / "moved")
    ids = torch.arange(12)[None]
    opened = AutoModelForCausalLM.from_pretrained(moved / "checkpoints" / checkpoint.name)
    plain = AutoModelForCausalLM.from_pretrained(moved / "model")
    by_peft = PeftModel.from_pretrained(plain, moved / "checkpoints" / checkpoint.name)
    with torch.no_grad():
        expected = policy(ids).logits
        torch.testing.assert_close(opened(ids).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(by_peft(ids).logits, expected, rtol=1e-5, atol=1e-5)
        with adapters_off(policy):
            assert not torch.allclose(policy(ids).logits, expected, atol=1e-3)


def test_a_checkpoint_is_taken_up_with_its_own_alpha_alone_and_is_no_start_of_another_run(kit, base, tmp_path):
    config = with_adapters()
    policy, _ = trained(kit, base, config)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    checkpoint.mkdir(parents=True)
    save_adapters(policy, checkpoint)
    open_tokenizer(base).save_pretrained(checkpoint)
    assert kit.same(open_policy(config, base, checkpoint).parameters(), policy.parameters())
    for lora, said in (
        (LoRAConfig(rank=4, alpha=8.0), "alpha = 32, the config has 8"),
        (LoRAConfig(rank=2), "rank = 4, .* has 2"),
    ):
        other = msgspec.structs.replace(config.learner, lora=lora)
        with pytest.raises(LearnerError, match=f"{said}: use the config"):
            open_policy(msgspec.structs.replace(config, learner=other), base, checkpoint)
    start = msgspec.structs.replace(config, model=PretrainedModel(path=str(checkpoint)))
    with pytest.raises(ConfigError, match="step-2 holds LoRA adapters: merge them"):
        load_or_make(start, tmp_path / "other", list, "")


def test_gradient_checkpointing_reaches_the_adapters(base):
    gradients = []
    for checkpointing in (False, True):
        policy = open_policy(with_adapters(gradient_checkpointing=checkpointing), base)
        torch.manual_seed(0)
        with torch.no_grad():
            for tensor in publishable_tensors(policy).values():
                tensor.add_(torch.randn_like(tensor) * 0.1)
        policy(torch.arange(12)[None]).logits.sin().sum().backward()
        gradients.append([parameter.grad for parameter in publishable_tensors(policy).values()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(torch.count_nonzero(gradient) for gradient in gradients[0])

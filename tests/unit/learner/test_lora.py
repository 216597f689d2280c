import os

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from asyncrl.config.learner import LearnerConfig, LoRAConfig, ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.model.lora import open_policy, publishable_tensors, save_adapters
from asyncrl.learner.model.policy import build_scratch, open_tokenizer, save_model
from asyncrl.learner.step.train_step import train_step
from asyncrl.models.adapters import adapters_off

ALPHABET = "abcdefghijklmnopqrstu"
"""As many tokens, with padding and end, as the kit's vocabulary."""


def config_of(rank=4, **learner):
    return RunConfig(learner=LearnerConfig(lora=LoRAConfig(rank=rank), learning_rate=1e-2, warmup_steps=0, **learner))


@pytest.fixture
def base(tmp_path):
    model, tokenizer = build_scratch(ScratchModel(hidden_size=32, num_layers=2, num_heads=4, max_positions=64), ALPHABET, 0)
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


def save(policy, base):
    folder = base.parent / "checkpoints" / "step-2"
    folder.mkdir(parents=True)
    save_adapters(policy, folder)
    open_tokenizer(base).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_trains_the_adapters_and_leaves_the_base_as_it_was(kit, base, dtype):
    policy, before = trained(kit, base, config_of(dtype=dtype))
    changed = {name for name, parameter in policy.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == set(publishable_tensors(policy))
    plain, ids = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)), torch.arange(12)[None]
    plain.set_attn_implementation(policy.config._attn_implementation)
    with torch.no_grad(), adapters_off(policy):
        assert torch.equal(policy(ids).logits, plain(ids).logits)


def test_a_checkpoint_opens_as_the_trained_policy_even_after_the_run_has_moved(kit, base):
    policy, _ = trained(kit, base, config_of())
    checkpoint = save(policy, base)
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


def test_adapters_of_another_rank_and_none_at_all_are_refused(base):
    checkpoint = save(open_policy(config_of(), base), base)
    with pytest.raises(LearnerError, match=r"not those of this model under this learner\.lora"):
        open_policy(config_of(rank=8), base, checkpoint)
    with pytest.raises(LearnerError, match=r"has no adapter_model\.safetensors: it was written without learner\.lora"):
        open_policy(config_of(), base, base)


def test_gradient_checkpointing_reaches_the_adapters(base):
    gradients = []
    for checkpointing in (False, True):
        policy = open_policy(config_of(gradient_checkpointing=checkpointing), base)
        torch.manual_seed(0)
        with torch.no_grad():
            for tensor in publishable_tensors(policy).values():
                tensor.add_(torch.randn_like(tensor) * 0.1)
        policy(torch.arange(12)[None]).logits.sin().sum().backward()
        gradients.append([parameter.grad for parameter in publishable_tensors(policy).values()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(torch.count_nonzero(gradient) for gradient in gradients[0])

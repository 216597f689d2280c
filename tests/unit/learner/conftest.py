"""A tiny Llama and hand-made batches: what the learner's tests share."""

import sys

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.model.policy import Critic, Reference, build_critic_optimizer, made_ready
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.train_state import TrainState
from asyncrl.models.attention import PACKED_ATTENTION
from asyncrl.schema.samples import PackedRow, PackedSample, StepBatch

VOCABULARY = 23
TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip


def tiny_model(seed=0, dtype="float32", **sizes):
    torch.manual_seed(seed)
    return made_ready(LlamaForCausalLM(LlamaConfig(**TINY | sizes)), LearnerConfig(dtype=dtype))


def run_config(algorithm=None, learner=None, **rest):
    settings = {"learning_rate": 1e-3, "warmup_steps": 1} | (learner or {})
    return RunConfig(algorithm=AlgorithmConfig(**(algorithm or {})), learner=LearnerConfig(**settings), **rest)


def train_state_of(model, config, critic=None, reference=None):
    train_state = TrainState(model, PolicyOptimizer(model.named_parameters(), config.learner, config.num_steps))
    if reference is not None:
        train_state.reference = Reference(reference, 64)
    if critic is not None:
        train_state.critic = critic
        settings = config.algorithm.critic, config.learner, config.num_steps
        train_state.critic_optimizer = build_critic_optimizer(critic, *settings, train_state.optimizer)
    return train_state


def new_critic(kind, dtype="float32"):
    """Make one that says 0 of everything."""
    return Critic(32, None if kind == "head" else tiny_model(4, dtype).base_model)


def critic(kind, dtype="float32"):
    """Make one that says something, which shows more."""
    made = new_critic(kind, dtype)
    torch.manual_seed(7)
    for parameter in made.output.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def bits(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(one, other):
    """Whether two lists of tensors are the same, bit for bit."""
    return all(torch.equal(old, new) for old, new in zip(one, other, strict=True))


def assert_near(one, other, atol):
    """Compare the parameters of two modules."""
    for (name, ours), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=name)


def random_samples(seed=0, groups=3, group_size=4, prompt=(3, 8), response=(1, 12), reward=None):
    """Plain dicts: prompt and response ids, mask with gaps, behaviour logprobs, reward, group id, index."""
    rng = np.random.default_rng(seed)
    samples = []
    for group_id in range(groups):
        prompt_ids = rng.integers(2, VOCABULARY, rng.integers(*prompt))
        for index in range(group_size):
            length = int(rng.integers(*response))
            mask = (rng.random(length) < 0.8).astype(np.uint8)
            mask[0] = 1
            sample = {"group_id": group_id, "index": index, "prompt": prompt_ids, "mask": mask}
            sample["response"] = rng.integers(2, VOCABULARY, length)
            sample["logprobs"] = rng.normal(-3.1, 0.3, length).astype(np.float32)
            sample["reward"] = float(rng.random()) if reward is None else reward
            samples.append(sample)
    return samples


def batch_of(samples, tokens_per_row=10_000, step=0, temperature=1.0, num_ranks=1):
    """Rows of whole samples in order, at least one each; rows go to ranks in turn. Samples of a pair must follow each other."""
    rows, packed = [], []
    for sample in samples:
        length = len(sample["prompt"]) + len(sample["response"])
        is_second = sample.get("pair", -1) >= 0 and rows and rows[-1][-1].get("pair", -1) == sample["pair"]
        if not rows or (sum(map(_length, rows[-1])) + length > tokens_per_row and not is_second):
            rows.append([])
        told = {name: sample[name] for name in PackedSample.__struct_fields__ if name in sample}
        place = {"row": len(rows) - 1, "start": sum(map(_length, rows[-1]))}
        lengths = {"prompt_tokens": len(sample["prompt"]), "response_tokens": len(sample["response"])}
        packed.append(PackedSample(oldest_version=0, **told, **place, **lengths))
        rows[-1].append(sample)
    return StepBatch(
        step=step,
        samples=tuple(packed),
        rows=tuple(_row(row, number % num_ranks) for number, row in enumerate(rows)),
        num_trained_tokens=int(sum(sample["mask"].sum() for sample in samples)),
        temperature=temperature,
    )


def _length(sample):
    return len(sample["prompt"]) + len(sample["response"])


def _row(samples, rank):
    def joined(name, dtype):
        parts = [np.concatenate([np.zeros(len(sample["prompt"])), sample[name]]) for sample in samples]
        return np.concatenate(parts).astype(dtype).tobytes()

    tokens = np.concatenate([part for sample in samples for part in (sample["prompt"], sample["response"])])
    return PackedRow(
        token_ids=tokens.astype("<i4").tobytes(),
        loss_mask=joined("mask", np.uint8),
        behaviour_logprobs=joined("logprobs", "<f4"),
        versions=joined("versions", "<i4") if "versions" in samples[0] else np.zeros(len(tokens), "<i4").tobytes(),
        rank=rank,
        reference_logprobs=joined("reference", "<f4") if "reference" in samples[0] else b"",
    )


def plain_hidden(body, samples):
    """Last hidden state before every response token of each sample, [response, D], by transformers' own padded forward."""
    texts = [torch.tensor([*sample["prompt"].tolist(), *sample["response"].tolist()]) for sample in samples]
    ids, attention = (pad_sequence(rows, batch_first=True) for rows in (texts, [torch.ones_like(text) for text in texts]))
    body.set_attn_implementation("eager")
    hidden = body(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
    body.set_attn_implementation(PACKED_ATTENTION)
    return [line[len(sample["prompt"]) - 1 : len(text) - 1] for line, sample, text in zip(hidden, samples, texts, strict=True)]


def plain_logprobs(model, samples, temperature=1.0):
    """Log-probability of every response token of each sample, without packing."""
    head, found = model.get_output_embeddings(), []
    for states, sample in zip(plain_hidden(model.base_model, samples), samples, strict=True):
        logprobs = (head(states) / temperature).log_softmax(-1)
        found.append(logprobs.gather(-1, torch.from_numpy(sample["response"])[:, None]).squeeze(-1))
    return found


# What tests call them: `kit.model()`.
model, config, train_state, samples, batch = tiny_model, run_config, train_state_of, random_samples, batch_of


@pytest.fixture
def kit():
    """Give tests this file (test folders are no packages, so they cannot import it)."""
    return sys.modules[__name__]

"""A tiny Llama and hand-made batches: what the learner's tests share."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.model.policy import made_ready
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.train_state import TrainState
from asyncrl.models.attention import PACKED_ATTENTION
from asyncrl.schema.batches import PackedRow, PackedSample, StepBatch

VOCABULARY = 23


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tiny_model(seed=0, dtype="float32", **sizes):
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": 128,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": None,
        }
        | sizes
    )
    return made_ready(LlamaForCausalLM(config), LearnerConfig(dtype=dtype))


def run_config(algorithm=None, learner=None, **rest):
    return RunConfig(
        algorithm=AlgorithmConfig(**(algorithm or {})),
        learner=LearnerConfig(**({"learning_rate": 1e-3, "warmup_steps": 1} | (learner or {}))),
        **rest,
    )


def optimizer_of(model, config):
    return PolicyOptimizer(model.named_parameters(), config.learner, config.num_steps)


def train_state_of(model, config):
    return TrainState(model, optimizer_of(model, config))


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
            samples.append({
                "group_id": group_id,
                "index": index,
                "prompt": prompt_ids,
                "response": rng.integers(2, VOCABULARY, length),
                "mask": mask,
                "logprobs": rng.normal(-3.1, 0.3, length).astype(np.float32),
                "reward": float(rng.random()) if reward is None else reward,
            })
    return samples


def batch_of(samples, tokens_per_row=10_000, step=0, temperature=1.0, num_ranks=1):
    """Rows of whole samples in order, at least one each; rows go to ranks in turn. Samples of a pair must follow each other."""
    rows, packed = [], []
    for sample in samples:
        length = len(sample["prompt"]) + len(sample["response"])
        is_second = sample.get("pair", -1) >= 0 and rows and rows[-1][-1].get("pair", -1) == sample["pair"]
        if not rows or (sum(map(_length, rows[-1])) + length > tokens_per_row and not is_second):
            rows.append([])
        packed.append(
            PackedSample(
                group_id=sample["group_id"],
                index=sample["index"],
                row=len(rows) - 1,
                start=sum(map(_length, rows[-1])),
                prompt_tokens=len(sample["prompt"]),
                response_tokens=len(sample["response"]),
                reward=sample["reward"],
                oldest_version=0,
                is_greedy=sample.get("is_greedy", False),
                pair=sample.get("pair", -1),
                is_chosen=sample.get("is_chosen", False),
            )
        )
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
    zeros = [np.zeros(len(sample["prompt"])) for sample in samples]

    def joined(name, dtype):
        return np.concatenate([
            part for zero, sample in zip(zeros, samples, strict=True) for part in (zero, sample[name])
        ]).astype(dtype)

    tokens = np.concatenate([part for sample in samples for part in (sample["prompt"], sample["response"])])
    lengths = [_length(sample) for sample in samples]
    return PackedRow(
        token_ids=tokens.astype("<i4").tobytes(),
        position_ids=np.concatenate([np.arange(length) for length in lengths]).astype("<i4").tobytes(),
        segment_ids=np.repeat(np.arange(len(lengths)), lengths).astype("<i4").tobytes(),
        loss_mask=joined("mask", np.uint8).tobytes(),
        behaviour_logprobs=joined("logprobs", "<f4").tobytes(),
        versions=joined("versions", "<i4").tobytes() if "versions" in samples[0] else np.zeros(len(tokens), "<i4").tobytes(),
        rank=rank,
        reference_logprobs=joined("reference", "<f4").tobytes() if "reference" in samples[0] else b"",
    )


def padded(samples):
    """Token ids [S, T] and attention mask, padded on the right: what a plain forward takes."""
    texts = [[*sample["prompt"].tolist(), *sample["response"].tolist()] for sample in samples]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    return ids, torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])


@contextlib.contextmanager
def eager(model):
    """Switch a model to transformers' own attention for a while."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(PACKED_ATTENTION)


def plain_logprobs(model, samples, temperature=1.0):
    """Log-probability of every response token of each sample, by transformers' own forward over a padded batch."""
    ids, attention = padded(samples)
    with eager(model):
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits / temperature
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return _responses(logprobs, samples)


def plain_hidden(body, samples):
    """Last hidden state before every response token of each sample, [response, D]."""
    ids, attention = padded(samples)
    with eager(body):
        hidden = body(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
    return _responses(hidden[:, :-1], samples)


def _responses(values, samples):
    return [
        line[len(sample["prompt"]) - 1 : len(sample["prompt"]) - 1 + len(sample["response"])]
        for line, sample in zip(values, samples, strict=True)
    ]


@pytest.fixture
def kit():
    """Give tests the builders of this file (test folders are no packages, so they cannot import it)."""
    return SimpleNamespace(
        vocabulary=VOCABULARY,
        model=tiny_model,
        config=run_config,
        optimizer=optimizer_of,
        train_state=train_state_of,
        samples=random_samples,
        batch=batch_of,
        plain_logprobs=plain_logprobs,
        plain_hidden=plain_hidden,
    )

"""Reference and reward models on their own workers: a reward model that the test trains itself, and whole runs with it."""

from __future__ import annotations

import asyncio
import json
import random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.clock import SystemClock
from asyncrl.config.load import parse_config
from asyncrl.inference.worker import run_inference_worker
from asyncrl.learner.model.policy import character_tokenizer
from asyncrl.schema.control import PROTOCOL, Hello, LoadModel, ModelsReady, Shutdown
from asyncrl.schema.samples import InferRequest, ids_to_bytes
from asyncrl.tasks.registry import build_task
from asyncrl.transport.local import InProcessListener
from asyncrl.transport.protocol import Lane

pytestmark = pytest.mark.timeout(300)

LETTERS = "abcdefgh "
ALPHABET = LETTERS + "0123456789"


def train_reward_model(folder, alphabet, make_pair, steps, seed=0):
    """Teach a tiny Llama to score the first text of a pair over the second, by the loss of Bradley and Terry; save it."""
    tokenizer = character_tokenizer(alphabet)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=64, num_labels=1, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(seed)
    for _ in range(steps):
        pairs = [make_pair(rng) for _ in range(32)]
        texts = [text for pair in zip(*pairs, strict=True) for text in pair]
        ids = [tokenizer(text)["input_ids"] for text in texts]
        ends = torch.tensor([len(each) - 1 for each in ids])
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(each) for each in ids], batch_first=True)
        hidden = model.model(input_ids=padded).last_hidden_state
        better, worse = model.score(hidden[torch.arange(len(ids)), ends]).squeeze(-1).chunk(2)
        loss = -torch.nn.functional.logsigmoid(better - worse).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def with_digit_and_without(rng):
    words = [[rng.choice(LETTERS) for _ in range(rng.randint(4, 14))] for _ in range(2)]
    words[0][rng.randrange(len(words[0]))] = rng.choice("0123456789")
    return "".join(words[0]), "".join(words[1])


async def send_all(connection, requests):
    for request in requests:
        await connection.send(request)


async def judged(config, folder, requests):
    """Run a worker over an in-process channel and return its results."""
    listener = InProcessListener(Hello(PROTOCOL, "controller", "controller", "a", 1))
    near = await listener.connect(Hello(PROTOCOL, "inference", "inference-0", "a", 2))
    far = await listener.accept()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(run_inference_worker(config, folder, near, SystemClock()))
        await far.send(LoadModel(str(folder / "model")), Lane.CONTROL)
        while not isinstance((delivery := await far.receive(Lane.CONTROL)).message, ModelsReady):
            delivery.ack()
        results = []
        group.create_task(send_all(far, requests))
        for _ in requests:
            delivery = await far.receive()
            delivery.ack()
            results.append(delivery.message)
        await far.send(Shutdown(), Lane.CONTROL)
    await listener.close()
    return results


async def test_a_reward_model_trained_here_ranks_unseen_answers_right(tmp_path):
    tokenizer = train_reward_model(tmp_path / "judge", ALPHABET, with_digit_and_without, steps=80)
    judge = {"name": "digits", "path": str(tmp_path / "judge"), "normalise": "running", "clip": 3.0}
    config = parse_config({
        "inference": {"reward_models": [judge], "tokens_per_batch": 200},
        "supervision": {"heartbeat_s": 0.05},
    })
    rng = random.Random(99)
    pairs = [with_digit_and_without(rng) for _ in range(100)]
    requests = []
    for at, pair in enumerate(pairs):
        for index, text in enumerate(pair):
            ids = tokenizer(text)["input_ids"]
            requests.append(InferRequest(at, index, 0, ids_to_bytes(ids[:2]), ids_to_bytes(ids[2:])))
    results = await judged(config, tmp_path, requests)
    rewards = {(item.group_id, item.index): item.rewards["digits"] for item in results}
    assert np.mean([rewards[at, 0] > rewards[at, 1] for at in range(len(pairs))]) >= 0.95
    values = np.array(list(rewards.values()))
    assert np.abs(values).max() <= 3.0
    assert abs(values.mean()) < 0.5
    assert 0.5 < values.std() < 1.5


@pytest.fixture
def sum_judge(tiny, tmp_path):
    """A reward model over the addition task's characters that prefers answers with a 1 in them."""
    task = build_task(tiny().task, 0)
    digits = "023456789"

    def make_pair(rng):
        texts = []
        for is_better in (True, False):
            answer = [rng.choice(digits) for _ in range(rng.randint(1, 3))]
            if is_better:
                answer[rng.randrange(len(answer))] = "1"
            texts.append(f"{rng.choice(digits)}+{rng.choice(digits)}={''.join(answer)}")
        return texts

    train_reward_model(tmp_path / "judge", task.alphabet, make_pair, steps=60)
    return {"name": "ones", "path": str(tmp_path / "judge"), "weight": 0.5, "normalise": "running", "clip": 2.0}


def trained_groups(run):
    """The groups that a run has trained, each once."""
    with LedgerReader(run.run_folder / "ledger.sqlite") as ledger:
        trained = [group_id for step in ledger.steps() for group_id in step.group_ids]
    assert len(trained) == len(set(trained))
    return trained


def balanced(status):
    groups = dict(status.groups)
    return groups.pop("issued") == sum(groups.values())


def with_models(judge):
    return {
        "inference__reward_models": [judge],
        "algorithm__kl": {"coefficient": 0.01},
        "algorithm__reference": {"where": "worker"},
    }


async def test_a_run_is_scored_by_rules_and_models_and_trains_against_the_workers_reference(tiny, sum_judge):
    async with asyncrl.Run(tiny(**with_models(sum_judge))) as run:
        reports = [report async for report in run.steps()]
        status = await run.status()
    assert status.phase == "stopped", status.reason
    assert status.groups["trained"] == 5 * 4
    assert balanced(status)
    assert {process.kind for process in status.processes} == {"learner", "reward", "inference", "generator"}
    with LedgerReader(run.run_folder / "ledger.sqlite") as ledger:
        members = [member for group_id in trained_groups(run) for member in ledger.group(group_id).samples]
    assert len(members) == 5 * 4 * 4
    for member in members:
        assert set(member.parts) == {"answer_match", "ones"}
        assert member.reward == pytest.approx(member.parts["answer_match"] + 0.5 * member.parts["ones"])
    # At version 0 the learner is the reference, so the worker's numbers must be its own; later they are not.
    divergence = [report.metrics["kl/reference_mean"] for report in reports]
    assert divergence[0] == pytest.approx(0.0, abs=1e-8)
    assert divergence[-1] > 1e-7
    spans = [json.loads(line) for line in (run.run_folder / "spans.jsonl").read_text().splitlines()]
    assert {"reward-0", "inference-0"} <= {span["process"] for span in spans}

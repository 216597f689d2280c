"""The reference on the learner: frozen, apart from the policy, or the policy without its adapters."""

import msgspec
import pytest
import torch

from asyncrl.config.algorithm import KLConfig
from asyncrl.config.learner import LearnerConfig, LoRAConfig
from asyncrl.config.model import ScratchModel
from asyncrl.config.run import RunConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.model import row_logprobs
from asyncrl.learner.reference import AdapterOffReference, FrozenReference
from asyncrl.learner.rows import prepare
from asyncrl.learner.start import build_trainee, prepare_standing
from asyncrl.learner.step import train_step

ALPHABET = "abcdefghijklmnopqrstu"
RUN = RunConfig(
    model=ScratchModel(hidden_size=32, num_layers=1, num_heads=2), learner=LearnerConfig(learning_rate=1e-2, warmup_steps=0)
)


def with_kl(config, **learner):
    algorithm = msgspec.structs.replace(config.algorithm, kl=KLConfig(coefficient=0.1))
    return msgspec.structs.replace(config, algorithm=algorithm, learner=msgspec.structs.replace(config.learner, **learner))


def test_the_reference_stays_what_it_was(kit):
    model, config = kit.model(), kit.config({"kl": KLConfig(coefficient=0.1)}, {"learning_rate": 1e-2})
    trainee = kit.trainee(model, config)
    trainee.reference = FrozenReference(kit.model(), 64)
    (row,) = prepare(kit.batch(kit.samples())).rows
    before = trainee.reference.logprobs(row, 1.0)
    results = [train_step(trainee, kit.batch(kit.samples(), step=step), config) for step in range(3)]
    assert torch.equal(trainee.reference.logprobs(row, 1.0), before)
    assert results[0].metrics["kl/reference_mean"] == pytest.approx(0.0, abs=1e-6)
    assert results[2].metrics["kl/reference_mean"] > 1e-6
    assert results[0].timings_s["time/reference_s"] > 0


def test_reference_logprobs_are_those_of_the_temperature(kit):
    model = kit.model()
    (row,) = prepare(kit.batch(kit.samples())).rows
    expected, _ = row_logprobs(model, row, temperature=0.5, chunk_tokens=64)
    assert torch.equal(FrozenReference(model, 64).logprobs(row, 0.5), expected.detach())


def test_nothing_is_loaded_where_nothing_needs_it(tmp_path):
    prepare_standing(RUN, tmp_path, list, ALPHABET)
    trainee = build_trainee(RUN, tmp_path / "model")
    assert trainee.reference is None
    assert trainee.critic is None


def test_the_reference_is_the_run_s_initial_model_unless_a_path_says_otherwise(kit, tmp_path):
    config = with_kl(RUN)
    prepare_standing(config, tmp_path, list, ALPHABET)
    trainee = build_trainee(config, tmp_path / "model")
    (row,) = prepare(kit.batch(kit.samples())).rows
    own, _ = row_logprobs(trainee.model, row, temperature=1.0, chunk_tokens=64)
    assert torch.equal(trainee.reference.logprobs(row, 1.0), own.detach())
    other = msgspec.structs.replace(RUN, seed=5)
    prepare_standing(other, tmp_path / "other", list, ALPHABET)
    reference = msgspec.structs.replace(config.algorithm.reference, path=str(tmp_path / "other" / "model"))
    elsewhere = msgspec.structs.replace(config, algorithm=msgspec.structs.replace(config.algorithm, reference=reference))
    away = build_trainee(elsewhere, tmp_path / "model").reference.logprobs(row, 1.0)
    assert (away - own).abs().max() > 1e-3


def test_with_adapters_the_reference_is_the_policy_without_them(kit, tmp_path):
    config = with_kl(RUN, lora=LoRAConfig(rank=4))
    prepare_standing(config, tmp_path, list, ALPHABET)
    trainee = build_trainee(config, tmp_path / "model")
    assert isinstance(trainee.reference, AdapterOffReference)
    (row,) = prepare(kit.batch(kit.samples())).rows
    before = trainee.reference.logprobs(row, 1.0)
    for step in range(3):
        train_step(trainee, kit.batch(kit.samples(), step=step), config)
    assert torch.equal(trainee.reference.logprobs(row, 1.0), before)
    now, _ = row_logprobs(trainee.model, row, temperature=1.0, chunk_tokens=64)
    assert (now - before).abs().max() > 1e-4


def test_a_missing_reference_is_named(kit):
    config = kit.config({"kl": KLConfig()})
    with pytest.raises(LearnerError, match="step 0 needs log-probabilities of the reference"):
        train_step(kit.trainee(kit.model(), config), kit.batch(kit.samples()), config)


def test_a_batch_where_one_row_lacks_them_asks_the_learner_s_own(kit):
    """Rows of all ranks decide alike, or ranks that share a reference would call it unequally often."""
    config = kit.config({"kl": KLConfig()})
    samples = kit.samples()
    for sample in samples:
        sample["reference"] = sample["logprobs"]
    batch = kit.batch(samples, 40)
    short = (msgspec.structs.replace(batch.rows[0], reference_logprobs=b""), *batch.rows[1:])
    trainee = kit.trainee(kit.model(), config)
    train_step(trainee, batch, config)
    with pytest.raises(LearnerError, match="needs log-probabilities of the reference"):
        train_step(trainee, msgspec.structs.replace(batch, rows=short, step=1), config)

"""What one optimizer step does in its corner cases; what critics start from, and that they train alone when they should."""

import copy
import math

import msgspec
import numpy as np
import pytest
import torch

from asyncrl.algorithms.diagnostics import sequence_figures, token_figures
from asyncrl.algorithms.types import LossOutputs
from asyncrl.config import algorithm as kinds
from asyncrl.config.live import OF_STEPS, changed, settings_of, with_settings
from asyncrl.config.run import ObserveConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.step.microbatch import prepare
from asyncrl.learner.step.train_step import OpenStep, train_step
from asyncrl.observe.samples import CLIPPED, KEPT, TRAINED
from asyncrl.schema.samples import StepBatch, ids_from_bytes, logprobs_from_bytes


def test_non_finite_loss_stops_with_the_batch_saved_and_the_weights_untouched(kit, tmp_path):
    samples = kit.samples()
    samples[0]["reward"] = math.nan
    batch, config, model = kit.batch(samples, step=7), kit.config(), kit.model()
    before = kit.bits(model)
    with pytest.raises(LearnerError, match=r"step 7: loss nan.*step-7\.msgpack"):
        train_step(kit.train_state(model, config), prepare(batch), config, failed_folder=tmp_path / "failed")
    assert kit.same(before, model.parameters())
    saved = msgspec.msgpack.decode((tmp_path / "failed" / "step-7.msgpack").read_bytes(), type=StepBatch)
    assert saved.rows == batch.rows
    assert saved.step == 7


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_a_step_is_the_same_in_16_bits_but_for_their_precision(kit, dtype):
    gradients = []
    for each in ("float32", dtype):
        config, model = kit.config({}, {"dtype": each}), kit.model(dtype=each)
        gradient, _ = OpenStep(kit.train_state(model, config), kit.batch(kit.samples(), 24), config).gradient()
        assert gradient.shape == (sum(parameter.numel() for parameter in model.parameters()),)
        gradients.append(gradient)
    exact, rounded = gradients
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.9
    assert rounded.norm().item() == pytest.approx(exact.norm().item(), rel=0.1)


BUCKETS = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9+": (9, 99)}


@pytest.mark.parametrize(("tokens_per_row", "epochs"), [(24, 1), (400, 1), (400, 2)])
def test_what_is_kept_of_the_tokens_adds_up_to_the_figures_of_the_step(kit, tokens_per_row, epochs):
    """They are those of the first pass; later ones count for clipping only. A sequence is as old as its oldest trained token."""
    corrections = (kinds.TruncatedToken(1.05), kinds.StalenessMask(max_versions=8))
    learner = {"minibatches": 2, "epochs": epochs}
    config = kit.config({"corrections": corrections}, learner, observe=ObserveConfig(samples=100))
    samples, model, random = kit.samples(groups=6), kit.model(), np.random.default_rng(0)
    for sample in samples:
        sample["versions"] = np.sort(12 - random.choice([0, 1, 2, 4, 6, 11], len(sample["response"])))
    samples[0]["versions"] = np.full(len(samples[0]["response"]), 12)
    result = train_step(kit.train_state(model, config), kit.batch(samples, tokens_per_row, step=12), config)
    rows = {(row.group_id, row.index): row for row in result.tokens}
    assert len(rows) == len(samples)
    trained = []
    for number, sample in enumerate(samples):
        row = rows[sample["group_id"], sample["index"]]
        flags, mask = np.frombuffer(row.flags, np.uint8), sample["mask"].astype(bool)
        names = ("behaviour", "learner", "weights", "entropy", "advantages")
        floats = np.stack([logprobs_from_bytes(getattr(row, name)) for name in names]).astype(float)
        assert row.reward == sample["reward"]
        assert ids_from_bytes(row.token_ids).tolist() == sample["response"].tolist()
        assert floats[0].tolist() == sample["logprobs"].tolist()
        assert ((flags & TRAINED) > 0).tolist() == mask.tolist()
        assert np.isnan(floats[1:, ~mask]).all()
        ages = 12 - ids_from_bytes(row.versions)[mask]
        whole = np.full((2, len(ages)), [[ages.max()], [number]])
        trained.append(np.concatenate([floats[:, mask], [flags[mask] & KEPT > 0, flags[mask] & CLIPPED > 0, ages], whole]))
    behaviour, learner, weights, entropy, advantages, kept, clipped, age, oldest, ids = np.concatenate(trained, axis=1)
    ratios, fresh, of_tokens = np.exp(learner - behaviour), oldest == 0, token_figures(learner, behaviour)
    assert 0 < fresh.sum() < (age == 0).sum()  # after an older token, keys and values can be the older version's
    figures = {
        "ratio/max": ratios.max(), "ratio/mean": ratios.mean(), "ratio/p95": np.quantile(ratios, 0.95),
        "ratio/capped_fraction": (ratios >= 1.05).mean(), "ratio/correction_mean": weights.mean(),
        "ratio/ess": of_tokens["ratio/ess"], "kl/mean": of_tokens["kl/mean"], "policy/entropy": entropy.mean(),
        "policy/kept_fraction": kept.mean(), "mismatch/tokens": fresh.sum(),
        "mismatch/kl_k3": token_figures(learner[fresh], behaviour[fresh])["kl/mean"],
        "mismatch/logprob_gap_max": abs(learner - behaviour)[fresh].max(),
    }  # fmt: skip
    for bucket, (low, high) in BUCKETS.items():
        chosen, old = (age >= low) & (age <= high), (oldest >= low) & (oldest <= high)
        of_bucket = token_figures(learner[chosen], behaviour[chosen])
        figures |= {
            f"ratio/ess_by_staleness/{bucket}": of_bucket["ratio/ess"],
            f"kl/proximal_k3_by_staleness/{bucket}": of_bucket["kl/mean"],
            f"policy/kept_fraction_by_staleness/{bucket}": kept[chosen].mean(),
        }
        if old.any():
            of_old = sequence_figures(learner[old], behaviour[old], ids[old].astype(int))
            figures[f"ratio/chi2_sequence_by_staleness/{bucket}"] = of_old["ratio/chi2_sequence"]
    if epochs == 1:
        figures["policy/clip_fraction"] = clipped.mean()
    assert figures == pytest.approx({name: result.metrics[name] for name in figures}, rel=1e-4)
    assert weights.max() == pytest.approx(1.05)
    assert advantages.std() > 0.1


@pytest.mark.parametrize("kind", [kinds.TruncatedSequence, kinds.TruncatedGeometric])
def test_a_cap_on_whole_sequences_counts_the_tokens_it_holds_and_the_sequences_over_it(kit, kind):
    config = kit.config({"corrections": (kind(cap=1.05),)}, observe=ObserveConfig(samples=100))
    result = train_step(kit.train_state(kit.model(), config), kit.batch(kit.samples(groups=6)), config)
    weights_S = [logprobs_from_bytes(row.weights) for row in result.tokens]
    capped_S = [weights[~np.isnan(weights)] >= 1.05 - 1e-6 for weights in weights_S]
    assert result.metrics["ratio/capped_fraction"] == pytest.approx(np.concatenate(capped_S).mean())
    assert result.metrics["ratio/high_fraction"] == pytest.approx(np.mean([capped.any() for capped in capped_S]))
    assert 0.0 < result.metrics["ratio/high_fraction"] < 1.0


def test_a_step_without_a_trained_token_is_refused(kit):
    samples = kit.samples()
    for sample in samples:
        sample["mask"][:] = 0
    model, config = kit.model(), kit.config()
    with pytest.raises(LearnerError, match="nothing to train"):
        train_step(kit.train_state(model, config), prepare(kit.batch(samples)), config)


def test_a_step_of_which_corrections_drop_every_token_changes_no_weight(kit):
    config, drops_all = kit.config(), kit.config({"corrections": (kinds.StalenessMask(max_versions=0),)})
    model, samples = kit.model(), kit.samples()
    state = kit.train_state(model, config)
    moved = train_step(state, kit.batch(samples, step=9), config)
    before = kit.bits(model)
    still = train_step(state, kit.batch(samples, step=10), drops_all)
    assert kit.same(before, model.parameters())
    assert moved.metrics["policy/relative_update"] > 0
    figures = ("policy/kept_fraction", "policy/grad_norm", "policy/relative_update", "policy/learning_rate")
    assert [still.metrics[name] for name in figures] == [0.0] * 4


@pytest.mark.parametrize(("algorithm", "learner", "passes"), [
    ({}, {}, 1), ({"kind": "auto"}, {}, 1), ({"denominator": "kept"}, {}, 2), ({}, {"epochs": 2}, 3),
    ({"proximal": "behaviour"}, {"epochs": 2}, 2), ({"proximal": "loglinear"}, {"epochs": 2}, 2),
])  # fmt: skip
def test_no_pass_is_made_that_nothing_needs(kit, algorithm, learner, passes):
    config, model, calls = kit.config(algorithm, learner), kit.model(), []
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    batch = kit.batch(kit.samples(), 45)
    train_step(kit.train_state(model, config), batch, config)
    assert len(calls) == passes * len(batch.rows)


@pytest.mark.parametrize(("where", "share", "error"), [("loss", 0.9, -0.1), ("reward", 0.5, -0.2)])
def test_the_coefficient_follows_the_penalty_s_own_estimate(kit, where, share, error):
    """k1 is told and answered to, not the k3 of the same two policies; by a fifth at most."""
    samples, (policy, reference) = kit.samples(), (kit.model(seed, initializer_range=0.3) for seed in (0, 2))
    mask = torch.cat([torch.from_numpy(sample["mask"]).bool() for sample in samples])
    ours, theirs = (torch.cat(kit.plain_logprobs(model, samples)).detach()[mask] for model in (policy, reference))
    measured = (ours - theirs).mean().item()
    assert measured > 0.0
    penalty = kinds.KLConfig(coefficient=0.5, estimator="k1", where=where, cap=math.inf, target=measured / share, horizon=100)
    config = kit.config({"advantage": "reinforce_pp", "kl": penalty})
    train_state = kit.train_state(policy, config, reference=reference)
    metrics = train_step(train_state, kit.batch(samples, 40), config).metrics
    assert metrics["kl/penalty_mean"] == pytest.approx(measured, rel=1e-4)
    assert metrics["kl/reference_mean"] != pytest.approx(measured, rel=1e-2)
    assert train_state.memory.kl_coefficient == pytest.approx(0.5 * (1.0 + error * 12 / 100), rel=1e-5)


@pytest.mark.parametrize("target", [None, 0.01])
def test_an_adaptive_coefficient_is_refused_where_the_loss_gives_no_estimate_to_follow(kit, target):
    def own_loss(inputs, _):
        nowhere = torch.zeros_like(inputs.mask)
        return LossOutputs(-inputs.logprobs[inputs.mask].sum(), inputs.mask.to(torch.float32), nowhere, nowhere)

    config, model = kit.config({"kl": kinds.KLConfig(target=target)}), kit.model()
    before, state = kit.bits(model), kit.train_state(model, config, reference=kit.model(seed=2))
    step = OpenStep(state, kit.batch(kit.samples(), 45), config, loss=own_loss)
    if target is None:
        step.backward(0)
        step.update()
        assert "kl/penalty_mean" not in step.result().metrics
        return
    with pytest.raises(LearnerError, match=r"algorithm\.kl\.target.*reference_kl"):
        step.backward(0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert kit.same(before, model.parameters())


def test_auto_picks_from_what_was_measured_and_says_when_it_changes_to_and_fro(kit):
    config = kit.config({"kind": "auto"})
    train_state, samples = kit.train_state(kit.model(), config), kit.samples()
    first = train_step(train_state, kit.batch(samples), config)
    assert train_state.memory.recipe == "lagging"
    assert first.metrics["policy/recipe"] == 1
    assert "no mismatch measured yet" in first.recipe_reason
    for sample in samples:
        sample["logprobs"] += 2.0
    far = [train_step(train_state, kit.batch(samples, step=step), config) for step in (1, 2)]
    assert train_state.memory.recipe == "far"
    assert far[1].metrics["policy/recipe"] == 2
    assert far[1].metrics["policy/kept_fraction"] < 1.0
    assert "kl/mean" in (far[0].recipe_reason + far[1].recipe_reason)
    again = train_step(train_state, kit.batch(samples, step=3), config)
    assert again.recipe_reason == ""
    for _ in range(2):  # what the first of them measures is what the second chooses by
        for sample, logprobs in zip(samples, kit.plain_logprobs(train_state.model, samples), strict=True):
            sample["logprobs"] = logprobs.detach().numpy() - np.float32(1e-4)
        near = train_step(train_state, kit.batch(samples), config)
    assert "near instead of far" in near.recipe_reason
    assert near.metrics["ratio/high_fraction"] == 0.0


def test_what_reads_the_current_policy_follows_it_beside_a_correction_planned_over_the_update(kit):
    """Samples of the model itself: opsm's divergence is 0 before the step and moves with each update. The other drops nothing."""
    mask = kinds.OffPolicySequenceMask(0.0)
    start, samples, outcomes = kit.model(), kit.samples(groups=4, group_size=3), []
    for sample, logprobs in zip(samples, kit.plain_logprobs(start, samples), strict=True):
        sample["logprobs"] = (logprobs.detach() - 0.01).numpy()
    for corrections in ((mask,), (mask, kinds.SecondMomentMask(1e9))):
        config = kit.config({"corrections": corrections}, {"learning_rate": 1e-2, "epsilon": 1e-2, "epochs": 4})
        model = copy.deepcopy(start)
        result = train_step(kit.train_state(model, config), kit.batch(samples, 45), config)
        outcomes.append((result.metrics["policy/kept_fraction"], model))
    (alone, expected), (beside, model) = outcomes
    assert 0.0 < alone < 1.0, "it changed within the step"
    assert beside == alone
    kit.assert_near(model, expected, atol=1e-7)


def test_loglinear_proximal_lies_between_behaviour_and_current(kit):
    """Version 2 of 6: alpha is (6 - 1 - 2) / (6 - 2); the first update's weight is then exp(0.75 (current - behaviour))."""
    samples, start = kit.samples(groups=2, group_size=3), kit.model().double()
    for sample in samples:
        sample["versions"] = np.full(len(sample["response"]), 2)
    config = kit.config({"proximal": "loglinear", "corrections": (kinds.TruncatedToken(10.0),)})
    current = [values.detach() for values in kit.plain_logprobs(start, samples)]
    weights = [
        math.exp(0.75 * (logprobs[token].item() - float(sample["logprobs"][token])))
        for sample, logprobs in zip(samples, current, strict=True)
        for token in np.flatnonzero(sample["mask"])
    ]
    result = train_step(kit.train_state(start, config), kit.batch(samples, 45, step=6), config)
    assert result.metrics["ratio/correction_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)


def test_remax_takes_the_greedy_sample_s_reward_and_trains_none_of_it(kit):
    samples = kit.samples(groups=2, group_size=3)
    for sample in samples:
        sample["is_greedy"] = sample["index"] == 2
        if sample["is_greedy"]:
            sample["mask"][:] = 0
            sample["reward"] = 0.25
    config, model = kit.config({"advantage": "remax"}), kit.model()
    result = train_step(kit.train_state(model, config), kit.batch(samples), config)
    rewards = [sample["reward"] for sample in samples if not sample["is_greedy"]]
    assert result.metrics["advantage/mean"] == pytest.approx(np.mean(rewards) - 0.25)
    assert result.metrics["reward/mean"] == pytest.approx(np.mean(rewards))
    assert result.metrics["data/samples"] == 4
    assert result.num_tokens == sum(int(sample["mask"].sum()) for sample in samples)


LIVE = {
    "num_steps": 40, "learner.learning_rate": 5e-3, "learner.min_learning_rate_ratio": 0.9, "learner.warmup_steps": 9,
    "learner.max_grad_norm": 1e-3, "algorithm.clip_low": 0.01, "algorithm.clip_high": 0.01, "algorithm.dual_clip": 1.01,
    "algorithm.max_ratio": 1.01, "algorithm.entropy_coefficient": 0.5, "algorithm.kl.coefficient": 2.0,
}  # fmt: skip


def test_all_that_a_step_can_be_told_anew_is_tried_here():
    assert LIVE.keys() == {field for field in OF_STEPS if not field.startswith("checkpoint.")}


@pytest.mark.parametrize("field", LIVE)
def test_a_step_is_trained_by_the_settings_that_come_with_it_whatever_the_learner_began_with(kit, field):
    """The very bits of a learner that had the new value from the start, and others than by the old one."""
    samples, start, kl = kit.samples(), kit.model(), kinds.KLConfig(coefficient=0.1)
    for sample, logprobs in zip(samples, kit.plain_logprobs(start, samples), strict=True):  # ratios to both sides of 1
        sample["logprobs"] = (logprobs.detach() + torch.linspace(-0.5, 0.5, len(logprobs))).float().numpy()
    loss = "cispo" if field == "algorithm.max_ratio" else "ppo_clip"
    algorithm = {"kind": "policy", "loss": loss, "proximal": "behaviour", "corrections": (), "kl": kl}
    learner = {"warmup_steps": 0, "min_learning_rate_ratio": 0.1, "epsilon": 1e-2}
    before = kit.config(algorithm, learner, num_steps=4)
    after, _ = changed(before, {field: LIVE[field]})
    told, trained = with_settings(before, settings_of(after)), []
    for built, config in ((before, before), (before, told), (after, after)):
        model = copy.deepcopy(start)
        state = kit.train_state(model, built, reference=kit.model(seed=2))
        state.follow(config)
        train_step(state, kit.batch(samples, step=1), config)
        trained.append(kit.bits(model))
    assert kit.same(trained[1], trained[2])
    assert not kit.same(trained[0], trained[1])


any_kind = pytest.mark.parametrize("kind", ["head", "separate"])


def ppo_config(kit, kind, learner=None, algorithm=None, **critic):
    own = kinds.CriticConfig(**{"kind": kind, "learning_rate": 1e-2, "value_clip": math.inf} | critic)
    return kit.config({"advantage": "gae", "critic": own} | (algorithm or {}), learner)


@any_kind
def test_a_new_critic_says_nothing_and_changes_no_first_policy_step(kit, kind):
    """At 0 everywhere, GAE(1) is the plain return, and no gradient of the values reaches the policy."""
    samples, config, rewarded = kit.samples(), ppo_config(kit, kind), kit.config({"advantage": "reward"})
    with_critic, plain = kit.model(), kit.model()
    result = train_step(kit.train_state(with_critic, config, kit.new_critic(kind)), kit.batch(samples), config)
    train_step(kit.train_state(plain, rewarded), kit.batch(samples), rewarded)
    assert result.metrics["value/mean"] == 0.0
    kit.assert_near(with_critic, plain, atol=1e-6)


@any_kind
def test_warmup_trains_the_critic_and_leaves_the_policy_s_bits_and_its_schedule(kit, kind):
    learner = {"weight_decay": 0.1, "learning_rate": 1e-3, "warmup_steps": 4}
    config, model, critic = ppo_config(kit, kind, learner, warmup_steps=2), kit.model(), kit.critic(kind)
    train_state, policy, values = kit.train_state(model, config, critic), kit.bits(model), kit.bits(critic)
    for step in range(2):
        result = train_step(train_state, kit.batch(kit.samples(seed=step), 40, step=step), config)
        assert kit.same(policy, model.parameters())
        assert "policy/loss" not in result.metrics
        assert result.metrics["value/grad_norm"] > 0
        assert result.version == step + 1
    assert not kit.same(values, critic.parameters())
    after = train_step(train_state, kit.batch(kit.samples(seed=2), 40, step=2), config)
    assert not kit.same(policy, model.parameters())
    assert after.metrics["policy/grad_norm"] > 0
    assert after.metrics["policy/learning_rate"] == pytest.approx(1e-3 / 4), "the first of the policy's own warm-up"


@any_kind
def test_a_critic_keeps_its_own_learning_rate_when_the_settings_of_a_step_are_followed(kit, kind):
    config = ppo_config(kit, kind, {"learning_rate": 1e-5})
    train_state = kit.train_state(kit.model(), config, kit.critic(kind))
    train_state.follow(config)
    assert (train_state.optimizer.step(99), train_state.critic_optimizer.step(99)) == (pytest.approx(1e-5), pytest.approx(1e-2))


@pytest.mark.parametrize(("low", "aggregation"), [(0.9, "token-mean"), (90.0, "seq-mean-token-mean")], ids=["some kept", "none"])
def test_what_corrections_drop_is_no_matter_to_the_critic(kit, low, aggregation):
    """The value loss is over all trained tokens, so its denominator is too, in one row or many."""
    outcomes = []
    for denominator, tokens_per_row in (("all", 10_000), ("kept", 10_000), ("kept", 30)):
        algorithm = {"denominator": denominator, "aggregation": aggregation, "corrections": (kinds.MaskedToken(low, low + 0.2),)}
        config = ppo_config(kit, "separate", {"minibatches": 2, "epsilon": 1e-2}, algorithm, learning_rate=1e-5)
        critic = kit.critic("separate")
        result = train_step(kit.train_state(kit.model(), config, critic), kit.batch(kit.samples(), tokens_per_row), config)
        assert (0.0 < result.metrics["policy/kept_fraction"] < 0.7) if low < 1.0 else not result.metrics["policy/kept_fraction"]
        outcomes.append(([result.metrics[f"value/{name}"] for name in ("loss", "grad_norm")], critic))
    for figures, critic in outcomes[1:]:
        assert figures == pytest.approx(outcomes[0][0], rel=1e-5)
        kit.assert_near(critic, outcomes[0][1], atol=1e-6)

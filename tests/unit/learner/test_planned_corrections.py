"""Corrections of a whole update beside those that follow the current policy row by row."""

import copy

import pytest
import torch

from asyncrl.config.corrections import OffPolicySequenceMask, PythonCorrection, SecondMomentMask
from asyncrl.learner.step import train_step

OPSM = OffPolicySequenceMask(0.0)
KEEPS_ALL = SecondMomentMask(1e9)
"""Planned over the update, and without effect."""


def samples_on_policy(kit, model):
    """Samples of the model itself, so that opsm's divergence is 0 before the step and moves with each update."""
    samples = kit.samples(groups=4, group_size=3)
    with torch.no_grad():
        for sample, logprobs in zip(samples, kit.plain_logprobs(model, samples), strict=True):
            sample["logprobs"] = (logprobs - 0.01).numpy()
    return samples


def trained(kit, start, samples, corrections, tokens_per_row):
    config = kit.config({"corrections": corrections}, {"learning_rate": 1e-2, "epsilon": 1e-2, "epochs": 4})
    model = copy.deepcopy(start)
    result = train_step(kit.trainee(model, config), kit.batch(samples, tokens_per_row), config)
    return result.metrics, list(model.parameters())


OWN = """
from asyncrl.algorithms.corrections_masks import opsm
from asyncrl.config.corrections import OffPolicySequenceMask

def mask(inputs, config):
    return opsm(inputs, OffPolicySequenceMask(config.parameter))
"""


@pytest.mark.parametrize("tokens_per_row", [45, 10_000])
@pytest.mark.parametrize("is_own", [False, True], ids=["opsm", "a user's"])
def test_what_reads_the_current_policy_follows_it_beside_a_planned_correction(kit, tmp_path, is_own, tokens_per_row):
    (tmp_path / "own.py").write_text(OWN)
    mask = PythonCorrection(f"{tmp_path / 'own.py'}:mask") if is_own else OPSM
    start = kit.model()
    samples = samples_on_policy(kit, start)
    alone, weights = trained(kit, start, samples, (mask,), tokens_per_row)
    beside, others = trained(kit, start, samples, (mask, KEEPS_ALL), tokens_per_row)
    assert 0.0 < alone["policy/kept_fraction"] < 1.0, "it changed within the step"
    assert beside["policy/kept_fraction"] == alone["policy/kept_fraction"]
    for ours, theirs in zip(others, weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_both_masks_drop_and_their_weights_multiply(kit):
    start = kit.model()
    samples = samples_on_policy(kit, start)
    dropped = OffPolicySequenceMask(-1e9)
    kept = trained(kit, start, samples, (dropped, SecondMomentMask(1e-9)), 45)[0]["policy/kept_fraction"]
    planned = trained(kit, start, samples, (SecondMomentMask(1e-9),), 45)[0]["policy/kept_fraction"]
    rows = trained(kit, start, samples, (dropped,), 45)[0]["policy/kept_fraction"]
    assert kept <= min(planned, rows) < 1.0

"""Random micro-batches for tests of losses and corrections."""

from dataclasses import replace

import pytest
import torch

from asyncrl.algorithms.types import Denominators, LossInputs


def random_inputs(seed=0, *, tokens=40, sequences=6, spread=0.5, row_advantages=True, dtype=torch.float64, **replaced):
    """Four policies `spread` apart, with gaps in the mask, several versions, and sequences of different lengths."""
    random = torch.Generator().manual_seed(seed)

    def draw(size=tokens):
        return torch.randn(size, generator=random, dtype=torch.float64)

    base = draw() - 2
    ids = torch.randint(0, sequences, (tokens,), generator=random).sort().values
    mask = torch.rand(tokens, generator=random) < 0.8
    values = {
        "logprobs": -(base + spread * draw()).abs(),
        "proximal_logprobs": -(base + spread * draw()).abs(),
        "behaviour_logprobs": -(base + spread * draw()).abs(),
        "reference_logprobs": -(base + spread * draw()).abs(),
        "entropy": draw().abs(),
        "advantages": draw(sequences)[ids] if row_advantages else draw(),
    }
    values = {name: value.to(dtype) for name, value in values.items()}
    values |= {
        "mask": mask,
        "sequence_ids": ids,
        "num_sequences": sequences,
        "denominators": Denominators(float(mask.sum()), float(len(ids[mask].unique())), constant=7.0),
        "versions": torch.randint(3, 10, (tokens,), generator=random),
        "learner_version": 9,
    }
    values |= replaced
    values["logprobs"] = values["logprobs"].detach().clone().requires_grad_()
    return LossInputs(**values)


def on_policy_inputs(seed=0, **more):
    drawn = random_inputs(seed, **more)
    same = drawn.logprobs.detach()
    return replace(
        drawn, proximal_logprobs=same, behaviour_logprobs=same, versions=torch.full_like(drawn.versions, drawn.learner_version)
    )


@pytest.fixture(scope="session")
def loss_inputs():
    """Return the function that draws a micro-batch."""
    return random_inputs


@pytest.fixture(scope="session")
def on_policy():
    """Return the function that draws a micro-batch whose three policies are one."""
    return on_policy_inputs

"""Random micro-batches for tests of losses and corrections."""

import math

import pytest
import torch

from asyncrl.algorithms.types import Denominators, LossInputs


def random_inputs(seed=0, *, tokens=40, sequences=6, row_advantages=True, dtype=torch.float64, garbage=math.nan, **replaced):
    """Four policies some way apart, several versions, sequences of different lengths, and `garbage` at masked tokens."""
    random = torch.Generator().manual_seed(seed)

    def draw(size=tokens):
        return torch.randn(size, generator=random, dtype=torch.float64)

    base = draw() - 2
    ids = torch.randint(0, sequences, (tokens,), generator=random).sort().values
    mask = torch.rand(tokens, generator=random) < 0.8
    values = {f"{policy}logprobs": -(base + 0.5 * draw()).abs() for policy in ("", "proximal_", "behaviour_", "reference_")}
    values |= {"entropy": draw().abs(), "advantages": draw(sequences)[ids] if row_advantages else draw()}
    values = {name: value.where(mask, garbage).to(dtype) for name, value in values.items()}
    values |= {
        "mask": mask,
        "sequence_ids": ids,
        "num_sequences": sequences,
        "denominators": Denominators(float(mask.sum()), float(len(ids[mask].unique())), constant=7.0),
        "versions": torch.randint(3, 10, (tokens,), generator=random).where(mask, -(10**9)),
        "learner_version": 9,
    }
    values |= replaced
    values["logprobs"] = values["logprobs"].detach().clone().requires_grad_()
    return LossInputs(**values)


@pytest.fixture(scope="session")
def loss_inputs():
    """Return the function that draws a micro-batch."""
    return random_inputs

"""A user's own loss, advantage and correction: the documented ones work, wrong ones are told what is wrong with them."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import AdvantageConfig, AdvantageInputs, load_advantage
from asyncrl.algorithms.corrections import load_correction
from asyncrl.algorithms.losses import load_loss
from asyncrl.algorithms.types import LossConfig
from asyncrl.config.algorithm import PythonCorrection
from asyncrl.errors import LearnerError

DOCS = Path(__file__).resolve().parents[3] / "docs" / "algorithms.md"
PRELUDE = """
import dataclasses
import numpy as np
import torch
from asyncrl.algorithms.advantages import AdvantageOutputs
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.types import CorrectionOutputs

def reinforce(inputs, config, **changed):
    return dataclasses.replace(LOSSES["reinforce"](inputs, config), **changed)

def mine(inputs, config):
"""


@pytest.fixture
def own(tmp_path):
    def write(body: str, prelude: str = PRELUDE) -> str:
        (tmp_path / "mine.py").write_text(prelude + "\n".join(f"    {line}" for line in body.splitlines()) + "\n")
        return f"{tmp_path}/mine.py:mine"

    return write


@pytest.fixture
def samples():
    mask = np.array([[True, True, False], [True, True, True]])
    return AdvantageInputs(rewards=np.array([1.0, 0.0]), group_ids=np.zeros(2, dtype=np.int64), mask=mask)


def test_the_functions_of_the_documentation_run(tmp_path, loss_inputs, samples):
    (example,) = re.findall(r"```python\n(# my_maths.py.*?)```", DOCS.read_text(), flags=re.DOTALL)
    (tmp_path / "my_maths.py").write_text(example)
    inputs = loss_inputs(0, garbage=0.0)
    outputs = load_loss(f"{tmp_path}/my_maths.py:soft_ppo")(inputs, LossConfig())
    outputs.loss.backward()
    assert (inputs.logprobs.grad[inputs.mask] != 0).any()
    advantages = load_advantage(f"{tmp_path}/my_maths.py:reward_less_half")(samples, AdvantageConfig()).advantages
    np.testing.assert_array_equal(advantages, [[0.5, 0.5, 0.0], [-0.5, -0.5, -0.5]])
    found = load_correction(f"{tmp_path}/my_maths.py:young_only")(inputs, PythonCorrection("", parameter=2.0))
    assert torch.equal(found.kept, inputs.mask & (inputs.learner_version - inputs.versions <= 2.0))


WRONG = {
    load_loss: [
        ("pass", r"algorithm\.loss .*mine.* must return asyncrl\.algorithms\.types\.LossOutputs, got NoneType"),
        ("return reinforce(inputs, config, loss=inputs.logprobs.detach().sum())", "loss has no gradient"),
        ("raise ValueError('my own trouble')", r"raised ValueError at mine\.py:\d+: my own trouble"),
    ],
    load_advantage: [
        ("return AdvantageOutputs(inputs.rewards)", r"advantages must have shape \[S, T\] = \[2, 3\], got \[2\]"),
        ("return AdvantageOutputs(np.where(inputs.mask, np.nan, 0))", "advantages are not finite at 5 trained tokens"),
    ],
    load_correction: [
        ("return CorrectionOutputs(torch.ones(2), inputs.mask)", r"weights must have shape \[N\] = \[40\], got \[2\]"),
        ("return CorrectionOutputs(inputs.logprobs, inputs.logprobs)", "kept must be bool, got torch.float64"),
    ],
}


@pytest.mark.parametrize(("load", "body", "message"), [(load, *case) for load, cases in WRONG.items() for case in cases])
def test_a_wrong_answer_is_told_what_is_wrong(load, body, message, own, loss_inputs, samples):
    inputs = samples if load is load_advantage else loss_inputs(0, garbage=0.0)
    config = {load_loss: LossConfig(), load_advantage: AdvantageConfig(), load_correction: PythonCorrection("")}[load]
    with pytest.raises(LearnerError, match=message):
        load(own(body))(inputs, config)

"""The critic: the return to expect from the state before each token, as a head on the policy or as a model of its own.

Invariants: a new critic gives 0 everywhere (its output layer starts at zero), so that it begins by changing nothing; the output
layer is float32, also where the body is not; saving and loading changes no bit.

Legend: M targets of a row, D hidden size.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.model.policy import row_hidden
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.ranks.fsdp import divided_like, whole_tensors
from asyncrl.learner.step.microbatch import Row


class Critic(torch.nn.Module):
    """A linear layer on the policy's hidden states (a head, whose gradient goes on into the policy) or on a body of its own."""

    def __init__(self, hidden_size: int, body: PreTrainedModel | None = None) -> None:
        """Make one on the CPU, or where its body is.

        Args:
            hidden_size: D.
            body: A transformer without its output layer; None: it is a head.
        """
        super().__init__()
        self.body = body
        self.output = torch.nn.Linear(hidden_size, 1)
        for parameter in self.output.parameters():
            torch.nn.init.zeros_(parameter)
        if body is not None:
            self.output.to(next(body.parameters()).device)

    def forward(self, given: Row | torch.Tensor) -> torch.Tensor:
        """Return [M], the value of the state before each target: of a row or, of a head, of the policy's hidden states [M, D]."""
        if isinstance(given, Row):
            assert self.body is not None, "a head is given the policy's hidden states"
            given = row_hidden(self.body, given)
        values: torch.Tensor = self.output(given.to(self.output.weight.dtype)).squeeze(-1)
        return values


def build_critic_optimizer(
    critic: Critic, config: CriticConfig, learner: LearnerConfig, num_steps: int, policy: PolicyOptimizer
) -> PolicyOptimizer:
    """Return the critic's optimizer: the learner's, at the critic's learning rate; `policy` is the policy's."""
    own = msgspec.structs.replace(learner, learning_rate=config.learning_rate)
    shared = policy if critic.body is None else None
    return PolicyOptimizer(critic.named_parameters(), own, num_steps, shares_scale_of=shared)


def save_critic(critic: Critic, path: Path) -> None:
    """Write the critic's parameters to a safetensors file."""
    tensors = {name: parameter.contiguous() for name, parameter in whole_tensors(critic.named_parameters())}
    save_file(tensors, path)


def load_critic(critic: Critic, path: Path) -> None:
    """Take over what `save_critic` wrote.

    Raises:
        LearnerError: The file is not there or belongs to another critic.
    """
    if not path.is_file():
        raise LearnerError(
            f"{path.parent.parent} was written without a critic: go on without [algorithm.critic], or start a new run"
        )
    stored, own = load_file(path), dict(critic.named_parameters())
    if {name: tensor.shape for name, tensor in stored.items()} != {name: parameter.shape for name, parameter in own.items()}:
        raise LearnerError(f"{path} is of another critic: algorithm.critic.kind and path must stay those of the run")
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(divided_like(tensor, own[name]))

"""One side of `logits_memory`: prints the peak resident bytes that log-probabilities of T tokens add, forward and backward.

`python -m benchmarks.logits_memory chunked|whole`: ours, or all [T, V] logits at once.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from asyncrl.config.learner import LearnerConfig
from asyncrl.models.logprobs import token_logprobs

VOCABULARY, NUM_TOKENS, HIDDEN = 49_152, 4_096, 64

Way = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    """Measure one way."""
    way = {"chunked": _chunked, "whole": _whole}[sys.argv[1]]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (NUM_TOKENS,))
    way(head, hidden[:8], targets[:8]).sum().backward()  # type: ignore[no-untyped-call]
    before = _peak_bytes()
    way(head, hidden, targets).sum().backward()  # type: ignore[no-untyped-call]
    print(_peak_bytes() - before)


def _peak_bytes() -> int:
    """Return this program's peak resident bytes; on Linux not by getrusage, which counts the parent's peak before exec too."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def _chunked(head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return token_logprobs(hidden, targets, head, temperature=1.0, chunk_tokens=LearnerConfig().logprob_chunk_tokens)[0]


def _whole(head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = head(hidden)
    return logits.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


if __name__ == "__main__":
    main()

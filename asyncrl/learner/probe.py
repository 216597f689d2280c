"""A fixed sequence whose log-probabilities say whether a generator holds the weights the learner means.

Called by learner/worker.py and learner/follower.py.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrl.models.causal import sequence_logprobs
from asyncrl.schema.samples import ids_to_bytes, logprobs_to_bytes
from asyncrl.schema.weights import Probe

PROBE_TOKENS = 16


def make_probe(model: PreTrainedModel, max_tokens: int) -> Probe:
    """Return the probe of the weights as they are.

    Args:
        model: The policy.
        max_tokens: Longest sequence a generator takes.
    """
    vocabulary = model.config.get_text_config().vocab_size
    token_ids = np.random.default_rng(0).integers(0, vocabulary, min(PROBE_TOKENS, max_tokens)).astype(np.int32)
    logprobs = sequence_logprobs(model, torch.from_numpy(token_ids.astype(np.int64)).to(model.device))
    return Probe(ids_to_bytes(token_ids), logprobs_to_bytes(logprobs.float().cpu().numpy()))

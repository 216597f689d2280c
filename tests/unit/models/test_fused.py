"""What of the fused kernel can be seen without a GPU: who is told what. tests/gpu compares its numbers."""

import sys

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.models import fused
from asyncrl.models.fused import fused_chosen, fused_logprobs


def test_it_refuses_any_device_but_cuda():
    with pytest.raises(ConfigError, match=r"runs on CUDA, the learner is on cpu: set 'chunked'"):
        fused_logprobs(torch.randn(3, 4), torch.arange(3), torch.nn.Linear(4, 5), temperature=1.0, chunk_tokens=8)


def test_a_missing_library_is_named_with_how_to_get_it(monkeypatch):
    for name in ("liger_kernel", "liger_kernel.ops.fused_linear_cross_entropy"):
        monkeypatch.setitem(sys.modules, name, None)
    fused._kernel.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[fused\]', or set learner.logprobs = 'chunked'"):
        fused_chosen(torch.randn(3, 4), torch.arange(3), torch.nn.Linear(4, 5), 1.0)

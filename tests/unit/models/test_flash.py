"""Flash attention's operators on a CPU, by kernels written out here: what goes into them, and that torch.compile takes them.

The GPU's own kernels: tests/gpu/test_attention.py.
"""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.algorithm import AlgorithmConfig, KLConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.run import RunConfig
from asyncrl.learner.model.policy import Reference, compile_now, made_ready
from asyncrl.learner.optim.optimizer import PolicyOptimizer
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.train_state import TrainState
from asyncrl.models import attention, flash, logprobs
from asyncrl.models.attention import build_layout, packed_attention
from asyncrl.models.flash import flash_runs, flash_runs_gradients
from asyncrl.packing.pack import pack_step
from asyncrl.schema.samples import Prompt, ScoredGroup, ScoredSample
from tests.builders import make_sample


def probabilities(query, key, keys, ends, numbers, scale):
    """Yield each sequence's queries, keys and [H, Q, K] probabilities."""
    for (first, last), (begin, end) in zip(*(torch.stack([each[:-1], each[1:]], 1).tolist() for each in ends), strict=True):
        assert last - first <= numbers[0]
        assert end - begin <= numbers[1]
        own, of_keys = slice(first, last), keys[begin:end]
        scores = torch.einsum("qhd,khd->hqk", query[own], widened(key[of_keys], query)) * scale
        distance = torch.arange(end - begin - (last - first), end - begin)[:, None] - torch.arange(end - begin)
        seen = (distance >= 0) & ((distance <= numbers[2]) if numbers[2] >= 0 else True)
        yield own, of_keys, scores.masked_fill(~seen, -torch.inf).softmax(-1)


def widened(keys, query):
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)


@flash_runs.register_kernel("cpu")
def attend(query, key, value, keys, query_ends, key_ends, numbers, scale):
    output = torch.zeros(query.shape)
    for own, of_keys, weights in probabilities(query, key, keys, (query_ends, key_ends), numbers, scale):
        output[own] = torch.einsum("hqk,khd->qhd", weights, widened(value[of_keys], query))
    return output, query.new_zeros(query.shape[1], query.shape[0])


@flash_runs_gradients.register_kernel("cpu")
def gradients(grad, kept, numbers, scale):
    query, key, value, _, _, keys, *ends = kept
    found = [torch.zeros(tensor.shape) for tensor in kept[:3]]
    for own, of_keys, weights in probabilities(query, key, keys, ends, numbers, scale):
        of_weights = torch.einsum("qhd,khd->hqk", grad[own], widened(value[of_keys], query))
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
        found[0][own] = torch.einsum("hqk,khd->qhd", of_scores, widened(key[of_keys], query))
        both = (torch.einsum("hqk,qhd->khd", of_scores, query[own]), torch.einsum("hqk,qhd->khd", weights, grad[own]))
        for own_found, wide in zip(found[1:], both, strict=True):
            own_found.index_add_(0, of_keys, wide.view(len(of_keys), key.shape[1], -1, key.shape[2]).sum(2))
    return tuple(found)


def ranges(*parts):
    return np.concatenate([np.arange(*part) for part in parts])


@pytest.mark.parametrize("sequences", [[ranges((3, 6)), ranges((0, 3))], [ranges((0, 2), (4, 6)), ranges((2, 4))]])
def test_tokens_in_another_order_have_no_runs(sequences):
    assert build_layout(sequences, 6).runs is None


def inputs(num_tokens):
    torch.manual_seed(0)
    return [torch.randn(1, heads, num_tokens, 8, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 3])
def test_what_goes_into_flash_attention_says_what_the_buckets_say(monkeypatch, window):
    sequences = [ranges((0, 9)), ranges((0, 5), (9, 16)), ranges((0, 5)), ranges((0, 5), (9, 12), (16, 28))]
    layout, num_tokens = build_layout(sequences, 28), 28
    assert layout.runs.longest == (12, 20)
    weights, found = torch.randn(1, num_tokens, 4, 8), []
    for has_flash in (False, True):
        monkeypatch.setattr(attention, "can_flash", lambda *_, has_flash=has_flash: has_flash)
        given = inputs(num_tokens)
        output, _ = packed_attention(torch.nn.Identity(), *given, None, packed_layout=layout, sliding_window=window)
        found.append([output, *torch.autograd.grad((output * weights).sum(), given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "head_size", "window", "is_shared"),
    [
        (torch.bfloat16, 64, None, True),
        (torch.float32, 64, None, False),
        (torch.float16, 64, 5, False),
        (torch.bfloat16, 256, None, False),
    ],
)
def test_only_flash_attention_is_given_fewer_heads_of_keys_than_of_queries(monkeypatch, dtype, head_size, window, is_shared):
    """With any other kernel of a GPU torch would hold all scores."""
    given = []

    def kernel(query, key, value, *, enable_gqa, **_):
        given.append((enable_gqa, key.shape[1], value.shape[1]))
        return query

    monkeypatch.setattr(flash, "_has_flash", lambda _: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    with FakeTensorMode():
        tensors = [torch.empty(40, heads, head_size, dtype=dtype, device="cuda") for heads in (4, 2, 2)]
        attention._attend(tensors, (1, 40), None, window)
    assert given == [(True, 2, 2) if is_shared else (False, 4, 4)]


def test_a_block_with_flash_attention_is_one_graph_for_rows_of_every_size(monkeypatch):
    monkeypatch.setattr(attention, "can_flash", lambda *_: True)
    counter = CompileCounter()

    def block(query, key, value, layout):
        output, _ = packed_attention(torch.nn.Identity(), query.cos(), key, value, None, packed_layout=layout)
        return output.sin()

    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    for ends in ([9, 16, 18, 44, 65], [30, 36, 56, 65], [8, 43, 60, 64, 76, 104]):
        own = [ranges((0, 5), (first, last)) for first, last in pairwise(ends)]  # all begin with the first one's five
        layout, given = build_layout([ranges((0, ends[0])), *own], ends[-1]), inputs(ends[-1])
        torch.testing.assert_close(compiled(*given, layout), block(*given, layout))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile reads it
def test_what_steps_run_is_compiled_before_the_first_one_and_nothing_as_a_model_is_opened(monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(logprobs, "_compiled", lambda function: torch.compile(function, dynamic=True))
    monkeypatch.setattr(attention, "can_flash", lambda *_: True)
    learner = LearnerConfig(compile=True, logprobs="fused", logprob_chunk_tokens=8, minibatches=2)
    algorithm = AlgorithmConfig(group_size=2, groups_per_step=2, entropy_coefficient=0.1, kl=KLConfig())
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    policy, frozen = (made_ready(LlamaForCausalLM(LlamaConfig(**sizes)), learner) for _ in range(2))
    assert counter.frame_count == 0, "a model of several ranks is on the CPU here"
    config, reference = RunConfig(algorithm=algorithm, learner=learner), Reference(frozen, 8)
    optimizer = PolicyOptimizer(policy.named_parameters(), learner, 10)
    compile_now(policy, optimizer, config, reference)
    compiled = counter.frame_count
    groups = []
    for number in range(2):
        made = [make_sample(number, index, [5] * (9 * number + index + 2), [8, 9, 10 + number]) for index in range(2)]
        members = tuple(ScoredSample(one, float(index)) for index, one in enumerate(made))
        groups.append(ScoredGroup(number, Prompt("p"), members))
    batch = pack_step(0, groups, tokens_per_row=64, temperature=0.7)
    train_step(TrainState(policy, optimizer, reference), batch, config)
    assert counter.frame_count == compiled > 0

import pytest
import torch

from asyncrl.models.copying import copy_tensor, copy_tensors

SOURCES = {
    "alike": torch.randn(5, 3),
    "turned": torch.randn(3, 5).t(),
    "cast": torch.randn(5, 3, dtype=torch.float64),
    "parameter": torch.nn.Parameter(torch.randn(5, 3)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_tensor_arrives_whatever_its_strides_and_dtype(name):
    target = torch.zeros(5, 3)
    copy_tensor(SOURCES[name], target)
    assert torch.equal(target, SOURCES[name].detach().float())


def test_scalars_and_empty_tensors_are_copied_too():
    scalar, empty = torch.zeros(()), torch.zeros(0, 2)
    copy_tensors([(torch.tensor(3.0), scalar), (torch.zeros(0, 2), empty)])
    assert scalar.item() == 3.0


def test_a_target_that_needs_gradients_is_written_in_place():
    parameter = torch.nn.Parameter(torch.zeros(4))
    address = parameter.data_ptr()
    copy_tensor(torch.ones(4), parameter)
    copy_tensor(torch.full((4,), 2, dtype=torch.int64), parameter)
    assert (parameter.tolist(), parameter.data_ptr(), parameter.grad_fn) == ([2.0] * 4, address, None)


def test_many_are_copied_side_by_side():
    pairs = [(torch.full((index + 1,), float(index)), torch.zeros(index + 1)) for index in range(50)]
    copy_tensors(iter(pairs), num_threads=3)
    assert all(torch.equal(source, target) for source, target in pairs)


def test_a_failing_copy_is_raised():
    with pytest.raises((ValueError, RuntimeError)):
        copy_tensors([(torch.zeros(3), torch.zeros(4))])

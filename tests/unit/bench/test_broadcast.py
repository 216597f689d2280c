import pytest
import torch

from asyncrl.errors import ConfigError
from benchmarks.broadcast import MEDIA, OTHERS, _changing, _ratios_of, chosen


def test_all_media_and_the_others_are_measured_unless_some_are_named():
    assert chosen("all") == [*MEDIA, *OTHERS]
    assert chosen("ray, shared_memory") == ["ray", "shared_memory"]
    with pytest.raises(ConfigError, match="carrier_pigeon"):
        chosen("shared_memory,carrier_pigeon")


def test_zeromq_is_compared_with_the_bare_socket_of_the_same_round():
    samples = {"zeromq_fetch_ms": [10.0, 30.0, 20.0], "bare_zeromq_live_ms": [5.0, 30.0, 16.0]}
    assert _ratios_of(samples)["zeromq_vs_bare"].value == 0.8


def test_a_share_of_the_elements_changes_from_version_to_version():
    change = _changing({"w": torch.zeros(10_000, dtype=torch.bfloat16)})
    first = {name: tensor.clone() for name, tensor in change().items()}
    differing = int((first["w"].view(torch.int16) != change()["w"].view(torch.int16)).sum())
    assert 50 < differing <= 101

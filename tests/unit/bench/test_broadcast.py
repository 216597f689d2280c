import pytest

from asyncrl.errors import ConfigError
from benchmarks.broadcast import MEDIA, _ratios_of, chosen


def test_all_media_are_measured_unless_some_are_named():
    assert chosen("all") == list(MEDIA)
    assert chosen("files, shared_memory") == ["files", "shared_memory"]
    with pytest.raises(ConfigError, match="carrier_pigeon"):
        chosen("shared_memory,carrier_pigeon")


def test_zeromq_is_compared_with_the_bare_socket_of_the_same_round():
    samples = {"zeromq_fetch_ms": [10.0, 30.0, 20.0], "bare_zeromq_live_ms": [5.0, 30.0, 16.0]}
    assert _ratios_of(samples)["zeromq_vs_bare"].value == 0.8

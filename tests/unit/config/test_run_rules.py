import pytest

from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError


@pytest.mark.parametrize("kind", ["nccl", "cuda_ipc"])
def test_deltas_are_refused_where_no_generator_keeps_the_version_before(kind):
    with pytest.raises(ConfigError, match=rf"broadcast.delta needs a copy .* '{kind}' .* take shared_memory, files or zeromq"):
        parse_config({"broadcast": {"medium": {"kind": kind}, "delta": {}}})


@pytest.mark.parametrize("kind", ["shared_memory", "files", "zeromq", "gloo"])
def test_deltas_are_taken_where_blobs_can_be_fetched(kind):
    config = parse_config({"broadcast": {"medium": {"kind": kind}, "delta": {"full_every": 5}}})
    assert config.broadcast.delta.full_every == 5

import pytest

from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError


@pytest.mark.parametrize("kind", ["gloo", "nccl", "cuda_ipc"])
def test_deltas_are_refused_over_media_that_carry_none(kind):
    with pytest.raises(ConfigError, match=rf"broadcast.delta needs a copy .* '{kind}' .* take shared_memory, files or zeromq"):
        parse_config({"broadcast": {"medium": {"kind": kind}, "delta": {}}})

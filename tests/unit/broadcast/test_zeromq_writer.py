import pytest
import torch

from asyncrl.broadcast.zeromq_writer import ZeroMQWriter
from asyncrl.config.stages import ZeroMQMedium
from asyncrl.errors import BroadcastError
from asyncrl.models.layout import make_manifest


def test_a_version_that_nobody_would_serve_is_an_error_and_not_a_silence():
    writer = ZeroMQWriter(ZeroMQMedium())
    writer.open(make_manifest({"w": torch.zeros(5)}))
    assert writer.commit(0, 1, "f") == writer.location
    writer.close()
    with pytest.raises(BroadcastError, match="version 2 can be fetched by nobody"):
        writer.commit(1, 2, "g")

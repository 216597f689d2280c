import pytest

from asyncrl.errors import ConfigError
from benchmarks.broadcast import MEDIA, chosen


def test_all_media_are_measured_unless_some_are_named():
    assert chosen("all") == list(MEDIA)
    assert chosen("files, shared_memory") == ["files", "shared_memory"]
    with pytest.raises(ConfigError, match="carrier_pigeon"):
        chosen("shared_memory,carrier_pigeon")

"""Runs that are looked at where they lie."""

import pytest

from asyncrl.errors import ConfigError
from asyncrl.serve.daemon import view_runs


async def test_folders_of_the_same_name_cannot_be_told_apart(tmp_path):
    with pytest.raises(ConfigError, match="two are same"):
        await view_runs([tmp_path / "a" / "same", tmp_path / "b" / "same"], 0, print)

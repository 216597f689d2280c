"""Who holds a detached run, and what becomes of it once nobody does."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.config.run import OwnerConfig
from asyncrl.control.launch.lease import SOCKET_FILE, own_by_lease, take_lease


@pytest.mark.parametrize("absent", ["go_on", "drain", "stop"])
async def test_a_run_that_is_left_does_what_its_config_says_once_the_last_has_gone(tmp_path, absent):
    async with asyncio.timeout(30), own_by_lease(tmp_path, OwnerConfig(absent=absent, grace_s=0.1)) as owner:
        first, second = await take_lease(tmp_path), await take_lease(tmp_path)
        first.close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(owner.gone.wait(), 0.3)  # the second one holds it
        second.close()
        await first.wait_closed()
        await second.wait_closed()
        await owner.nobody.wait()
        if absent == "go_on":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(owner.gone.wait(), 0.3)
        else:
            await owner.gone.wait()
            assert owner.then == absent
    assert not (tmp_path / SOCKET_FILE).exists()
    assert await take_lease(tmp_path) is None

"""How a rank joins the group. Groups of several ranks: tests/integration/ranks."""

import os

import pytest
from torch.distributed import HashStore

from asyncrl.config.broadcast import BroadcastConfig, NCCLMedium, SharedMemoryMedium
from asyncrl.config.run import RunConfig
from asyncrl.learner.ranks.group import joined_ranks, keeps_nccl_on_loopback


@pytest.mark.parametrize(("medium", "is_kept"), [
    (SharedMemoryMedium(), True), (NCCLMedium(), True), (NCCLMedium(host="10.0.0.5"), False), (NCCLMedium(host="node"), False),
])  # fmt: skip
@pytest.mark.parametrize("set_by_user", [None, "eth7"])
def test_nccl_stays_on_loopback_unless_weights_leave_the_machine_by_it_or_the_user_says_otherwise(
    monkeypatch, medium, is_kept, set_by_user
):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "so that it is put back")
        monkeypatch.delenv(name)
    if set_by_user:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", set_by_user)
    config = RunConfig(broadcast=BroadcastConfig(medium=medium))
    with joined_ranks(0, 1, HashStore(), "cpu", 30.0, nccl_on_loopback=keeps_nccl_on_loopback(config)):
        loopback = os.environ["GLOO_SOCKET_IFNAME"]
        assert os.environ.get("NCCL_SOCKET_IFNAME") == (set_by_user or (loopback if is_kept else None))

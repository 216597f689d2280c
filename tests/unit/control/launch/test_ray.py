"""What a launch on Ray follows from, without a cluster; the launcher is in tests/integration/machines/test_ray_cluster.py."""

from typing import Any

import pytest

from asyncrl.config.broadcast import ZeroMQMedium
from asyncrl.config.load import dump_config, load_config, load_run_config, parse_config
from asyncrl.config.places import needs_of, with_launch_choices
from asyncrl.config.run import RayLaunch, RunConfig

pytest.importorskip("ray")


def on_ray(**settings: Any) -> RunConfig:
    return parse_config({"launch": {"kind": "ray"}, **settings})


def test_gpus_follow_from_devices_unless_they_are_said() -> None:
    config = on_ray(learner={"device": "cuda", "ranks": 4}, generate={"engine": {"kind": "vllm", "tensor_parallel": 2}})
    assert needs_of(config, "learner").num_gpus == 4
    assert needs_of(config, "generator").num_gpus == 2
    assert needs_of(config, "reward").num_gpus == 0
    said = parse_config({"launch": {"kind": "ray", "generator": {"num_gpus": 0.5}}})
    assert needs_of(said, "generator").num_gpus == 0.5


def test_what_ends_at_one_machine_s_edge_is_replaced_and_each_process_puts_its_own_address_there(tmp_path, monkeypatch) -> None:
    config, said = with_launch_choices(on_ray())
    assert (config.transport.kind, config.transport.host, len(said)) == ("tcp", "node", 2)
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_run_config(tmp_path).transport.host == "127.0.0.1"
    monkeypatch.setenv("ASYNCRL_NODE_ADDRESS", "10.0.0.9")
    here = load_run_config(tmp_path)
    assert here.transport.host == "10.0.0.9"
    assert isinstance(here.broadcast.medium, ZeroMQMedium)
    assert here.broadcast.medium.bind == here.broadcast.medium.relay_bind == "tcp://10.0.0.9:*"
    assert isinstance(load_config(tmp_path / "config.toml").launch, RayLaunch)

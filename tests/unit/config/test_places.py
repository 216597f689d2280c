import pytest

from asyncrl.config.load import dump_config, load_run_config, parse_config
from asyncrl.config.places import choose_medium, with_chosen_medium, with_launch_choices
from asyncrl.errors import ConfigError
from asyncrl.generate.rollout import with_own_server
from tests.builders import laid_over

VLLM = {"kind": "vllm", "device": "cuda", "max_sequence_tokens": 512}
SERVERS = {"kind": "vllm_server", "url": "http://10.0.0.7:8000, http://10.0.0.8:8000", "shared_folder": "/mnt/shared"}
NETWORK = {"kind": "tcp", "host": "10.1.2.3"}
RAY = {"kind": "ray"}
ONE = {"generate__num_workers": 1}
JOINING = {"generate__num_workers": 0, "placement__most_joining_generators": 4, "eval__at_start": False, "eval__at_end": False}


def config(engine=None, learner="cpu", **settings):
    settings |= {"learner__device": learner, "broadcast__medium__kind": "auto"}
    return parse_config(laid_over({}, settings | ({"generate__engine": engine} if engine else {})))


@pytest.mark.parametrize(("told", "kind", "reason"), [
    ({}, "shared_memory", "on this machine"),
    ({"engine": VLLM}, "shared_memory", "on this machine"),
    ({"engine": VLLM, "learner": "cuda"}, "cuda_ipc", "share GPU 0"),
    ({"engine": VLLM | {"device": "auto"}, "learner": "cuda:0"}, "cuda_ipc", "share GPU 0"),
    ({"engine": VLLM | {"tensor_parallel": 2}, "learner": "cuda:2"} | ONE, "nccl", "learner on GPU 2, engine on GPU 0, 1"),
    ({"engine": VLLM, "learner": "cuda:1"}, "shared_memory", "several generators share GPU 0, and nccl takes one"),
    ({"engine": VLLM | {"tensor_parallel": 2}, "learner": "cuda"}, "shared_memory", "reach only a part"),
    ({"engine": VLLM, "learner": "cuda", "broadcast__delta": {}}, "shared_memory", "broadcast.delta needs"),
    ({"engine": {"kind": "fake"}, "learner": "cuda"}, "shared_memory", "on this machine"),
    ({"engine": SERVERS}, "shared_memory", "hands its vLLM server"),
    ({"transport": NETWORK}, "zeromq", "'10.1.2.3' opens the run to other machines"),
    ({"engine": VLLM, "learner": "cuda:1", "transport": NETWORK} | ONE, "nccl", "open to other machines"),
    ({"engine": VLLM, "learner": "cuda", "transport": NETWORK} | ONE, "zeromq", "feeds every generator itself"),
    ({"engine": VLLM, "learner": "cuda", "transport": NETWORK} | JOINING, "nccl", "open to other machines"),
    ({"engine": VLLM, "learner": "cuda", "transport": NETWORK}, "zeromq", "10.1.2.3"),
    ({"engine": VLLM, "learner": "cuda", "transport": NETWORK, "broadcast__delta": {}}, "zeromq", "10.1.2.3"),
    ({"engine": VLLM, "learner": "cuda", "transport": {"kind": "tcp", "host": "0.0.0.0"}}, "zeromq", "0.0.0.0"),
    ({"launch": RAY}, "zeromq", "Ray may put"),
    ({"launch": RAY, "engine": VLLM, "learner": "cuda"}, "nccl", "Ray may put"),
    ({"launch": RAY | {"generator": {"num_gpus": 0.5}}, "engine": VLLM, "learner": "cuda"}, "zeromq", "Ray may put"),
    ({"placement__kind": "colocated", "buffer__max_staleness": 0}, "shared_memory", "changes hands"),
    ({"placement__kind": "hybrid", "buffer__max_staleness": 0}, "shared_storage", "the learner's own weights"),
    ({"transport": {"kind": "tcp", "host": "localhost"}}, "shared_memory", "on this machine"),
])  # fmt: skip
def test_the_medium_follows_from_where_the_processes_are(told, kind, reason):
    chosen, why = choose_medium(config(**told))
    assert chosen.kind == kind
    assert reason in why


def test_auto_is_replaced_once_says_what_and_why_and_addresses_follow_the_host_that_the_run_is_open_on():
    chosen, line = with_chosen_medium(config())
    assert chosen.broadcast.medium.kind == "shared_memory"
    assert line == "broadcast.medium auto is shared_memory: learner and generators are on this machine"
    assert with_chosen_medium(chosen) == (chosen, "")
    assert choose_medium(config(transport=NETWORK))[0].bind == "tcp://10.1.2.3:*"
    assert choose_medium(config(VLLM, "cuda:1", transport=NETWORK, **ONE))[0].host == "10.1.2.3"
    assert choose_medium(config(VLLM, "cuda", launch=RAY))[0].host == "node"


def test_on_ray_what_ends_at_one_machine_s_edge_is_replaced_and_each_process_puts_its_own_address_there(tmp_path, monkeypatch):
    chosen, said = with_launch_choices(parse_config({"launch": RAY}))
    assert (chosen.transport.kind, chosen.transport.host, len(said)) == ("tcp", "node", 2)
    (tmp_path / "config.toml").write_text(dump_config(chosen))
    monkeypatch.delenv("ASYNCRL_NODE_ADDRESS", raising=False)
    for address in ("127.0.0.1", "10.0.0.9"):
        here = load_run_config(tmp_path)
        assert (here.launch.kind, here.transport.host, here.broadcast.medium.kind) == ("ray", address, "zeromq")
        assert here.broadcast.medium.bind == here.broadcast.medium.relay_bind == f"tcp://{address}:*"
        monkeypatch.setenv("ASYNCRL_NODE_ADDRESS", "10.0.0.9")


def test_each_generator_has_the_server_of_its_number():
    two = config(SERVERS, generate__num_workers=2)
    urls = [with_own_server(two, name).generate.engine.urls for name in ("generator-0", "generator-1")]
    assert urls == [("http://10.0.0.7:8000",), ("http://10.0.0.8:8000",)]
    with pytest.raises(ConfigError, match="generator-2 is without one"):
        with_own_server(two, "generator-2")

import pytest

from asyncrl.config.load import parse_config
from asyncrl.config.places import choose_medium, doubts_about_medium, with_chosen_medium
from asyncrl.errors import ConfigError

VLLM = {"kind": "vllm", "device": "cuda", "max_sequence_tokens": 512}
ON_CPU = VLLM | {"device": "cpu"}
SERVERS = {"kind": "vllm_server", "url": "http://10.0.0.7:8000, http://10.0.0.8:8000", "shared_folder": "/mnt/shared"}
NETWORK = {"kind": "tcp", "host": "10.1.2.3"}
EVERYWHERE = {"kind": "tcp", "host": "0.0.0.0"}
RAY = {"kind": "ray"}


def config(engine=None, learner="cpu", medium="auto", **rest):
    broadcast = {"medium": {"kind": medium}} | rest.pop("broadcast", {})
    generate = {"generate": {"engine": engine}} if engine else {}
    return parse_config({"learner": {"device": learner} | rest.pop("learner_rest", {}), "broadcast": broadcast} | generate | rest)


@pytest.mark.parametrize(
    ("told", "kind", "reason"),
    [
        ({}, "shared_memory", "on this machine"),
        ({"engine": ON_CPU}, "shared_memory", "on this machine"),
        ({"engine": ON_CPU, "learner": "cuda"}, "shared_memory", "on this machine"),
        ({"engine": VLLM}, "shared_memory", "on this machine"),
        ({"engine": VLLM, "learner": "cuda"}, "cuda_ipc", "share GPU 0"),
        ({"engine": VLLM | {"device": "auto"}, "learner": "cuda:0"}, "cuda_ipc", "share GPU 0"),
        ({"engine": VLLM, "learner": "cuda:1"}, "nccl", "learner on GPU 1, engine on GPU 0"),
        ({"engine": VLLM | {"tensor_parallel": 2}, "learner": "cuda:2"}, "nccl", "engine on GPU 0, 1"),
        ({"engine": VLLM | {"tensor_parallel": 2}, "learner": "cuda"}, "shared_memory", "reach only a part"),
        ({"engine": VLLM, "learner": "cuda", "broadcast": {"delta": {}}}, "shared_memory", "broadcast.delta needs"),
        ({"engine": {"kind": "transformers", "device": "cuda"}, "learner": "cuda"}, "cuda_ipc", "share GPU 0"),
        ({"engine": {"kind": "transformers", "device": "cuda:1"}, "learner": "cuda"}, "nccl", "engine on GPU 1"),
        ({"engine": {"kind": "transformers"}, "learner": "cuda"}, "shared_memory", "on this machine"),
        ({"engine": {"kind": "fake"}, "learner": "cuda"}, "shared_memory", "on this machine"),
        ({"engine": SERVERS}, "shared_memory", "hands its vLLM server"),
        ({"transport": NETWORK}, "zeromq", "'10.1.2.3' opens the run to other machines"),
        ({"engine": VLLM, "learner": "cuda", "transport": NETWORK}, "nccl", "open to other machines"),
        ({"engine": VLLM, "learner": "cuda", "transport": NETWORK, "broadcast": {"delta": {}}}, "zeromq", "10.1.2.3"),
        ({"engine": VLLM, "learner": "cuda", "transport": EVERYWHERE}, "zeromq", "0.0.0.0"),
        ({"launch": RAY}, "zeromq", "Ray may put"),
        ({"launch": RAY, "engine": VLLM, "learner": "cuda"}, "nccl", "Ray may put"),
        ({"placement": {"kind": "colocated"}, "buffer": {"max_staleness": 0}}, "shared_memory", "changes hands"),
        ({"placement": {"kind": "hybrid"}, "buffer": {"max_staleness": 0}}, "shared_storage", "the learner's own weights"),
        ({"transport": {"kind": "tcp", "host": "127.0.0.1"}}, "shared_memory", "on this machine"),
        ({"transport": {"kind": "tcp", "host": "localhost"}}, "shared_memory", "on this machine"),
    ],
)
def test_the_medium_follows_from_where_the_processes_are(told, kind, reason):
    chosen, why = choose_medium(config(**told))
    assert chosen.kind == kind
    assert reason in why


@pytest.mark.parametrize("medium", [{"kind": "gloo", "host": "0.0.0.0"}, {"kind": "nccl", "host": "::"}])
def test_a_collective_is_not_told_to_meet_at_every_interface(medium):
    with pytest.raises(ConfigError, match=r"is told to every generator and names no machine"):
        config(VLLM, "cuda:1", broadcast={"medium": medium})


def test_auto_is_replaced_once_and_says_what_and_why():
    chosen, line = with_chosen_medium(config())
    assert chosen.broadcast.medium.kind == "shared_memory"
    assert line == "broadcast.medium auto is shared_memory: learner and generators are on this machine"
    assert with_chosen_medium(chosen) == (chosen, "")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"engine": VLLM, "medium": "cuda_ipc"}, r"'cuda_ipc' begins in a GPU and learner.device is 'cpu'"),
        ({"engine": VLLM, "medium": "nccl"}, r"'nccl' begins in a GPU and learner.device is 'cpu'"),
        ({"engine": ON_CPU, "learner": "cuda", "medium": "nccl"}, r"ends in a GPU and generate.engine.device is 'cpu'"),
        ({"learner": "cuda", "medium": "nccl"}, r"ends in a GPU and generate.engine.device is 'cpu'"),
        ({"engine": {"kind": "fake"}, "learner": "cuda", "medium": "nccl"}, r"generate.engine.kind 'fake' has none"),
        ({"engine": VLLM, "learner": "cuda:1", "medium": "cuda_ipc"}, r"the same GPU; learner.device is 'cuda:1' .* GPU 0"),
        ({"engine": VLLM, "learner": "cuda", "medium": "nccl"}, r"different GPUs; learner.device is 'cuda' .* GPU 0"),
        ({"engine": VLLM, "learner": "cuda", "medium": "cuda_ipc", "broadcast": {"delta": {}}}, r"broadcast.delta needs a copy"),
    ],
)
def test_a_medium_that_ends_where_nobody_is_is_refused(told, message):
    broadcast = {"medium": {"kind": told["medium"]}} | told.pop("broadcast", {})
    with pytest.raises(ConfigError, match=message):
        config(**told, broadcast=broadcast)


def test_deltas_of_float32_are_doubted_and_of_bfloat16_are_not():
    (doubt,) = doubts_about_medium(config(broadcast={"delta": {}}))
    assert 'set broadcast.dtype = "bfloat16"' in doubt
    assert doubts_about_medium(config(broadcast={"delta": {}, "dtype": "bfloat16"})) == []
    assert doubts_about_medium(config()) == []


def test_addresses_follow_the_host_that_the_run_is_open_on():
    assert choose_medium(config(transport=NETWORK))[0].bind == "tcp://10.1.2.3:*"
    assert choose_medium(config(VLLM, "cuda", transport=NETWORK))[0].host == "10.1.2.3"
    assert choose_medium(config(VLLM, "cuda", launch=RAY))[0].host == "node"

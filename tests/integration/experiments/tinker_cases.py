"""The real `tinker` SDK, unchanged, against experiments/tinker: loops of its documented calls, and what must hold under them.

Run by test_tinker.py, in a process of its own.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from subprocess import PIPE, STDOUT

import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).resolve().parents[3] / "experiments" / "tinker"
SERVE = (sys.executable, FOLDER / "serve.py", "quickstart")
SMALL = (
    "task.digits=1", "task.held_out=10", "model.hidden_size=64", "model.max_positions=24",
    "model.warm_start.steps=100", "model.warm_start.until_accuracy=0.0", "generate.engine.num_slots=64",
)  # fmt: skip
CALM = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
VOCABULARY = 14
PLAIN = types.AdamParams(learning_rate=1e4, beta1=0.0, beta2=0.0, eps=1e4)
"""A step with these moves each weight by -g / (1 + |g| / 1e4)."""


def options(name, *values):
    return [word for value in values for word in (name, value)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker")
    for name in ("snapshot-00000001", ".partial-snapshot-00000002", "named"):
        (folder / "saved" / "before:train:0" / "sampler_weights" / name).mkdir(parents=True)
    command = [*SERVE, "--folder", folder, "--model-name", "tiny", *options("--set", *SMALL)]
    process = subprocess.Popen(list(map(str, command)), stdout=PIPE, stderr=PIPE, text=True, env=CALM)
    yield {"folder": folder} | dict(process.stdout.readline().split() for _ in range(2))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "Traceback" not in errors, errors
    assert "ERROR" not in errors, errors


@pytest.fixture
def service(server):
    with tinker.ServiceClient(base_url=server["base_url"], api_key=server["api_key"]) as client:
        yield client


@pytest.fixture
def folder_of(server, tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    return lambda path: next(root.glob(f"tinker*/saved/{path.removeprefix('tinker://')}/step-*"))


@pytest.fixture
def weights_of(folder_of):
    """Read what a training client has now."""

    def read(training, name):
        return load_file(folder_of(training.save_state(name).result().path) / "adapter_model.safetensors")

    return read


@pytest.fixture
def post(server):
    """Send a body as it is; return status and answer."""

    def send(name, body, key=None):
        kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"X-API-Key": server["api_key"] if key is None else key, "Content-Type": kind}
        request = urllib.request.Request(f"{server['base_url']}/api/v1/{name}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    return send


def opened(service, seed=1):
    return service.create_lora_training_client(base_model="tiny", rank=4, seed=seed).result()


def datum(tokens, **inputs):
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def drawn(seed, *names):
    """Four sequences with targets that are not their own tokens, and values for a loss."""
    rng = np.random.default_rng(seed)
    lengths = (3, 17, 1, 9)
    return [
        datum(
            rng.integers(0, VOCABULARY, length).tolist(),
            target_tokens=rng.integers(0, VOCABULARY, length),
            **{name: (rng.normal(size=length) - 2.5 * (name == "logprobs")).astype(np.float32) for name in names},
        )
        for length in lengths
    ]


def trained(training, data, loss="cross_entropy", params=None):
    """Make a pass and a step; return the pass's answer."""
    passed, stepped = training.forward_backward(data, loss), training.optim_step(params or types.AdamParams(learning_rate=0.01))
    stepped.result()
    return passed.result()


def figures(output, name):
    return [float(line.split()[3]) for line in output.splitlines() if f" {name} " in line]


def test_both_loops_run_to_their_end_at_once_and_learn(server):
    own = {"rl_loop": ["--reward=short", "--groups=16"], "sl_loop": ["--digits=2"]}
    common = [f"--base-url={server['base_url']}", f"--api-key={server['api_key']}", "--digits=1", "--steps=16"]
    loops = [
        subprocess.Popen([sys.executable, FOLDER / f"{name}.py", *common, *words], stdout=PIPE, stderr=STDOUT, text=True)
        for name, words in own.items()
    ]
    said = [loop.communicate(timeout=600)[0] for loop in loops]
    assert [loop.returncode for loop in loops] == [0, 0], said
    rewards, losses = figures(said[0], "reward"), figures(said[1], "loss")
    assert (len(rewards), len(losses)) == (16, 16)
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.2, rewards
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4]), losses
    assert "saved tinker://" in said[1]


def ratio(lp, d, low=0.0, high=np.inf):
    return (lp - d["logprobs"]).exp().clamp(low, high)


REFERENCE = {
    "cross_entropy": (None, lambda lp, d: -(d["weights"] * lp)),
    "importance_sampling": (None, lambda lp, d: -ratio(lp, d) * d["advantages"]),
    "ppo": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
        lambda lp, d: -torch.minimum(ratio(lp, d) * d["advantages"], ratio(lp, d, 0.7, 1.1) * d["advantages"]),
    ),
    "cispo": (
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
        lambda lp, d: -ratio(lp, d, 0.5, 1.5).detach() * lp * d["advantages"],
    ),
    "dro": ({"beta": 0.1}, lambda lp, d: -(lp * d["advantages"] - 0.05 * (lp - d["logprobs"]) ** 2)),
}
"""What to ask for, and the loss of each token by its log-probability and its inputs."""


def test_losses_gradients_and_logprobs_are_those_of_a_float64_reference(service, folder_of, weights_of):
    first = opened(service)
    trained(first, drawn(0, "weights"))  # now neither half of the adapters is 0
    path = first.save_state("start").result().path
    start = load_file(folder_of(path) / "adapter_model.safetensors")
    for name, (config, formula) in REFERENCE.items():
        data = drawn(1, *(("weights",) if name == "cross_entropy" else ("logprobs", "advantages")))
        model = AutoModelForCausalLM.from_pretrained(folder_of(path)).double()
        adapters = {key: one.requires_grad_(True) for key, one in model.named_parameters() if "lora_" in key}
        loss, logprobs = torch.zeros((), dtype=torch.float64), []
        for one in data:
            given = {key: value.to_torch() for key, value in one.loss_fn_inputs.items()}
            logits = model(torch.tensor([one.model_input.to_ints()])).logits[0].log_softmax(-1)
            logprobs.append(logits.gather(-1, given["target_tokens"][:, None])[:, 0])
            loss = loss + formula(logprobs[-1], {key: value.double() for key, value in given.items()}).sum()
        loss.backward()
        training = service.create_training_client_from_state(path).result()
        answer = training.forward_backward(data, name, config).result()
        training.optim_step(PLAIN).result()
        moved = {key: after.double() - start[key].double() for key, after in weights_of(training, name).items()}
        assert answer.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
        for output, wanted in zip(answer.loss_fn_outputs, logprobs, strict=True):
            assert output["logprobs"].to_torch().double().numpy() == pytest.approx(wanted.detach().numpy(), abs=1e-4)
        for key, adapter in adapters.items():
            step = -moved["base_model.model." + key.replace(".default.", ".")]
            gradient = step / (1.0 - step.abs() / 1e4)
            assert gradient.numpy() == pytest.approx(adapter.grad.numpy(), rel=1e-3, abs=1e-4), (name, key)


def test_a_request_that_is_sent_again_is_worked_once(service, weights_of, post):
    first, second, data = opened(service), opened(service), drawn(0, "weights")
    for training in (first, second):
        trained(training, data)
    request = types.ForwardBackwardRequest(types.ForwardBackwardInput(data, "cross_entropy"), second.model_id, 3)
    body = forward_backward_request_to_proto(request).SerializeToString()
    answers = [post("forward_backward", body) for _ in range(3)]
    assert answers[0][0] == 200
    assert answers[1:] == answers[:1] * 2
    step = {"model_id": second.model_id, "seq_id": 4, "adam_params": {"learning_rate": 0.01}}
    assert post("optim_step", step) == post("optim_step", step)
    second._reserve_request_ids(2)
    second._turn_counter += 2
    trained(first, data)
    assert post("forward_backward", body) == answers[0]  # nor is it worked once more after the step
    theirs = weights_of(second, "again")
    for name, ours in weights_of(first, "once").items():
        assert torch.equal(ours, theirs[name]), name
    early = {"model_id": first.model_id, "seq_id": 99, "adam_params": {}}
    status, answer = post("optim_step", early)
    assert (status, "6 is the next" in answer["detail"]) == (409, True)


def test_gradients_add_up_until_a_step_and_a_custom_loss_is_one(service, weights_of):
    whole, parts, custom = (opened(service) for _ in range(3))
    data = drawn(2, "weights")
    trained(whole, data, params=PLAIN)
    parts.forward_backward(data[:1], "cross_entropy")
    trained(parts, data[1:], params=PLAIN)

    def loss(data, logprobs):
        each = [-(one.loss_fn_inputs["weights"].to_torch() * own).sum() for one, own in zip(data, logprobs, strict=True)]
        return sum(each), {"own:sum": 1.0}

    answer = custom.forward_backward_custom(data, loss)
    custom.optim_step(PLAIN).result()
    assert answer.result().metrics["own:sum"] == 1.0
    wanted = weights_of(whole, "whole")
    for training in (parts, custom):
        for name, ours in weights_of(training, "same").items():
            assert ours.numpy() == pytest.approx(wanted[name].numpy(), rel=1e-4, abs=1e-4), name


def test_a_sampler_gives_the_version_it_names_whichever_is_newer(service):
    training, prompt = opened(service), types.ModelInput.from_ints([3, 4, 5])
    paths = []
    for name in ("old", "new"):
        paths.append(training.save_weights_for_sampler(name).result().path)
        trained(training, drawn(3, "weights"), params=types.AdamParams(learning_rate=0.1))
    clients = [service.create_sampling_client(model_path=path).result() for path in paths]
    clients.append(service.create_sampling_client(base_model="tiny").result())
    params = types.SamplingParams(max_tokens=8, seed=7, stop=[])

    def ask():
        asked = [client.sample(prompt, 4, params, include_prompt_logprobs=True) for client in clients * 2]
        return [[(one.tokens, one.logprobs) for one in future.result().sequences] for future in asked]

    old, new, base, *again = ask()
    assert [len(tokens) for tokens, _ in old] == [8] * 4
    assert again == [old, new, base] == ask()[3:]
    assert old == base  # adapters begin by changing nothing
    assert old != new
    for client, sampled in ((clients[0], old), (clients[1], new)):
        tokens, logprobs = sampled[0]
        scored = client.compute_logprobs(types.ModelInput.from_ints([3, 4, 5, *tokens])).result()
        assert scored[0] is None
        assert scored[3:] == pytest.approx(logprobs, abs=1e-4)
    resumed = opened(service)  # the same as `old`
    tokens, logprobs = old[0]
    answer = resumed.forward([datum([3, 4, 5, *tokens[:-1]], target_tokens=[4, 5, *tokens])], "cross_entropy").result()
    assert answer.loss_fn_outputs[0]["logprobs"].tolist()[2:] == pytest.approx(logprobs, abs=1e-4)


IMAGE = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
WRONG = {
    "no loss 'ppp'": ([datum([1], target_tokens=[1])], "ppp", None),
    "weights has 1 values": ([datum([1], target_tokens=[1], weights=[float("nan")])], "cross_entropy", None),
    "target_tokens has 2 values; there must be 1": ([datum([1], target_tokens=[1, 2])], "cross_entropy", None),
    f"token {VOCABULARY} is outside the vocabulary": ([datum([VOCABULARY], target_tokens=[1])], "cross_entropy", None),
    "token -1 is outside": ([datum([1], target_tokens=[-1])], "cross_entropy", None),
    "1 to 24 can be trained": ([datum([1] * 25, target_tokens=[1] * 25)], "cross_entropy", None),
    "reads target_tokens, advantages, logprobs": ([datum([1], target_tokens=[1])], "importance_sampling", None),
    "ppo takes clip_low_threshold": (drawn(0, "logprobs", "advantages"), "ppo", {"beta": 1.0}),
    "wants clip_low_threshold in": (drawn(0, "logprobs", "advantages"), "ppo", {"clip_low_threshold": 2.0}),
    "must be dense": ([datum([1, 2], target_tokens=torch.tensor([[1, 2], [3, 4]]))], "cross_entropy", None),
    "kind image are not supported": ([types.Datum(IMAGE, {"target_tokens": [1]})], "cross_entropy", None),
    "not finite; the gradients": ([datum([1, 2], target_tokens=[1, 2], weights=[3e38, 3e38])], "cross_entropy", None),
}  # fmt: skip


def test_wrong_input_is_a_sentence_and_changes_nothing(service, weights_of, post):
    training, untouched, data = opened(service), opened(service), drawn(4, "weights")
    for one in (training, untouched):
        one.forward_backward(data, "cross_entropy").result()
    for sentence, (wrong, loss, config) in WRONG.items():
        with pytest.raises(tinker.RequestFailedError, match=sentence) as caught:
            training.forward_backward(data + wrong if loss == "cross_entropy" else wrong, loss, config).result()
        assert caught.value.category == "user"
    long = types.TensorData(data=[1.0, 2.0], dtype="float32", shape=[2])
    with pytest.raises(tinker.RequestFailedError) as caught:
        training.forward_backward([datum([1], target_tokens=[1], **{"x" * 10_000: long})], "cross_entropy").result()
    assert len(str(caught.value)) < 2_000
    for params, sentence in (
        (types.AdamParams(beta1=1.0), "beta1 must be"),
        (types.AdamParams(eps=1e-60), "eps must be at least 1e-30"),
        (types.DimuonParams(learning_rate=1), "AdamParams"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=sentence):
            training.optim_step(params).result()
    for one in (training, untouched):
        one.optim_step(PLAIN).result()
        with pytest.raises(tinker.RequestFailedError, match="there are no gradients"):
            one.optim_step(PLAIN).result()
        with pytest.raises(tinker.RequestFailedError, match="is no weights"):
            one.save_state("../x").result()
        with pytest.raises(tinker.RequestFailedError, match="take another name"):
            one.save_weights_for_sampler("snapshot-final").result()
    wanted = weights_of(untouched, "same")
    for name, ours in weights_of(training, "same").items():
        assert torch.equal(ours, wanted[name]), name
    with pytest.raises(tinker.UnprocessableEntityError, match="take 'tiny'"):
        service.create_lora_training_client(base_model="gpt").result()
    with pytest.raises(tinker.NotFoundError, match="is not here"):
        service.create_sampling_client(model_path=f"tinker://{training.model_id}/sampler_weights/x").result()
    sampler, prompt = service.create_sampling_client(base_model="tiny").result(), types.ModelInput.from_ints([3])
    with pytest.raises(tinker.UnprocessableEntityError, match="topk_prompt_logprobs is not supported"):
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), topk_prompt_logprobs=2).result()
    for wrong in (types.SamplingParams(max_tokens=99), types.SamplingParams(stop="="), types.SamplingParams(temperature=-1)):
        with pytest.raises(tinker.RequestFailedError):
            sampler.sample(prompt, 1, wrong).result()
    assert post("create_session", {}, key="tml-wrong")[0] == 401
    assert post("forward_backward", b"\xff\xff")[0] == post("optim_step", [1])[0] == 422
    assert post("get_info", {"model_id": "nobody"})[0] == post("nothing", {})[0] == 404
    assert post("optim_step", {"model_id": training.model_id, "seq_id": "1"})[0] == 409


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_a_state_is_overwritten_by_one_that_is_whole(service, folder_of, weights_of):
    training, second = opened(service), opened(service, seed=2)
    first = weights_of(training, "first")
    trained(training, drawn(5, "weights"))
    weights_of(training, "kept")
    path = training.save_state("kept", overwrite=True).result().path
    later = load_file(folder_of(path) / "adapter_model.safetensors")
    training.load_state(path.replace("kept", "first")).result()  # now at a lower version than what it replaces
    training.save_state("kept", overwrite=True).result()
    second.load_state(path).result()
    for name, theirs in weights_of(second, "theirs").items():
        assert torch.equal(theirs, first[name]), name
    assert any(not torch.equal(first[name], later[name]) for name in first)
    old = folder_of(path)
    (obstacle := old.with_name(f".partial-step-{int(old.name.removeprefix('step-')) + 1:06d}")).touch()
    with pytest.raises(tinker.RequestFailedError, match="cannot be written") as caught:
        training.save_state("kept", overwrite=True).result()
    assert caught.value.category == "server"
    obstacle.unlink()
    second.load_state(path).result()
    assert list(old.parent.iterdir()) == [old]


def test_models_that_cannot_be_opened_take_no_place(service, folder_of, post):
    training = opened(service)
    path = training.save_state("damaged").result().path
    (folder_of(path) / "adapter_model.safetensors").write_bytes(b"")
    for _ in range(9):
        with pytest.raises(tinker.RequestFailedError, match="is damaged"):
            service.create_training_client_from_state(path).result()
    session, number = opened(service).model_id.split(":train:")
    failed = f"{session}:train:{int(number) - 1}"
    status, answer = post("optim_step", {"model_id": failed, "seq_id": 1, "adam_params": {}})
    assert status == 200
    assert "could not be opened" in post("retrieve_future", answer)[1]["error"]
    assert "is damaged" in post("retrieve_future", {"request_id": f"{failed}:0"})[1]["error"]
    post(f"sessions/{session}/finish", {})
    assert post("retrieve_future", answer)[0] == 410


def test_answers_that_are_kept_and_requests_that_wait_are_bounded_but_none_is_lost(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import futures as subject

    monkeypatch.setattr(subject, "MOST_ANSWER_BYTES", 100)
    monkeypatch.setattr(subject, "MOST_WAITING_BYTES", 100)

    async def of(size, go_on):
        await go_on.wait()
        return b"x" * size

    async def known():
        async with asyncio.TaskGroup() as tasks:
            futures, now, later = subject.Futures(tasks), asyncio.Event(), asyncio.Event()
            now.set()
            futures.begin("a:slow", lambda: of(5, later), 300)  # alone
            with pytest.raises(subject.RefusedError, match="requests that wait hold 0 MiB: send this one later") as refused:
                futures.begin("b:slow", lambda: of(4, later), 1)
            assert refused.value.status == 429
            futures.begin("a:slow", lambda: of(5, later), 300)  # is the same one
            later.set()
            await futures.answer("a:slow", 1.0)
            later.clear()
            futures.begin("b:slow", lambda: of(4, later), 60)  # and that one is taken now
            futures.begin("a:slower", lambda: of(5, later))
            for number, size in enumerate((60, 40, 50, 300)):
                futures.begin(f"a:{number}", lambda size=size: of(size, now), 40)
                assert len(await futures.answer(f"a:{number}", 1.0)) == size
            there = set(futures._known)
            futures.forget("a")
            later.set()
            assert await futures.answer("b:slow", 1.0) == b"xxxx"
            return there, set(futures._known), futures._num_bytes, futures._waiting_bytes

    assert asyncio.run(known()) == ({"b:slow", "a:slower", "a:3"}, {"b:slow"}, 4, 0)


def test_a_server_begins_without_snapshots_and_tells_the_length_that_can_be_sampled_and_trained(server):
    left = server["folder"] / "saved" / "before:train:0" / "sampler_weights"
    assert [one.name for one in left.iterdir()] == ["named"]
    client = tinker.RestClient(base_url=server["base_url"], api_key=server["api_key"])
    assert client.get_server_capabilities().result().supported_models[0].max_context_length == 16


def test_a_config_that_cannot_be_served_is_one_line(server, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    import serve as subject

    faults = {
        "learner.dtype=bfloat16": "the learner must have one rank, float32 and adamw here, without offload_optimizer",
        "learner.lora.alpha=8.0": f"{server['folder']} is of a config with another model, task, seed, lora.alpha or "
        "lora.target_modules; take another --folder, or remove it",
        "num_steps=1": f"{server['folder']} is another server's; take another --folder, or end that server",
    }
    for changed, fault in faults.items():
        words = [*SERVE[1:], "--folder", server["folder"], *options("--set", *SMALL, changed)]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        with pytest.raises(SystemExit) as ended:
            subject.main()
        assert (ended.value.code, *capsys.readouterr()) == (f"serve.py: {fault}", "", "")

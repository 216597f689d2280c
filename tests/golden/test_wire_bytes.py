"""The bytes of every message, as committed in wire_bytes.json: what an older or newer process can read stays readable.

A change that fails here either adds a field with a default (regenerate with `python tests/golden/test_wire_bytes.py`, once the
decode tests have passed with the old file) or breaks the protocol (raise `PROTOCOL` as well).
"""

import json
from pathlib import Path

import msgspec
import pytest

from asyncrl.errors import CodecError
from asyncrl.schema import control, samples, weights
from asyncrl.schema.codec import MESSAGE_TYPES, decode, encode
from asyncrl.schema.samples import ids_to_bytes, logprobs_to_bytes

WIRE_BYTES = Path(__file__).with_name("wire_bytes.json")

_SAID = ids_to_bytes([5, 6, 7])
_PROMPT = samples.Prompt(
    "addition/train/4711", text="12+30=", messages=(samples.ChatMessage("user", "12+30="),), token_ids=_SAID, answer="42",
    reference_json='{"a": 1}',
)  # fmt: skip
_SAMPLING = samples.SamplingParams(max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=50, stop_token_ids=(2,), ignore_eos=True)
_SAMPLE = samples.Sample(
    group_id=17, index=3, attempt=1, prompt_ids=_SAID, token_ids=ids_to_bytes([8, 9]), logprobs=logprobs_to_bytes([-0.5, -1.25]),
    versions=ids_to_bytes([0, 1]), finish_reason="stop", text="42", generator="generator-0", started_s=10.5, finished_s=11.25,
    loss_mask=bytes([1, 0]),
)  # fmt: skip
_GROUP = samples.ScoredGroup(17, _PROMPT, (samples.ScoredSample(_SAMPLE, 1.0, {"exact": 1.0}, logprobs_to_bytes([-0.5, -1.0])),))
_ROW = samples.PackedRow(
    token_ids=ids_to_bytes([5, 8]), loss_mask=bytes([0, 1]),
    behaviour_logprobs=logprobs_to_bytes([0.0, -0.5]), versions=ids_to_bytes([-1, 4]), rank=1,
    reference_logprobs=logprobs_to_bytes([0.0, -0.75]),
)  # fmt: skip
_PACKED = samples.PackedSample(17, 3, 0, 0, 1, 1, 1.0, 4, pair=0, is_chosen=True, is_greedy=True)
_SCORE = samples.Score(3, 1.0, {"exact": 1.0}, "", logprobs_to_bytes([-0.5, -1.0]))
_MANIFEST = weights.WeightsManifest((weights.TensorEntry("lm_head.weight", (4, 2), "F32", 0, 32),), 32)
_PROBE = weights.Probe(ids_to_bytes([1, 2]), logprobs_to_bytes([-0.5]))

MESSAGES = {
    "group_work": samples.GroupWork(17, 1, _PROMPT, (0, 1, 2, 3), _SAMPLING, seed=7, purpose="eval", greedy_index=3),
    "samples": samples.Samples(
        17, 1, "generator-0", _SAID, (0, 3), (1, 2), ids_to_bytes([4, 8, 9]), logprobs_to_bytes([-1.0, -0.5, -1.25]),
        ids_to_bytes([1, 0, 1]), ("length", "stop"), ("4", "42"), 10.5, 11.25, bytes([1, 1, 0]),
    ),
    "progress": samples.Progress(17, 3, 1, 2, ids_to_bytes([8, 9]), logprobs_to_bytes([-0.5, -1.25])),
    "sample_failure": samples.SampleFailure(17, 3, 2, "generate", "engine died"),
    "score_request": samples.ScoreRequest(17, 1, _PROMPT, (0, 3), ("4", "42"), ("length", "stop"), (1, 2)),
    "infer_request": samples.InferRequest(17, 3, 1, _SAID, ids_to_bytes([8, 9]), 0.7, "eval"),
    "infer_result": samples.InferResult(
        17, 3, 1, logprobs_to_bytes([-0.5, -1.0]), {"judge": 0.25}, "", "inference-0", 11.5, 11.75, "eval"
    ),
    "scores": samples.Scores(17, 1, (samples.Score(0, 0.0, error="it raised"), _SCORE), "reward-0", 11.5, 11.75),
    "scored_group": _GROUP,
    "groups_taken": samples.GroupsTaken(5, (_GROUP,), 3),
    "step_batch": samples.StepBatch(4, (_PACKED,), (_ROW,), 1, 0.7),
    "step_done": samples.StepDone(4, 5, {"loss/policy": 0.25}, 20.0, 21.5, 0.5),
    "set_phase": control.SetPhase("rollout", 3),
    "phase_reached": control.PhaseReached(
        "learner", "train", 4, (control.ComponentMove("policy", "host", "device", 1024, 0.25),), {"policy": 1024}, 2048, 12.5
    ),
    "weights_available": weights.WeightsAvailable(5, "files", "/run/weights", _MANIFEST, "00ff", 21.5, 1.5, _PROBE),
    "weights_available_by_deltas": weights.WeightsAvailable(
        5, "files", "/run/weights", _MANIFEST, "00ff", 21.5, bucket_fingerprints=bytes(range(8)), full_version=4,
        full_bucket_fingerprints=bytes(range(8, 16)), deltas=(weights.Delta(5, 4, "00fe", "delta-00000005", 12, "00fd"),),
    ),
    "version_live": weights.VersionLive(5, "generator-0", 22.0, 12.5, 1.5, 1e-6),
    "heartbeat": control.Heartbeat("generator-0", 30.0, "weights of version 3", 29.0, {"tokens": 5.0}),
    "learner_ready": control.LearnerReady(5, "/run/model", {"warm_up/accuracy": 0.5}, "/run/checkpoints/step-000005"),
    "join_terms": control.JoinTerms('name = "quickstart"\n', "/run", "somewhere"),
    "load_model": control.LoadModel("/run/model"),
    "models_ready": control.ModelsReady("inference-0", ("reference", "judge"), 4096),
    "engine_ready": control.EngineReady("generator-0", 32, -1),
    "engine_room": control.EngineRoom("generator-0", 24),
    "pause": control.Pause(),
    "resume": control.Resume(),
    "shutdown": control.Shutdown("done"),
    "abort_group": control.AbortGroup(17),
    "checkpoint": control.Checkpoint(5),
    "checkpoint_done": control.CheckpointDone(5, "/run/checkpoints/step-000005", 0.5),
    "fault": control.Fault("learner-0", "loss is nan", True),
}  # fmt: skip


def committed(name: str) -> bytes:
    return bytes.fromhex(json.loads(WIRE_BYTES.read_text())[name])


def test_every_message_type_has_golden_bytes():
    assert {type(message) for message in MESSAGES.values()} == set(MESSAGE_TYPES)
    assert set(json.loads(WIRE_BYTES.read_text())) == set(MESSAGES)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_encodes_to_the_committed_bytes_and_they_decode_to_it(name):
    assert encode(MESSAGES[name]) == committed(name)
    assert decode(committed(name)) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes_of_an_older_process_without_the_newer_defaulted_fields_still_decode(name):
    fields, defaults = msgspec.msgpack.decode(committed(name)), {}
    for field in msgspec.structs.fields(MESSAGES[name]):
        if not field.required:
            del fields[field.encode_name]
            defaults[field.name] = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    assert decode(msgspec.msgpack.encode(fields)) == msgspec.structs.replace(MESSAGES[name], **defaults)


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes_of_a_newer_process_with_a_field_we_do_not_know_still_decode(name):
    fields = msgspec.msgpack.decode(committed(name))
    assert decode(msgspec.msgpack.encode({**fields, "of_tomorrow": [1, {"x": b"y"}]})) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_no_truncation_of_a_message_decodes(name):
    whole = committed(name)
    for size in range(len(whole)):
        with pytest.raises(CodecError):
            decode(whole[:size])


if __name__ == "__main__":
    WIRE_BYTES.write_text(json.dumps({name: encode(message).hex() for name, message in MESSAGES.items()}, indent=1) + "\n")

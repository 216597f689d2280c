import contextlib
import sqlite3
from collections import Counter

import msgspec
import pytest

from asyncrl.buffer.buffer import Buffer, TakenStep
from asyncrl.buffer.events import ScoreMembers
from asyncrl.buffer.ledger.reader import LedgerReader
from asyncrl.buffer.ledger.store import connect_read_only
from asyncrl.buffer.open import open_buffer
from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError, LedgerError
from asyncrl.observe.decisions import UNTRAINED
from asyncrl.schema.samples import Prompt, SampleFailure, Samples, ids_to_bytes, logprobs_to_bytes
from tests.builders import make_sample, outcome, score_of


def _config(algorithm=None, learner=None, observe=None, temperature=1.0, **buffer):
    return parse_config({
        "generate": {"sampling": {"temperature": temperature}},
        "algorithm": {"groups_per_step": 1, "group_size": 2, **(algorithm or {})},
        "learner": learner or {},
        "observe": observe or {},
        "buffer": {"max_staleness": 1, "min_group_members": 1, **buffer},
    })


def _sample(group_id, index, version=0, **changes):
    return msgspec.structs.replace(make_sample(group_id, index, versions=version), **changes)


def _samples(*of, **changes):
    return Samples.of([_sample(*of, **changes)])


@pytest.fixture(params=["disk", "memory"])
def buffer(request, tmp_path):
    buffer = open_buffer(_config(ledger=request.param), tmp_path)
    yield buffer
    buffer.check()
    buffer.close()


@pytest.fixture
def reopen(tmp_path):
    """Return a function that opens the same folder again, closing what was open."""
    opened: list[Buffer] = []

    def again(**changes):
        for buffer in opened:
            buffer.close()
        opened.append(open_buffer(_config(**changes), tmp_path))
        opened[-1].check()
        return opened[-1]

    yield again
    opened[-1].close()


def _issue(buffer, version=0, name="p"):
    prompt = Prompt(name, text="1+1=")
    return buffer.issue(prompt, "g0", version=version, group_size=2, now=0.0, cursor=buffer.cursor + 1).group_id


def _finish(buffer, group_id, version=0):
    for index in range(2):
        buffer.add_samples([_samples(group_id, index, version)], 1.0)
        buffer.add_scores([score_of(group_id, index, float(index), {"exact": float(index)})], 2.0)


def test_everything_is_acknowledged_after_it_is_committed_and_repeats_too(buffer):
    acknowledged = []
    group = _issue(buffer)
    for _ in range(2):
        buffer.add_samples([_samples(group, 0)], 1.0)
        buffer.when_committed(lambda: acknowledged.append("sample"))
        buffer.add_scores([score_of(group, 0, 1.0)], 2.0)
        buffer.when_committed(lambda: acknowledged.append("score"))
    buffer.add_failure(SampleFailure(group, 1, 0, "generate", "no"), 3.0)
    buffer.when_committed(lambda: acknowledged.append("failure"))
    buffer.add_samples([_samples(99, 0)], 1.0)
    buffer.when_committed(lambda: acknowledged.append("stranger"))
    buffer.take(0, 4.0, lambda: acknowledged.append("taken"))
    buffer.mark_trained(0, 5.0)
    buffer.when_committed(lambda: acknowledged.append("trained"))
    buffer.ledger.close()
    assert acknowledged == ["sample", "score", "sample", "score", "failure", "stranger", "taken", "trained"]


@pytest.mark.parametrize("late", ["failure", "invalid sample"])
def test_a_late_failure_of_an_earlier_attempt_does_not_fail_the_member_that_another_generates(buffer, late):
    group = _issue(buffer)
    buffer.generator_lost("g0", 1.0)
    order = buffer.reissue(group, "g1", 0, 2.0)
    acknowledged = []
    if late == "failure":
        receipt = buffer.add_failure(SampleFailure(group, 0, 0, "generate", "aborted after 3 tokens"), 3.0)
    else:
        receipt = buffer.add_samples([_samples(group, 0, logprobs=b"")], 3.0)[0]
    buffer.when_committed(lambda: acknowledged.append(late))
    assert outcome(receipt) == ("duplicate" if late == "failure" else "refused")
    assert not receipt.instructions
    assert buffer.state.groups[group].pending == (0, 1)
    buffer.add_failure(SampleFailure(group, 0, order.attempt, "generate", "no"), 4.0)
    assert buffer.state.groups[group].pending == (1,)
    buffer.check()
    assert acknowledged == [late]


PAIRS_OF_64 = {
    "algorithm": {"kind": "dpo", "groups_per_step": 1, "group_size": 2},
    "generate": {"engine": {"kind": "fake", "max_sequence_tokens": 32}, "sampling": {"max_new_tokens": 8}},
    "packing": {"tokens_per_row": 64},
}
REMAX = {"algorithm": {"groups_per_step": 1, "group_size": 2, "advantage": "remax"}}
LONG = [make_sample(0, index, [3] * num) for index, num in enumerate((60, 61))]


@pytest.mark.parametrize(("config", "samples", "reason"), [
    ({}, [], "1 or more samples"), ({}, [_sample(0, 0), _sample(0, 1, prompt_ids=ids_to_bytes([9]))], "of one prompt"),
    ({}, [_sample(0, 0), _sample(0, 1, version=3)], "sample 1 of the group is invalid: "),
    ({}, [_sample(0, 0, version=3)], "only 0 to 0 were ever published"),
    (PAIRS_OF_64, LONG, "have 125 tokens with their prompts, and a preference pair shares a row of 64"),
    (REMAX, [_sample(0, 0), _sample(0, 1)], "member 2 of a group is its greedy baseline"),
])  # fmt: skip
def test_a_group_from_outside_that_is_wrong_is_refused_and_nothing_changes(tmp_path, config, samples, reason):
    with contextlib.closing(open_buffer(parse_config(config), tmp_path)) as buffer:
        receipt = buffer.submit_group(Prompt("theirs"), samples, "notebook", 1.0)
        assert (outcome(receipt), buffer.counts().issued) == ("refused", 0)
        assert reason in receipt.refused[0]


def test_a_memory_ledger_cannot_repeat_a_trained_step(tmp_path):
    buffer = open_buffer(_config(ledger="memory"), tmp_path)
    _finish(buffer, _issue(buffer))
    buffer.take(0, 1.0)
    assert isinstance(buffer.take(0, 1.0), TakenStep)
    buffer.mark_trained(0, 2.0)
    assert buffer.learner_restarted(0, 3.0) == (0,)
    with pytest.raises(LedgerError, match=r"buffer.ledger is 'memory'"):
        buffer.take(0, 4.0)


def test_with_record_all_samples_that_no_step_trains_are_told_once_each_with_the_reason(tmp_path):
    config, told = _config(ledger="memory", max_staleness=9, observe={"record": "all"}), []
    buffer = open_buffer(config, tmp_path, watch=lambda name, event, *_: told.append(event) if name == UNTRAINED else None)
    for group_id in range(4):
        _issue(buffer)
        buffer.add_samples([Samples.of([make_sample(group_id, index) for index in range(2)])], 1.0)
    buffer.add_failure(SampleFailure(0, 1, 0, "reward", "it took too long"), 1.0)
    buffer.add_scores([score_of(0, 0, 1.0)], 2.0)
    assert isinstance(buffer.take(0, 3.0), TakenStep)
    buffer.mark_trained(0, 4.0)
    buffer.drop_group(1, "by hand", 3.0)
    buffer.add_scores([score_of(2, 0, 1.0), score_of(2, 1, 0.0)], 2.0)
    buffer.take(1, 3.0)
    buffer.set_aside(1, "the learner died over it", 4.0)
    assert [(one.group_id, one.reason, [sample.index for sample in one.samples]) for one in told] == [
        (0, "it took too long", [1]), (1, "by hand", [0, 1]), (2, "the learner died over it", [0, 1]),
    ]  # fmt: skip
    assert told[0].samples[0] == make_sample(0, 1)
    buffer.check()
    buffer.close()


# -- resume --------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_where_the_books_say(reopen):
    buffer = reopen()
    running, scoring = _issue(buffer, name="a"), _issue(buffer, name="b")
    buffer.add_samples([_samples(running, 1)], 1.0)
    for index in range(2):
        buffer.add_samples([_samples(scoring, index)], 1.0)
    buffer.add_scores([score_of(scoring, 0, 0.75, {"exact": 0.75})], 2.0)

    buffer = reopen()
    assert (buffer.counts().running, buffer.counts().scoring, buffer.cursor) == (1, 1, 2)
    assert (buffer.state.groups[running].generator, buffer.state.groups[running].attempt) == ("", 1)
    assert buffer.state.unscored() == [ScoreMembers(running, (1,)), ScoreMembers(scoring, (1,))]
    buffer.add_scores([score_of(scoring, 1, 0.25)], 3.0)
    taken = buffer.take(0, 4.0)
    assert [(m.reward, m.parts) for m in taken.groups[0].members] == [(0.75, {"exact": 0.75}), (0.25, {})]
    assert buffer.reissue(running, "g1", 0, 5.0).pending == (0,)


@pytest.mark.parametrize("version", [0, 3])
def test_a_checkpoint_that_does_not_belong_to_the_ledger_is_refused(reopen, version):
    buffer = reopen()
    for step in range(2):
        _finish(buffer, _issue(buffer, version=step), version=step)
        buffer.take(step, 1.0)
        buffer.mark_trained(step, 2.0)
    buffer.forget(1, 3.0)
    buffer = reopen()
    with pytest.raises(LedgerError, match=f"stands at version {version}"):
        buffer.learner_restarted(version, 4.0)
    assert buffer.learner_restarted(1, 4.0) == (1,)


def test_a_prompt_to_be_issued_again_and_the_reasons_survive_a_resume(reopen):
    buffer = reopen()
    for _ in range(2):
        group = _issue(buffer, name="again")
        for index in range(2):
            buffer.add_failure(SampleFailure(group, index, 0, "generate", "no"), 1.0)
    buffer.issue(buffer.returned_prompt()[1], "g0", version=0, group_size=2, now=2.0, replaces=0)
    buffer = reopen()
    assert buffer.counts().failed == {"no": 2}
    assert buffer.returned_prompt()[0] == 1


def test_a_start_does_not_look_at_groups_that_had_ended_when_payloads_were_forgotten(reopen):
    buffer = reopen(max_staleness=9)
    failing = _issue(buffer)
    for index in range(2):
        buffer.add_failure(SampleFailure(failing, index, 0, "generate", "no"), 1.0)
    dropped = buffer.issue(Prompt("p"), "g0", version=0, group_size=2, now=2.0, replaces=failing).group_id
    buffer.drop_group(dropped, "asked for", 2.0)
    trained = buffer.issue(Prompt("p"), "g0", version=0, group_size=2, now=2.0, replaces=dropped).group_id
    for step, group in enumerate((trained, _issue(buffer), _issue(buffer))):
        _finish(buffer, group)
        buffer.take(step, 3.0)
        buffer.mark_trained(step, 3.0)
    running = _issue(buffer)
    buffer.forget(2, 4.0)
    buffer.ledger.sync()
    kept, counts, cursor = buffer.state.steps[2].group_ids, buffer.counts(), buffer.cursor
    with contextlib.closing(sqlite3.connect(buffer.ledger.path)) as connection, connection:
        connection.execute("UPDATE groups SET version = 1 << 50, returns = 0, reason = 'changed' WHERE group_id < ?", kept)
        connection.execute("UPDATE samples SET newest = 1 << 50 WHERE key < ? << 20", kept)

    buffer = reopen(max_staleness=9)
    assert (buffer.counts(), buffer.cursor, buffer.returned_prompt()) == (counts, cursor, None)
    assert (counts.trained, counts.dropped, counts.failed) == (3, {"asked for": 1}, {"no": 1})
    assert buffer.learner_restarted(2, 5.0) == (2,)
    assert [group.group_id for group in buffer.take(2, 6.0).groups] == list(kept)
    buffer.mark_trained(2, 7.0)
    buffer.drop_group(running, "asked for", 8.0)
    _issue(buffer)
    buffer.forget(3, 9.0)
    buffer = reopen(max_staleness=9)
    assert (buffer.counts().dropped, buffer.returned_prompt()[0]) == ({"asked for": 2}, running)


# -- screening and what scores bring -------------------------------------------------------------------------------------


def test_a_step_taken_again_is_trained_as_it_was_taken_whatever_a_resume_changed(reopen):
    settings, learner = {"advantage": "remax", "mask_truncated": True, "group_size": 2}, {"minibatches": 4}
    buffer = reopen(algorithm=settings, learner=learner)
    buffer.issue(Prompt("p"), "g0", version=0, group_size=3, now=0.0, cursor=1)
    for index in range(3):
        buffer.add_samples([_samples(0, index, finish_reason="length" if index == 0 else "stop")], 1.0)
        buffer.add_scores([score_of(0, index, float(index))], 2.0)
    before = buffer.state.groups[0].trained

    buffer = reopen(algorithm=settings, learner=learner)
    assert buffer.state.groups[0].trained == before == (1,)
    taken = buffer.take(0, 3.0)
    assert (len(taken.groups[0].members), taken.staleness.num_samples, taken.is_repeat) == (3, 1, False)
    buffer.mark_trained(0, 3.5)

    buffer = reopen(algorithm=settings | {"mask_truncated": False}, learner={"minibatches": 1})
    buffer.learner_restarted(0, 4.0)
    again = buffer.take(0, 5.0)
    assert (again.groups, again.params, again.is_repeat) == (taken.groups, taken.params, True)
    assert (again.params.minibatches, again.staleness.num_samples) == (4, 1)
    assert again.staleness.metrics["staleness/mean"] == taken.staleness.metrics["staleness/mean"]


def test_reference_logprobs_live_as_long_as_their_sample(reopen):
    reference = logprobs_to_bytes([-1.0, -2.0])
    buffer = reopen()
    group = _issue(buffer)
    for index in range(2):
        buffer.add_samples([_samples(group, index)], 1.0)
        buffer.add_scores([score_of(group, index, float(index), reference_logprobs=reference if index else b"")], 2.0)

    buffer = reopen()
    taken = buffer.take(0, 3.0)
    assert [member.reference_logprobs for member in taken.groups[0].members] == [b"", reference]
    buffer.mark_trained(0, 4.0)
    buffer.learner_restarted(0, 5.0)
    assert [member.reference_logprobs for member in buffer.take(0, 6.0).groups[0].members] == [b"", reference]
    buffer.mark_trained(0, 7.0)
    buffer.forget(1, 8.0)
    buffer.ledger.sync()
    with connect_read_only(buffer.ledger.path) as connection:
        assert connection.execute("SELECT count(*) FROM scores WHERE reference <> x''").fetchone() == (0,)


KL_ON_WORKER = {"kl": {"coefficient": 0.1}, "reference": {"where": "worker"}}
REFERENCE = logprobs_to_bytes([-1.0, -2.0])


def test_a_resume_that_moves_the_reference_to_workers_asks_again_for_the_scores_of_groups_not_taken_yet(reopen):
    buffer = reopen(max_staleness=9)
    running, scoring, ready = (_issue(buffer) for _ in range(3))
    for group in (running, scoring, ready):
        buffer.add_samples([_samples(group, 0)], 1.0)
        buffer.add_scores([score_of(group, 0, 0.25, {"exact": 0.25})], 2.0)
    buffer.add_samples([_samples(scoring, 1)], 1.0)
    buffer.add_failure(SampleFailure(ready, 1, 0, "generate", "gone"), 1.0)
    assert (buffer.counts().running, buffer.counts().scoring, buffer.counts().ready) == (1, 1, 1)

    for _ in range(2):
        buffer = reopen(max_staleness=9, algorithm=KL_ON_WORKER)
        assert (buffer.counts().running, buffer.counts().scoring, buffer.counts().ready) == (1, 2, 0)
        asked = [(asked.group_id, index) for asked in buffer.state.unscored() for index in asked.indices]
        assert asked == [(running, 0), (scoring, 0), (scoring, 1), (ready, 0)]
    for key in asked:
        buffer.add_scores([score_of(*key, 0.5, {"exact": 0.5}, reference_logprobs=REFERENCE)], 3.0)

    buffer = reopen(max_staleness=9, algorithm=KL_ON_WORKER)
    assert not buffer.state.unscored()
    assert [group.group_id for group in buffer.take(0, 4.0).groups] == [scoring]
    (only,) = buffer.take(1, 5.0).groups[0].members
    assert (only.reward, only.parts, only.reference_logprobs) == (0.5, {"exact": 0.5}, REFERENCE)
    buffer.ledger.sync()
    told = Counter(event.what for event in LedgerReader(buffer.ledger.path).group(ready).events)
    assert told == {"issued": 1, "ready": 1, "scored again": 1, "taken": 1}


def test_a_resume_with_another_temperature_or_reference_asks_again_for_the_scores_of_groups_not_taken_yet(reopen):
    buffer = reopen(max_staleness=9, algorithm=KL_ON_WORKER)
    group = _issue(buffer)
    elsewhere = {**KL_ON_WORKER, "reference": {"where": "worker", "path": "other"}}
    for settings in ({}, {"temperature": 0.5}, {"temperature": 0.5, "algorithm": elsewhere}):
        buffer = reopen(max_staleness=9, **{"algorithm": KL_ON_WORKER, **settings})
        assert [asked.indices for asked in buffer.state.unscored()] == ([(0, 1)] if settings else [])
        if not settings:
            buffer.add_samples([_samples(group, index) for index in range(2)], 1.0)
        buffer.add_scores([score_of(group, index, 0.5, reference_logprobs=REFERENCE) for index in range(2)], 2.0)
        assert buffer.counts().ready == 1


def test_moving_the_reference_to_workers_is_refused_while_a_taken_step_has_none(reopen):
    buffer = reopen()
    for _ in range(2):
        _finish(buffer, _issue(buffer))
    buffer.take(0, 3.0)
    buffer.take(1, 3.0)
    buffer.mark_trained(0, 4.0)
    with pytest.raises(ConfigError, match=r"steps 1 to 1 were taken.*resume with the settings as they were"):
        reopen(algorithm=KL_ON_WORKER)

    buffer = reopen()
    buffer.mark_trained(1, 5.0)
    buffer = reopen(algorithm=KL_ON_WORKER)
    assert buffer.learner_restarted(2, 6.0) == ()
    with pytest.raises(LedgerError, match="steps 1 to 1 were taken"):
        buffer.learner_restarted(1, 7.0)


@pytest.mark.parametrize(("kind", "tokens_per_row"), [("policy", 511), ("dpo", 1023)])
def test_a_resume_with_rows_too_short_for_what_is_held_is_refused(reopen, tmp_path, kind, tokens_per_row):
    buffer = reopen()
    group = _issue(buffer)
    for index in range(2):
        buffer.add_samples([Samples.of([make_sample(group, index, [3] * 510)])], 1.0)
    buffer.close()
    raw = PAIRS_OF_64 | {"packing": {"tokens_per_row": tokens_per_row}}
    raw["algorithm"] = raw["algorithm"] | {"kind": kind}
    with pytest.raises(ConfigError, match=rf"tokens_per_row \({tokens_per_row}\) must be at least {tokens_per_row + 1} here"):
        open_buffer(parse_config(raw), tmp_path)


def test_payloads_go_with_the_group_that_is_dropped_or_fails_and_its_story_stays(reopen):
    buffer = reopen(max_staleness=9)
    dropped, failed, kept = (_issue(buffer) for _ in range(3))
    for group in (dropped, kept):
        _finish(buffer, group)
    buffer.drop_group(dropped, "asked to", 3.0)
    buffer.add_samples([_samples(failed, 0)], 3.0)
    for index in (1, 0):
        buffer.add_failure(SampleFailure(failed, index, 0, "generate", "gone"), 3.0)
    buffer.ledger.sync()
    with connect_read_only(buffer.ledger.path) as connection:
        groups = {key >> 20 for (key,) in connection.execute("SELECT key FROM samples WHERE file IS NOT NULL")}
    assert groups == {kept}
    story = LedgerReader(buffer.ledger.path).sample(dropped, 1)
    assert (story.sample, story.row.reward, story.group.reason) == (None, 1.0, "asked to")


@pytest.mark.parametrize(("reference", "said"), [
    (b"", "brings no reference logprobs"), (logprobs_to_bytes([-1.0]), "reference logprobs"),
    (logprobs_to_bytes([-1.0, float("nan")]), "reference logprobs"),
])  # fmt: skip
def test_a_score_whose_reference_logprobs_do_not_fit_or_are_owed_fails_the_member(reopen, reference, said):
    buffer = reopen(algorithm=KL_ON_WORKER)
    group = _issue(buffer)
    buffer.add_samples([_samples(group, 0)], 1.0)
    buffer.add_scores([score_of(group, 0, 1.0, reference_logprobs=reference)], 2.0)
    assert buffer.state.member_state(group, 0) == "failed"
    assert said in buffer.state.groups[group].last_failure


@pytest.mark.parametrize("other", ["4", "6"])
def test_a_ledger_of_another_schema_is_refused_in_one_line(reopen, tmp_path, other):
    reopen().close()
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (other,))
    with pytest.raises(LedgerError, match=f"has the form {other} of another version of asyncrl, this one reads 5"):
        reopen()

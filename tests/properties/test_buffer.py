"""Random lives of a run: admission, buffer and ledger together, with deaths, crashes, duplicates and lagging weights.

The world plays generators, reward workers and the learner. The ledger holds units back until the world commits them, so that a
crash loses what was written and not yet committed, as a killed process would.
"""

import shutil
import tempfile
from collections import deque
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.algorithms.screening import NO_PAIR, NO_SPREAD, TRUNCATED, members_of, trained_members
from asyncrl.buffer import events as ev
from asyncrl.buffer.buffer import Buffer, TakenStep
from asyncrl.buffer.open import open_buffer
from asyncrl.config.load import parse_config
from asyncrl.schema.samples import Prompt, SampleFailure, Samples, Score, Scores
from tests.builders import make_sample, outcome, score_of

SCREENED = {NO_SPREAD, NO_PAIR, TRUNCATED}


class HoldingLedger:
    """Passes units on when told to; what it still holds is lost with it."""

    def __init__(self, inner):
        self.inner, self.held = inner, deque()
        self.state_counts = inner.state_counts

    def write(self, records, on_committed=None):
        self.held.append((list(records), on_committed))

    def commit(self, num_units=None):
        callbacks = []
        for _ in range(len(self.held) if num_units is None else min(num_units, len(self.held))):
            records, on_committed = self.held.popleft()
            self.inner.write(records)
            if on_committed is not None:
                callbacks.append(on_committed)
        if callbacks:
            self.inner.sync()
        for callback in callbacks:
            callback()

    def sync(self, timeout_s=60.0):
        self.commit()
        self.inner.sync(timeout_s)

    def load_groups(self, group_ids):
        self.sync()
        return self.inner.load_groups(group_ids)

    def close(self):
        self.commit()
        self.inner.close()

    def crash(self):
        self.held.clear()
        self.inner.close()


class RunLife(RuleBasedStateMachine):
    """One run. `policy` and `screens` (settings of `algorithm`, one of which is drawn) are fixed by `lives` below."""

    policy = "wait"
    screens: tuple[dict, ...] = ({},)

    @initialize(
        groups_per_step=st.integers(1, 3),
        group_size=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        num_slots=st.lists(st.integers(1, 5), min_size=1, max_size=3),
        min_group_members=st.integers(1, 2),
        reissue=st.booleans(),
        on_disk=st.booleans(),
        data=st.data(),
    )
    def start(self, groups_per_step, group_size, max_staleness, num_slots, min_group_members, reissue, on_disk, data):
        self.folder = Path(tempfile.mkdtemp())
        screen = data.draw(st.sampled_from(self.screens))
        if screen.get("dynamic_sampling") or screen.get("kind") == "dpo":
            group_size = max(group_size, 2)
        advantage = {} if screen.get("kind") == "dpo" else {"advantage": "reward"}
        self.config = parse_config({
            "num_steps": 1_000_000,
            "algorithm": {"groups_per_step": groups_per_step, "group_size": group_size, **advantage, **screen},
            "buffer": {
                "max_staleness": max_staleness,
                "policy": self.policy,
                "min_group_members": min_group_members,
                "reissue_dropped": reissue,
                "ledger": "disk" if on_disk else "memory",
            },
        })
        self.on_disk = on_disk
        self.largest_eta, self.was_lowered = max_staleness, False
        self.num_slots = {f"g{i}": slots for i, slots in enumerate(num_slots)}
        self.now = 0.0
        self.learner_version = 0
        self.oldest_checkpoint = 0
        self.newest_ever = 0
        self.to_train = deque()
        self.delivered = {}
        self.acknowledged = set()
        self.open()
        self.buffer.learner_restarted(0, self.now)
        for name in self.num_slots:
            self.generator_ready(name, 0)

    def open(self):
        self.buffer: Buffer = open_buffer(self.config, self.folder)
        self.buffer.ledger = HoldingLedger(self.buffer.ledger)
        self.live = {}
        self.orders = {}
        self.rewards = {(g.group_id, i): reward for g in self.buffer.state.groups.values() for i, reward in g.rewards.items()}
        self.cut = {(g.group_id, i) for g in self.buffer.state.groups.values() for i in g.truncated}
        self.objected_in_row = 0

    # -- the world -------------------------------------------------------------------------------------------------------

    def tell(self, event):
        self.buffer.state.handle(event, self.now)
        self.issue()

    def issue(self):
        while (issue := self.buffer.state.next_issue()) is not None:
            if isinstance(issue, ev.ReissueGroup):
                order = self.buffer.reissue(issue.group_id, issue.generator, issue.version, self.now)
            else:
                returned = self.buffer.returned_prompt()
                cursor = self.buffer.cursor + (returned is None)
                order = self.buffer.issue(
                    returned[1] if returned else Prompt(f"p{cursor}"),
                    issue.generator,
                    version=issue.version,
                    group_size=self.config.algorithm.members_per_group,
                    now=self.now,
                    cursor=cursor,
                    replaces=returned[0] if returned else None,
                )
            self.give(issue.generator, order)

    def give(self, generator, order):
        for index in order.pending:
            self.orders[order.group_id, index] = (generator, order.attempt, self.live[generator])

    def objection(self, group_id):
        """What the screen should say, worked out from what the world itself sent."""
        algorithm = self.config.algorithm
        rewards = {index: reward for (group, index), reward in self.rewards.items() if group == group_id}
        whole = {index for index in rewards if not (algorithm.mask_truncated and (group_id, index) in self.cut)}
        if algorithm.kind == "dpo":
            return "" if len({rewards[index] for index in whole}) > 1 else NO_PAIR
        if not whole - ({algorithm.group_size} if algorithm.has_greedy_baseline else set()):
            return TRUNCATED
        return NO_SPREAD if algorithm.dynamic_sampling and len(set(rewards.values())) == 1 else ""

    def screened(self, item):
        if item.after != "ready" and item.reason not in SCREENED:
            return
        objection = self.objection(item.group_id)
        most = self.config.algorithm.max_resamples * self.config.algorithm.groups_per_step
        if item.after == "ready":
            assert not objection or self.objected_in_row >= most, f"{item} should have been dropped: {objection}"
            assert objection != NO_PAIR, f"{item} could not be trained"
        else:
            assert item.reason == objection
            assert objection == NO_PAIR or self.objected_in_row < most, f"{item} is one too many in a row"
        self.objected_in_row = self.objected_in_row + 1 if objection else 0

    def follow(self, instructions):
        gone = {item.group_id for item in instructions if isinstance(item, ev.GroupMoved) and item.reason in SCREENED}
        assert not gone & self.buffer.state.returned.keys()
        for item in instructions:
            if isinstance(item, ev.ScreenLifted):
                assert self.objection(item.group_id) == item.reason
            if isinstance(item, ev.GroupMoved):
                self.screened(item)
            if isinstance(item, ev.GroupMoved) and item.after in {"dropped", "failed"}:
                assert self.policy != "wait" or item.reason != "stale" or self.was_lowered, f"wait dropped {item}"
                if item.generator:
                    self.abort(item)
        self.issue()

    def abort(self, moved):
        """Stop at a group that is over, as its generator is told to."""
        for key in [key for key in self.orders if key[0] == moved.group_id]:
            generator, _, _ = self.orders.pop(key)
            assert generator == moved.generator
            self.tell(ev.MembersFinished(generator))

    def generator_ready(self, name, version):
        self.live[name] = version
        self.tell(ev.GeneratorReady(name, self.num_slots[name], version))

    def sample(self, key, oldest, newest, attempt=0, generator="g0", cut=False):
        ended = {"finish_reason": "length" if cut else "stop", "finished_s": self.now}
        return make_sample(*key, versions=[oldest, newest], attempt=attempt, generator=generator, **ended)

    def pick(self, items, number):
        items = sorted(items)
        return items[number % len(items)]

    # -- rules -----------------------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 99), first=st.integers(0, 3), second=st.integers(0, 3), cut=st.booleans(), both=st.booleans())
    @precondition(lambda self: self.orders)
    def members_finish(self, number, first, second, cut, both):
        key = self.pick(self.orders, number)
        generator, attempt, version = order = self.orders[key]
        newest = self.live.get(generator, version)
        oldest = min(version + first, newest)
        keys = [other for other, its in self.orders.items() if (other[0], its) == (key[0], order)] if both else [key]
        samples = [self.sample(each, oldest, min(oldest + second, newest), attempt, generator, cut) for each in keys]
        for each in keys:
            del self.orders[each]
            if cut and self.buffer.state.member_state(*each) == "pending":
                self.cut.add(each)
        receipt = self.buffer.add_samples([Samples.of(samples)], self.now)[0]
        self.buffer.when_committed(lambda: self.acknowledged.update(keys))
        assert outcome(receipt) in {"stored", "duplicate"}, receipt
        self.follow(receipt.instructions)
        self.tell(ev.MembersFinished(generator, len(keys)))

    @rule(number=st.integers(0, 99), is_invalid=st.booleans())
    @precondition(lambda self: self.orders)
    def member_fails(self, number, is_invalid):
        key = self.pick(self.orders, number)
        generator, attempt, version = self.orders.pop(key)
        if is_invalid:
            sample = msgspec.structs.replace(self.sample(key, version, version, attempt, generator), versions=b"\0\0\0\0")
            receipt = self.buffer.add_samples([Samples.of([sample])], self.now)[0]
            assert outcome(receipt) == "refused"
        else:
            receipt = self.buffer.add_failure(SampleFailure(*key, attempt, "generate", "would not"), self.now)
        self.follow(receipt.instructions)
        self.tell(ev.MembersFinished(generator))

    @rule(number=st.integers(0, 99), good=st.booleans(), reward=st.integers(0, 1))
    @precondition(lambda self: self.buffer.state.unscored())
    def score_comes(self, number, good, reward):
        key = self.pick([(asked.group_id, index) for asked in self.buffer.state.unscored() for index in asked.indices], number)
        if good:
            self.rewards[key] = float(reward)
        receipt = self.buffer.add_scores([score_of(*key, float(reward), error="" if good else "raised")], self.now)[0]
        assert outcome(receipt) == "stored"
        self.follow(receipt.instructions)

    @rule(equal=st.booleans())
    def all_scores_come(self, equal=True):
        arrived = []
        for asked in self.buffer.state.unscored():
            rewards = {index: 1.0 if equal else float(index % 2) for index in asked.indices}
            self.rewards |= {(asked.group_id, index): reward for index, reward in rewards.items()}
            arrived.append(Scores(asked.group_id, 0, tuple(Score(*pair) for pair in rewards.items())))
        receipts = self.buffer.add_scores(arrived, self.now)
        # A group can be dropped as too old by the first of its scores; the others then come too late.
        assert {outcome(receipt) for receipt in receipts} <= ({"stored", "duplicate"} if self.policy == "drop" else {"stored"})
        self.follow([item for receipt in receipts for item in receipt.instructions])

    @rule(group_id=st.integers(-1, 30), index=st.integers(-1, 3))
    def duplicates_and_strangers_change_nothing(self, group_id, index):
        if self.buffer.state.member_state(group_id, index) in {"pending", "generated"}:
            return
        before = self.buffer.counts()
        sample = self.sample((group_id, index), 0, 0)
        receipts = self.buffer.add_samples([Samples.of([sample])], self.now)
        receipts += self.buffer.add_scores([score_of(group_id, index)], self.now)
        receipts.append(self.buffer.add_failure(SampleFailure(group_id, index, 0, "reward", "x"), self.now))
        assert "stored" not in map(outcome, receipts)
        assert self.buffer.counts() == before

    @rule(number=st.integers(0, 9), behind=st.integers(0, 3))
    @precondition(lambda self: self.live)
    def weights_arrive(self, number, behind):
        name = self.pick(self.live, number)
        version = max(self.live[name], self.learner_version - behind)
        self.live[name] = version
        self.tell(ev.VersionIsLive(name, version))

    @rule(number=st.integers(0, 9))
    @precondition(lambda self: self.live)
    def generator_dies(self, number):
        name = self.pick(self.live, number)
        del self.live[name]
        self.orders = {key: order for key, order in self.orders.items() if order[0] != name}
        self.follow(self.buffer.generator_lost(name, self.now))

    @rule(number=st.integers(0, 9))
    @precondition(lambda self: len(self.live) < len(self.num_slots))
    def generator_returns(self, number):
        self.generator_ready(self.pick(self.num_slots.keys() - self.live.keys(), number), self.learner_version)

    @rule()
    @precondition(lambda self: len(self.to_train) < 2)
    def learner_asks(self):
        step = self.learner_version + len(self.to_train)
        committed = []
        taken = self.buffer.take(step, self.now, lambda: committed.append(step))
        self.follow(taken.instructions)
        if isinstance(taken, TakenStep):
            self.buffer.ledger.commit()
            assert committed == [step]
            self.deliver(taken)

    def deliver(self, taken):
        # A step that is repeated was taken under the bound of then.
        eta, masks = self.config.buffer.max_staleness, taken.params.mask_below
        eta = self.largest_eta if taken.step in self.delivered else eta
        group_ids = tuple(group.group_id for group in taken.groups)
        assert len(group_ids) == self.config.algorithm.groups_per_step
        assert group_ids == tuple(sorted(group_ids))
        assert taken.staleness.token_max <= eta
        for group in taken.groups:
            assert "whoever" not in {member.sample.generator for member in group.members}, "a submitter's samples bear its name"
            trained = trained_members(members_of(group), taken.params.screen)
            versions = [v for m in group.members if m.sample.index in trained for v in memoryview(m.sample.versions).cast("i")]
            assert self.objection(group.group_id) == NO_PAIR or [v for v in versions if v >= max(masks, 0)], "nothing to train"
            assert all(taken.step - v <= eta for v in versions if v >= masks)
        if eta == 0 and taken.staleness.num_tokens:
            assert taken.staleness.metrics["staleness/histogram/0"] == 1.0
        assert self.delivered.setdefault(taken.step, group_ids) == group_ids, "a repeated step has other groups"
        assert len({g for ids in self.delivered.values() for g in ids}) == len(self.delivered) * len(group_ids)
        self.to_train.append(taken.step)

    @rule(lands=st.booleans())
    @precondition(lambda self: self.to_train)
    def step_is_done(self, lands):
        step = self.to_train.popleft()
        self.learner_version = step + 1
        self.newest_ever = max(self.newest_ever, self.learner_version)
        if lands:
            self.buffer.mark_trained(step, self.now)
            self.buffer.mark_trained(step, self.now)
            self.buffer.version_published(step + 1)
        else:
            self.restart_learner(self.learner_version)

    @rule(back=st.integers(0, 3))
    def learner_dies(self, back):
        if self.on_disk:
            self.restart_learner(max(self.oldest_checkpoint, self.learner_version - back))

    def restart_learner(self, version):
        self.learner_version = version
        self.to_train.clear()
        steps = self.buffer.learner_restarted(version, self.now)
        assert steps == tuple(range(version, self.buffer.state.next_step))

    @rule()
    @precondition(lambda self: self.to_train and not self.buffer.state.steps[self.to_train[0]].trained_before)
    def batch_is_set_aside(self):
        """The learner died twice over the step in hand; later steps move up, and it starts again where it was."""
        step = self.to_train[0]
        group_ids = self.delivered[step]
        groups = self.buffer.set_aside(step, "it ends the learner", self.now)
        assert tuple(group.group_id for group in groups) == group_ids
        later = {key - 1: ids for key, ids in self.delivered.items() if key > step}
        self.delivered = {key: ids for key, ids in self.delivered.items() if key < step} | later
        self.restart_learner(self.learner_version)
        self.issue()

    @rule()
    def checkpoint_ages(self):
        trained = min((step for step, r in self.buffer.state.steps.items() if not r.trained), default=self.buffer.state.next_step)
        self.oldest_checkpoint = max(self.oldest_checkpoint, min(self.learner_version, trained))
        self.buffer.forget(self.oldest_checkpoint, self.now)

    @rule(size=st.integers(1, 3), behind=st.integers(0, 4))
    def outsider_submits(self, size, behind):
        version = max(0, self.learner_version - behind)
        samples = [self.sample((0, 0), version, version, generator="whoever") for _ in range(size)]
        receipt = self.buffer.submit_group(Prompt("theirs"), samples, "outside", self.now)
        if outcome(receipt) == "stored":
            self.follow(receipt.instructions)

    @rule(number=st.integers(0, 99))
    @precondition(lambda self: self.buffer.state.groups)
    def somebody_drops_a_group(self, number):
        group_id = self.pick(self.buffer.state.groups, number)
        for key in [key for key in self.orders if key[0] == group_id]:
            self.tell(ev.MembersFinished(self.orders.pop(key)[0]))
        self.follow(self.buffer.drop_group(group_id, "asked for", self.now))

    @rule(eta=st.integers(0, 3))
    def bound_changes(self, eta):
        """Live: up at once, down from the next step that is taken on."""
        before = self.config.buffer
        self.was_lowered |= eta < before.max_staleness
        self.largest_eta = max(self.largest_eta, eta)
        self.config = msgspec.structs.replace(self.config, buffer=msgspec.structs.replace(before, max_staleness=eta))
        self.buffer.change(self.config, "a test", self.now)
        self.issue()

    @rule()
    def pause_and_resume(self):
        self.tell(ev.IssuePaused())
        self.buffer.check()
        self.tell(ev.IssueResumed())

    @rule(num_units=st.integers(1, 5))
    def ledger_commits(self, num_units):
        self.buffer.ledger.commit(num_units)

    @rule(back=st.integers(0, 3))
    @precondition(lambda self: self.on_disk)
    def everything_is_killed(self, back):
        """The controller loses what it had not committed; the learner comes back from a checkpoint, the generators empty."""
        self.buffer.ledger.crash()
        self.open()
        self.buffer.check()
        for key in self.acknowledged:
            assert self.buffer.state.member_state(*key) not in {"pending", "unknown"}, f"{key} was acknowledged and is lost"
        self.restart_learner(max(self.oldest_checkpoint, self.learner_version - back))
        self.issue()
        for name in self.num_slots:
            self.generator_ready(name, self.learner_version)

    @invariant()
    def all_is_accounted_for(self):
        if not hasattr(self, "buffer"):
            return
        self.now += 1.0
        self.buffer.state.check_invariants()
        counts = self.buffer.counts()
        most = (self.newest_ever + self.largest_eta + 1) * self.config.algorithm.groups_per_step
        assert counts.held <= most

    def teardown(self):
        if hasattr(self, "buffer"):
            self.finish_everything()
            self.buffer.check()
            self.buffer.close()
            shutil.rmtree(self.folder)

    def finish_everything(self):
        """No deadlock: when everybody does their work, ten more steps are trained."""
        goal = self.buffer.state.next_step + 10
        for _ in range(2000):
            for name in self.num_slots:
                if name not in self.live:
                    self.generator_ready(name, self.learner_version)
                if self.live[name] < self.learner_version:
                    self.live[name] = self.learner_version
                    self.tell(ev.VersionIsLive(name, self.learner_version))
            while self.orders:
                self.members_finish(number=0, first=0, second=0, cut=False, both=False)
            self.all_scores_come(equal=self.config.algorithm.kind != "dpo")
            while len(self.to_train) < 2:
                before = len(self.to_train)
                self.learner_asks()
                if len(self.to_train) == before:
                    break
            if self.to_train:
                self.step_is_done(lands=True)
            if self.learner_version >= goal:
                return
        raise AssertionError(f"stuck at version {self.learner_version} of {goal}: {self.buffer.counts()}")


PENALTIES = (
    {"dynamic_sampling": True, "max_resamples": 1},
    {"dynamic_sampling": True, "max_resamples": 2, "advantage": "remax"},
    {"mask_truncated": True, "max_resamples": 1},
    {"mask_truncated": True, "dynamic_sampling": True, "advantage": "remax", "max_resamples": 1},
)
PAIRS = (
    {"kind": "dpo", "max_resamples": 1},
    {"kind": "dpo", "max_resamples": 1, "mask_truncated": True, "preference": {"pairs": "threshold"}},
)


def lives(policy, *screens):
    """Return the tests of runs under this policy, and under no screen or one of these."""
    life = type(f"{policy.title()}Life", (RunLife,), {"policy": policy, "screens": ({}, *screens)})
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    life.TestCase.settings = settings(max_examples=25, stateful_step_count=60, suppress_health_check=slow)
    return life.TestCase


TestWaitPolicy = lives("wait", *PENALTIES, *PAIRS)
TestDropPolicy = lives("drop")
TestMaskPolicy = lives("mask", *PENALTIES)

"""Random versions, absences, failures and restarts: whoever follows the plan holds the very bytes of the announced version."""

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.schema.weights import Delta, WeightsAvailable, WeightsManifest
from asyncrl.weights.delta_chain import DeltaChain, WholeVersion, is_path, num_bytes, plan_fetch

TOTAL_BYTES = 100
MANIFEST = WeightsManifest((), TOTAL_BYTES)

OUTCOMES = st.sampled_from(["delta", "delta", "delta", "large", "failed", "refused", "restart"])
MOVES = st.lists(st.tuples(OUTCOMES, st.integers(1, 60), st.integers(1, 3), st.sets(st.integers(0, 2))), max_size=40)


class Learner:
    """Its bytes are a name: what a fingerprint stands for. A blob is a pair of names."""

    def __init__(self, number, full_every, always_whole):
        self.number = number
        self.always_whole = always_whole
        self.chain = DeltaChain(TOTAL_BYTES, full_every)

    def publish(self, version, outcome, delta_bytes, wholes, blobs):
        """Return the announcement, None where the version could not be made fetchable."""
        name = f"learner {self.number} version {version}"
        head = self.chain.head
        is_offered = outcome != "large" and head is not None
        whole = None
        if self.always_whole or self.chain.is_whole_due(delta_bytes if is_offered else None) or outcome == "refused":
            if outcome == "failed":
                return None
            whole = WholeVersion(version, name, name.encode())
            wholes[name] = name
        delta = None
        if is_offered and outcome != "refused":
            delta = Delta(version, head[0], head[1], f"{head[1]} to {name}", delta_bytes, "")
            blobs[delta.name] = (head[1], name)
        for dropped in self.chain.advance(name, whole, delta):
            del blobs[dropped.name]
        self.chain.check_invariants()
        known = self.chain.whole
        return WeightsAvailable(
            version, "any", known.location, MANIFEST, name, 0.0, bucket_fingerprints=name.encode(), full_version=known.version,
            full_bucket_fingerprints=known.bucket_fingerprints, deltas=self.chain.deltas,
        )  # fmt: skip


def carried_out(plan, held, wholes, blobs):
    """Return the bytes that following the plan yields; fail where a delta is not based on them."""
    content = held.fingerprint if plan.whole is None else wholes[plan.whole.location]
    if plan.whole is not None:
        assert plan.whole.bucket_fingerprints == content.encode()
    for delta in plan.deltas:
        base, content_after = blobs[delta.name]
        assert base == content
        content = content_after
    return content


@settings(max_examples=300)
@given(st.integers(1, 5), st.booleans(), MOVES)
def test_whoever_follows_the_plan_holds_the_announced_bytes_however_many_versions_were_missed(full_every, always_whole, moves):
    learner = Learner(0, full_every, always_whole)
    wholes, blobs, version = {}, {}, 0
    held = [None, None, None]
    for outcome, delta_bytes, step, absent in moves:
        if outcome == "restart":
            version, blobs = max(0, version - 3 * step), {}
            learner = Learner(learner.number + 1, full_every, always_whole)
            continue
        version += step
        available = learner.publish(version, outcome, delta_bytes, wholes, blobs)
        if available is None:
            continue
        assert is_path(available.deltas)
        assert {delta.name for delta in available.deltas} == set(blobs)
        assert len(available.deltas) <= full_every
        assert num_bytes(available.deltas) <= TOTAL_BYTES
        for index in {0, 1, 2} - absent:
            plan = plan_fetch(available, held[index])
            assert carried_out(plan, held[index], wholes, blobs) == available.fingerprint
            cost = num_bytes(plan.deltas) + (TOTAL_BYTES if plan.whole else 0)
            assert cost <= TOTAL_BYTES + num_bytes(available.deltas)
            held[index] = available


@settings(max_examples=100)
@given(st.integers(1, 5), st.booleans(), st.lists(st.integers(1, 20), min_size=2, max_size=20))
def test_who_follows_every_version_fetches_deltas_alone(full_every, always_whole, sizes):
    learner, wholes, blobs, held = Learner(0, full_every, always_whole), {}, {}, None
    for version, delta_bytes in enumerate(sizes):
        available = learner.publish(version, "delta", delta_bytes, wholes, blobs)
        plan = plan_fetch(available, held)
        assert (plan.whole is None) == (held is not None)
        held = available

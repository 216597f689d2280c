"""Who starts: all or nothing, by priority, then first come, and nobody overtakes."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.load import resolve_config
from asyncrl.serve.machine import Machine, admit, demand_of, in_order, waits
from asyncrl.serve.records import Demand, RunRecord


def run(number, gpus=0, cores=1, memory=0, priority=0, **more):
    return RunRecord(id=f"r{number}", number=number, priority=priority, demand=Demand(gpus, cores, memory), **more)


def test_what_a_run_waits_for_is_said():
    machine = Machine(("a", "b"), cores=4, memory_bytes=8 << 30)
    live = RunRecord(id="r0", number=0, state="live", gpus=("a",), demand=Demand(1, 3, 6 << 30))
    assert waits(machine, [live, run(2), run(1, gpus=2, memory=3 << 30)]) == ["2 GPUs (1 free), 3 GiB (2 free)", "1 before it"]
    assert waits(machine, [live, run(1)]) == ["its start"]


def test_the_most_generators_that_a_run_may_grow_to_are_counted():
    machine, elastic = Machine(cores=1000), {"launch": {"kind": "local", "elastic": {"max_generators": 64}}}
    grown = demand_of(resolve_config("quickstart", {"generate.num_workers": 64}), machine)
    assert demand_of(resolve_config("quickstart", {"generate.num_workers": 2, **elastic}), machine) == grown
    assert grown.cores >= 64


demands = st.integers(0, 3), st.integers(1, 4), st.integers(0, 4)
records = st.builds(run, st.integers(0, 1000), *demands, st.integers(-1, 1), state=st.sampled_from(["queued", "ended"]))


def test_a_run_that_a_larger_machine_took_does_not_hold_the_queue_up():
    assert list(admit(Machine(cores=2), [run(1, cores=16), run(2)])) == ["r1"]


@given(st.lists(records, max_size=12, unique_by=lambda one: one.number), st.integers(0, 4), st.integers(1, 8), st.integers(0, 8))
def test_what_is_given_is_there_and_is_the_head_of_the_queue(runs, gpus, cores, memory):
    machine = Machine(tuple(map(str, range(gpus))), cores, memory)
    granted = admit(machine, runs)
    by_id = {one.id: one for one in runs}
    assert list(granted) == [one.id for one in in_order(runs)][: len(granted)]
    given_out = [gpu for gpus in granted.values() for gpu in gpus]
    assert len(given_out) == len(set(given_out))
    assert all(len(gpus) == by_id[run].demand.gpus for run, gpus in granted.items())
    assert sum(min(by_id[run].demand.cores, cores) for run in granted) <= cores
    assert sum(by_id[run].demand.memory_bytes for run in granted) <= memory

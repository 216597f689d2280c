import msgspec
import numpy as np
import pytest

from asyncrl.config.load import dump_config, parse_config
from asyncrl.observe.spans import span
from asyncrl.plan.simulator.measured import fit_decode, scenario_of_run, working_time


def test_the_three_terms_of_decoding_are_found_again():
    rng = np.random.default_rng(0)
    samples, starts = [], []
    for batch in range(40):
        # A batch of n that begins and ends together: every one has n - 1 beside it in its middle.
        size, tokens, start = int(rng.integers(1, 30)), int(rng.integers(5, 200)), batch * 100.0
        seconds = 0.05 + tokens * (0.01 + (size - 1) * 0.0005)
        samples += [span("generate", start, start + seconds, "g", tokens=tokens) for _ in range(size)]
        starts += [start] * size
    assert fit_decode(samples, starts) == pytest.approx((0.05, 0.01, 0.0005), rel=0.02)


def write_run(folder, num_steps, pause_s=0.0):
    config = parse_config({
        "num_steps": 100,
        "generate": {"num_workers": 1, "engine": {"kind": "fake", "num_slots": 2}},
        "algorithm": {"groups_per_step": 1, "group_size": 2},
    })  # fmt: skip
    (folder / "config.toml").write_text(dump_config(config))
    spans = []
    for step in range(num_steps):
        now = step * 2.0 + (pause_s if step >= num_steps // 2 else 0.0)
        # Four samples in two slots: the second pair waits for the first.
        for index in range(4):
            end = now + (0.5 if index < 2 else 1.0)
            spans.append(span("generate", now, end, "generator-0", tokens=50, group=step, index=index, purpose="train"))
            spans.append(span("score", end + 0.02, end + 0.03, "reward-0", group=step, index=index))
        spans.append(span("wait", now + 1.0, now + 1.1, "learner", step=step))
        spans.append(span("step", now + 1.1, now + 1.6, "learner", step=step, version=step + 1))
        spans.append(span("swap", now + 1.6, now + 1.9, "generator-0", version=step + 1, fetch_ms=200.0, swap_ms=100.0))
    (folder / "spans.jsonl").write_bytes(b"".join(msgspec.json.encode(item) + b"\n" for item in spans))


def test_a_scenario_says_what_the_spans_said(tmp_path):
    write_run(tmp_path, 8)
    made = scenario_of_run(tmp_path)
    assert (made.num_workers, made.num_slots, made.group_size, made.num_steps) == (1, 2, 2, 8)
    assert made.lengths.mean == 50
    assert made.sequence_s + 50 * (made.decode_s + made.decode_s_per_sequence) == pytest.approx(0.5, rel=0.01)
    assert made.reward_s.mean == pytest.approx(0.01, rel=1e-6)
    assert made.hop_s == pytest.approx(0.01, rel=1e-6)
    assert made.step_s.mean == pytest.approx(1.9, rel=1e-6)
    assert made.sync_s.mean == pytest.approx(0.2, rel=1e-6)
    assert made.swap_s == pytest.approx(0.1)


def test_a_pause_is_no_work(tmp_path):
    """With a sample in flight as the run was paused, and finished after."""
    through, paused = tmp_path / "through", tmp_path / "paused"
    for folder, pause_s in ((through, 0.0), (paused, 500.0)):
        folder.mkdir()
        write_run(folder, 12, pause_s)
        in_flight = span("generate", 11.5, 12.2 + pause_s, "generator-0", tokens=50, group=99, index=0, purpose="eval")
        with (folder / "spans.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(in_flight) + b"\n")
    expected, made = scenario_of_run(through), scenario_of_run(paused)
    assert made.step_s.mean == pytest.approx(expected.step_s.mean, rel=0.2)
    assert made.decode_s == pytest.approx(expected.decode_s, rel=1e-6)
    assert working_time(paused)(512.5) == pytest.approx(12.5, abs=0.6)

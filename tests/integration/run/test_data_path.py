"""A run of what the data path adds to plain groups: a file of preferences."""

import asyncrl
from asyncrl.buffer.ledger.reader import LedgerReader
from tests.builders import write_jsonl
from tests.integration.conftest import NO_EVALUATION, assert_balanced


async def test_a_file_of_preferences_is_learned_without_generating(tiny, tmp_path):
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
    pairs = [{"prompt": prompt, "chosen": answer, "rejected": f"0{answer}"} for prompt, answer in sums]
    task = {"kind": "preferences", "path": write_jsonl(tmp_path / "pairs.jsonl", pairs), "chat": False}
    config = tiny(
        **NO_EVALUATION, num_steps=40, task=task, generate__engine={"kind": "replay", "max_sequence_tokens": 16},
        reward__functions=[{"kind": "preference"}], learner={"learning_rate": 3e-3, "warmup_steps": 2},
        algorithm={"kind": "dpo", "groups_per_step": 16, "group_size": 2},
    )  # fmt: skip
    async with asyncrl.Run(config) as run:
        reports = [report async for report in run.steps()]
        status = await run.status()
    assert status.phase == "stopped", status.reason
    assert_balanced(status)
    accuracy = [report.metrics["dpo/accuracy"] for report in reports]
    assert accuracy[0] <= 0.75
    assert sum(accuracy[-5:]) / 5 > 0.9
    assert reports[-1].metrics["dpo/margin"] > reports[0].metrics["dpo/margin"]
    assert max(report.staleness_max for report in reports) <= 2
    assert status.groups["trained"] == 40 * 16
    ledger = LedgerReader(run.run_folder)
    assert {prompt.groups for prompt in ledger.prompts(limit=200)} <= {6, 7}
    rewards = {row.index: row.reward for row in ledger.group(0).samples}
    assert rewards == {0: 1.0, 1: 0.0}

"""Every destination of metrics gets what it is handed."""

import json
import logging
import socket
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from asyncrl.config.load import parse_config
from asyncrl.observe.samples import SampleRow
from asyncrl.observe.sinks import MOST_WAITING, MetricSinks, Webhook, open_sinks


def test_unknown_name_is_told_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sinks = MetricSinks(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            sinks.write(step, 0.0, {"reward/mena": 1.0})
    assert [record.message for record in caplog.records] == ["metrics that observe/metrics.py does not list: reward/mena"]
    assert "asyncrl_reward_mena 1.0" in sinks.prometheus_text()
    sinks.close()


def test_what_is_over_is_told_no_more_and_a_late_evaluation_changes_nothing_of_the_newest_step(tmp_path: Path) -> None:
    sinks = MetricSinks(tmp_path)
    sinks.write(1, 0.0, {"eval/accuracy": 0.25})
    assert "asyncrl_step 1" in sinks.prometheus_text()
    sinks.write(6, 0.0, {"staleness/histogram/7": 1.0, "queue/slots/joined-a-1-0": 8.0, "eval/reward_mean": 0.125})
    sinks.write(7, 0.0, {"staleness/histogram/0": 1.0, "reward/mean": 0.5})
    sinks.write(5, 0.0, {"eval/accuracy": 0.75})
    told = [line for line in sinks.prometheus_text().splitlines() if not line.startswith("#")]
    assert told == [
        "asyncrl_eval_accuracy 0.75", "asyncrl_eval_reward_mean 0.125", "asyncrl_reward_mean 0.5",
        'asyncrl_staleness_histogram{key="0"} 1.0', "asyncrl_step 7.0",
    ]  # fmt: skip
    sinks.close()


def test_a_reason_with_slashes_is_of_its_family(tmp_path: Path) -> None:
    sinks = MetricSinks(tmp_path)
    sinks.write(1, 0.0, {"failed/cannot read /data/tests/7.json": 2.0, "failed/reward": 1.0, "failed/": 1.0})
    told = [line for line in sinks.prometheus_text().splitlines() if line.startswith("asyncrl_failed_total")]
    assert told == ['asyncrl_failed_total{key="cannot read /data/tests/7.json"} 2.0', 'asyncrl_failed_total{key="reward"} 1.0']
    sinks.close()


@pytest.mark.slow
def test_wandb_offline_needs_no_network_and_leaves_no_process(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    sinks = open_sinks(parse_config({"observe": {"wandb": "offline"}}), tmp_path)
    sinks.write(0, 1.0, {"reward/mean": 0.5})
    sinks.write_samples(0, 1.0, [SampleRow(0, 7, 1, "p7", "1+1=", "2 | <b>\n", 0.5, {"exact": 1.0}, 3, 4, 5, "stop")])
    sinks.close()
    number = (tmp_path / "wandb" / "id").read_text()
    assert list(tmp_path.glob(f"wandb/offline-run-*-{number}/run-{number}.wandb"))
    [path] = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    table = json.loads(path.read_text())
    [row] = [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]
    assert (row["prompt"], row["text"], row["reward"]) == ("1+1=", "2 | <b>\n", 0.5)


def test_a_resumed_run_goes_on_with_its_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        open_sinks(parse_config({"observe": {"wandb": "online"}}), tmp_path / folder).close()
    first, again, other = (told for _, told in wandb.init.call_args_list)
    assert first["id"] == again["id"] != other["id"]
    assert first["id"].isalnum()
    assert {told["resume"] for told in (first, again, other)} == {"allow"}


def test_wandb_is_told_no_secret_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    launch = {"kind": "ray", "environment": {"pip": ["numpy"], "env_vars": {"HF_TOKEN": "secret"}}}
    for table in ({"launch": launch}, {}):
        observe = {"wandb": "offline", "webhook": "https://hooks.example/secret"}
        open_sinks(parse_config({"observe": observe, "num_steps": 7, **table}), tmp_path).close()
    (_, told), (_, of_local) = wandb.init.call_args_list
    assert "secret" not in json.dumps([told["config"], of_local["config"]])
    assert told["config"]["launch"]["environment"]["env_vars"] == {"HF_TOKEN": ""}
    assert told["config"]["num_steps"] == 7


def test_a_webhook_that_never_answers_holds_nobody_up_and_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        webhook = Webhook(f"http://127.0.0.1:{listening.getsockname()[1]}/secret")
        with caplog.at_level(logging.WARNING):
            for number in range(MOST_WAITING + 2):  # one of them is on its way
                webhook.tell({"number": number})
        assert any("one more is dropped" in record.message for record in caplog.records)
    webhook.close()
    assert "secret" not in caplog.text

"""deploy/*.yaml as Kubernetes' own schemas have them, what the daemon's manifest must say of it, and its unit for systemd."""

import configparser
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from asyncrl.cli import app
from asyncrl.client import START_TIMEOUT_S
from asyncrl.config.run import SupervisionConfig

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
VERSION = "1.33"


def documents() -> list[dict[str, Any]]:
    """Every object; of a RayJob, whose schema Kubernetes does not have, its pod templates as pods."""
    found = [one for path in sorted(DEPLOY.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]
    for job in [one for one in found if one["kind"] == "RayJob"]:
        found.remove(job)
        cluster = job["spec"]["rayClusterSpec"]
        pods = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
        found += [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **pod} for pod in pods]
    return found


def test_every_manifest_is_valid_and_a_wrong_one_is_not():
    kinds = []
    for one in documents():
        kubernetes_validate.validate(one, VERSION, strict=True)
        kinds.append(one["kind"])
    assert {"StatefulSet", "Service", "PersistentVolumeClaim", "Pod"} <= set(kinds)
    wrong = next(one for one in documents() if one["kind"] == "StatefulSet")
    wrong["spec"]["template"]["spec"]["containers"][0]["image"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_a_mount_gives_nobody_access_to_the_keys_of_runs():
    specs = [one["spec"] for one in documents() if one["kind"] in {"Pod", "StatefulSet"}]
    pods = [spec["template"]["spec"] if "template" in spec else spec for spec in specs]
    assert {pod["securityContext"]["fsGroupChangePolicy"] for pod in pods} == {"OnRootMismatch"}


def test_the_daemon_has_one_pod_that_may_drain_and_keeps_its_folder():
    spec = next(one["spec"] for one in documents() if one["kind"] == "StatefulSet")
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["replicas"] == 1
    assert "--drain" in container["args"]
    assert pod["terminationGracePeriodSeconds"] > SupervisionConfig().drain_timeout_s
    folder = container["args"][container["args"].index("--folder") + 1]
    claims = [claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]]
    assert any(folder.startswith(mount["mountPath"]) for mount in container["volumeMounts"] if mount["name"] in claims)
    paths = {name: probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")}
    assert paths == {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}


def test_the_unit_of_systemd_leaves_runs_alive_is_told_when_it_is_ready_and_names_a_command_that_there_is():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # systemd's names have capitals
    unit.read_string((DEPLOY / "asyncrl.service").read_text())
    service = unit["Service"]
    assert (service["Type"], service["NotifyAccess"], service["KillMode"]) == ("notify", "main", "process")
    assert int(service["WatchdogSec"]) > 0
    assert int(service["TimeoutStartSec"]) > START_TIMEOUT_S  # a run that an earlier daemon was starting is waited for so long
    program, name, *options = shlex.split(service["ExecStart"])
    assert Path(program).name == "asyncrl"
    asked = typer.main.get_command(app).commands[name].make_context(name, options).params
    assert asked["folder"] == Path("/var/lib") / service["StateDirectory"]
    assert asked["host"] == "127.0.0.1"

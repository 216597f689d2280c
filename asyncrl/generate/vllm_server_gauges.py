"""What we need of a vLLM server's `/metrics`: is it still the same process, how much KV cache is free, how many requests run.

Pure text reading; a row that is not there leaves its field empty. Called by generate/vllm_server_engine.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ROW = re.compile(
    r"^(process_start_time_seconds|vllm:num_requests_running|vllm:kv_cache_usage_perc|vllm:cache_config_info)(\{.*\})? (\S+)$",
    re.MULTILINE,
)
_LABEL = re.compile(r'(num_gpu_blocks|(?<!\w)block_size)="(\d+)"')


@dataclass(frozen=True, slots=True)
class ServerGauges:
    """One reading; several engines behind one server are added up."""

    started_s: float
    """When the server's process began; 0: it does not say."""
    running: int
    free_blocks: int
    block_tokens: int
    """Of a KV block; 0: it does not say."""


def read_gauges(text: str) -> ServerGauges:
    """Read the metrics page."""
    started_s, running, usages, num_blocks, block_tokens = 0.0, 0.0, [], 0, 0
    for name, labels, value in _ROW.findall(text):
        if name == "process_start_time_seconds":
            started_s = float(value)
        elif name == "vllm:num_requests_running":
            running += float(value)
        elif name == "vllm:kv_cache_usage_perc":
            usages.append(float(value))
        else:
            said = dict(_LABEL.findall(labels))
            num_blocks += int(said.get("num_gpu_blocks", 0))
            block_tokens = int(said.get("block_size", 0))
    usage = sum(usages) / len(usages) if usages else 0.0
    return ServerGauges(started_s, int(running), int(num_blocks * (1 - usage)), block_tokens if num_blocks else 0)

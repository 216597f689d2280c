"""How often SmolLM2-135M is right before any training, by family of reasoning-gym.

    python experiments/reversal/probe.py [FAMILY ...]      # 15 s a family on 2 cores; needs models/SmolLM2-135M-Instruct

64 held-out problems each, sampled once at temperature 1 after three worked examples. Prints the share that the run's reward takes
as right, the share that has the answer somewhere in the text, and the first answer beside its reference.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from asyncrl.clock import SystemClock
from asyncrl.config.load import parse_config
from asyncrl.config.reward import ReasoningGymReward
from asyncrl.generate.engine import EngineRequest, TokenStream
from asyncrl.generate.rollout import start_engine
from asyncrl.reward.inputs import RewardInput
from asyncrl.reward.reasoning_gym import build_reasoning_gym
from asyncrl.schema.samples import SamplingParams
from asyncrl.tasks.registry import build_task

MODEL = Path("models/SmolLM2-135M-Instruct")
NUM_PROBLEMS, NEW_TOKENS = 64, 24
FAMILIES: dict[str, dict[str, Any]] = {
    "aiw": {}, "base_conversion": {"min_base": 2, "max_base": 4, "min_value": 1, "max_value": 15},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "calendar_arithmetic": {},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "count_primes": {"min_n": 1, "max_n": 20}, "course_schedule": {"min_num_courses": 3, "max_num_courses": 4},
    "decimal_arithmetic": {}, "family_relationships": {"min_family_size": 4, "max_family_size": 5},
    "fraction_simplification": {"min_value": 1, "max_value": 10, "min_factor": 2, "max_factor": 5},
    "gcd": {"min_value": 1, "max_value": 30}, "gsm_symbolic": {},
    "isomorphic_strings": {"min_string_length": 3, "max_string_length": 5}, "lcm": {"min_value": 1, "max_value": 10},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 4},
    "letter_counting": {"min_words": 3, "max_words": 5},
    "letter_jumble": {"min_words": 1, "max_words": 1, "min_word_len": 4, "max_word_len": 6},
    "needle_haystack": {"min_num_statements": 4, "max_num_statements": 8},
    "number_filtering": {
        "min_numbers": 3, "max_numbers": 4, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": 20,
    },
    "palindrome_generation": {"min_length": 3, "max_length": 5},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "ransom_note": {"min_note_length": 2, "max_note_length": 4, "min_magazine_length": 3, "max_magazine_length": 8},
    "self_reference": {}, "sentence_reordering": {"min_words_in_sentence": 3, "max_words_in_sentence": 4},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9},
    "spell_backward": {"min_word_len": 3, "max_word_len": 3}, "syllogism": {}, "time_intervals": {},
    "word_sequence_reversal": {"min_words": 3, "max_words": 3}, "word_sorting": {"min_words": 3, "max_words": 3},
}  # fmt: skip


async def main(families: list[str]) -> None:
    """Print a line a family."""
    torch.set_num_threads(2)
    config = parse_config({
        "model": {"kind": "pretrained", "path": str(MODEL)},
        "task": {"kind": "reasoning_gym"},
        "generate": {
            "engine": {
                "kind": "transformers", "num_slots": NUM_PROBLEMS, "num_threads": 2, "max_sequence_tokens": 768,
                "dtype": "bfloat16",
            },
            "sampling": {"max_new_tokens": NEW_TOKENS},
        },
    })  # fmt: skip
    engine, codec = await start_engine(config, MODEL, SystemClock())
    await engine.load_weights(0, load_file(MODEL / "model.safetensors"), "recompute")
    score = cast("Callable[[RewardInput], float]", build_reasoning_gym(ReasoningGymReward()))  # it is not async
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    for family in families:
        options = {"family": family, "family_options": FAMILIES[family], "held_out": NUM_PROBLEMS, "size": 1500}
        prompts = build_task(parse_config({"task": {"kind": "reasoning_gym", **options}}).task, 0).held_out
        streams = [
            engine.submit(EngineRequest(f"{family}{number}", codec.encode(prompt), sampling, number))
            for number, prompt in enumerate(prompts)
        ]
        texts = [codec.decode(await tokens_of(stream)) for stream in streams]
        pairs = list(zip(prompts, texts, strict=True))
        right = sum(score(RewardInput(prompt, text, "stop", 1)) for prompt, text in pairs) / NUM_PROBLEMS
        there = sum(prompt.answer.lower() in text.lower() for prompt, text in pairs) / NUM_PROBLEMS
        print(f"{family:24s} {right:.2f} ({there:.2f})  {prompts[0].answer!r} <- {texts[0]!r}", flush=True)
    await engine.close()


async def tokens_of(stream: TokenStream) -> list[int]:
    """Return all tokens of an answer."""
    return [token for chunk in [chunk async for chunk in stream] for token in chunk.token_ids]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or list(FAMILIES)))

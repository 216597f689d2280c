"""Reinforcement learning by the `tinker` SDK alone: sums, group-centred advantages, importance sampling.

    python experiments/tinker/rl_loop.py --base-url=URL --api-key=KEY

Only the two arguments say that the server is ours. The model's tokenizer must know digits, `+` and `=`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any

import tinker
from tinker import types

REWARDS: dict[str, Callable[[str, str], bool]] = {
    "right": lambda text, answer: text == answer,
    "short": lambda text, _: len(text) == 1,
}
"""Of a text and the right answer. One character is learnt within 20 steps, sums take hundreds."""
WARMUP_STEPS = 10
"""Adam's first steps are as long as any, whatever the gradient; adapters that begin at 0 do not stand that."""


def examples_of(prompt: list[int], sequences: Sequence[types.SampledSequence], rewards: list[float]) -> list[types.Datum]:
    """Return what a group trains: each sample's tokens with its reward over the group's mean; nothing where all are alike."""
    mean = sum(rewards) / len(rewards)
    data = []
    for sequence, reward in zip(sequences, rewards, strict=True):
        tokens, unsampled = prompt + sequence.tokens, len(prompt) - 1
        inputs: dict[str, Any] = {
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * unsampled + list(sequence.logprobs or []),
            "advantages": [0.0] * unsampled + [reward - mean] * len(sequence.tokens),
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data if len(set(rewards)) > 1 else []


def main() -> None:
    """Print one line a step: its mean reward."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--api-key", required=True)
    parser.add_argument("--reward", choices=REWARDS, default="right")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, low = random.Random(args.seed), 0 if args.digits == 1 else 10 ** (args.digits - 1)
    server = {"base_url": args.base_url, "api_key": args.api_key}
    model = tinker.RestClient(**server).get_server_capabilities().result().supported_models[0].model_name or ""
    with tinker.ServiceClient(**server) as service:
        training = service.create_lora_training_client(base_model=model, rank=args.rank, seed=args.seed).result()
        tokenizer = training.get_tokenizer()
        for step in range(args.steps):
            sampler = training.save_weights_and_get_sampling_client().result()
            asked = []
            for group in range(args.groups):
                a, b = rng.randrange(low, 10**args.digits), rng.randrange(low, 10**args.digits)
                prompt = tokenizer.encode(f"{a}+{b}=", add_special_tokens=False)
                params = types.SamplingParams(max_tokens=args.digits + 2, seed=args.seed + step * args.groups + group)
                asked.append((prompt, str(a + b), sampler.sample(types.ModelInput.from_ints(prompt), args.group_size, params)))
            data, rewards = [], []
            for prompt, answer, future in asked:
                sequences = future.result().sequences
                texts = [tokenizer.decode(one.tokens, skip_special_tokens=True).strip() for one in sequences]
                own = [float(REWARDS[args.reward](text, answer)) for text in texts]
                data += examples_of(prompt, sequences, own)
                rewards += own
            print(f"step {step} reward {sum(rewards) / len(rewards):.3f}", flush=True)
            if data:
                passed = training.forward_backward(data, "importance_sampling")
                stepped = training.optim_step(
                    types.AdamParams(learning_rate=args.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS))
                )
                passed.result()
                stepped.result()


if __name__ == "__main__":
    main()

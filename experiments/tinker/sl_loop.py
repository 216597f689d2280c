"""Supervised learning by the `tinker` SDK alone: cross-entropy on worked sums.

    python experiments/tinker/sl_loop.py --base-url=URL --api-key=KEY

Only the two arguments say that the server is ours. The model's tokenizer must know digits, `+` and `=`.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import tinker
from tinker import types

WARMUP_STEPS = 10
"""Adam's first steps are as long as any, whatever the gradient; adapters that begin at 0 do not stand that."""


def main() -> None:
    """Print one line a step: the loss of a trained token."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--api-key", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, low = random.Random(args.seed), 0 if args.digits == 1 else 10 ** (args.digits - 1)
    server = {"base_url": args.base_url, "api_key": args.api_key}
    model = tinker.RestClient(**server).get_server_capabilities().result().supported_models[0].model_name or ""
    with tinker.ServiceClient(**server) as service:
        training = service.create_lora_training_client(base_model=model, rank=args.rank, seed=args.seed).result()
        tokenizer = training.get_tokenizer()
        for step in range(args.steps):
            data, num_trained = [], 0
            for _ in range(args.batch_size):
                a, b = rng.randrange(low, 10**args.digits), rng.randrange(low, 10**args.digits)
                prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (f"{a}+{b}=", str(a + b)))
                tokens = [*prompt, *answer, tokenizer.eos_token_id]
                weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(answer) + 1)
                inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": weights}
                data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
                num_trained += len(answer) + 1
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(
                types.AdamParams(learning_rate=args.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS))
            )
            print(f"step {step} loss {passed.result().metrics['loss:sum'] / num_trained:.3f}", flush=True)
            stepped.result()
        print("saved", training.save_state("final").result().path)


if __name__ == "__main__":
    main()

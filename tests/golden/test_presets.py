"""configs/algorithms against the settings their papers print, each number with where it stands.

A preset says nothing that is not in the table: what its paper leaves open is in `OURS`, so that nothing passes for published that
is not. A preset is laid over a run whose own settings are all others, so that nothing of the run shows through.
"""

import tomllib
from pathlib import Path

import pytest
import tomli_w

from asyncrl.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ROOT / "configs" / "algorithms"


def leaves(table, path=""):
    """The values of a TOML table, by dotted names."""
    if isinstance(table, list) and table and isinstance(table[0], dict):
        table = {str(number): value for number, value in enumerate(table)}
    if not isinstance(table, dict):
        return {path[1:]: table}
    return {name: leaf for key, value in table.items() for name, leaf in leaves(value, f"{path}.{key}").items()}


PUBLISHED = {
    # DeepSeekMath (arXiv 2402.03300): equation 3 (a mean over each output, then over the group), equation 4 (k3, in the loss),
    # section 4.1.2 (rewards less their group's mean, over its deviation), section 4.2 (numbers: 64 outputs, batch 1,024, learning
    # rate 1e-6, KL 0.04, a single update after each exploration).
    "grpo": {
        "algorithm": {
            "advantage": "grpo", "loss": "ppo_clip", "corrections": (), "aggregation": "seq-mean-token-mean", "group_size": 64,
            "groups_per_step": 1024 // 64, "kl.coefficient": 0.04, "kl.estimator": "k3", "kl.where": "loss",
        },
        "learner": {"learning_rate": 1e-6, "minibatches": 1, "epochs": 1},
    },
    # DAPO (arXiv 2503.14476): equation 8 and section 3 (clip-higher, dynamic sampling, token mean), section 2.3 (no KL),
    # section 4.1 (512 prompts x 16, mini-batches of 512 answers and so 16 updates, constant 1e-6 after 20 rollout steps, 0.2 and
    # 0.28).
    # Weight decay: run_dapo_qwen2.5_32b.sh of verl's recipe/dapo.
    "dapo": {
        "algorithm": {
            "advantage": "grpo", "dynamic_sampling": True, "loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28,
            "corrections": (), "aggregation": "token-mean", "groups_per_step": 512, "group_size": 16, "kl": None,
        },
        "learner": {
            "learning_rate": 1e-6, "min_learning_rate_ratio": 1.0, "warmup_steps": 20, "weight_decay": 0.1,
            "minibatches": 512 * 16 // 512, "epochs": 1,
        },
    },
    # Dr. GRPO (arXiv 2503.20783): section 3.2 (neither deviation nor length; a sum over a constant, the generation budget),
    # table of hyper-parameters (128 prompts x 8, 3,000 tokens, constant 1e-6, clip 0.2, one inner epoch, KL 0).
    "dr_grpo": {
        "algorithm": {
            "advantage": "dr_grpo", "loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "corrections": (),
            "aggregation": "constant", "aggregation_constant": 3000.0, "groups_per_step": 128, "group_size": 8, "kl": None,
        },
        "learner": {
            "learning_rate": 1e-6, "min_learning_rate_ratio": 1.0, "warmup_steps": 0, "minibatches": 1, "epochs": 1,
        },
    },
    # GSPO (arXiv 2507.18071): equations 5 to 7, section 5.1 (3e-4 and 4e-4, each batch in four mini-batches).
    "gspo": {
        "algorithm": {
            "advantage": "grpo", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "corrections": (),
            "aggregation": "seq-mean-token-mean",
        },
        "learner": {"minibatches": 4, "epochs": 1},
    },
    # MiniMax-M1 (arXiv 2506.13585): equations 4 and 5 (detached ratio, no lower bound, token mean), section 3.1 (no KL, DAPO's
    # dynamic sampling, 16 rounds of updates a batch), section 3.2 (AdamW). max_ratio: ScaleRL (arXiv 2510.13786).
    "cispo": {
        "algorithm": {
            "advantage": "grpo", "dynamic_sampling": True, "loss": "cispo", "max_ratio": 5.0, "corrections": (),
            "aggregation": "token-mean", "kl": None,
        },
        "learner": {"betas": (0.9, 0.95), "epsilon": 1e-15, "minibatches": 16, "epochs": 1},
    },
    # AReaL (arXiv 2505.24298): equation 5 (decoupled PPO), section 5.2 (proximal policy recomputed before the updates), section
    # 7.1 and the table of hyper-parameters. The cap: `behave_imp_weight_cap` of its code.
    "areal": {
        "algorithm": {
            "critic": None, "advantage": "reward", "whiten": True, "gamma": 1.0, "gae_lambda": 1.0, "loss": "decoupled_ppo",
            "clip_low": 0.2, "clip_high": 0.2, "proximal": "recompute", "corrections.0.cap": 5.0, "aggregation": "token-mean",
            "groups_per_step": 512, "group_size": 16, "kl": None,
        },
        "buffer": {"max_staleness": 4, "ahead": "as_allowed"},
        "learner": {
            "learning_rate": 2e-5, "min_learning_rate_ratio": 1.0, "warmup_steps": 0, "betas": (0.9, 0.95), "epsilon": 1e-5,
            "weight_decay": 0.05, "max_grad_norm": 1.0, "minibatches": 4, "epochs": 1,
        },
    },
    # InstructGPT (arXiv 2203.02155), appendix C.4: 512 episodes in minibatches of 64, one inner epoch, clip 0.2, KL 0.02 in the
    # reward, no discount, 9.65e-6 and 9e-6, warm-up over 10 iterations. lambda, value clip, whitening:
    # lm-human-preferences, train_policy.py.
    "ppo_critic": {
        "algorithm": {
            "advantage": "gae", "gamma": 1.0, "gae_lambda": 0.95, "whiten": True, "loss": "ppo_clip", "clip_low": 0.2,
            "clip_high": 0.2, "corrections": (), "kl.coefficient": 0.02, "kl.estimator": "k1", "kl.where": "reward",
            "critic.kind": "separate", "critic.learning_rate": 9e-6, "critic.value_clip": 0.2, "groups_per_step": 512,
            "group_size": 1,
        },
        "learner": {
            "learning_rate": 9.65e-6, "min_learning_rate_ratio": 1.0, "warmup_steps": 10, "minibatches": 512 // 64, "epochs": 1,
        },
    },
    # prime-rl: default_loss_fn and DefaultLossConfig (dppo_mask_low, dppo_mask_high, adv_tau 1, kl_tau); DPPO (arXiv 2602.04879).
    "prime_rl": {
        "algorithm": {
            "advantage": "dr_grpo", "loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, "max_ratio": float("inf"),
            "log_ratio_penalty": 1e-3, "proximal": "behaviour", "corrections": (), "aggregation": "token-mean",
        },
    },
    # DPO (arXiv 2305.18290), equation 7 and appendix B: beta 0.1, batch 64, 1e-6 after a linear warm-up of 150 steps.
    "dpo": {
        "algorithm": {
            "kind": "dpo", "preference.loss": "sigmoid", "preference.label_smoothing": 0.0, "preference.beta": 0.1,
            "groups_per_step": 64,
        },
        "learner": {
            "learning_rate": 1e-6, "min_learning_rate_ratio": 1.0, "warmup_steps": 150, "minibatches": 1, "epochs": 1,
        },
    },
}  # fmt: skip
PUBLISHED = {name: leaves(tables) for name, tables in PUBLISHED.items()}

OURS = {
    "grpo": {"algorithm.clip_low", "algorithm.clip_high", "learner.min_learning_rate_ratio"},
    "gspo": {"algorithm.groups_per_step", "algorithm.group_size", "learner.learning_rate", "learner.min_learning_rate_ratio"},
    "cispo": {"algorithm.groups_per_step", "algorithm.group_size", "learner.learning_rate", "learner.min_learning_rate_ratio"},
    "dpo": {"algorithm.group_size", "algorithm.preference.pairs"},
    "ppo_critic": {"buffer.min_group_members", "algorithm.aggregation"},
}
"""What the paper does not print, or what this pipeline needs besides."""
OF_THE_PIPELINE = {"algorithm.kind", "algorithm.proximal", "algorithm.corrections.0.kind"}
"""How the published method is named here."""
ELSEWHERE = {
    "learner": {
        "learning_rate": 3e-3, "min_learning_rate_ratio": 0.5, "warmup_steps": 77, "betas": [0.1, 0.2], "epsilon": 1e-3,
        "weight_decay": 0.7, "max_grad_norm": 9.0, "epochs": 3, "minibatches": 3,
    },
    "buffer": {"max_staleness": 3},
}  # fmt: skip
"""A run with settings of its own."""


def value_at(config, name):
    for part in name.split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


def test_every_preset_has_its_table():
    assert {path.stem for path in PRESETS.glob("*.toml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_over_a_run_of_other_settings_has_the_published_ones(name, tmp_path):
    elsewhere = tmp_path / "elsewhere.toml"
    elsewhere.write_text(tomli_w.dumps(ELSEWHERE))
    config = load_config(ROOT / "configs" / "quickstart.toml", presets=[elsewhere, PRESETS / f"{name}.toml"])
    assert {key: value_at(config, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    assert (config.algorithm.dual_clip, config.learner.num_threads) == (None, 1), "the quickstart's own"
    assert config.algorithm.proximal == PUBLISHED[name].get("algorithm.proximal", "recompute")
    said, ours = leaves(tomllib.loads((PRESETS / f"{name}.toml").read_text())).keys(), OURS.get(name, set())
    assert ours <= said
    assert ours.isdisjoint(PUBLISHED[name])
    assert said <= OF_THE_PIPELINE | ours | PUBLISHED[name].keys()

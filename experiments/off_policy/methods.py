"""What is compared: each a change to the `[algorithm]` table of config.toml."""

from __future__ import annotations

TIS = {"kind": "tis_token", "cap": 2.0}

METHODS: dict[str, dict[str, object]] = {
    # No correction: the data is taken for the current policy's own. With one update a step this is PPO against a proximal policy
    # that is recomputed, as well.
    "no correction": {"loss": "reinforce", "corrections": []},
    # One ratio, current / behaviour, that does both jobs.
    "ppo against behaviour": {"loss": "ppo_clip", "proximal": "behaviour", "corrections": []},
    "gspo": {"loss": "gspo", "proximal": "behaviour", "corrections": [], "aggregation": "seq-mean-token-mean"},
    "cispo (here the same as aipo)": {"loss": "cispo", "max_ratio": 5.0, "proximal": "behaviour", "corrections": []},
    "sapo": {"loss": "sapo", "proximal": "behaviour", "corrections": [], "aggregation": "seq-mean-token-mean"},
    "importance sampling": {"loss": "importance_sampling", "corrections": []},
    "topr": {"loss": "topr", "corrections": []},
    # Decoupled: a proximal policy and a correction beside it.
    "decoupled + tis token": {"loss": "decoupled_ppo", "corrections": [TIS]},
    "decoupled + tis sequence": {"loss": "decoupled_ppo", "corrections": [{"kind": "tis_sequence", "cap": 2.0}]},
    "decoupled + icepop": {"loss": "decoupled_ppo", "corrections": [{"kind": "icepop", "low": 0.5, "high": 2.0}]},
    "decoupled + geometric mask": {
        "loss": "decoupled_ppo",
        "corrections": [TIS, {"kind": "masked_geometric", "low": 0.5, "high": 2.0}],
    },
    "decoupled + opsm": {"loss": "decoupled_ppo", "corrections": [TIS, {"kind": "opsm", "threshold": 0.1}]},
    "decoupled + staleness weight": {"loss": "decoupled_ppo", "corrections": [TIS, {"kind": "staleness_weight", "decay": 0.9}]},
    "log-linear proximal + tis": {"loss": "decoupled_ppo", "proximal": "loglinear", "corrections": [TIS]},
    # As in AReaL: rho decides what is dropped and weighs nothing.
    "m2po mask": {"loss": "ppo_clip", "corrections": [{"kind": "m2po_mask", "threshold": 0.04}], "denominator": "kept"},
    "m2po clip": {"loss": "ppo_clip", "proximal": "behaviour", "corrections": [{"kind": "m2po_clip", "threshold": 0.04}]},
    "auto": {"kind": "auto"},
}
COMPARED = (
    "no correction", "ppo against behaviour", "gspo", "cispo (here the same as aipo)", "importance sampling",
    "decoupled + tis token", "decoupled + icepop", "m2po clip", "auto",
)  # fmt: skip
BASELINE = "auto"
"""Every other is compared with it: does who leaves the choice to the program lose anything?"""

"""The arithmetic people do on paper: whole models of 2 bytes a parameter on one card. What it leaves out: docs/planning.md.

Called by the command line (`asyncrl plan --textbook`).
"""

from __future__ import annotations

from asyncrl.plan.question import Question

GB = 1e9
ACTIVATIONS_GB = 8.0
WHOLE_MODELS = ("policy", "reference", "reward model", "value model")
"""Parts that are a model's weights."""


def textbook_gb(question: Question) -> dict[str, float]:
    """Return decimal gigabytes of each part: bf16 models, 4 bytes of optimizer a trained parameter (8 bit: 2), 8 activations.

    Example:
        >>> from asyncrl.plan.hardware import parse_cluster
        >>> from asyncrl.plan.models import find_model
        >>> seven = find_model("7B")
        >>> ppo = Question(model=seven, cluster=parse_cluster("H100"), placement="colocated", algorithm="ppo",
        ...                critic=seven, reward_model=seven, has_reference=True)
        >>> round(sum(textbook_gb(ppo).values()))
        92
    """
    model = 2 * question.model.parameters / GB
    trained = (question.lora_parameters or question.model.parameters) / GB
    parts = {"policy": model, "optimizer": (4 if question.optimizer == "adamw" else 2) * trained, "activations": ACTIVATIONS_GB}
    if question.has_reference and not question.lora_rank:
        parts["reference"] = model
    if question.reward_model is not None:
        parts["reward model"] = 2 * question.reward_model.parameters / GB
    if question.critic is not None:
        parts["value model"] = 2 * question.critic.parameters / GB
    if question.lora_rank:
        parts["adapters"] = 2 * question.lora_parameters / GB
    return parts

"""What is checked before a learner makes or opens anything."""

import json

import pytest
from transformers import dynamic_module_utils

from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.corrections import PythonCorrection
from asyncrl.config.model import PretrainedModel
from asyncrl.errors import ConfigError
from asyncrl.learner.start import build_trainee, prepare_standing, resolve_functions


def refused():
    raise AssertionError("the warm start began")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": "no_such_module:loss"}, "algorithm.loss.*cannot import 'no_such_module'"),
        ({"advantage": "math:no_such_function"}, "algorithm.advantage.*has no function 'no_such_function'"),
        (
            {"corrections": (PythonCorrection(path="nowhere.py:weigh"),)},
            "algorithm.corrections.path.*there is no file nowhere.py",
        ),
    ],
)
def test_a_function_that_is_not_there_is_refused_before_a_model_is_made(kit, tmp_path, algorithm, message):
    with pytest.raises(ConfigError, match=message):
        prepare_standing(kit.config(algorithm), tmp_path, refused, "0123456789")
    assert list(tmp_path.iterdir()) == []


def test_preferences_resolve_no_policy_loss(kit):
    resolve_functions(kit.config({"kind": "dpo"}).algorithm)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def folder_with_own_code(kit, folder):
    kit.model().save_pretrained(folder)
    (folder / "own.py").write_text(OWN_CODE)
    (folder / "tokenizer.json").write_text("{}")
    own = {"model_type": "own_llama", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return folder


@pytest.mark.parametrize("path_is_given", [True, False])
def test_a_separate_critic_opens_a_folder_with_code_where_the_run_trusts_it(kit, tmp_path, monkeypatch, path_is_given):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = folder_with_own_code(kit, tmp_path / "model")
    critic = CriticConfig(path=str(folder) if path_is_given else "")
    model = PretrainedModel(path=str(folder), trust_remote_code=True)
    config = kit.config({"advantage": "gae", "critic": critic}, model=model)
    trainee = build_trainee(config, folder)
    assert type(trainee.critic.body.config).__name__ == "OwnConfig"

import pytest

from asyncrl.config.load import parse_config
from asyncrl.errors import ConfigError


@pytest.mark.parametrize(
    ("learner", "algorithm", "message"),
    [
        ({"optimizer": "paged_adamw_8bit"}, {}, r"pages on CUDA only and learner.device is 'cpu': take 'adamw_8bit'"),
        (
            {"optimizer": "paged_adamw_8bit", "device": "cuda", "offload_optimizer": True},
            {},
            r"set learner.offload_optimizer = false, or take 'adamw_8bit'",
        ),
        ({"logprobs": "fused"}, {}, r"runs on CUDA only and learner.device is 'cpu': set 'chunked'"),
        ({"compile": True}, {}, r"learner.compile is for CUDA and learner.device is 'cpu': set it to false"),
        ({"lora": {"rank": 0}}, {}, r"rank"),
        ({"lora": {"ranks": 8}}, {}, r"ranks"),
        ({"optimizer": "adam_8bit"}, {}, r"adam_8bit"),
    ],
)
def test_settings_that_cannot_go_together_are_refused(learner, algorithm, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"learner": learner, "algorithm": algorithm})

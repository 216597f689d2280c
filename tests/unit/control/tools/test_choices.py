"""What `auto` means on this machine, what a dry run says, and what is looked at before a run is started."""

import re
from importlib.util import find_spec

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl import Run
from asyncrl.config.load import parse_config
from asyncrl.control.placement.limits import total_memory
from asyncrl.control.placement.memory import generator_parts
from asyncrl.control.tools.choices import KV_CACHE_SHARE, describe, start_faults, with_choices
from asyncrl.errors import ConfigError
from asyncrl.learner.model.policy import character_tokenizer
from asyncrl.models.number_format import hardware_format
from tests.builders import write_jsonl

WITH_VLLM = pytest.mark.skipif(find_spec("vllm") is None or torch.cuda.is_available(), reason="no vLLM for the CPU is installed")
GOOD = """
print("imported")
def task(seed): ...
def score(prompt, text): return 0.0
def maths(inputs, config): ...
"""


def chosen(num_workers=1, groups=64, hidden_size=128, **engine):
    engine = {"kind": "transformers", "max_sequence_tokens": 16, "dtype": "float32"} | engine
    return with_choices(parse_config({
        "model": {"kind": "scratch", "hidden_size": hidden_size, "num_layers": 1000},
        "algorithm": {"groups_per_step": groups, "group_size": 4},
        "learner": {"dtype": "auto"},
        "generate": {"num_workers": num_workers, "engine": engine, "sampling": {"max_new_tokens": 4}},
    }))  # fmt: skip


@pytest.mark.parametrize(("num_workers", "groups", "slots"), [(1, 64, 256), (2, 64, 128), (3, 64, 86), (1, 3, 12)])
def test_a_generator_gets_its_part_of_a_steps_samples_as_slots(num_workers, groups, slots):
    config, said = chosen(num_workers, groups)
    assert config.generate.engine.num_slots == slots
    assert any(line.startswith(f"generate.engine.num_slots auto is {slots}: {4 * groups} samples a step") for line in said)


def test_slots_are_as_many_as_there_is_room_for_rows_that_the_engine_makes_for_them():
    row_bytes = KV_CACHE_SHARE * total_memory() / 45  # room for 45 rows: 32 slots have 32, 33 slots 64
    config, said = chosen(hidden_size=int(row_bytes / (2 * 1000 * 16 * 4)) // 4 * 4)
    assert config.generate.engine.num_slots == 32
    assert generator_parts(config)[1].num_bytes <= KV_CACHE_SHARE * total_memory()
    assert any("but the KV cache of more would take over 25% of" in line for line in said)


def test_auto_dtypes_are_this_machines_and_what_is_given_stays():
    config, said = chosen(num_slots=7, dtype="auto")
    expected, why = hardware_format("cpu")
    assert (config.learner.dtype, config.generate.engine.dtype) == (expected, expected)
    assert f"learner.dtype auto is {expected}: {why}" in said
    assert config.generate.engine.num_slots == 7
    again, nothing = with_choices(config)
    assert (again, nothing) == (config, [])


@pytest.mark.parametrize(("learner", "engine"), [("auto", "float32"), ("bfloat16", "auto")])
def test_on_ray_a_machine_without_a_gpu_chooses_no_dtype_for_one(monkeypatch, learner, engine):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    devices = {"launch": {"kind": "ray"}, "generate": {"engine": {"kind": "transformers", "device": "cuda", "dtype": engine}}}
    wrong = "learner.dtype" if learner == "auto" else "generate.engine.dtype"
    with pytest.raises(ConfigError, match=f"^{wrong} = 'auto' cannot be chosen here: .*; set 'bfloat16' or 'float32'"):
        with_choices(parse_config({**devices, "learner": {"device": "cuda", "dtype": learner}}))


def test_on_ray_a_dry_run_opens_no_device_of_its_own_machine():
    devices = {"generate": {"engine": {"kind": "transformers", "device": "cuda"}}, "learner": {"device": "cuda"}}
    assert describe(parse_config({**devices, "launch": {"kind": "ray"}}))[1] == []


# -- what it names outside itself ---------------------------------------------------------------------------------------


def config_of(path, **changes):
    own = {name: f"{path}:{name}" for name in ("task", "score", "maths")}
    rewards = [{"kind": "python", "path": own["score"]}, {"kind": "answer_match"}]
    algorithm = dict.fromkeys(("advantage", "loss"), own["maths"]) | {"corrections": [{"kind": "python", "path": own["maths"]}]}
    task = {"kind": "python", "path": own["task"]}
    return parse_config({"task": task, "reward": {"functions": rewards}, "algorithm": algorithm, **changes})


def written(folder, text):
    path = folder / "mine.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("wrong", "messages"), [
    (
        {"def task(seed)": "def task()", "def score(prompt, text)": "def score(text)", "maths(inputs, config)": "maths(x)"},
        (r"task.path '.*mine.py:task' is called with \(seed\) and takes \(\)",
         r"reward.functions .* is called with \(prompt, text\) and takes \(text\)", r"algorithm.advantage .* takes \(x\)"),
    ),
    ({"print(": "import no_such_package; ("}, ["cannot be imported: No module named 'no_such_package'"]),
    ({"print(": "import os; os._exit(0) or ("}, ["ended the process with exit code 0 and no answer: it said nothing"]),
])  # fmt: skip
def test_a_fault_shows_before_anything_is_started(tmp_path, wrong, messages):
    text = GOOD
    for good, bad in wrong.items():
        text = text.replace(good, bad)
    faults = "\n".join(describe(config_of(written(tmp_path, text)))[1])
    for message in messages:
        assert re.search(message, faults)


async def test_a_task_s_file_that_is_not_there_blocks_no_name_and_the_dry_run_names_it(tmp_path):
    files = {"path": str(tmp_path / "train.jsonl"), "held_out_path": str(tmp_path / "test.jsonl")}
    task = {"kind": "jsonl", "chat": False, **files}
    config = parse_config({"task": task, "folder": str(tmp_path), "name": "early"})
    with pytest.raises(ConfigError, match=r"task.path: there is no file .*train.jsonl\ntask.held_out_path: .*test.jsonl"):
        async with Run(config):
            pass
    assert not (tmp_path / "early").exists()
    assert [fault.partition(":")[0] for fault in describe(config)[1]] == ["task.path", "task.held_out_path"]
    (tmp_path / "train.jsonl").mkdir()
    assert "train.jsonl is a folder; a task file has one JSON object a line" in start_faults(config)[0]


def test_functions_in_an_environment_of_the_run_are_not_looked_for_here():
    launch = {"kind": "ray", "environment": {"working_dir": "elsewhere"}}
    assert start_faults(config_of("not_here.py", launch=launch)) == []
    fields = ["task.path", "reward.functions", "algorithm.advantage", "algorithm.loss", "algorithm.corrections"]
    found = start_faults(config_of("not_here.py", launch={"kind": "ray"}))
    assert [fault.partition(" ")[0] for fault in found] == fields


def test_a_dry_run_counts_prompts_and_names_those_that_are_too_long(tmp_path):
    records = [{"question": f"{'x' * 20}{number}", "answer": "2"} for number in range(30)]
    task = {"kind": "jsonl", "path": write_jsonl(tmp_path / "d.jsonl", records), "chat": False, "held_out": 10}
    generate = {"engine": {"kind": "transformers", "max_sequence_tokens": 32}, "sampling": {"max_new_tokens": 16}}
    (fault,) = describe(parse_config({"task": task, "generate": generate}))[1]
    assert fault.startswith("20 of the first 20 prompts are over 16 tokens (the longest has 22)")
    write_jsonl(tmp_path / "d.jsonl", [*records[:9], *({"question": f"{number}", "answer": "2"} for number in range(21))])
    said, faults = describe(
        parse_config({"task": {**task, "held_out": 0}, "generate": generate, "eval": {"at_start": False, "at_end": False}})
    )
    assert faults == []
    assert "# WARNING: 9 of the first 30 prompts are over 16 tokens" in said


def test_a_dry_run_takes_no_fault_from_what_a_run_does_not_use(tmp_path):
    text = "from asyncrl.schema.samples import Prompt\nfrom asyncrl.tasks.task import ComputedSequence, TaskData\n"
    text += "prompts = ComputedSequence(9, lambda index: Prompt(str(index), text='q', answer='46'))\n"
    path = written(tmp_path, text + "def task(seed): return TaskData(train=prompts, held_out=[])\n")
    config = {
        "task": {"kind": "python", "path": f"{path}:task"}, "learner": {"fake_step_s": 0.1},
        "generate": {"engine": {"kind": "fake"}}, "model": {"kind": "scratch", "warm_start": {"steps": 1}},
        "reward": {"functions": [{"kind": "caller"}]},
        "eval": {"at_start": False, "at_end": False}, "checkpoint": {"every_steps": 0},
    }  # fmt: skip
    assert describe(parse_config(config))[1] == []


def test_a_dry_run_names_what_a_pretrained_model_lacks_for_the_config(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 12}
    model = tmp_path / "model"
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=8)).save_pretrained(model)
    character_tokenizer("0123456789+=").save_pretrained(model)
    pattern = {"functions": [{"kind": "answer_match", "extract": "("}]}
    config = {"model": {"kind": "pretrained", "path": str(model)}, "reward": pattern, "learner": {"device": "cpu"}}
    said = "\n".join(describe(parse_config(config))[1])
    positions = "max_sequence_tokens is 512; the model was made for 8 positions"
    for fault in (r"extract: '\(' is not a", positions, "token id 13, and the model's vocabulary has 12 tokens"):
        assert re.search(fault, said), said
    lora = {"learner": {"lora": {"target_modules": ["query"]}}}
    assert re.search(r"target_modules \['query'\]", "\n".join(describe(parse_config({**config, **lora}))[1]))
    assert re.search(r"target_modules \['query'\]", "\n".join(describe(parse_config(lora))[1]))  # of a scratch model
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors is cut off" in "\n".join(describe(parse_config(config))[1])


@pytest.mark.parametrize(("num_heads", "engine", "said"), [
    (1, {"kv_cache_gib": 1e-5}, r"kv_cache_gib \(1e-05\) has no room for one sequence .* set at least 3.1e-05"),
    (1, {"arguments": {"model": "another"}}, "arguments may not set model"),
    pytest.param(4, {}, "cannot run attention heads of size 16", marks=WITH_VLLM),
])  # fmt: skip
def test_a_dry_run_names_what_vllm_cannot_do(num_heads, engine, said):
    model = {"kind": "scratch", "hidden_size": 64, "num_layers": 1, "num_heads": num_heads, "max_positions": 64}
    engine = {"kind": "vllm", "dtype": "float32", "max_sequence_tokens": 16, **engine}
    (fault,) = describe(parse_config({"model": model, "generate": {"engine": engine, "sampling": {"max_new_tokens": 4}}}))[1]
    assert re.search(said, fault)


def test_a_dry_run_names_what_a_scratch_model_lacks_of_its_task(tmp_path):
    text = "prompts = ComputedSequence(9, lambda index: Prompt(str(index), text=f'{index}+', answer='z'))"
    text = f"from asyncrl.schema.samples import Prompt\nfrom asyncrl.tasks.task import ComputedSequence, TaskData\n{text}\n"
    path = written(tmp_path, text + "def task(seed): return TaskData(train=prompts, held_out=[], alphabet='01234567')\n")
    config = {"task": {"kind": "python", "path": f"{path}:task"}, "model": {"kind": "scratch", "warm_start": {"steps": 1}}}
    examples, tokens = describe(parse_config(config))[1]
    assert examples.startswith("model.warm_start: this task has no worked examples")
    assert "a token for each character of TaskData.alphabet, and '+8' are not in it" in tokens
    assert describe(parse_config({**config, "learner": {"kind": "external"}}))[1] == []


@pytest.mark.parametrize(("files", "said"), [
    ([], "model.path: there is no folder"), (["config.json"], "has no tokenizer"), (["tokenizer.json"], "has no config.json"),
])  # fmt: skip
def test_folders_that_are_not_there_or_cannot_be_written_and_files_that_a_model_lacks_are_named(tmp_path, files, said):
    for name in files:
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / name).write_text("{}")
    (tmp_path / "file").write_text("")
    model = {"kind": "pretrained", "path": str(tmp_path / "m")}
    wrong, unwritten = start_faults(parse_config({"model": model, "folder": str(tmp_path / "file" / "runs")}))
    assert said in wrong
    assert unwritten == f"folder: {tmp_path / 'file'} is no folder that can be written"


def test_a_phase_without_room_is_said_beside_what_is_wrong_with_folders(tmp_path):
    (tmp_path / "file").write_text("")
    placement = {"kind": "colocated", "device_memory_gib": 1e-6}
    wrong = {"folder": str(tmp_path / "file" / "runs"), "placement": placement, "buffer": {"max_staleness": 1}}
    unwritten, no_room = start_faults(parse_config(wrong))
    assert unwritten.startswith("folder: ")
    assert "does not fit the device" in no_room


@pytest.mark.parametrize("task", [{"kind": "jsonl", "path": __file__}, {"kind": "reasoning_gym"}])
def test_a_scratch_model_has_no_chat_template_for_a_tasks_turns(tmp_path, task):
    (said,) = start_faults(parse_config({"folder": str(tmp_path), "task": task}))
    assert "has no chat template" in said
    assert said.endswith("or task.chat = false") == ("path" in task)
    assert start_faults(parse_config({"folder": str(tmp_path), "task": {**task, "chat": False}} if "path" in task else {})) == []


def test_shares_of_one_device_that_do_not_fit_are_said_before_anything_starts(tmp_path):
    shares = {"kind": "async_hybrid", "device_memory_gib": 0.002}
    (said,) = start_faults(parse_config({"folder": str(tmp_path), "placement": shares}))
    assert said.startswith("placement: training and generation do not fit")
    assert "set placement.device_memory_gib to at least" in said

import pytest

from asyncrl.models.number_format import ask_driver, format_of_cpu, format_of_gpu


@pytest.mark.parametrize(("cpuinfo", "dtype", "why"), [
    ("processor: 0\nflags\t\t: fpu avx512f amx_bf16 avx512_bf16\n", "bfloat16", "amx_bf16"),
    ("flags\t\t: fpu avx512f avx512_bf16\nflags : fpu\n", "bfloat16", "avx512_bf16"), ("", "float32", "no AMX"),
    ("Features\t: fp asimd bf16 i8mm\n", "bfloat16", "bf16"), ("flags\t\t: fpu avx2 avx512f\n", "float32", "no AMX"),
])  # fmt: skip
def test_a_cpu_gets_bfloat16_where_it_multiplies_it(cpuinfo, dtype, why):
    found = format_of_cpu(cpuinfo)
    assert found[0] == dtype
    assert why in found[1]


@pytest.mark.parametrize(("capability", "dtype"), [("9.0", "bfloat16"), ("8.0", "bfloat16"), ("7.5", "float32"), ("", "float32")])
def test_a_gpu_gets_bfloat16_from_ampere_on(capability, dtype):
    assert format_of_gpu(capability)[0] == dtype


UUID = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"


@pytest.mark.parametrize(("visible", "asked"), [
    (None, "1"), ("", "1"), ("3", "1"), ("2,3", "3"), ("2, 3", "3"), (f"0,{UUID}", UUID), ("0,MIG-1", "1"),
])  # fmt: skip
def test_the_driver_is_asked_for_the_gpu_that_torch_means_by_the_number(tmp_path, monkeypatch, visible, asked):
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "$1"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ask_driver("memory.total", 1) == f"--id={asked}"

import pytest

from asyncrl.models.number_format import format_of_cpu, format_of_gpu


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

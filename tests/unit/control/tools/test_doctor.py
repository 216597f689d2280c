from asyncrl.control.tools.doctor import judge_packages


def test_packages_are_judged_against_what_the_metadata_asks_for():
    installed = {"torch": "2.13.0+cpu", "numpy": "1.9", "ray": "2.60.0", "trl": "1.17.0"}
    asked = [
        "torch>=2.8", "numpy>=2.0", 'ray>=2.50; extra == "ray"', 'trl==1.16.0; extra == "bench"', 'wandb>=0.25; extra == "wandb"',
        'pytest>=9; extra == "dev"', 'asyncrl[ray,tasks]; extra == "dev"',
    ]  # fmt: skip
    findings = {finding.name: finding for finding in judge_packages(asked, installed.get)}
    assert list(findings) == ["torch", "numpy", "ray", "trl", "wandb"]
    assert (findings["torch"].ok, findings["torch"].required) == (True, True)
    assert findings["numpy"].detail == "1.9 (wanted >=2.0)"
    assert (findings["ray"].ok, findings["ray"].required) == (True, False)
    assert (findings["trl"].ok, findings["trl"].detail) == (False, "1.17.0 (wanted ==1.16.0)")
    assert findings["wandb"].detail.startswith("not installed")
    assert "asyncrl[wandb]" in findings["wandb"].advice

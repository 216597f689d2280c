"""The first program of docs/python.md in a notebook, whose event loop runs already."""

from __future__ import annotations

import json
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.integration.conftest import NO_MODEL, written
from tests.integration.service.test_python_page import OFF, PROGRAMS

pytestmark = [
    # Of the notebook's own libraries.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def test_a_run_is_scored_and_followed_from_a_notebook(tiny, tmp_path):
    config = written(tiny(**OFF, num_steps=4, buffer__max_staleness=2, generate__engine=NO_MODEL), tmp_path / "c.toml")
    (program,) = [text for text in PROGRAMS if "asyncrl.Run(" in text]
    cells = [program.partition("if __name__")[0], f"await main({str(config)!r})"]
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"display_name": "here", "language": "python", "argv": command}
    folder = tmp_path / "jupyter" / "kernels" / "here"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(kernel))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
        environment.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        NotebookClient(
            notebook, timeout=200, startup_timeout=200, kernel_name="here", resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
    said = "".join(output.text for output in notebook.cells[1].outputs if output.name == "stdout")
    assert [line.split()[0] for line in said.splitlines()[:5]] == ["1", "2", "from", "3", "4"]
    assert "change from step" in said

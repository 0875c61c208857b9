"""The quickstart notebook runs from top to bottom, and its stored outputs are what it shows."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "tools" / "notebooks" / "quickstart.ipynb"
TRAIN = 'env="CartPole-v1"'
PICTURES = {"image/png": "_repr_png_", "text/html": "_repr_html_"}

# Stands in for a Jupyter kernel: runs the cells in one namespace, and says for each in which of
# the forms of PICTURES its last expression can be shown.
KERNEL = """
import ast, json, sys
cells, forms = json.load(sys.stdin)
names, shown = {"__name__": "__main__"}, []
for source in cells:
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    value = None
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    shown.append([k for k, method in forms.items() if getattr(value, method, lambda: None)()])
print(json.dumps({"shown": shown, "ok": names["report"].ok, "passed": names["bundle"].passed}))
"""


@pytest.fixture(scope="module")
def notebook():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def code_cells(notebook):
    return [c for c in notebook["cells"] if c["cell_type"] == "code"]


def source_of(cell):
    return "".join(cell["source"])


def stored_kinds(cell):
    return [k for k in PICTURES for o in cell["outputs"] if k in o.get("data", {})]


def test_it_is_a_notebook_with_outputs_and_without_noise(notebook, code_cells):
    assert (notebook["nbformat"], notebook["nbformat_minor"]) >= (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for number, cell in enumerate(code_cells, start=1):
        assert cell["execution_count"] == number and cell["outputs"], source_of(cell)
        assert all(o.get("name") != "stderr" for o in cell["outputs"])
        assert all(o["output_type"] != "error" for o in cell["outputs"])
    assert NOTEBOOK.stat().st_size < 400_000


def test_its_outputs_show_a_trained_and_consistent_policy(code_cells):
    text = json.dumps([cell["outputs"] for cell in code_cells])
    assert "return, deterministic: 500.0 +- 0.0" in text
    assert ": consistent (" in text and "return 500 on" in text
    pictures = [
        o["data"]["image/png"]
        for c in code_cells
        for o in c["outputs"]
        if "image/png" in o.get("data", {})
    ]
    assert len(pictures) == 3
    for picture in pictures:
        assert base64.b64decode("".join(picture)).startswith(b"\x89PNG")
    assert not re.search(r"/(home|root|tmp|usr|opt)/", text)


def test_it_runs_from_top_to_bottom(code_cells, tmp_path):
    """With fewer steps; each cell shows its result in the form that is stored."""
    for package in ("matplotlib", "onnx", "onnxruntime", "pygame"):
        pytest.importorskip(package)
    sources = [source_of(cell) for cell in code_cells]
    assert sum(source.count(f'algo="ppo", {TRAIN}') for source in sources) == 1
    short = [s.replace(f"{TRAIN})", f"{TRAIN}, total_steps=4096)") for s in sources]
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps([short, PICTURES]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"] and found["passed"]
    assert found["shown"] == [stored_kinds(cell) for cell in code_cells]

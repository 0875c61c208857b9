"""What notebooks show of runs, bundles and consistency reports."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import pytest
from bundle_helpers import edit_manifest, make_policy, shared_bundle, write

from msrl_accel import html
from msrl_accel.config import resolve_config
from msrl_accel.consistency.report import BackendResult, ConsistencyReport
from msrl_accel.export.bundle import Bundle
from msrl_accel.run import Run

HOSTILE = "<script>alert('x')</script> & \"more\""
VOID = {"br", "img"}


class Page(HTMLParser):
    """Texts, links, images and rows of a page whose tags are balanced."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.texts, self.links, self.images = [], [], [], []
        self.open: list[str] = []
        self.feed(content)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        if tag == "a":
            self.links.append(values["href"])
        if tag == "img":
            self.images.append(values["src"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return "\n".join(self.texts)


def test_texts_are_escaped_and_ready_markup_is_not():
    page = Page(html.table([(HOSTILE, html.verdict("fine", True))], header=("a", "b")))
    assert page.texts == ["a", "b", HOSTILE, "fine"]
    assert page.tags.count("tr") == 2 and "b" in page.tags and "script" not in page.tags
    assert Page(html.bullets([HOSTILE])).texts == [HOSTILE]
    assert html.bullets([]) == ""


def test_a_link_leads_to_a_file_of_any_name(tmp_path):
    (url,) = Page(html.link(tmp_path / "a 'b' #1%.csv")).links
    assert url.endswith("/a%20%27b%27%20%231%25.csv")


@pytest.fixture
def run(tmp_path):
    config = resolve_config(
        overrides={"algo": "ppo", "env": "CartPole-v1", "run_dir": str(tmp_path / "a run")}
    )
    return Run.create(config)


def test_a_complete_run_shows_its_results_files_and_curve(run):
    picture = b"\x89PNG not really"
    (run.path / "learning_curve.png").write_bytes(picture)
    (run.path / "metrics.csv").write_text("step\n")
    result = {"return_mean": 487.25, "return_std": 3.0, "episodes": 20}
    run.write_summary(
        {"steps": 100_800, "seconds": 65.0, "deterministic": result, "sampled": result}
    )
    page = Page(run._repr_html_())
    assert "PPO on CartPole-v1, seed 0: complete" in page.text
    assert page.texts.count("487.2 +- 3.0 over 20 episodes") == 2
    assert "100,800 in 1:05" in page.text
    names = [url.rpartition("/")[2] for url in page.links]
    assert names == ["config.yaml", "summary.json", "metrics.csv"]
    (source,) = page.images
    kind, _, data = source.partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(data) == picture


def test_an_interrupted_run_says_so_and_has_no_picture(run):
    page = Page(run._repr_html_())
    assert "not complete" in page.text and not page.images


def test_a_bundle_shows_every_file_and_how_closely_it_agrees(graph_mode):
    bundle = Bundle.open(shared_bundle())
    page = Page(bundle._repr_html_())
    linked = {url.rpartition("/")[2] for url in page.links}
    assert linked == set(bundle.manifest["files"])
    assert "mindir: bit-equal with the training graph" in page.text
    assert re.search(r"onnx: within [\d.]+e-\d\d of the training graph", page.text)
    assert page.tags.count("tr") == 1 + len(linked)


def test_a_bundle_that_failed_says_so(graph_mode, tmp_path):
    write(make_policy("discrete"), tmp_path / "bundle", formats=("mindir",))

    def fail(manifest):
        result = manifest["parity"]["results"]["mindir"]
        result.update(passed=False, problems=[HOSTILE])
        manifest["parity"].update(passed=False, gate=False)

    edit_manifest(tmp_path / "bundle", fail)
    page = Page(Bundle.open(tmp_path / "bundle")._repr_html_())
    assert "parity check FAILED" in page.text
    assert f"mindir: DIFFERS: {HOSTILE}" in page.text and "script" not in page.tags


def test_a_report_escapes_what_engines_said():
    result = BackendResult("lite", None, error=HOSTILE)
    report = ConsistencyReport(HOSTILE, "the graph", {"lite": result})
    page = Page(report._repr_html_())
    assert f"lite: {HOSTILE}" in page.text and "NOT CONSISTENT" in page.text
    assert "script" not in page.tags


def test_notebooks_show_figures_as_png(run):
    pytest.importorskip("matplotlib")
    (run.path / "metrics.csv").write_text("step,episode/return\n1,2.0\n")
    assert run.plot()._repr_png_().startswith(b"\x89PNG")

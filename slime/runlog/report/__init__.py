"""report.html: one self-contained file with what a run learned and where its time went; compare.html
shows several runs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from slime.runlog.format import duration, number, score, signed
from slime.runlog.jsonl import replace_file
from slime.runlog.report import sections
from slime.runlog.report.compare import comparison
from slime.runlog.run_folder import RunData, read_run

REPORT_FILE = "report.html"
COMPARE_FILE = "compare.html"


def write_report(run_dir: str | Path) -> Path:
    """Render <run_dir>/report.html from the current contents of the folder."""
    run = read_run(run_dir)
    path = run.run_dir / REPORT_FILE
    replace_file(path, render_report(run).encode())
    return path


def write_comparison(run_dirs: Sequence[str | Path]) -> Path:
    """Render compare.html in the first folder: the runs' configurations and curves on one page."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    path = runs[0].run_dir / COMPARE_FILE
    replace_file(path, _render("compare.html.jinja", comparison(runs)).encode())
    return path


def render_report(run: RunData) -> str:
    values = {
        "name": run.run_dir.resolve().name,
        "header": sections.header(run),
        "reward": sections.reward_chart(run),
        "charts": sections.small_charts(run),
        "stands_out": sections.stands_out(run),
        "components": sections.component_charts(run),
        "others": sections.other_charts(run),
        "phases": sections.phases(run),
        "samples": sections.samples(run),
        "config": sections.config(run),
        "starts": sections.starts(run),
        "resumed_at": sorted(set(run.resumed_at)),
    }
    return _render("report.html.jinja", values)


def _render(template: str, values: Mapping[str, object]) -> str:
    environment = page_templates("slime.runlog.report")
    environment.filters.update(number=number, score=score, signed=signed, duration=duration)
    # uPlot is vendored so that the page needs no network; its files are not templates.
    folder = Path(__file__).parent / "templates"
    script = (folder / "uPlot.iife.min.js").read_text()
    script += environment.get_template("report.js.jinja").render()
    return environment.get_template(template).render(
        policy=Markup(content_policy(script)),
        script=Markup(script),
        chart_style=Markup((folder / "uPlot.min.css").read_text()),
        **values,
    )


def page_templates(package: str) -> Environment:
    """Load the templates in the package's folder `templates`; values are escaped, unknown names raise."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def content_policy(script: str) -> str:
    """Return a Content-Security-Policy that allows this script and nothing else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )

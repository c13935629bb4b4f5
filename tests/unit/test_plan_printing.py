"""Brackets in messages are printed as they are: rich would take them for markup and drop them."""

from dataclasses import replace

from rich.console import Console

from slime.cli.plan.plan import Plan
from slime.cli.plan.render import print_plan
from slime.cli.plan.request import PlanOptions
from slime.cli.plan.suggest import Suggestion, _show
from slime.config.arguments import Args
from slime.core.errors import UserError
from tests.unit.test_plan import count, folder, plan_of  # noqa: F401  (folder is a fixture)

INSTALL = "pip install 'slime[reasoning-gym]'"


class Bracketed(Plan):
    @property
    def reason(self) -> str:
        return "rollout of judge[bold] needs 90 GiB"


def test_a_plan_prints_brackets(folder, capsys):  # noqa: F811
    plan = plan_of(folder, count(10**9))
    args = Args(plan.args.to_dict(redact=False), {}, (f"reasoning-gym: {INSTALL}",))
    phases = [replace(plan.phases[0], name="rollout of judge[bold]"), *plan.phases[1:]]
    fields = {**vars(plan), "args": args, "phases": phases, "advice": ["remove layers [0:4]"]}
    fields["capacity_source"] = "the GPU [0] of this machine"
    print_plan(Bracketed(**fields), Console(width=200))
    printed = capsys.readouterr().out
    assert f"note: reasoning-gym: {INSTALL}" in printed
    assert "try: remove layers [0:4]" in printed
    assert "fits: rollout of judge[bold] needs 90 GiB" in printed
    assert printed.count("judge[bold]") == 2  # the reason and the head of the column
    assert "(the GPU [0] of this machine)" in printed


def test_suggestions_print_brackets(folder, capsys):  # noqa: F811
    plan = plan_of(folder, count(10**9), "--sglang-mem-fraction-static", "0.7")
    found = [Suggestion(plan=plan, effort=0, lora=("--x '[bold]'",))]
    _show(found, [UserError(INSTALL)], PlanOptions(gpus=8))
    printed = capsys.readouterr().out
    assert f"The first: {INSTALL}" in printed and "--x '[bold]'" in printed

"""The page of a run, from its state alone: what was found, and what that decides."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu import decisions
from benchmarks.gpu.state import FAILED, FINAL, PASSED, TIMED_OUT, Outcome, State
from benchmarks.gpu.step_list import STEPS, Step
from benchmarks.harness import taken
from benchmarks.vmm.section import Section

OUTPUT_LINES = 40
"""The end of what a step said that did not pass."""


def page(run: State) -> str:
    """Markdown."""
    facts = run.facts
    lines = [f"# {facts['device']}", "", f"Begun {run.begun}. {taken(facts)}.", ""]
    if run.simulated:
        lines += ["**Simulated: no figure on this page was measured on a GPU.**", ""]
    if run.quick:
        lines += ["**A short run: its figures are no evidence.**", ""]
    for name in ("packages", "nvidia_smi"):
        told = facts.get(name)
        if told:
            lines += ["; ".join(f"{key} {value}" for key, value in told.items()) + ".", ""]
    lines += ["## Steps", "", "| step | proves | | s | |", "|---|---|---|--:|---|"]
    lines += [_row(step, run.outcome(step.name), run) for step in STEPS]
    for step in STEPS:
        lines += _found(step, run.outcome(step.name))
    lines += ["", "## What it decides", "", *(f"- {line}" for line in decisions.lines(run)), ""]
    return "\n".join(lines)


def summary(run: State) -> str:
    """For the terminal: how many passed, which did not, and what was decided."""
    outcomes = {step.name: run.outcome(step.name) for step in STEPS}
    passed = sum(each.status == PASSED for each in outcomes.values())
    lines = [f"{passed} of {len(STEPS)} steps passed"]
    lines += [
        f"  {name}: {each.status}{each.why and ': '}{each.why}"
        for name, each in outcomes.items()
        if each.status != PASSED
    ]
    return "\n".join([*lines, *decisions.lines(run)])


def _row(step: Step, outcome: Outcome, run: State) -> str:
    took = f"{outcome.took_s:.1f}" if outcome.status in FINAL else ""
    status = f"**{outcome.status}**" if outcome.status in (FAILED, TIMED_OUT) else outcome.status
    why = outcome.why
    if outcome.commit and outcome.commit != run.facts.get("commit"):
        why = f"commit {outcome.commit}{why and '; '}{why}"
    return f"| {step.name} | {step.proves} | {status} | {took} | {_one_line(why)} |"


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _found(step: Step, outcome: Outcome) -> list[str]:
    told: dict[str, Any] = outcome.findings
    body = [f"- {line}" for line in map(str, told.get("lines", ()))]
    body += [
        f"- {'ok' if each['passed'] else '**FAILED**'}: {each['name']}"
        f"{each.get('said') and ': '}{_one_line(str(each.get('said', '')))}"
        for each in told.get("checks", ())
    ]
    for each in told.get("tables", ()):
        rows = [tuple(map(str, row)) for row in each.get("rows", ())]
        headings = tuple(map(str, each.get("headings", ())))
        section = Section(each["title"], headings, rows, list(map(str, each.get("notes", ()))))
        body += ["", section.markdown().replace("## ", "#### ", 1)]
    if outcome.status in (FAILED, TIMED_OUT):
        end = [line.replace("```", "'''") for line in outcome.output.splitlines()[-OUTPUT_LINES:]]
        body += ["", "```", *end, "```"]
    return ["", f"### {step.name}", "", *body] if body else []

"""Draw what one kill costs: a real run of the demo's two scenarios, as the picture of the README.

    python benchmarks/picture.py [docs/crash.svg]

Both scenarios run as in the demo, with real processes, a real SIGKILL and a real Temporal server.
The picture has one mark for each finished step: an Activity, or a question with its answer. (The
wait for memory to apply the write has no mark.) The marks are in the order of the run and evenly
spaced, because many steps are only milliseconds apart. The seconds after each kill are measured,
and the totals are counted. The picture claims that the plain process repeats every step, and that
the Workflow repeats none. If the run did not show that, nothing is written and the exit code is 1.
"""

import sys
import time
from pathlib import Path
from string import Template

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import run_demo
from refund_agent import Answer, Question

MARKS = {  # by the path of a call, or by the point that a process reached
    "ask": "question",
    "after agent_decide_next_step": "decision",
    "after lookup_order": "lookup",
    "after lookup_customer_history": "lookup",
    "after issue_refund": "refund",
    "after xmemory_read": "memory",
    "after xmemory_write_async": "memory",
}
BEFORE = 10  # steps before the kill; the bars of the picture are made for this number
AFTER = ["after issue_refund", "after xmemory_write_async"]  # what is left to do
PITCH = 25  # from one mark to the next
FIRST, SECOND, LAST = 30, 402, 660  # where the first process, the second and its new steps begin
# Color is never the only difference: stripes, dashes and shapes say the same. `$$` is one dollar.
PICTURE = Template("""\
<svg xmlns="http://www.w3.org/2000/svg" width="900" height="470" viewBox="0 0 720 376"
  role="img" aria-labelledby="t d">
<title id="t">An AI agent is killed one step before it refunds the customer</title>
<desc id="d">Two lanes, from a real run. Plain process: SIGKILL, $plain_gap s later it starts over,
asks the customer again, then refunds; $plain_total. Temporal Workflow: SIGKILL, $workflow_gap s
later it resumes at the refund and repeats nothing; $workflow_total.</desc>
<style>
svg { --page: #fff; --edge: #d1d9e0; --text: #1f2328; --quiet: #59636e; --bar: #eaeef2;
  --first: #0a5cc2; --again: #bc4c00; --stripe: #ffd8b5; --money: #0b7a4b; }
@media (prefers-color-scheme: dark) {
  svg { --page: #0d1117; --edge: #3d444d; --text: #f0f6fc; --quiet: #9da7b1; --bar: #262c36;
    --first: #6cb6ff; --again: #ffa657; --stripe: #5a3210; --money: #4ad295; }
}
text { font: 18px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text); }
.title { font-size: 21px; font-weight: 700; }
.bold { font-weight: 600; }
.quiet { fill: var(--quiet); }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
.inside { font-weight: 700; fill: var(--page); stroke: none; }
.bar { fill: var(--bar); }
.first { fill: var(--first); }
.again { fill: var(--again); }
.stripes { fill: url(#stripes); stroke: var(--again); stroke-width: 1.5; }
.skipped { fill: none; stroke: var(--quiet); stroke-width: 1.2; stroke-dasharray: 3 2.5; }
.money { fill: var(--money); }
.kill { stroke: var(--text); stroke-width: 6; stroke-linecap: round; }
.gap { stroke: var(--quiet); stroke-width: 2.5; stroke-dasharray: 1 7; stroke-linecap: round; }
</style>
<defs>
<pattern id="stripes" width="8" height="8" patternUnits="userSpaceOnUse"
  patternTransform="rotate(45)"><path d="M0 0h8v8h-8z" fill="var(--page)"/>
  <path d="M0 0h4v8h-4z" fill="var(--stripe)"/></pattern>
<g id="question"><path d="M-8-12h16a4 4 0 0 1 4 4v10a4 4 0 0 1-4 4h-6l-7 6v-6h-3a4 4 0 0 1-4-4v-10a4
  4 0 0 1 4-4z"/><text class="inside middle" y="3">?</text></g>
<path id="decision" d="M0-8l8 8l-8 8l-8-8z"/>
<path id="lookup" d="M-7-7h14v14h-14z"/>
<path id="memory" d="M-8-7c0-5 16-5 16 0v13c0 5-16 5-16 0z"/>
<g id="refund"><circle class="money" r="14" stroke="none"/><text class="inside middle"
  y="6.5">$$</text></g>
<path id="kill" class="kill" d="M-10-10l20 20m0-20l-20 20"/>
</defs>
<rect x=".5" y=".5" width="719" height="375" rx="10" fill="var(--page)" stroke="var(--edge)"/>
<path d="M290 72V204" stroke="var(--text)" stroke-width="1.5" stroke-dasharray="4 4"/>
<rect x="240" y="117" width="100" height="30" rx="6" fill="var(--text)"/>
<text class="inside middle" x="290" y="138.5">SIGKILL</text>
<g transform="translate(0 72)">
<text class="title" x="14" y="-36">Plain process</text>
<text class="bold end again" x="706" y="-36">starts over, asks the customer again</text>
<rect class="bar" x="14" y="-24" width="258" height="48" rx="10"/>
<rect class="bar" x="384" y="-24" width="322" height="48" rx="10"/>
<rect class="stripes" x="384" y="-24" width="258" height="48" rx="10"/>
<path class="gap" d="M314 0h60"/><use href="#kill" x="290"/>
$plain_marks
<text class="quiet middle" x="343" y="-12">$plain_gap s</text>
<text class="end" x="706" y="48">$plain_total</text>
</g>
<g transform="translate(0 206)">
<text class="title" x="14" y="-36">Temporal Workflow</text>
<text class="bold end money" x="706" y="-36">resumes at the refund</text>
<rect class="bar" x="14" y="-24" width="258" height="48" rx="10"/>
<rect class="bar" x="642" y="-24" width="64" height="48" rx="10"/>
<path class="gap" d="M314 0h60"/><use href="#kill" x="290"/>
$workflow_marks
<text class="quiet middle" x="343" y="-12">$workflow_gap s</text>
<text class="end" x="706" y="48">$workflow_total</text>
</g>
<path d="M14 268H706" stroke="var(--edge)"/>
<g transform="translate(0 296)">
<use href="#question" x="26" class="first"/><text class="quiet" x="44" y="6">question</text>
<use href="#decision" x="158" class="first"/><text class="quiet" x="173" y="6">decision</text>
<use href="#lookup" x="288" class="first"/><text class="quiet" x="301" y="6">lookup</text>
<use href="#memory" x="396" class="first"/><text class="quiet" x="410" y="6">memory</text>
<use href="#refund" x="524" class="first"/><text class="quiet" x="544" y="6">refund</text>
</g>
<g transform="translate(0 329)">
<rect class="stripes" x="14" y="-9" width="24" height="18" rx="4"/>
<text class="quiet" x="44" y="6">done again</text>
<use href="#decision" x="180" class="skipped"/>
<text class="quiet" x="195" y="6">recorded, so not done again</text>
</g>
<text class="quiet" x="14" y="364">
One mark per step of a real run, in order. Seconds: kill to next step.
</text>
</svg>
""")


class Workflow(run_demo.Durable):
    async def ask(self, question: Question) -> Answer:
        """Add the question to the calls. In the plain process it is a call already."""
        pid = self.calls[-1].pid
        self.calls.append(harness.Call(pid, "ask", [question], time.monotonic()))
        return await super().ask(question)


def steps(world: run_demo.Scenario, killed: bool) -> list[str]:
    """What the killed process finished, or the process after it, in order."""
    calls = [call for call in world.calls if (call.pid == world.dead) == killed]
    names = [call.args[0] if call.path == "reach" else call.path for call in calls]
    return [name for name in names if name in MARKS]


def marks(names: list[str], left: int, look: str) -> str:
    return "\n".join(
        f'<use href="#{MARKS[name]}" x="{left + PITCH * n}" class="{look}"/>'
        for n, name in enumerate(names)
    )


def gap(world: run_demo.Scenario) -> str:
    """Seconds from the kill to the start of the next step."""
    starts = [call.at - world.killed_at for call in world.calls if call.path == "reach"]
    return f"{min(at for at in starts if at > 0):.1f}"


def total(world: run_demo.Scenario) -> str:
    counted = world.count()
    return (
        f"{counted['questions to the customer']} questions, {counted['decisions made']} decisions"
    )


def draw(plain: run_demo.Plain, workflow: Workflow) -> str:
    before, after = steps(workflow, killed=True), steps(workflow, killed=False)
    shown = [observed for observed, _ in run_demo.claims(plain, workflow)]
    shown += [len(before) == BEFORE, after == AFTER]
    shown += [steps(plain, killed=True) == before, steps(plain, killed=False) == before + after]
    if not all(shown):
        raise harness.HarnessError("The run did not show what the picture claims.")
    first, last = marks(before, FIRST, "first"), marks(after, LAST, "first")
    return PICTURE.substitute(
        plain_marks=first + marks(before, SECOND, "again") + last,
        plain_gap=gap(plain),
        plain_total=total(plain),
        workflow_marks=first + marks(before, SECOND, "skipped") + last,
        workflow_gap=gap(workflow),
        workflow_total=total(workflow),
    )


async def main(file: Path) -> int:
    plain, workflow = run_demo.Plain("1234", "before-refund"), Workflow("1234", "before-refund")
    await run_demo.play_both(plain, workflow)
    file.write_text(draw(plain, workflow))
    print(f"\nWrote {file}.")
    return 0


if __name__ == "__main__":
    file = Path(harness.__file__).parent / "docs" / "crash.svg"
    harness.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else file))

"""Walkthroughs run against live code: prose that cannot go stale.

A walkthrough is `walkthroughs/NN-name.md`; `nanovllm walkthrough new NN-name` makes one to start
from. What an author writes:

    <!-- scenario: scheduler -->            runs walkthroughs/scenarios/scheduler.py (or: none)

    [`Scheduler.schedule`]                  links to a symbol: any unique ending of its dotted path
    [the plan][`Scheduler.schedule`]        the same, in other words; path.py::Name works as well
    [the budget][sched/budget]              links to a label that a stop or an anchor defines:

    <!-- anchor sched/budget                lines without a stop
    at: Scheduler.schedule                  a symbol, and in it, if need be,
    from: plan = _StepPlan(                 part of a line that no other line of the symbol has;
    to: self._schedule_running(plan)        part of a later line. Both mean the whole statement
    -->                                     that begins there (a loop with all its body)

    <!-- stop sched/running                 lines to stop at: all of the above and
    at: Scheduler._schedule_running
    from: request = self.running[
    show: num_new_tokens, plan.token_budget   values before and after: the tool makes a table
    when: request.request_id == "b"         which pass, judged when it ends (default: the first);
                                            `nth == 3` is the third
    expect: num_new_tokens == 16            a claim, judged when the pass ends; one a line
    expect: plan.token_budget == before(plan.token_budget) - 16
    rows: 4                                 a table of this pass and the next three, one row each
    order: any                              not bound to come later in the run than the stop above
    -->
    The stop's prose follows its comment, up to the next stop or heading.

    <!-- not-run: 7 2023 -->                numerals of this section that are not about the run

Expressions see the variables of the function at the range's end, `before(x)` (x when the pass
began), `nth`, and `returned` if the function returned from inside the range. A pass runs from the
range's first line to the first line outside it. Stops go forward in time: each takes the first
fitting pass that begins no earlier than the stop before it did. Ranges of imports, constants,
fields or whole classes are static: their expressions see the module's names.

A scenario is a plain script. Its module level sets things up and is not recorded; `main()` is
recorded, takes under 2 s and does the same every time (seeded, `enforce_eager=True`, few blocks);
it ends with `if __name__ == "__main__": main()`.

Triton kernels run interpreted, one program after another, and stops can lie in them; the numbers of
their tensor x are `x.handle.data`. The scenario sets TRITON_INTERPRET=1 before it imports anything.

Numerals in prose must occur in a claim or table up to the end of their section (under any
heading), in a link's text, or in `not-run`. Code spans count only if they state a number
(`16`, `x == 16`); headings, fences and versions such as 0.23.0 do not.

    nanovllm walkthrough fix [NAME]         writes links, tables, .tours, .vscode; run it often
    nanovllm walkthrough check [NAME]       says what is wrong; nothing else counts as done
    nanovllm walkthrough accept NAME LABEL  the code at LABEL changed, and the prose was read again
    nanovllm tour NAME [--live]             read it with its values; stop in pdb

Docstrings are part of an anchor's text (they state contracts), comments and blank lines are not. A
class that is only linked to is compared by its fields, signatures and docstrings.

The modules: source.py and anchors.py find code, document.py takes markdown apart, recorder.py runs
a scenario (values.py makes text of what it sees), walkthrough.py puts them together; check.py,
codetour.py, pager.py and html.py are what comes of it. Nothing of the engine imports this package.
"""

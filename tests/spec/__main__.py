"""Print the specification: every rule, invariant and property with its sentence, by component.

    python -m tests.spec                 everything
    python -m tests.spec radix block     the modules whose names contain one of these

Read off the live classes, so what is printed is what is tested.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from textwrap import fill
from types import ModuleType
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine
from rich.console import Console
from rich.text import Text

import tests.spec
from tests.spec.support import Machine

ORDER = (
    "free_queue",
    "block_pool",
    "kv_cache_manager",
    "radix_cache",
    "radix_kv",
    "scheduler",
    "same_tokens",
    "input_batch",
    "engine",
)


def modules(words: list[str]) -> list[ModuleType]:
    """The spec modules, from the smallest part to the whole engine."""
    names = [m.name for m in pkgutil.iter_modules(tests.spec.__path__) if m.name != "__main__"]
    chosen = [n for n in names if n.startswith("test_") and any(w in n for w in words or [""])]

    def place(name: str) -> tuple[int, str]:
        found = [i for i, part in enumerate(ORDER) if name.startswith("test_" + part)]
        return (found[-1] if found else len(ORDER), name)

    return [importlib.import_module(f"tests.spec.{name}") for name in sorted(chosen, key=place)]


def machines(module: ModuleType) -> list[type[RuleBasedStateMachine]]:
    """The state machines that a module defines itself."""
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, RuleBasedStateMachine)
        and value.__module__ == module.__name__
    ]


def properties(module: ModuleType) -> list[Any]:
    """The property tests that a module defines itself."""
    return [f for name, f in vars(module).items() if name.startswith("test_") and callable(f)]


def sentence(function: Any) -> tuple[str, str]:
    """A method's name read as a sentence, and the sentence that explains it."""
    name = function.__name__.removeprefix("test_").replace("_", " ")
    return name[0].upper() + name[1:], inspect.cleandoc(function.__doc__ or "").replace("\n", " ")


def line(function: Any) -> int:
    """Where it stands in its file."""
    return inspect.unwrap(function).__code__.co_firstlineno


def statements(machine: type[RuleBasedStateMachine]) -> Iterator[tuple[str, list[Any]]]:
    """(kind, functions) of a machine, in the order of its source, inherited ones last."""
    state = machine.setup_state()
    for kind, found in (
        ("starts", state.initializers),
        ("may happen", state.rules),
        ("always holds", state.invariants),
    ):
        functions = [statement.function for statement in found]
        yield kind, sorted(functions, key=line)


def defined_by(function: Any, machine: type[RuleBasedStateMachine]) -> type:
    """The class, among those `machine` inherits from, that the statement comes from."""
    return next(c for c in machine.__mro__ if function.__name__ in vars(c))


def print_statements(console: Console, functions: list[Any]) -> int:
    for function in functions:
        name, explanation = sentence(function)
        console.print(Text(f"    {name}", style="bold"))
        indent = " " * 8
        console.print(Text(fill(explanation, 96, initial_indent=indent, subsequent_indent=indent)))
    return len(functions)


def print_class(console: Console, owner: type, machine: type[RuleBasedStateMachine]) -> int:
    """What `machine` has from the class `owner`. Returns the number of statements."""
    count = 0
    for kind, functions in statements(machine):
        own = [f for f in functions if defined_by(f, machine) is owner]
        if own:
            console.print(Text(f"  {kind}", style="italic cyan"))
            count += print_statements(console, own)
    return count


def main(words: list[str]) -> None:
    console = Console(highlight=False, width=100)
    count, num_components = 0, 0
    shared: set[type] = set()
    for module in modules(words):
        title, _, _ = inspect.cleandoc(module.__doc__ or "").partition("\n")
        console.print()
        console.rule(Text(title, style="bold green"), align="left")
        num_components += 1
        for machine in machines(module):
            for owner in reversed(machine.__mro__):
                is_spec = issubclass(owner, Machine) and owner is not Machine
                if not is_spec or owner in shared:
                    continue
                if owner is not machine:
                    shared.add(owner)
                    about = inspect.cleandoc(owner.__doc__ or "").partition("\n")[0]
                    console.print(Text(f"  {about}", style="green"))
                count += print_class(console, owner, machine)
        found = properties(module)
        if found:
            console.print(Text("  for any input", style="italic cyan"))
            count += print_statements(console, found)
    console.print()
    console.print(f"{count} statements in {num_components} components")


if __name__ == "__main__":
    main(sys.argv[1:])

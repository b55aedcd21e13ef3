"""The engine's specification, in a form that runs.

Each module is about one component. Its rules say what may happen, its invariants what holds
whatever has happened; every one is a method named as a sentence, with a sentence as docstring.

    python -m tests.spec         print them
    pytest tests/spec            try them (profiles: tests/conftest.py)
    python -m tests.mutants      show that each of them can fail
"""

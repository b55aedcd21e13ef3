"""Real bugs, put back one at a time, to show that the specification notices each of them.

    python -m tests.mutants              all
    python -m tests.mutants radix 219    those with one of these words in name, file or source

catalogue.py lists them. Each is applied to a temporary copy of the package, never to the work
tree, and the spec it names is run there. It counts as killed when an assertion of the spec itself
fails: not when the engine crashes, when an assert of the engine's own goes off, or when the test
cannot be run.
"""
